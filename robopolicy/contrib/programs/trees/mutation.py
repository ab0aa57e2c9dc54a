"""Random changes of behavior trees, as plain JSON values, for a search without a language model.

Sources: Xu et al. 2025, PORTAL, and Aravindan et al. 2025, IPP. Changes preserve the language, but may not fit the
observations and skills: invalid trees are rejected on reading or building, and the search draws again.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

Plain = dict[str, Any]

SPREAD = 0.5  # standard deviation of the logarithm of a number's scale factor
SHIFT = 0.1  # standard deviation of the value added to a number, for numbers near 0


def mutate(tree: Plain, others: Sequence[Plain], skills: Sequence[str], rng: np.random.Generator) -> Plain:
    """A copy of `tree` with one random change; an identical copy if the drawn change does not apply.

    Args:
        tree: A tree as plain values.
        others: Trees from which parts may be copied.
        skills: Names that an action may call.
        rng: Of the change.
    """
    made = copy.deepcopy(tree)
    changes: list[Callable[[], None]] = [
        lambda: _number(made, rng),
        lambda: _number(made, rng),  # twice, because most formulas have several numbers
        lambda: _comparison(made, rng),
        lambda: _swap(made, rng),
        lambda: _drop(made, rng),
        lambda: _copy_part(made, [tree, *others], rng),
        lambda: _kind(made, rng),
        lambda: _resume(made, rng),
        lambda: _limit(made, rng),
        lambda: _skill(made, skills, rng),
    ]
    changes[int(rng.integers(len(changes)))]()
    return made


def _nodes(tree: Plain) -> Iterator[Plain]:
    yield tree
    for child in tree.get("children", []):
        yield from _nodes(child)


def _pick(found: Sequence[Any], rng: np.random.Generator) -> Any | None:
    return found[int(rng.integers(len(found)))] if found else None


def _formulas(tree: Plain) -> list[tuple[Any, Any]]:
    """Every formula as its container and key."""
    nodes = list(_nodes(tree))
    plain = [(node, key) for node in nodes for key in ("holds", "until", "unless") if key in node]
    return plain + [(node["control"], i) for node in nodes for i in range(len(node.get("control", [])))]


def _number(tree: Plain, rng: np.random.Generator) -> None:
    """Scale and shift one number of one formula, indices excluded."""
    _rewrite(tree, rng, lambda node: type(getattr(node, "value", None)) in (int, float), _perturb)


def _perturb(node: Any, rng: np.random.Generator) -> None:
    node.value = float(f"{abs(node.value * np.exp(SPREAD * rng.normal()) + SHIFT * rng.normal()):.3g}")


def _comparison(tree: Plain, rng: np.random.Generator) -> None:
    """Reverse one comparison."""
    _rewrite(tree, rng, lambda node: isinstance(node, ast.Compare), _flip)


def _flip(node: Any, rng: np.random.Generator) -> None:
    node.ops = [ast.Gt() if isinstance(node.ops[0], ast.Lt | ast.LtE) else ast.Lt()]


def _rewrite(
    tree: Plain,
    rng: np.random.Generator,
    matches: Callable[[ast.AST], bool],
    change: Callable[[Any, np.random.Generator], None],
) -> None:
    place = _pick(_formulas(tree), rng)
    if place is None:
        return
    holder, key = place
    body = ast.parse(holder[key], mode="eval")
    indices = {id(part) for node in ast.walk(body) if isinstance(node, ast.Subscript) for part in ast.walk(node.slice)}
    node = _pick([node for node in ast.walk(body) if matches(node) and id(node) not in indices], rng)
    if node is not None:
        change(node, rng)
        holder[key] = ast.unparse(body)


def _composites(tree: Plain, least: int) -> list[Plain]:
    return [node for node in _nodes(tree) if len(node.get("children", [])) >= least]


def _swap(tree: Plain, rng: np.random.Generator) -> None:
    node = _pick(_composites(tree, 2), rng)
    if node is not None:
        first, second = rng.choice(len(node["children"]), 2, replace=False)
        children = node["children"]
        children[first], children[second] = children[second], children[first]


def _drop(tree: Plain, rng: np.random.Generator) -> None:
    node = _pick(_composites(tree, 2), rng)
    if node is not None:
        del node["children"][int(rng.integers(len(node["children"])))]


def _copy_part(tree: Plain, sources: Sequence[Plain], rng: np.random.Generator) -> None:
    """Insert a copy of a part of some tree into the children of a node."""
    node, source = _pick(_composites(tree, 1), rng), _pick(sources, rng)
    if node is not None and source is not None:
        part = copy.deepcopy(_pick(list(_nodes(source)), rng))
        node["children"].insert(int(rng.integers(len(node["children"]) + 1)), part)


def _kind(tree: Plain, rng: np.random.Generator) -> None:
    node = _pick(_composites(tree, 1), rng)
    if node is not None:
        node["kind"] = "selector" if node["kind"] == "sequence" else "sequence"


def _resume(tree: Plain, rng: np.random.Generator) -> None:
    node = _pick(_composites(tree, 2), rng)
    if node is not None and not node.pop("resume", False):
        node["resume"] = True


def _actions(tree: Plain) -> list[Plain]:
    return [node for node in _nodes(tree) if node.get("kind") == "action"]


def _limit(tree: Plain, rng: np.random.Generator) -> None:
    node = _pick(_actions(tree), rng)
    if node is not None:
        node["limit"] = round(max(1, node.get("limit") or 10) * float(np.exp(SPREAD * rng.normal())))


def _skill(tree: Plain, skills: Sequence[str], rng: np.random.Generator) -> None:
    node = _pick([node for node in _actions(tree) if "skill" in node], rng)
    if node is not None and skills:
        node["skill"] = str(_pick(skills, rng))
