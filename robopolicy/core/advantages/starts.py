"""Where the advantage starts: what a recipe hands to the first stage."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from robopolicy.core.advantages.pipeline import outcome
from robopolicy.core.decisions import Decisions

Start = Callable[[Decisions], Tensor]
"""`decisions -> (N, 1) per row or (N, T) per decision`."""

STARTS: dict[str, Start] = {"outcome": outcome}
