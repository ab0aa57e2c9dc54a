"""A policy's decision as one flat list of tensor operations: one robot, fixed shapes, all randomness an input.

`act(deterministic=True)` is run once and every operation that depends on the inputs is written down, derivatives
included (guidance, climbing a critic, divergences). Whatever does not depend on them, such as time embeddings, noise
tables and probing directions, is computed now and kept as a constant. Loops are unrolled.

What a trace cannot hold is refused: decisions by the values of the inputs, and randomness that comes from anywhere but
the noise that the policy is handed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._decomp import core_aten_decompositions
from torch.fx.experimental.proxy_tensor import make_fx

from robopolicy.errors import UserError
from robopolicy.policies.heads.average_velocity import forward_mode
from robopolicy.policies.noise import PerRowGenerator

_aten = torch.ops.aten


SHAPED_ALIKE = {  # what only takes the shape of its input
    _aten.new_full.default,
    _aten.new_zeros.default,
    _aten.new_ones.default,
    _aten.full_like.default,
    _aten.zeros_like.default,
    _aten.ones_like.default,
}


class ReplayNoise(PerRowGenerator):
    """Hands out `noise` `(B, R, A)` piece by piece, in the order in which a policy draws."""

    def __init__(self, noise: Tensor) -> None:
        super().__init__([], [])
        self._noise, self._used = noise.flatten(1), 0

    def normal(self, shape: Sequence[int]) -> Tensor:
        """The next piece, as `(B, ...)`."""
        start, self._used = self._used, self._used + math.prod(shape[1:])
        return self._noise[:, start : self._used].reshape(-1, *shape[1:])


class CountingNoise(PerRowGenerator):
    """Counts how many numbers a policy draws for one row."""

    def __init__(self) -> None:
        super().__init__([], [])
        self.size = 0

    def normal(self, shape: Sequence[int]) -> Tensor:
        """Zeros."""
        self.size += math.prod(shape[1:])
        return torch.zeros(tuple(shape))


def trace(decide: Callable[..., Any], inputs: Sequence[Tensor]) -> fx.GraphModule:
    """What `decide` does with `inputs`, as a graph without anything that could be computed beforehand.

    Raises:
        UserError: It draws randomness that is no input.
    """
    derivatives: dict[Any, Any] = {op: how for op, how in core_aten_decompositions().items() if "backward" in str(op)}
    with forward_mode():
        graph = make_fx(decide, decomposition_table=derivatives, tracing_mode="real")(*inputs)
    _check_randomness(graph)
    _fold(graph)
    return graph


def _check_randomness(graph: fx.GraphModule) -> None:
    """Rewind generators of fixed seed, whose draws are constants; there may be no others."""
    for node in graph.graph.nodes:
        if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
            continue
        generator = node.kwargs.get("generator")
        generator = getattr(graph, str(generator.target)) if isinstance(generator, fx.Node) else generator
        if generator is None:
            raise UserError(f"This policy draws noise of its own ({node.target}), which a graph cannot repeat.")
        generator.manual_seed(generator.initial_seed())


def _fold(graph: fx.GraphModule) -> None:
    """Replace whatever is known without the inputs by constants; equal views of one memory become one constant."""
    known: dict[fx.Node, Any] = {}
    for node in graph.graph.nodes:
        if node.op == "get_attr":
            known[node] = getattr(graph, node.target)
        elif node.op == "call_function" and (
            node.target in SHAPED_ALIKE or all(given in known for given in node.all_input_nodes)
        ):

            def value(given: fx.Node) -> Any:
                if given in known:
                    return known[given]
                return torch.empty(given.meta["val"].shape, dtype=given.meta["val"].dtype)

            arguments = fx.map_arg((node.args, dict(node.kwargs)), value)
            known[node] = node.target(*arguments[0], **arguments[1])
    constants: dict[Any, str] = {}
    for node in list(graph.graph.nodes):
        users = [user for user in node.users if user not in known]
        if node not in known or not users:
            continue
        with graph.graph.inserting_before(node):
            constant = graph.graph.get_attr(_constant(graph, known[node], constants))
        for user in users:
            user.replace_input_with(node, constant)
    for node in reversed(list(known)):
        if not node.users:
            graph.graph.erase_node(node)
    graph.graph.eliminate_dead_code()
    for name in {*graph._parameters, *graph._buffers} - set(constants.values()):
        delattr(graph, name)
    graph.recompile()


def _constant(graph: fx.GraphModule, value: Tensor, constants: dict[Any, str]) -> str:
    key = (value.data_ptr(), value.shape, value.stride(), value.dtype)
    if key not in constants:
        constants[key] = f"constant_{len(constants)}"
        graph.register_buffer(constants[key], value.detach())
    return constants[key]
