"""World models in the terminal, controlled by keys (`worldmodel play`)."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from robopolicy.sim.contract import VectorSim

UP, DOWN = "dwrty", "asfgh"  # keys of the upper and the lower bound of each action dimension
REST, QUIT = " ", "q"


def action_of(key: str, sim: VectorSim) -> Tensor | None:
    """Return the action `(1, A)` of a key: zero for space, None for an unassigned key."""
    action = torch.zeros(1, sim.spec.action_dim).clamp(sim.spec.action_low, sim.spec.action_high)
    for keys, bound in ((UP, sim.spec.action_high), (DOWN, sim.spec.action_low)):
        dimension = keys.find(key)
        if 0 <= dimension < sim.spec.action_dim:
            action[0, dimension] = bound[dimension]
            return action
    return action if key == REST else None


def action_names(sim: VectorSim) -> tuple[str, ...]:
    """Return the action names of the simulator, or numbered names."""
    return sim.spec.action_names or tuple(f"action {index}" for index in range(sim.spec.action_dim))


def keys_help(sim: VectorSim) -> str:
    """Describe the keys in one line."""
    pairs = [f"{low}/{high} {name}" for low, high, name in zip(DOWN, UP, action_names(sim), strict=False)]
    return f"{', '.join(pairs)}, space rests, {QUIT} quits"


def pressed(script: str | None) -> Iterator[str]:
    """Yield the keys of a script, or from the terminal until `q`."""
    if script is not None:
        yield from script
        return
    with _raw_terminal():
        while (key := sys.stdin.read(1)) not in (QUIT, ""):
            yield key


def half_blocks(image: Tensor) -> str:
    """Render an image `(3, h, w)` uint8 as lines of coloured half blocks, two pixels per character."""
    lines: list[str] = []
    for upper, lower in zip(image[:, ::2].unbind(1), image[:, 1::2].unbind(1), strict=False):
        pairs = zip(upper.T.tolist(), lower.T.tolist(), strict=True)
        cells = [f"\x1b[38;2;{a};{b};{c}m\x1b[48;2;{d};{e};{f}m▀" for (a, b, c), (d, e, f) in pairs]
        lines.append("".join(cells) + "\x1b[0m")
    return "\n".join(lines)


@contextmanager
def _raw_terminal() -> Iterator[None]:
    """Read single keys from a terminal without waiting for a line."""
    if not sys.stdin.isatty():
        yield
        return
    import termios
    import tty

    before = termios.tcgetattr(sys.stdin)
    try:
        tty.setcbreak(sys.stdin)
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
