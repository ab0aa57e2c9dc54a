"""`robopolicy import`: write a policy of another library as a checkpoint."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from robopolicy.cli.options import add_overwrite_option, check_numbers, renames
from robopolicy.plurals import counted

if TYPE_CHECKING:
    from robopolicy.policies.base import Policy
    from robopolicy.sim.contract import VectorSim

EXAMPLES = """\
examples:
  robopolicy import onnx policy.onnx --task lift --out runs/vla
  robopolicy import onnx hopper.onnx --task hopper --rename state=obs --rename chunk=actions --out runs/hopper_onnx
  robopolicy import lerobot lerobot/diffusion_pusht --task push_t --out runs/pusht
  robopolicy import remote ws://127.0.0.1:8765 --task lift --action-horizon 4 --out runs/pi0
  robopolicy import openpi ws://127.0.0.1:8000 --task lift --rename state=observation/state --out runs/pi05
  robopolicy import sb3 hopper_sac.zip --task hopper --out runs/hopper_sb3
  robopolicy import rsl_rl logs/model_1500.pt --task hopper --rename state=policy --out runs/hopper_rsl
  robopolicy eval runs/pi0 --episodes 100
  robopolicy train algorithm=dsrl_sac init_from=runs/pi0 budget.env_steps=50000
"""


def add_parser(subparsers: Any) -> None:
    """Register the command."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "import",
        description="Wrap or convert a policy of another library, test it on its task and write a checkpoint. A "
        "checkpoint of a remote endpoint calls it at every decision; files are copied.",
        epilog=EXAMPLES,
    )
    parser.add_argument("kind", metavar="KIND", help="lerobot | onnx | openpi | remote | rsl_rl | sb3")
    parser.add_argument("source", metavar="SOURCE", help="file or address")
    parser.add_argument("--task", required=True, help="task of the policy, see 'robopolicy list tasks'")
    parser.add_argument("--out", type=Path, required=True, help="checkpoint folder to write")
    text = "NAME in the source of an observation KEY, of 'noise' or of 'chunk'; may be repeated"
    parser.add_argument("--rename", action="append", default=[], metavar="KEY=NAME", help=text)
    text = "lerobot, openpi: instruction of a language-conditioned policy; lerobot: may be repeated"
    parser.add_argument("--instruction", action="append", default=[], metavar="TEXT", help=text)
    parser.add_argument("--config", default="", metavar="FILE", help="rsl_rl: agent.yaml of the run")
    parser.add_argument("--action-horizon", type=int, help="actions executed per chunk (default: the policy's own)")
    parser.add_argument("--backend", default="auto", help="simulator backend (default: the task's own)")
    parser.add_argument("--reward", default="sparse", help="sparse or shaped (default: sparse)")
    add_overwrite_option(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Write the checkpoint; return 0."""
    from contextlib import closing

    from robopolicy.cli.policy_args import PolicyEntry, open_sim, sim_options
    from robopolicy.files import check_new_folder
    from robopolicy.interop.sources import ImportSource, open_policy
    from robopolicy.sim.chunk import ChunkedSim
    from robopolicy.sim.registry import get_task
    from robopolicy.training.checkpoint import GOLDEN_ROWS, save_checkpoint
    from robopolicy.training.manifest import MANIFEST

    if args.action_horizon is not None:
        check_numbers(args, positive=("action_horizon",), non_negative=())
    check_new_folder(args.out, "a checkpoint", MANIFEST, overwrite=args.overwrite)
    entry = get_task(args.task)
    with closing(open_sim(entry, sim_options(args, [], 1), [])) as sim:
        shapes = {key: tuple(spec.shape) for key, spec in sim.spec.observation.items()}
    source = ImportSource(
        args.source, shapes, renames(args.rename), args.config, args.action_horizon or 0, tuple(args.instruction)
    )
    policy = open_policy(args.kind, source)
    policy_entries = [PolicyEntry(args.source, lambda: policy, policy.spec)]
    with closing(open_sim(entry, sim_options(args, policy_entries, GOLDEN_ROWS), policy_entries)) as sim:
        _fit_normalizer(policy, sim)
        obs = ChunkedSim(sim, obs_horizon=policy.spec.obs_horizon).reset(0)
        obs = {key: obs[key] for key in policy.spec.observation}
        imported = {"imported": {"kind": args.kind, "source": args.source}}
        save_checkpoint(args.out, policy, task=entry.name, obs_sample=obs, training=imported)
    spec = policy.spec
    if args.json:
        content = {"out": str(args.out), "policy": policy.name, "task": entry.name, "takes_noise": policy.is_steerable}
        print(json.dumps(content))
        return 0
    horizon = counted(spec.horizon, "action")
    print(
        f"{args.out}: policy '{policy.name}' for {entry.name}, chunks of {horizon} of {spec.action_dim} numbers, "
        f"{spec.action_horizon} executed, {'with' if policy.is_steerable else 'without'} noise."
    )
    return 0


def _fit_normalizer(policy: Policy, sim: VectorSim) -> None:
    """Fit the action normaliser of a black-box policy, which critics use, to the bounds of the task."""
    from robopolicy.nets.normalizer import unfitted_normalizers

    if unfitted_normalizers(policy):
        policy.fit_normalizer({"action": {"min": sim.spec.action_low, "max": sim.spec.action_high}})
