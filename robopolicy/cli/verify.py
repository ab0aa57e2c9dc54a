"""`robopolicy verify`: check that a checkpoint reproduces its stored action chunk."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from robopolicy.plurals import counted

EXAMPLES = """\
examples:
  robopolicy verify runs/lift_flow_bc/checkpoints/best
  robopolicy verify runs/lift_flow_bc/checkpoints/best --device cuda --json
  robopolicy verify bundles/lift
"""


def add_parser(subparsers: Any) -> None:
    """Register the command."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "verify",
        description="Check the files of a checkpoint or a bundle and recompute its stored action chunk. A composed "
        "checkpoint is invalid if a parent was moved or changed.",
        epilog=EXAMPLES,
    )
    text = "checkpoint folder, or bundle of 'export'"
    parser.add_argument("checkpoint", type=Path, metavar="CKPT_OR_BUNDLE", help=text)
    parser.add_argument("--device", default="", help="device of a checkpoint (default: cpu)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Verify; return 0 if the chunk is reproduced, else 1."""
    from robopolicy.deploy.bundle import MANIFEST
    from robopolicy.errors import UserError
    from robopolicy.schema import to_dict
    from robopolicy.sim.registry import get_task
    from robopolicy.training.checkpoint import verify_checkpoint
    from robopolicy.training.manifest import parent_path

    if (args.checkpoint / MANIFEST).is_file():
        return _verify_bundle(args)
    report = verify_checkpoint(args.checkpoint, args.device or "cpu")
    manifest = report.manifest
    changed = {
        name: f"{version} -> {report.versions[name]}"
        for name, version in manifest.versions.items()
        if name in report.versions and report.versions[name] != version
    }
    if args.json:
        content = {
            "ok": report.ok,
            "max_error": report.max_error,
            "tolerance": report.tolerance,
            "policy": manifest.policy,
            "task": manifest.task,
            "changed_versions": changed,
            "parents": [to_dict(parent) for parent in manifest.parents],
        }
        print(json.dumps(content))
    else:
        print(f"{args.checkpoint}: {'verified' if report.ok else 'FAILED'}")
        calls = counted(manifest.network_calls, "network call")
        print(f"  policy {manifest.policy}, task {manifest.task}, {calls} per chunk")
        try:
            get_task(manifest.task)
        except UserError as error:
            print(f"  the policy cannot be evaluated here: {error}")
        print(f"  golden chunk: largest error {report.max_error:.3g} (tolerance {report.tolerance:g})")
        for parent in manifest.parents:
            weights = parent.files.get("model.safetensors", "")[:12]
            print(f"  composed of {parent_path(parent, args.checkpoint)}: {parent.policy} {weights}, unchanged")
        for name, change in changed.items():
            print(f"  {name} has changed since: {change}")
        if not report.ok:
            print("  This installation computes other actions; install the versions above or repeat the training.")
    return 0 if report.ok else 1


def _verify_bundle(args: argparse.Namespace) -> int:
    from robopolicy.deploy.bundle import open_bundle
    from robopolicy.errors import UserError

    if args.device:
        raise UserError("A bundle runs on the CPU; --device is for checkpoints.")
    bundle = open_bundle(args.checkpoint)
    report, manifest = bundle.verify(), bundle.manifest
    bundle.close()
    if args.json:
        numbers = {"ok": report.ok, "max_error": report.max_error, "tolerance": report.tolerance}
        print(json.dumps({**numbers, "policy": manifest.policy, "task": manifest.task}))
    else:
        print(f"{args.checkpoint}: {'verified' if report.ok else 'FAILED'}")
        calls = f"{counted(manifest.network_calls, 'network call')} per chunk"
        print(f"  bundle of policy {manifest.policy}, task {manifest.task}, {calls}")
        print(f"  golden chunk: largest error {report.max_error:.3g} (tolerance {report.tolerance:g})")
    return 0 if report.ok else 1
