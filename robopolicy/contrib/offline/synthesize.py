"""`robopolicy synthesize`: train a trajectory model on a dataset, and write synthetic trajectories of a policy."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from robopolicy.cli.options import (
    add_model_options,
    add_overwrite_option,
    check_numbers,
    check_resume,
    reject_unused,
    train_model,
)
from robopolicy.plurals import counted

if TYPE_CHECKING:
    from robopolicy.training.loop import Trainer

EXAMPLES = """\
examples:
  robopolicy collect lift --policy runs/lift_flow_bc/checkpoints/best --stochastic --keep-failures --out data/mixed
  robopolicy synthesize train data/mixed --name mixed_trajectories
  robopolicy synthesize train data/mixed --override updates=50000 model.length=16 --device cuda
  robopolicy synthesize train --resume runs/mixed_trajectories
  robopolicy synthesize write runs/mixed_trajectories/checkpoints/best --episodes 2000 --out data/more
  robopolicy synthesize write MODEL --policy runs/lift_iql/checkpoints/best --append-dataset data/mixed --out data/new

After training on the written data the policy has changed: write again, guided by the new one.
"""


def add_parser(subparsers: Any) -> None:
    """Register the command."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "synthesize",
        description="Train a diffusion model of a dataset's trajectory segments (vector observations, actions, "
        "rewards, terminations), and write synthetic datasets with it. Guided by a policy, the synthetic "
        "trajectories follow this policy close to the data (policy-guided diffusion).",
        epilog=EXAMPLES,
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    train = actions.add_parser("train", help="train a trajectory model, or resume a run")
    add_model_options(train, "DATASET", "dataset folder with rewards", "model.length=16")
    write = actions.add_parser("write", help="write a dataset of synthetic episodes")
    write.add_argument("model", type=Path, metavar="MODEL", help="checkpoint of a trajectory model")
    write.add_argument("--out", type=Path, required=True, help="dataset folder to write")
    write.add_argument("--episodes", type=int, default=1000, help="synthetic episodes (default: 1000)")
    write.add_argument("--policy", type=Path, metavar="CKPT", help="policy that guides the samples (default: none)")
    write.add_argument(
        "--guidance-scale",
        type=float,
        default=1.0,
        help="guidance scale: exponent of the policy's density (default: 1)",
    )
    write.add_argument(
        "--std",
        type=float,
        default=0.5,
        help="standard deviation of policies without a density, relative to the data's actions (default: 0.5)",
    )
    write.add_argument(
        "--append-dataset", metavar="DATASET", help="dataset whose episodes are appended (default: none)"
    )
    write.add_argument("--batch", type=int, default=64, help="segments drawn together (default: 64)")
    write.add_argument("--seed", type=int, default=0, help="seed of the noise (default: 0)")
    add_overwrite_option(write)
    write.add_argument("--json", action="store_true", help="print one JSON object")
    write.add_argument("--device", default="cpu", help="device (default: cpu)")


def run(args: argparse.Namespace) -> int:
    """Run the chosen action; return 0, or 130 after Ctrl-C in training."""
    return {"train": _train, "write": _write}[args.action](args)


def _train(args: argparse.Namespace) -> int:
    from robopolicy.contrib.offline.trajectory_training import (
        TrajectoryTrainConfig,
        resume_trajectories,
        start_trajectories,
    )
    from robopolicy.training.model_runs import with_settings

    check_resume(args)

    def start(fields: dict[str, Any]) -> Trainer:
        return start_trajectories(with_settings(TrajectoryTrainConfig(**fields), args.override))

    return train_model(args, start, resume_trajectories)[0]


def _write(args: argparse.Namespace) -> int:
    import torch

    from robopolicy.cli.progress import progress_bars
    from robopolicy.contrib.offline.trajectory_diffusion import PolicyGuidance, PolicyPull
    from robopolicy.contrib.offline.trajectory_training import (
        SYNTHETIC,
        kept_episodes,
        load_trajectories,
        synthetic_segments,
    )
    from robopolicy.data.formats.lerobot import LeRobotWriter
    from robopolicy.errors import UserError
    from robopolicy.training.checkpoint import load_policy

    check_numbers(args, positive=("episodes", "batch"), non_negative=("seed",))
    guidance = PolicyGuidance(args.guidance_scale, args.std)
    if args.policy is None:
        reject_unused(args, "without --policy", "--guidance-scale", "--std")
    model, manifest = load_trajectories(args.model, args.device)
    pull = None
    if args.policy is not None:
        policy, parent = load_policy(args.policy, args.device)
        if parent.task != manifest.task:
            raise UserError(f"The policy was trained on {parent.task}, but the trajectory model on {manifest.task}.")
        pull = PolicyPull(model, policy, guidance)
    kept = kept_episodes(args.append_dataset, model.layout, manifest) if args.append_dataset else []
    frames, far = 0, list[torch.Tensor]()
    options = {"overwrite": args.overwrite, "names": manifest.names}
    with (
        progress_bars() as add_bar,
        LeRobotWriter(args.out, control_dt=manifest.control_dt, **options) as writer,
    ):
        update = add_bar("synthesize", args.episodes)
        done = 0
        for segments in synthetic_segments(model, args.episodes, pull=pull, seed=args.seed, batch=args.batch):
            for segment in segments:
                episode = model.layout.episode(segment, manifest.task, SYNTHETIC)
                writer.add(episode)
                frames += len(episode)
            if pull is not None:
                far.append(pull.distance(segments))
            done += len(segments)
            update(done)
        for episode in kept:
            writer.add(episode)
    distance = float(torch.cat(far).mean()) if far else None
    if args.json:
        counts = {"episodes": args.episodes, "frames": frames, "kept": len(kept)}
        print(json.dumps({"out": str(args.out), **counts, "distance": distance}))
        return 0
    also = f", and {len(kept)} of {args.append_dataset}" if kept else ""
    print(f"{args.out}: {counted(args.episodes, 'synthetic episode')} ({counted(frames, 'frame')}){also}")
    if distance is not None:
        print(f"RMS distance to the policy's mean actions: {distance:.3g} standard deviations of the data.")
    return 0
