"""Table from cells: accuracy, pass@k, entropy and dead groups with intervals, and a verdict on every claim."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.text.cell import by_source
from benchmarks.text.claims import SEEDS, claim_of, difference, mean_of, verdict
from robopolicy.evaluation.intervals import Interval, wilson

Cell = dict[str, Any]
SHOWN = ("pass@1", "pass@8", "entropy", "tokens", "format", "tool calls")  # of held-out prompts
TRAINING = ("dead groups", "informative rows", "clipped")


def rows(cells: Sequence[Cell]) -> list[dict[str, object]]:
    """One row per task and recipe, the base first."""
    table: list[dict[str, object]] = []
    for task in dict.fromkeys(cell["task"] for cell in cells):
        inside = [cell for cell in cells if cell["task"] == task]
        base = _base(inside)
        table.append(_row(task, "(imitation)", [base], [], {"claim": "-", "difference": "-", "verdict": "-"}))
        table.extend(
            _row(task, recipe, played, TRAINING, _judged(recipe, inside))
            for recipe in dict.fromkeys(cell["recipe"] for cell in inside)
            if (played := _played(inside, recipe))
        )
    return table


def refusals(cells: Sequence[Cell]) -> list[str]:
    """One line per recipe that some tasks do not support: these tasks, the tasks that do, and the reason."""
    lines: list[str] = []
    for recipe in dict.fromkeys(cell["recipe"] for cell in cells):
        own = [cell for cell in cells if cell["recipe"] == recipe]
        refused = {cell["task"]: cell["refused"] for cell in own if cell["refused"]}
        if refused:
            played = sorted({cell["task"] for cell in own} - refused.keys())
            elsewhere = f", plays {' and '.join(played)}" if played else ""
            reason = next(iter(refused.values())).split("; the world measures")[0].rstrip(".")
            lines.append(f"- `{recipe}`: not on {' and '.join(sorted(refused))}{elsewhere}. {reason}.")
    return lines


def figures(cells: Sequence[Cell]) -> dict[str, Any]:
    """The same numbers for programs, by task and recipe."""
    result: dict[str, Any] = {"seeds": sorted({cell["seed"] for cell in cells})}
    for task in dict.fromkeys(cell["task"] for cell in cells):
        inside = [cell for cell in cells if cell["task"] == task]
        base = _base(inside)
        entries: dict[str, Any] = {"(imitation)": _figures([base], ())}
        for recipe in dict.fromkeys(cell["recipe"] for cell in inside):
            played = _played(inside, recipe)
            if not played:
                entries[recipe] = {"refused": next(run["refused"] for run in inside if run["recipe"] == recipe)}
                continue
            claim, gap = claim_of(recipe), _gap(recipe, inside)
            entries[recipe] = _figures(played, TRAINING) | {
                "tokens_generated": sum(run["tokens"] for run in played) / len(played),
                "gain": _accuracy(played).estimate - _accuracy([base]).estimate,
                "claim": {
                    "is": str(claim),
                    "difference": None if gap is None else gap.to_dict(),
                    "verdict": _verdict(recipe, inside),
                },
            }
        result[task] = entries
    return result


def _base(inside: Sequence[Cell]) -> Cell:
    """The shared base of the cells of a task, in the form of a cell."""
    return {**inside[0], "after": inside[0]["base"]}


def _played(inside: Sequence[Cell], recipe: str) -> list[Cell]:
    return [cell for cell in inside if cell["recipe"] == recipe and not cell["refused"]]


def _gap(recipe: str, inside: Sequence[Cell]) -> Interval | None:
    claim = claim_of(recipe)
    return difference(claim, _played(inside, recipe), _played(inside, claim.against))


def twin(recipe: str, inside: Sequence[Cell]) -> str | None:
    """An earlier recipe with the same result on every common seed: the task does not distinguish the two."""
    names = sorted({cell["recipe"] for cell in inside}, key=by_source)
    played = {run["seed"]: run["after"] for run in _played(inside, recipe)}
    for other in names[: names.index(recipe)]:
        theirs = {run["seed"]: run["after"] for run in _played(inside, other)}
        common = played.keys() & theirs.keys()
        if common and all(played[seed] == theirs[seed] for seed in common):
            return other
    return None


def _verdict(recipe: str, inside: Sequence[Cell]) -> str:
    same = twin(recipe, inside)
    return verdict(claim_of(recipe), _gap(recipe, inside)) if same is None else f"here the same as {same}"


def _judged(recipe: str, inside: Sequence[Cell]) -> dict[str, str]:
    claim, gap = claim_of(recipe), _gap(recipe, inside)
    shown = "-" if gap is None else f"{gap:+.3f}" if gap.n >= SEEDS else f"{gap.estimate:+.3f}"
    return {"claim": str(claim), "difference": shown, "verdict": _verdict(recipe, inside)}


def _row(
    task: str, recipe: str, runs: Sequence[Cell], training: Sequence[str], judged: dict[str, str]
) -> dict[str, object]:
    seconds = [run["cpu_seconds"] for run in runs] if training else []
    return {
        "task": task,
        "recipe": recipe,
        "seeds": len(runs),
        "accuracy": f"{_accuracy(runs):.1%}",
        **{name: _shown(mean_of(name, runs)) for name in SHOWN},
        **{name: _shown(mean_of(name, runs)) if training else "-" for name in TRAINING},
        "CPU s": round(sum(seconds) / len(seconds)) if seconds else "-",
        **judged,
    }


def _figures(runs: Sequence[Cell], training: Sequence[str]) -> dict[str, Any]:
    accuracy = _accuracy(runs)
    return {
        "accuracy": {"value": accuracy.estimate, "low": accuracy.low, "high": accuracy.high},
        "by_seed": [run["after"]["correct"] / run["after"]["n"] for run in runs],
        **{name: value for name in (*SHOWN, *training) if (value := mean_of(name, runs)) is not None},
    }


def _accuracy(runs: Sequence[Cell]) -> Interval:
    """Pooled over seeds and prompts, with its Wilson interval."""
    return wilson(sum(run["after"]["correct"] for run in runs), sum(run["after"]["n"] for run in runs))


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
