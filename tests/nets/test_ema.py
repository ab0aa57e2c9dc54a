"""Tests of the weight average with Diffusion Policy's schedule."""

import pytest
import torch
from torch import nn

from robopolicy.nets.module_state import EMA


def test_first_update_copies_and_later_updates_follow_the_schedule() -> None:
    net = nn.Linear(2, 2)
    ema = EMA(net)
    with torch.no_grad():
        net.weight.fill_(1.0)
    ema.update(net)
    assert torch.equal(ema.module.weight, net.weight)
    with torch.no_grad():
        net.weight.fill_(2.0)
    ema.update(net)
    decay = 1 - 2**-0.75
    torch.testing.assert_close(ema.module.weight, torch.full((2, 2), decay * 1 + (1 - decay) * 2))


def test_decay_is_bounded() -> None:
    ema = EMA(nn.Linear(1, 1), max_decay=0.9)
    assert ema.decay(0) == 0.0
    assert ema.decay(5) == pytest.approx(1 - 6**-0.75)
    assert ema.decay(10**6) == 0.9


def test_buffers_are_copied_and_the_average_has_no_gradient() -> None:
    net = nn.BatchNorm1d(2)
    ema = EMA(net)
    net(torch.randn(8, 2) + 5)
    ema.update(net)
    assert torch.equal(ema.module.running_mean, net.running_mean)  # type: ignore[arg-type]
    assert not ema.module.training and not any(p.requires_grad for p in ema.module.parameters())


def test_restored_average_continues_the_schedule() -> None:
    net = nn.Linear(2, 2)
    ema, restored = EMA(net), EMA(nn.Linear(2, 2))
    for _ in range(3):
        ema.update(net)
    restored.load_state_dict(ema.state_dict())
    with torch.no_grad():
        net.weight.add_(1.0)
    ema.update(net)
    restored.update(net)
    assert torch.equal(ema.module.weight, restored.module.weight)
