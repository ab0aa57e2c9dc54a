"""Execution of `worldmodel judge`: train a success detector on real and reconstructed frames and measure it."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from robopolicy.cli.options import check_numbers
from robopolicy.errors import unknown_name
from robopolicy.plurals import counted

if TYPE_CHECKING:
    from robopolicy.data.episodes import Episodes

KINDS = ("classifier", "probe")
HELD_OUT = 0.2  # fraction of the episodes, half of them for calibration and half for measurement


def fit(args: argparse.Namespace) -> int:
    """Train, measure and write a judge; return 0."""
    from robopolicy.data.formats import read_dataset
    from robopolicy.evaluation.judge_metrics import episode_confusions, frame_confusions
    from robopolicy.files import check_new_folder
    from robopolicy.training.world_sims import load_world
    from robopolicy.worldmodel.success_detectors.classifier import SuccessClassifier
    from robopolicy.worldmodel.success_detectors.clips import Examples, FitConfig, JudgeConfig
    from robopolicy.worldmodel.success_detectors.store import FACTS, save_judge
    from robopolicy.worldmodel.videos import VideoDataset

    check_numbers(args, positive=("steps", "members", "frames"), non_negative=("seed",))
    if args.kind not in KINDS:
        raise unknown_name("kind of judge", args.kind, KINDS)
    check_new_folder(args.out, "a judge", FACTS, overwrite=args.overwrite)
    model, manifest = load_world(args.world, args.device)
    train, calibration, measurement = (
        Examples.from_videos(
            VideoDataset(model.spec, part, args.dataset), lambda frames: model.decode(model.encode(frames))
        )
        for part in _split(read_dataset(args.dataset), args.seed)
    )
    config = JudgeConfig(members=args.members, frames=args.frames)
    settings = {"config": config, "fit": FitConfig(steps=args.steps, seed=args.seed, device=args.device)}
    judge = _fit_judge(args.kind, manifest.task, train, calibration, settings)
    save_judge(args.out, judge)
    threshold = judge.threshold if isinstance(judge, SuccessClassifier) else 0.5
    measured = {
        "frames": frame_confusions(judge, measurement, threshold),
        "episodes": episode_confusions(judge, measurement, threshold),
    }
    if args.json:
        plain = {unit: {view: found.to_dict() for view, found in views.items()} for unit, views in measured.items()}
        print(json.dumps({"out": str(args.out), "threshold": threshold, **plain}))
        return 0
    _print_result(measured)
    print(f"judge: {args.out}")
    return 0


def _split(episodes: Episodes, seed: int) -> tuple[Episodes, Episodes, Episodes]:
    """Split into episodes for training, calibration and measurement; too few raise a UserError."""
    from robopolicy.errors import UserError
    from robopolicy.worldmodel.videos import alternating_half, split_episodes

    train, held_out = split_episodes(episodes, share=HELD_OUT, seed=seed)
    half = alternating_half(held_out.success)
    if half.all():
        found = counted(episodes.num_episodes, "episode")
        raise UserError(f"A judge needs more than {found} for calibration and measurement; collect more.")
    return train, held_out.subset(half), held_out.subset(~half)


def _fit_judge(kind: str, task: str, train: Any, calibration: Any, settings: dict[str, Any]) -> Any:
    from robopolicy.errors import UserError
    from robopolicy.sim.registry import get_task
    from robopolicy.worldmodel.success_detectors.classifier import fit_classifier, fit_probe

    if kind == "classifier":
        return fit_classifier(train, calibration, **settings)
    entry, states = get_task(task), train.videos.spec.proprio
    if entry.success_fn is None or not states:
        raise UserError(f"Observations of {entry.name} do not determine success; pass --kind classifier.")
    return fit_probe(train, calibration, states, entry.success_fn, **settings)


def _print_result(measured: dict[str, Any]) -> None:
    from robopolicy.evaluation.report import aligned

    for unit, views in measured.items():
        for view, found in views.items():
            print(f"held-out {unit}, {view}; abstained from {found.abstained}")
            print(aligned(*found.table()))
