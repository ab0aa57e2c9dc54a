"""Tracing of a policy's decision to a flat list of tensor operations with fixed shapes and noise as an input.

`act(deterministic=True)` is run once, and every operation that depends on the inputs is recorded, including derivatives
(guidance, ascent on a critic, divergences). Values that do not depend on the inputs, such as time embeddings, noise
tables and probe directions, become constants. Loops are unrolled. Control flow that depends on the values of inputs and
random draws without a fixed seed cannot be traced.
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

# Operators that use only the shape of their input.
_NAMES = ("new_full", "new_zeros", "new_ones", "full_like", "zeros_like", "ones_like")
SHAPE_ONLY = {getattr(torch.ops.aten, name).default for name in _NAMES}


class ReplayNoise(PerRowGenerator):
    """Generator that returns `noise` `(B, R, A)` in the order of the policy's draws."""

    def __init__(self, noise: Tensor) -> None:
        super().__init__([], [])
        self._noise, self._used = noise.flatten(1), 0

    def normal(self, shape: Sequence[int]) -> Tensor:
        """Return the next numbers, as `(B, ...)`."""
        start, self._used = self._used, self._used + math.prod(shape[1:])
        return self._noise[:, start : self._used].reshape(-1, *shape[1:])


class CountingNoise(PerRowGenerator):
    """Generator that counts the numbers drawn for one row."""

    def __init__(self) -> None:
        super().__init__([], [])
        self.size = 0

    def normal(self, shape: Sequence[int]) -> Tensor:
        """Return zeros."""
        self.size += math.prod(shape[1:])
        return torch.zeros(tuple(shape))


def trace(decide: Callable[..., Any], inputs: Sequence[Tensor]) -> fx.GraphModule:
    """Trace `decide`, with constants folded; raises `UserError` for random draws without a fixed seed."""
    derivatives: dict[Any, Any] = {op: rule for op, rule in core_aten_decompositions().items() if "backward" in str(op)}
    with forward_mode():
        graph = make_fx(decide, decomposition_table=derivatives, tracing_mode="real")(*inputs)
    _check_randomness(graph)
    _fold(graph)
    return graph


def _check_randomness(graph: fx.GraphModule) -> None:
    """Reset generators with a fixed seed, whose draws are constants; raise `UserError` for other draws."""
    for node in graph.graph.nodes:
        if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
            continue
        generator = node.kwargs.get("generator")
        generator = getattr(graph, str(generator.target)) if isinstance(generator, fx.Node) else generator
        if generator is None:
            raise UserError(f"This policy draws random numbers without a fixed seed ({node.target}); a graph cannot.")
        generator.manual_seed(generator.initial_seed())


def _fold(graph: fx.GraphModule) -> None:
    """Replace values that do not depend on the inputs by constants, one for equal views of the same memory."""
    known: dict[fx.Node, Any] = {}
    for node in graph.graph.nodes:
        if node.op == "get_attr":
            known[node] = getattr(graph, node.target)
        elif node.op == "call_function" and (
            node.target in SHAPE_ONLY or all(given in known for given in node.all_input_nodes)
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
