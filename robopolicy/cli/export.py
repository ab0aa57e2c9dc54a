"""`robopolicy export`: write a checkpoint as a bundle that runs on a robot without torch."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from robopolicy.cli.options import add_overwrite_option, reject_unused
from robopolicy.errors import UserError
from robopolicy.plurals import counted

EXAMPLES = """\
examples:
  robopolicy export runs/lift_flow_bc/checkpoints/best --out bundles/lift
  robopolicy export runs/lift_flow_bc/checkpoints/best --out bundles/lift --rtc --json
  robopolicy export runs/lift_act/checkpoints/best --lerobot --out runs/act_for_lerobot
"""


def add_parser(subparsers: Any) -> None:
    """Register the command."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "export",
        description="Write a checkpoint as a folder that runs with onnxruntime and numpy: an ONNX graph that contains "
        "normalisers and sampler and takes noise as an input, a manifest of inputs and outputs, and golden chunks. The "
        "export fails if the graph differs from torch by more than 1e-4 in normalised units. With --lerobot, write a "
        "policy of LeRobot instead.",
        epilog=EXAMPLES,
    )
    parser.add_argument("checkpoint", type=Path, help="checkpoint folder")
    parser.add_argument("--out", type=Path, required=True, help="bundle folder to write")
    text = "write the policy `act` as a policy of LeRobot, with its processors"
    parser.add_argument("--lerobot", action="store_true", help=text)
    text = "support continuing the actions being executed (real-time chunking)"
    parser.add_argument("--rtc", action="store_true", help=text)
    add_overwrite_option(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Write the bundle or policy; return 0."""
    if args.lerobot:
        return _write_lerobot(args)
    from robopolicy.deploy.bundle import GRAPH, TOLERANCE
    from robopolicy.deploy.bundle import MANIFEST as BUNDLE
    from robopolicy.deploy.export import export_bundle, read_task_metadata
    from robopolicy.files import check_new_folder
    from robopolicy.schema import to_dict
    from robopolicy.spec import TaskMetadata
    from robopolicy.training.checkpoint import golden_observations, load_policy
    from robopolicy.training.manifest import MANIFEST
    from robopolicy.versions import sha256

    check_new_folder(args.out, "a bundle", BUNDLE, overwrite=args.overwrite)
    policy, checkpoint = load_policy(args.checkpoint)
    unknown = ""
    try:
        facts = checkpoint.task_metadata or read_task_metadata(checkpoint.task)
    except UserError as error:
        facts, unknown = TaskMetadata(checkpoint.task), str(error)
    manifest = export_bundle(
        policy,
        args.out,
        task_metadata=facts,
        obs=golden_observations(args.checkpoint),
        checkpoint=sha256(args.checkpoint / MANIFEST),
        rtc=args.rtc,
        announce=lambda text: print(f"{args.out}: {text} ...", file=sys.stderr),
    )
    if args.json:
        print(json.dumps({**to_dict(manifest), "identity": manifest.identity, "unknown_task": unknown}))
        return 0
    size = (args.out / GRAPH).stat().st_size / 2**20
    noise = f"noise {manifest.noise_shape}" if manifest.noise_shape else "no noise"
    calls = counted(manifest.network_calls, "network call")
    print(f"{args.out}: bundle {manifest.identity[:12]}")
    print(f"  policy {manifest.policy}, task {manifest.task}, {calls} per chunk")
    print(f"  {size:.1f} MiB, {noise}, {'continues' if manifest.takes_prefix else 'does not continue'} given actions")
    print(f"  parity with torch: largest error {manifest.parity:.2g} in normalised units (tolerance {TOLERANCE:g})")
    if unknown:
        print(f"  names, bounds and rate of the actions are omitted: {unknown}")
    return 0


def _write_lerobot(args: argparse.Namespace) -> int:
    from robopolicy.interop.lerobot.act import write_act
    from robopolicy.policies.heads.act import ACTPolicy
    from robopolicy.training.checkpoint import load_policy

    reject_unused(args, "with --lerobot", "--rtc")
    policy, _ = load_policy(args.checkpoint)
    if not isinstance(policy, ACTPolicy):
        raise UserError(f"Only the policy act can be written for LeRobot, and {args.checkpoint} is '{policy.name}'.")
    write_act(policy, args.out, overwrite=args.overwrite)
    print(json.dumps({"out": str(args.out), "kind": "act"}) if args.json else f"{args.out}: LeRobot policy of kind act")
    return 0
