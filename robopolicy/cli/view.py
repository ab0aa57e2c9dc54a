"""`robopolicy view`: show a task, a policy, a dataset or a training run in 3D in a browser, or write it to a file."""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from robopolicy.cli.display import PORT
from robopolicy.cli.options import add_overwrite_option, add_rollout_options, check_numbers, reject_unused
from robopolicy.plurals import counted

if TYPE_CHECKING:
    from robopolicy.sim.contract import VectorSim
    from robopolicy.viewer.frames import EpisodeSource
    from robopolicy.viewer.panel import Curve

    Metrics = Callable[[], Mapping[str, Curve]]

EXAMPLES = """\
examples:
  robopolicy view lift
  robopolicy view velocity/go1 --policy random
  robopolicy view runs/lift_reinflow/checkpoints/best --seed 0
  robopolicy view runs/lift_reinflow
  robopolicy view data/lift
  robopolicy view runs/lift_reinflow/checkpoints/best --out lift.mcap --episodes 5
"""

CHECKPOINT, DATASET = "manifest.json", "meta/info.json"  # the modules that define them import PyTorch
LAST = Path("checkpoints/last")


def add_parser(subparsers: Any) -> None:
    """Register the command."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "view",
        description="Show a task, a checkpoint, a dataset or a running training in 3D in a browser, on 127.0.0.1 alone "
        "and without the internet: time bar, cameras, predicted path of the chunk, rewards and success. With --out, "
        "write the episodes to a file for Foxglove (.mcap) or Rerun (.rrd) instead.",
        epilog=EXAMPLES,
    )
    text = "task id, checkpoint folder, run folder (its newest checkpoint and its metrics) or dataset folder"
    parser.add_argument("target", metavar="TASK|CKPT|RUN|DATASET", help=text)
    add_rollout_options(parser)
    text = "policy of a task: expert, random or a checkpoint (default: the expert of the task, or random)"
    parser.add_argument("--policy", metavar="POLICY", help=text)
    parser.add_argument("--port", type=int, default=PORT, help=f"port; 0 is a free one (default: {PORT})")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write a .mcap or .rrd file (default: show a page)")
    parser.add_argument("--episodes", type=int, default=1, help="episodes to write with --out (default: 1)")
    add_overwrite_option(parser)


def run(args: argparse.Namespace) -> int:
    """Show or write episodes until they end or the program is stopped; return 0."""
    check_numbers(args, positive=("episodes",), non_negative=("seed", "port"))
    if args.out is None:
        reject_unused(args, "without --out", "--episodes", "--overwrite")
    else:
        reject_unused(args, "with --out", "--port")
    open_source = _find(args)
    if args.out is not None:
        source, _ = open_source()
        with closing(source):
            return _write(args, source)
    from robopolicy.viewer.page import Page, PageServer

    with ExitStack() as stack:
        server = stack.enter_context(closing(PageServer(args.target, args.port)))
        print(f"{args.target}: {server.url}\nCtrl-C stops", flush=True)
        with _without_garbage_collection():
            source, metrics = open_source()  # imports PyTorch, while the browser loads the page
            stack.enter_context(closing(source))
            page = stack.enter_context(closing(Page(server, source, metrics)))
        page.run()
    return 0


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Import large packages inside in four fifths of the time."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _find(args: argparse.Namespace) -> Callable[[], tuple[EpisodeSource, Metrics | None]]:
    """Check the target, and return a function that opens its episodes and the metrics of a training run."""
    from robopolicy.errors import UserError
    from robopolicy.sim.registry import get_task

    folder = Path(args.target)
    if (folder / DATASET).is_file():
        reject_unused(args, "on datasets", "--policy", "--seed", "--stochastic", "--task", "--plan-with")
        return lambda: (_dataset(args, folder), None)
    if (folder / CHECKPOINT).is_file():
        reject_unused(args, "on checkpoints", "--policy")
        return lambda: (_rollouts(args, args.target, args.task), None)
    if (folder / "config.yaml").is_file():
        reject_unused(args, "on training runs", "--policy")
        if not (folder / LAST / CHECKPOINT).is_file():
            raise UserError(f"{folder} has no checkpoint yet; view it after checkpoint_every updates.")
        return lambda: _training(args, folder)
    reject_unused(args, "with a task as the target", "--task")
    try:
        entry = get_task(args.target)
    except UserError:
        if not folder.exists():
            raise
        hint = "'robopolicy data convert' makes one of other formats"
        raise UserError(f"{folder} is no task, checkpoint, training run or LeRobot dataset; {hint}.") from None
    policy = args.policy or ("random" if entry.make_expert is None else "expert")
    return lambda: (_rollouts(args, policy, entry.name), None)


def _rollouts(args: argparse.Namespace, policy: str, task: str | None) -> EpisodeSource:
    """Episodes of a policy, from the seed of the options on."""
    from dataclasses import replace

    from robopolicy.cli.policy_args import load_policy_entries, open_sim, sim_options, with_planning
    from robopolicy.device import device_name
    from robopolicy.viewer.sim_episodes import SimEpisodes

    args.device = device_name(args.device)
    policy_entries, entry = load_policy_entries([policy], task, args.device)
    (policy_entry,) = with_planning(policy_entries, args, entry)
    options = sim_options(args, [policy_entry], 1, args.device, args.judge)
    sim = open_sim(entry, options, [policy_entry])
    predictor = None
    if policy_entry.spec is not None and policy_entry.spec.horizon > 1:
        predictor = open_sim(entry, replace(options, cameras=(), point_clouds=()), [])
    return SimEpisodes(
        f"{policy_entry.label} in {entry.name}",
        sim,
        policy_entry.make,
        seed=args.seed,
        predictor=predictor,
        deterministic=not args.stochastic,
    )


def _training(args: argparse.Namespace, folder: Path) -> tuple[EpisodeSource, Metrics]:
    """Episodes of the newest checkpoint of a run, which is loaded again when it changes, and its metrics."""
    from robopolicy.training.checkpoint import load_policy
    from robopolicy.viewer.training_run import NewestPolicy, read_metrics

    last = folder / LAST
    source: Any = _rollouts(args, str(last), args.task)
    source.title = f"{folder.name}, training"
    source.make_policy = NewestPolicy(last / CHECKPOINT, lambda: load_policy(last, args.device)[0])
    return source, lambda: read_metrics(folder)


def _dataset(args: argparse.Namespace, folder: Path) -> EpisodeSource:
    from robopolicy.sim.registry import SimOptions, get_task, make_sim
    from robopolicy.viewer.dataset_episodes import DatasetEpisodes

    def open_sim(task: str) -> VectorSim:
        return make_sim(get_task(task).name, SimOptions(num_envs=1, backend=args.backend, reward=args.reward))

    return DatasetEpisodes(folder, open_sim)


def _write(args: argparse.Namespace, source: EpisodeSource) -> int:
    """Write the first episodes to the file of `--out`."""
    from robopolicy.files import check_new_file
    from robopolicy.viewer.sinks import SINKS, open_sink, write_episodes

    check_new_file(args.out, *SINKS, overwrite=args.overwrite)
    with open_sink(args.out) as sink:
        count = write_episodes(source, sink, args.episodes)
    print(f"{args.out}: {counted(args.episodes, 'episode')}, {counted(count, 'frame')}")
    return 0
