"""Safeguards of a run: detection of non-finite numbers and collapse, and a comparison with the initial policy."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from robopolicy.algorithms.common.algorithm import Algorithm, make_metrics, read_metrics
from robopolicy.atomic import atomic_folder, restore_partial
from robopolicy.errors import UserError
from robopolicy.evaluation.harness import run_episodes
from robopolicy.evaluation.intervals import PairedDifference, paired_difference
from robopolicy.evaluation.result import EvalResult, concat_results
from robopolicy.policies.base import Policy
from robopolicy.sim.contract import VectorSim
from robopolicy.training.manifest import read_manifest

Summary = dict[str, Any]


class TrainingDiverged(UserError):
    """A number is not finite; the message names it."""


MIN_EPISODES = 10  # episodes required for a bootstrap interval of returns
RUN_FILES = ("config.yaml", "metrics.jsonl", "metrics.csv", "tensorboard", "wandb", "checkpoints")
MAX_DIVERGED = 0.1  # tolerated fraction of episodes in which the simulation diverges


def check_metrics(metrics: Mapping[str, float | Tensor], algorithm: Algorithm, update: int) -> None:
    """Raise TrainingDiverged for a non-finite metric; the message names a non-finite tensor if there is one.

    Metrics that are still on a device are not checked, because that would wait for it in every update.
    """
    for name, value in metrics.items():
        if not isinstance(value, Tensor) and not math.isfinite(value):
            check_parameters(algorithm, update)
            raise TrainingDiverged(_message(f"metric '{name}'", value, update))


def check_parameters(algorithm: Algorithm, update: int) -> None:
    """Raise TrainingDiverged for a non-finite tensor of the algorithm's state: weights, moments, statistics."""
    found = [(name, tensor) for name, tensor in named_tensors(algorithm.state_dict()) if tensor.is_floating_point()]
    # Summing is one pass without a temporary; elements are checked only if a sum is not finite.
    sums = read_metrics(make_metrics({str(i): tensor.detach().sum() for i, (_, tensor) in enumerate(found)}))
    for (name, tensor), total in zip(found, sums.values(), strict=True):
        if not math.isfinite(total):
            bad = ~torch.isfinite(tensor)
            if bool(bad.any()):
                raise TrainingDiverged(_message(f"tensor '{name}'", float(tensor[bad].flatten()[0]), update))


def named_tensors(tree: Any, where: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor of a nested state with its dotted path."""
    if isinstance(tree, Tensor):
        yield where, tree
    elif isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from named_tensors(value, f"{where}.{key}" if where else str(key))
    elif isinstance(tree, list | tuple):
        for index, value in enumerate(tree):
            yield from named_tensors(value, f"{where}.{index}")


def score(summary: Summary) -> float:
    """Return the success rate, or the mean return; without a simulator, the negative action error."""
    if "action_error" in summary:
        return -float(summary["action_error"])
    return float(summary["return_mean"] if summary["success"] is None else summary["success"])


def is_better(new: Summary, best: Summary | None) -> bool:
    """Whether `new` replaces `best`; ties in success are broken by the higher return, then by the earlier update.

    Returns are compared after excess divergence: if rewards are costs, a diverged simulation would end them early.
    """
    if best is None:
        return True
    first, second = ((-_excess_divergence(item), score(item), item.get("return_mean", 0.0)) for item in (new, best))
    return first > second


def _excess_divergence(summary: Summary) -> float:
    """Return the fraction of diverged episodes beyond `MAX_DIVERGED`; 0 for tasks with a success criterion."""
    if summary.get("success") is not None:
        return 0.0
    return max(summary.get("diverged", 0) / summary["n"] - MAX_DIVERGED, 0.0)


def has_collapsed(new: Summary, best: Summary) -> bool:
    """Whether the interval of `new` is entirely below the interval of `best`; False without a simulator."""
    if "action_error" in new:
        return False
    if new["success"] is None and min(new["n"], best["n"]) < MIN_EPISODES:
        return False
    low, high = ("return_low", "return_high") if new["success"] is None else ("low", "high")
    return new[high] is not None and best[low] is not None and new[high] < best[low]


def _message(what: str, value: float, update: int) -> str:
    return f"Training diverged at update {update}: {what} is {value}; lower the learning rate or check the data."


def backup_best(best: Path) -> None:
    """Back up the checkpoint `best` before it is replaced."""
    if best.is_dir() and not _backup_of(best).exists():
        with atomic_folder(_backup_of(best)) as folder:  # links; readers of `best` still find it
            shutil.copytree(best, folder, copy_function=_link, dirs_exist_ok=True)


def clear_backup(best: Path) -> None:
    """Delete the backup once a resume point refers to the current `best`."""
    shutil.rmtree(_backup_of(best), ignore_errors=True)


def restore_backup(best: Path, known: Mapping[str, Any] | None) -> None:
    """Restore the checkpoint `best` of a resume point, whose summary is `known`; None if it has no best checkpoint."""
    restore_partial(best)
    if known is not None and _backup_of(best).exists() and not (best.exists() and _update_of(best) == known["update"]):
        shutil.rmtree(best, ignore_errors=True)
        _backup_of(best).rename(best)
    clear_backup(best)


def _link(source: str, target: str) -> None:
    """Link a file, which is never changed in place; copy it where links are not supported."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def _backup_of(best: Path) -> Path:
    return best.with_name(f"{best.name}.before")


def _update_of(checkpoint: Path) -> int:
    return int(read_manifest(checkpoint).training["update"])


ROUNDS = 5  # of as many episodes as an evaluation, so the comparison costs at most ten evaluations


def compare_with_base(
    base: Policy, best: Policy, sim: VectorSim, *, episodes: int, seed: int, before_round: Callable[[], None]
) -> PairedDifference:
    """Compare `best` and `base` on common episodes, in at most `ROUNDS` rounds of `episodes` each.

    The first episode has the seed `seed`. `before_round` is called before each round and may raise to stop.
    """
    completed: list[tuple[EvalResult, EvalResult]] = []
    for index in range(ROUNDS):
        before_round()
        seeds = range(seed + index * episodes, seed + (index + 1) * episodes)
        first, second = (run_episodes(policy, sim, seeds) for policy in (base, best))
        completed.append((first, second))
        outcome = _difference(
            concat_results([pair[0] for pair in completed]), concat_results([pair[1] for pair in completed])
        )
        interval = outcome.difference
        if interval.n >= MIN_EPISODES and (interval.low > 0 or interval.high < 0):
            break
    return outcome


def _difference(first: EvalResult, second: EvalResult) -> PairedDifference:
    if first.success is None or second.success is None:
        return paired_difference(first.returns, second.returns)
    return paired_difference(first.success, second.success)


def describe_restore(best: Mapping[str, Any]) -> str:
    """Format the restoring of the best state after a collapse."""
    return f"{'return' if best['success'] is None else 'success'} collapsed; restored update {best['update']}"


def describe_checkpoints(folder: Path, saved: Sequence[str]) -> str:
    """Format the checkpoints of a run that has failed."""
    if not saved:
        return "No checkpoint was saved."
    return f"Continue from {' or '.join(saved)} of {folder}; {'it is' if len(saved) == 1 else 'both are'} intact."


def delete_run(folder: Path) -> None:
    """Delete the files of a run; files of other origin are kept."""
    with suppress(OSError):
        for path in (folder / name for name in RUN_FILES):
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        folder.rmdir()
