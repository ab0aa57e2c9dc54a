"""`robopolicy worldmodel`: train and test a video world model, and rank or run policies in it."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from robopolicy.cli.options import (
    EVALUATION_SEED,
    add_judge_option,
    add_model_options,
    add_overwrite_option,
    check_numbers,
    check_overwrite,
    check_resume,
    train_model,
)

if TYPE_CHECKING:
    from robopolicy.cli.policy_args import PolicyEntry
    from robopolicy.evaluation.ranking import Ranking
    from robopolicy.evaluation.result import EvalResult
    from robopolicy.sim.contract import VectorSim
    from robopolicy.training.loop import Trainer

RANKING = "ranking.json"  # file in the folder of a ranking

EXAMPLES = """\
examples:
  robopolicy collect push --render --cameras top --policies expert+0.5 random replay --episodes 900 --out data/videos
  robopolicy worldmodel train data/videos --preset tiny --name push_world
  robopolicy worldmodel train data/videos --override learner.updates=30000 learner.lr=5e-4 --device cuda
  robopolicy worldmodel train --resume runs/push_world
  robopolicy worldmodel eval runs/push_world/checkpoints/best data/other_videos
  robopolicy worldmodel judge runs/push_world/checkpoints/best data/videos --out runs/push_judge
  robopolicy worldmodel rank runs/push_world/checkpoints/best runs/push_bc/checkpoints/best expert expert+0.5 random
  robopolicy worldmodel play runs/push_world/checkpoints/best expert
  robopolicy eval runs/push_bc/checkpoints/best --backend worldmodel:runs/push_world/checkpoints/best
"""


def add_parser(subparsers: Any) -> None:
    """Register the command."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "worldmodel",
        description="A world model predicts camera frames from actions. After passing its tests it can replace the "
        "simulator as a backend: --backend worldmodel:FOLDER.",
        epilog=EXAMPLES,
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    train = actions.add_parser("train", help="train on videos (collect --render), or resume a run")
    add_model_options(train, "VIDEOS", "dataset of any format, or mapping file", "learner.updates=30000")
    train.add_argument("--preset", default="tiny", help="smoke, tiny, small or base (default: tiny)")
    train.add_argument("--held-out", nargs="+", default=[], metavar="POLICY", help="policies held out for validation")
    tests = actions.add_parser("eval", help="test whether a world model follows its actions")
    tests.add_argument("world", type=Path, metavar="WORLD", help="checkpoint of a world model")
    tests.add_argument("dataset", metavar="VIDEOS", help="dataset that it was not trained on")
    tests.add_argument("--windows", type=int, default=64, help="video windows to continue (default: 64)")
    tests.add_argument("--horizon", type=int, default=20, help="frames to predict (default: 20)")
    tests.add_argument("--out", type=Path, help="contact sheet to write, .png (default: none)")
    judge = actions.add_parser("judge", help="train a success detector on real and predicted frames and measure it")
    judge.add_argument("world", type=Path, metavar="WORLD", help="checkpoint of a world model")
    judge.add_argument("dataset", metavar="VIDEOS", help="dataset, of which a tenth is held out for measurement")
    judge.add_argument("--kind", default="classifier", help="classifier, or probe of the state (default: classifier)")
    judge.add_argument("--steps", type=int, default=1500, help="gradient steps (default: 1500)")
    judge.add_argument("--members", type=int, default=3, help="ensemble size (default: 3)")
    judge.add_argument("--frames", type=int, default=1, help="number of last frames as input (default: 1)")
    judge.add_argument("--seed", type=int, default=0, help="seed (default: 0)")
    judge.add_argument("--out", type=Path, required=True, help="folder to write")
    rank = actions.add_parser("rank", help="rank policies in the world model and in the simulator")
    ensemble = "checkpoint of a world model, or comma-separated checkpoints of an ensemble"
    rank.add_argument("world", metavar="WORLD", help=ensemble)
    text = "checkpoint, 'expert' or 'random'; CKPT+0.3 adds action noise"
    rank.add_argument("policies", nargs="+", metavar="CKPT", help=text)
    rank.add_argument("--episodes", type=int, default=50, help="episodes per policy, on both sides (default: 50)")
    rank.add_argument("--out", type=Path, help="report folder (default: the next free one of runs/rank)")
    rank.add_argument("--video", type=int, default=4, help="episodes to record side by side (default: 4)")
    play = actions.add_parser("play", help="record a policy in the world model and in the simulator")
    play.add_argument("world", metavar="WORLD", help=ensemble)
    play.add_argument("policy", metavar="CKPT", help="checkpoint, 'expert' or 'random'")
    play.add_argument("--episodes", type=int, default=4, help="episodes to record (default: 4)")
    text = ".mp4 or .gif (default: the next free one of runs/world.mp4, runs/world_2.mp4)"
    play.add_argument("--out", type=Path, help=text)
    for action in (rank, play):
        add_judge_option(action)
    for action in (tests, judge, rank, play):
        add_overwrite_option(action)
        action.add_argument("--device", default="auto", help="device (default: the GPU, if any)")
    for action in (tests, judge, rank):
        action.add_argument("--json", action="store_true", help="print one JSON object")
    for action in (rank, play):
        text = f"seed of the first episode (default: {EVALUATION_SEED})"
        action.add_argument("--seed", type=int, default=EVALUATION_SEED, help=text)
    rank.add_argument("--num-envs", type=int, default=16, help="environments stepped together (default: 16)")


def run(args: argparse.Namespace) -> int:
    """Run the chosen action; return 0, or 130 after Ctrl-C in training."""
    from robopolicy.cli.world_judge import fit

    return {"train": _train, "eval": _eval, "judge": fit, "rank": _rank, "play": _play}[args.action](args)


def _train(args: argparse.Namespace) -> int:
    from robopolicy.training.model_runs import WorldTrainConfig, preset, resume_world, start_world, with_settings

    check_resume(args, "--preset", "--held-out")

    def start(fields: dict[str, Any]) -> Trainer:
        config = WorldTrainConfig(model=preset(args.preset), held_out=tuple(args.held_out), **fields)
        return start_world(with_settings(config, args.override))

    code, report = train_model(args, start, resume_world)
    for reason in report["final"]["reasons"] if report else []:
        print(f"note: {reason}")
    return code


def _eval(args: argparse.Namespace) -> int:
    from robopolicy.data.formats import read_dataset
    from robopolicy.evaluation.predicted_outcomes import PredictedOutcomes
    from robopolicy.evaluation.report import aligned
    from robopolicy.evaluation.video_metrics import contact_sheet
    from robopolicy.files import check_new_file
    from robopolicy.training.world_sims import load_world
    from robopolicy.worldmodel.action_following import check_gates, measure_action_following, table
    from robopolicy.worldmodel.replays import replay
    from robopolicy.worldmodel.videos import VideoDataset

    check_numbers(args, positive=("windows", "horizon"), non_negative=())
    check_overwrite(args, "--out")
    if args.out is not None:
        check_new_file(args.out, ".png", overwrite=args.overwrite)
    model, manifest = load_world(args.world, args.device)
    videos = VideoDataset(model.spec, read_dataset(args.dataset), args.dataset)
    following = measure_action_following(model, videos, horizon=args.horizon, windows=args.windows)
    found = replay(model, videos) if "success" in videos.episodes.arrays else None
    outcomes = None if found is None else PredictedOutcomes.of(found)
    further = () if outcomes is None else outcomes.reasons()
    verdict = check_gates(following, failures=manifest.training.get("failures"), further=further)
    if args.out is not None:
        contact_sheet(model, videos, args.out)
    if args.json:
        content = {"passed": verdict.passed, "reasons": list(verdict.reasons), **following.to_dict()}
        print(json.dumps(content | ({} if found is None else {"replays": found.to_dict()})))
        return 0
    print(f"PSNR [dB] of {following.num_windows} video windows, by frames ahead")
    print(aligned(*table(following)))
    for name, fraction in following.directions.items():
        print(f"{name}: correct direction in {fraction:.0%} of the frames")
    if outcomes is not None:
        print(outcomes.describe())
    print(
        "It passed the test and may evaluate policies."
        if verdict.passed
        else f"It failed the test and must not evaluate policies: {' '.join(verdict.reasons)}"
    )
    if args.out is not None:
        print(f"contact sheet: {args.out}")
    return 0


def _rank(args: argparse.Namespace) -> int:
    from contextlib import closing
    from dataclasses import replace

    from robopolicy.atomic import atomic_folder
    from robopolicy.cli.progress import progress_bars
    from robopolicy.errors import UserError
    from robopolicy.evaluation.harness import evaluate
    from robopolicy.evaluation.plots import rank_scatter
    from robopolicy.evaluation.ranking import rank
    from robopolicy.files import check_new_folder, next_free_path
    from robopolicy.training.world_sims import abstention_notes

    check_numbers(args, positive=("episodes", "num_envs"), non_negative=("seed", "video"))
    check_overwrite(args, "--out")
    args.out = args.out or next_free_path(Path("runs/rank"))
    check_new_folder(args.out, "a ranking", RANKING, overwrite=args.overwrite)
    sims = _Sims(args, args.policies)
    if len({policy_entry.label for policy_entry in sims.policy_entries}) < len(sims.policy_entries):
        raise UserError(f"Pass different policies, got {' '.join(args.policies)}.")
    sides: dict[str, dict[str, EvalResult]] = {"real": {}, "predicted": {}}
    notes: list[str] = []
    episodes = {"episodes": args.episodes, "seed": args.seed}
    with progress_bars() as add_bar:
        for kind, results in sides.items():
            with closing(sims.open(kind, min(args.num_envs, args.episodes))) as sim:
                for policy_entry in sims.policy_entries:
                    progress = add_bar(f"{kind} {policy_entry.label}", args.episodes)
                    results[policy_entry.label] = evaluate(policy_entry.make(), sim, progress=progress, **episodes)
                    notes += abstention_notes(policy_entry.label, sim)
    ranking = rank(sides["real"], sides["predicted"])
    ranking = replace(ranking, notes=(*ranking.notes, *notes, *filter(None, [sims.refusal])))
    with atomic_folder(args.out) as folder:
        rank_scatter(ranking, folder / "scatter.png", ylabel="in the world model")
        _record_video(args, sims, sides["real"], folder)
        content = ranking.to_dict() | {"seconds": _seconds(sides)}
        (folder / RANKING).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    _print_result(args, ranking, _seconds(sides))
    return 0


def _print_result(args: argparse.Namespace, ranking: Ranking, seconds: dict[str, float]) -> None:
    from robopolicy.evaluation.report import aligned

    if args.json:
        print(json.dumps({"out": str(args.out), **ranking.to_dict(), "seconds": seconds}))
        return
    print(aligned(*ranking.values()))
    print(aligned(*ranking.table()))
    for note in ranking.notes:
        print(f"note: {note}")
    cost = ", ".join(f"{kind} {value:.3g} s" for kind, value in seconds.items())
    print(f"cost of an episode: {cost}")
    print(f"verdict: {ranking.verdict}")
    print(f"report: {args.out}")


def _seconds(sides: dict[str, dict[str, EvalResult]]) -> dict[str, float]:
    """Return the mean wall time of an episode on each side [s]."""
    return {
        kind: sum(result.cost.wall_s for result in results.values()) / sum(result.n for result in results.values())
        for kind, results in sides.items()
    }


def _record_video(args: argparse.Namespace, sims: _Sims, real: dict[str, EvalResult], folder: Path) -> None:
    """Record the policy with a success rate nearest to 50 % on both sides, on seeds with success and with failure."""
    import numpy as np

    if not args.video:
        return
    policy_entry = min(sims.policy_entries, key=lambda entry: abs(real[entry.label].outcomes.mean() - 0.5))
    result = real[policy_entry.label]
    order = np.argsort(result.outcomes, kind="stable")
    count = min(args.video, result.n)
    chosen = sorted({*order[: count // 2].tolist(), *order[len(order) - (count - count // 2) :].tolist()})
    sims.record_video(policy_entry, [int(result.seeds[index]) for index in chosen], folder / "films.mp4")


def _play(args: argparse.Namespace) -> int:
    from robopolicy.files import check_new_file, next_free_path

    check_numbers(args, positive=("episodes",), non_negative=("seed",))
    check_overwrite(args, "--out")
    args.out = args.out or next_free_path(Path("runs/world.mp4"))
    check_new_file(args.out, ".mp4", ".gif", overwrite=args.overwrite)
    sims = _Sims(args, [args.policy])
    if sims.refusal:
        print(f"note: {sims.refusal}")
    sims.record_video(sims.policy_entries[0], range(args.seed, args.seed + args.episodes), args.out)
    print(f"video: {args.out}")
    return 0


class _Sims:
    """Simulator, world model and policies of a comparison."""

    def __init__(self, args: argparse.Namespace, policy_entries: list[str]) -> None:
        """Load the policies and the world model; a model that failed its tests has a `refusal`."""
        from robopolicy.cli.policy_args import noisy_policy_entries
        from robopolicy.sim.registry import SimOptions, WorldOptions, get_task
        from robopolicy.training.world_sims import load_worlds

        self.model, self.manifest = load_worlds(args.world, args.device, tested=False)
        self.manifest.require_success(judge=bool(args.judge))
        self.refusal = self.manifest.refusal(args.world)
        self.world = WorldOptions(judge=args.judge)
        self.task = get_task(self.manifest.task).name
        self.policy_entries: list[PolicyEntry] = noisy_policy_entries(policy_entries, self.task, args.device)
        spec = self.model.spec
        self.options = SimOptions(device=args.device, cameras=spec.cameras, image_size=spec.size)

    def open(self, kind: str, num_envs: int) -> VectorSim:
        """Open the simulator ("real") or the world model ("predicted")."""
        from dataclasses import replace

        from robopolicy.evaluation.actors import check_compatible
        from robopolicy.sim.registry import make_sim
        from robopolicy.training.world_sims import world_sim

        options = replace(self.options, num_envs=num_envs)
        if kind == "real":
            sim = make_sim(self.task, options)
        else:
            sim = world_sim(self.task, replace(options, world=self.world), self.model, self.manifest)
        for policy_entry in self.policy_entries:
            if policy_entry.spec is not None:
                check_compatible(policy_entry.spec, sim.spec)
        return sim

    def record_video(self, policy_entry: PolicyEntry, seeds: Any, path: Path) -> None:
        """Record episodes as a grid with one row per side and one column per seed."""
        from contextlib import closing

        from robopolicy.evaluation.video import record, write_video

        recordings = []
        for kind in ("real", "predicted"):
            with closing(self.open(kind, len(seeds))) as sim:
                sim.reset(list(seeds))
                camera = self.model.spec.cameras[0]
                recordings.append(
                    record(policy_entry.make(), sim, seeds, title=kind, camera=camera, width=256, height=256)
                )
        write_video(recordings, path)
