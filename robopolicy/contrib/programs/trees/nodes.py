"""Nodes of a behavior tree and their tick, batched over environments (PORTAL, Xu et al. 2025).

    {"kind": "sequence", "children": [...]}     ticks its children in order until one does not succeed
    {"kind": "selector", "children": [...]}     ticks its children in order until one does not fail
    {"kind": "condition", "holds": "state[2] > 0.1"}                            succeeds or fails, never runs
    {"kind": "action", "skill": "grasp", "until": "state[22] < 0.05"}           a policy by its name
    {"kind": "action", "control": ["state[4] - state[0]", "0"], "limit": 20}    a plain controller

An action succeeds once `until` holds, fails once `unless` holds or after `limit` decisions, and runs otherwise. A node
with `"resume": true` begins its next tick with the child that was running at the last one; all others are reactive and
begin with the first. `"name"` is for readers.

Every node is ticked for all rows with a mask of the rows that count, so that rows do not depend on each other and the
tick can be traced into a graph. The memory of a tree is one vector per row: for `resume` the running child, for `limit`
the number of decisions so far. Both are 0 if the node was not running at the last tick.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from robopolicy.contrib.programs.trees.expressions import Formula, parse_formula
from robopolicy.errors import UserError
from robopolicy.files import parse_json

SUCCESS, FAILURE, RUNNING = 0, 1, 2
NODES = 256  # maximum nodes of a tree
DEPTH = 32  # maximum nesting
_FIELDS = {
    "sequence": {"children", "resume"},
    "selector": {"children", "resume"},
    "condition": {"holds"},
    "action": {"skill", "control", "until", "unless", "limit"},
}


@dataclass(frozen=True)
class Node:
    """A node with its subtree."""

    kind: str  # sequence | selector | condition | action
    index: int  # position in the text, the root is 0
    name: str = ""
    children: tuple[Node, ...] = ()  # of sequence and selector
    resume: bool = False  # resume the child that was running
    holds: Formula | None = None  # of a condition
    skill: str = ""  # name of the policy of an action
    control: tuple[Formula, ...] = ()  # formulas of an action, together one number per action dimension
    until: Formula | None = None  # success of an action
    unless: Formula | None = None  # failure of an action
    limit: int = 0  # decisions after which an action fails; 0: never

    @property
    def is_stateful(self) -> bool:
        """Whether it uses a slot of the memory."""
        return self.resume or self.limit > 0

    @property
    def label(self) -> str:
        """Name in messages."""
        return self.name or self.skill or f"{self.kind} {self.index}"

    def walk(self) -> Iterator[Node]:
        """The nodes of the subtree in the order of the text."""
        yield self
        for child in self.children:
            yield from child.walk()

    def formulas(self) -> Iterator[Formula]:
        """The node's own formulas."""
        yield from self.control
        yield from (formula for formula in (self.holds, self.until, self.unless) if formula is not None)


@dataclass(frozen=True)
class BehaviorTree:
    """A whole tree, created by `read_tree`."""

    root: Node
    plain: Mapping[str, Any] = field(repr=False)  # the original values

    @cached_property
    def nodes(self) -> tuple[Node, ...]:
        """All nodes by index."""
        return tuple(self.root.walk())

    @cached_property
    def actions(self) -> tuple[Node, ...]:
        """The action nodes, in order."""
        return tuple(node for node in self.nodes if node.kind == "action")

    @cached_property
    def places(self) -> dict[int, int]:
        """Index of an action node -> its position in `actions`."""
        return {node.index: place for place, node in enumerate(self.actions)}

    @cached_property
    def skills(self) -> tuple[str, ...]:
        """Names of the policies that the tree calls."""
        return tuple(dict.fromkeys(node.skill for node in self.actions if node.skill))

    @cached_property
    def slots(self) -> dict[int, int]:
        """Index of a stateful node -> its slot in the memory."""
        return {node.index: slot for slot, node in enumerate(node for node in self.nodes if node.is_stateful)}

    @property
    def reads(self) -> frozenset[str]:
        """Observations that the formulas read."""
        return frozenset(name for node in self.nodes for formula in node.formulas() for name in formula.names)

    def text(self) -> str:
        """The tree as indented JSON."""
        return json.dumps(self.plain, indent=2)

    def check(self, sizes: Mapping[str, int], action_dim: int) -> None:
        """Check that all formulas fit the observations and actions.

        Args:
            sizes: Vector observations and their sizes.
            action_dim: A, of the controllers.

        Raises:
            UserError: A formula reads unknown observations, has the wrong type, or a controller the wrong size.
        """
        for node in self.nodes:
            for formula in node.formulas():
                kind = formula.kind(sizes)
                if kind.truth == (formula in node.control):
                    expected = "numbers" if kind.truth else "a comparison"
                    raise UserError(f"Node '{node.label}' needs {expected}, got '{formula.text}'.")
            size = sum(formula.kind(sizes).size for formula in node.control)
            if node.control and size != action_dim:
                raise UserError(f"The controller of '{node.label}' has {size} numbers, but an action has {action_dim}.")

    def tick(self, values: Mapping[str, Tensor], memory: Tensor) -> TreeTick:
        """Tick the tree once.

        Args:
            values: Newest vector observations `{key: (B, d)}`.
            memory: `(B, len(slots))` after the last tick, zeros where an episode begins.
        """
        return _Ticking(self, values, memory).run()


@dataclass(frozen=True)
class TreeTick:
    """Result of one tick."""

    status: Tensor  # (B,) of the root
    statuses: Tensor  # (B, nodes) -1 where a node was not ticked
    action: Tensor  # (B,) index in `BehaviorTree.actions` of the active action, -1 where none was ticked
    running: Tensor  # (B,) whether this action runs, otherwise it was the last one to be ticked
    memory: Tensor  # (B, len(slots)) for the next tick


class _Ticking:
    """State of a tick in progress."""

    def __init__(self, tree: BehaviorTree, values: Mapping[str, Tensor], memory: Tensor) -> None:
        self.tree, self.values, self.before = tree, values, memory
        self.one = torch.ones_like(memory.sum(1, keepdim=True))  # (B, 1)
        self.rows = torch.zeros_like(self.one[:, 0], dtype=torch.long)  # (B,) zeros
        self.statuses: dict[int, Tensor] = {}
        self.after: dict[int, Tensor] = {}
        self.action = self.rows - 1
        self.running = self.rows > 0

    def run(self) -> TreeTick:
        status = self.tick(self.tree.root, self.rows == 0)
        slots = [self.after[index] for index in self.tree.slots]
        return TreeTick(
            status=status,
            statuses=torch.stack([self.statuses[node.index] for node in self.tree.nodes], 1),
            action=self.action,
            running=self.running,
            memory=torch.stack(slots, 1).to(self.before) if slots else self.before,
        )

    def tick(self, node: Node, active: Tensor) -> Tensor:
        """Status `(B,)` of a node; it counts for `active` rows only."""
        kinds: dict[str, Callable[[Node, Tensor], Tensor]] = {"condition": self._condition, "action": self._action}
        status = kinds.get(node.kind, self._composite)(node, active)
        self.statuses[node.index] = torch.where(active, status, -1)
        return status

    def _condition(self, node: Node, active: Tensor) -> Tensor:
        assert node.holds is not None
        return torch.where(self._holds(node.holds), SUCCESS, FAILURE)

    def _action(self, node: Node, active: Tensor) -> Tensor:
        status = self.rows + RUNNING
        if node.limit:
            elapsed = self._stored(node)
            status = torch.where(elapsed >= node.limit, FAILURE, status)
        if node.unless is not None:
            status = torch.where(self._holds(node.unless), FAILURE, status)
        if node.until is not None:
            status = torch.where(self._holds(node.until), SUCCESS, status)
        if node.limit:
            self.after[node.index] = torch.where(active & (status == RUNNING), elapsed + 1, 0)
        self.action = torch.where(active, self.tree.places[node.index], self.action)
        self.running = torch.where(active, status == RUNNING, self.running)
        return status

    def _composite(self, node: Node, active: Tensor) -> Tensor:
        passed = SUCCESS if node.kind == "sequence" else FAILURE  # a child with this status passes the tick to the next
        status, stopped, left = self.rows + passed, self.rows, active
        first = self._stored(node) if node.resume else self.rows
        for number, child in enumerate(node.children):
            entered = left & (first <= number)
            found = self.tick(child, entered)
            halted = entered & (found != passed)
            status = torch.where(halted, found, status)
            stopped = torch.where(halted, number, stopped)
            left = left & ~halted
        if node.resume:
            self.after[node.index] = torch.where(active & (status == RUNNING), stopped, 0)
        return status

    def _stored(self, node: Node) -> Tensor:
        return self.before[:, self.tree.slots[node.index]].round().long()

    def _holds(self, formula: Formula) -> Tensor:
        return formula(self.values, self.one)[:, 0]


def read_tree(plain: object) -> BehaviorTree:
    """Create a tree from plain JSON values.

    Raises:
        UserError: The tree is invalid; the message contains the position.
    """
    if not isinstance(plain, Mapping):
        raise UserError(f"A behavior tree must be a JSON object with a 'kind', got {type(plain).__name__}.")
    counter = iter(range(NODES))
    return BehaviorTree(_read(plain, "root", counter, 0), dict(plain))


def parse_tree(text: str) -> BehaviorTree:
    """Create a tree from JSON text.

    Raises:
        UserError: The text is not JSON, or not a tree.
    """
    try:
        return read_tree(parse_json(text))
    except ValueError as error:
        raise UserError(f"The behavior tree is not valid JSON: {error}.") from error


def _read(plain: object, where: str, counter: Iterator[int], depth: int) -> Node:
    kind = plain.get("kind") if isinstance(plain, Mapping) else None
    if not isinstance(plain, Mapping) or kind not in _FIELDS:
        raise UserError(f"{where} of the tree needs a kind ({', '.join(_FIELDS)}), got {kind!r}.")
    index = next(counter, None)
    if index is None or depth > DEPTH:
        raise UserError(f"A behavior tree has at most {NODES} nodes, nested at most {DEPTH} deep; this one has more.")
    surplus = sorted(set(plain) - _FIELDS[kind] - {"kind", "name"})
    if surplus:
        allowed = ", ".join(sorted(_FIELDS[kind]))
        raise UserError(f"{where} of the tree, a {kind}, has '{surplus[0]}'; it may have {allowed} and name.")
    formulas = {key: parse_formula(plain[key]) for key in ("holds", "until", "unless") if key in plain}
    node = Node(
        kind,
        index,
        name=_typed(plain, "name", str, "", where),
        children=tuple(
            _read(child, f"{where}.children[{number}]", counter, depth + 1)
            for number, child in enumerate(_typed(plain, "children", list, [], where))
        ),
        resume=_typed(plain, "resume", bool, False, where),
        skill=_typed(plain, "skill", str, "", where),
        control=tuple(parse_formula(entry) for entry in _typed(plain, "control", list, [], where)),
        limit=_typed(plain, "limit", int, 0, where),
        **formulas,
    )
    if kind in ("sequence", "selector") and not node.children:
        raise UserError(f"{where} of the tree, a {kind}, needs children.")
    if kind == "condition" and node.holds is None:
        raise UserError(f"{where} of the tree, a condition, needs 'holds'.")
    if kind == "action" and bool(node.skill) == bool(node.control):
        raise UserError(f"{where} of the tree, an action, needs either 'skill' or 'control'.")
    if node.limit < 0:
        raise UserError(f"{where} of the tree has limit {node.limit}; set a number of decisions, or 0 for no limit.")
    return node


def _typed(plain: Mapping[str, Any], key: str, kind: type, default: Any, where: str) -> Any:
    value = plain.get(key, default)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise UserError(f"{where}.{key} of the tree must be of type {kind.__name__}, got {value!r}.")
    return value
