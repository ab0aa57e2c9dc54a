"""`robopolicy eval --dataset`: errors of the actions of policies on recorded episodes, without a simulator."""

from __future__ import annotations

import argparse
import json

from robopolicy.plurals import counted

ALLOWED = {"--dataset", "--device", "--json", "--allow-code"}


def eval_dataset(args: argparse.Namespace) -> int:
    """Print the action errors of every policy; return 0."""
    from robopolicy.cli.options import reject_unused
    from robopolicy.cli.policy_args import check_different, short_names
    from robopolicy.data.compatibility import check_dataset_for_metadata
    from robopolicy.data.formats import read_dataset
    from robopolicy.errors import UserError
    from robopolicy.evaluation.action_error import action_error
    from robopolicy.evaluation.report import aligned
    from robopolicy.training.checkpoint import load_policy

    reject_unused(args, "with --dataset", *sorted(args.given - ALLOWED))
    if {"expert", "random"} & set(args.policies):
        raise UserError("--dataset compares checkpoints with recorded actions; pass checkpoint folders.")
    check_different(args.policies)
    loaded = [load_policy(name, args.device) for name in args.policies]
    episodes = read_dataset(args.dataset, task=loaded[0][1].task).without_closing_frames()
    for _, manifest in loaded:
        if manifest.task_metadata is not None:
            check_dataset_for_metadata(episodes, manifest.task_metadata, str(args.dataset))
    errors = {
        label: action_error(policy, episodes, what=f"dataset {args.dataset}")
        for label, (policy, _) in zip(short_names(args.policies), loaded, strict=True)
    }
    if args.json:
        found = {label: error.summary() for label, error in errors.items()}
        print(json.dumps({"dataset": str(args.dataset), "policies": found}))
        return 0
    for label, error in errors.items():
        where = f"{counted(episodes.num_episodes, 'episode')} of {args.dataset}"
        print(f"{label}: absolute error of the actions on {where}")
        print(aligned(*error.table()))
    return 0
