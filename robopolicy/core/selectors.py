"""Selectors: which rows of a batch enter the advantage and the update, and how often."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from robopolicy.core.decisions import Decisions

Selector = Callable[[Decisions, torch.Generator | None], Tensor]
"""`(decisions, generator of random choices) -> row indices (M,)`; a row may be dropped or drawn several times."""

SELECTORS: dict[str, Selector] = {}
