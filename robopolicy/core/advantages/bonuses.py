"""Bonuses for `Shape`: what is added to the advantage of a row or decision."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from robopolicy.core.decisions import Decisions

Bonus = Callable[[Decisions], Tensor]
"""`decisions -> (N, 1) per row or (N, T) per decision`."""

BONUSES: dict[str, Callable[..., object]] = {}
