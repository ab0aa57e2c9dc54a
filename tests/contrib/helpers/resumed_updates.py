"""Check of algorithms that are restored between updates on given batches."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def assert_resumes(make: Callable[[int], Any], feed: Callable[[], Any]) -> None:
    """An algorithm of another seed, restored after two of four updates, ends with the same weights."""
    torch.manual_seed(0)
    data = [feed() for _ in range(4)]
    straight, other = make(0), make(1)
    for part in data[:2]:
        straight.update(part)
    other.load_state_dict(copy.deepcopy(straight.state_dict()))
    for part in data[2:]:
        straight.update(part)
        other.update(part)
    for name, part in straight.checkpoint_items().items():
        expected, found = part.state_dict(), other.checkpoint_items()[name].state_dict()
        for key, value in expected.items():
            assert not isinstance(value, Tensor) or torch.equal(value, found[key]), f"{name} {key}"
