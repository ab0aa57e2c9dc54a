"""Tests of normalisers: round trips, constant dimensions, exact merging, and refusal of damaged statistics."""

import pytest
import torch
from torch import nn

from robopolicy.errors import UserError
from robopolicy.nets.normalizer import Normalizer, RunningNormalizer, make_normalizer, unfitted_normalizers

STATISTICS = {"min": [-3.0, 0.0, 5.0], "max": [1.0, 10.0, 5.00001], "mean": [0.0, 2.0, 5.0], "std": [2.0, 0.5, 1e-7]}


@pytest.mark.parametrize("mode", ["minmax", "meanstd", "identity"])
def test_round_trip_is_exact_and_constant_dimensions_are_finite(mode: str) -> None:
    normalizer = Normalizer(3, mode)
    normalizer.fit(STATISTICS)
    x = torch.randn(100, 4, 3) * torch.tensor([1.0, 5.0, 1e-6]) + torch.tensor([0.0, 3.0, 5.0])
    y = normalizer.normalize(x)
    assert bool(y.isfinite().all())
    torch.testing.assert_close(normalizer.denormalize(y), x, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("mode", ["minmax", "meanstd"])
def test_declared_narrow_bounds_are_not_treated_as_constant(mode: str) -> None:
    narrow = {"min": [-2e-5, 1.0], "max": [2e-5, 1.0], "mean": [0.0, 1.0], "std": [1e-5, 0.0]}
    measured, declared = Normalizer(2, mode), Normalizer(2, mode)
    measured.fit(narrow)
    declared.fit({**narrow, "declared": True})
    assert measured.scale.tolist() == [1.0, 1.0]
    assert declared.scale.tolist() == pytest.approx([2e-5 if mode == "minmax" else 1e-5, 1.0])
    assert float(declared.denormalize(torch.ones(2))[0]) <= 2.1e-5


def test_minmax_maps_the_range_to_one_and_constants_to_their_middle() -> None:
    normalizer = Normalizer(3, "minmax")
    normalizer.fit(STATISTICS)
    torch.testing.assert_close(normalizer.normalize(torch.tensor([-3.0, 10.0, 5.0]))[:2], torch.tensor([-1.0, 1.0]))
    assert float(normalizer.normalize(torch.tensor([0.0, 0.0, 5.000005]))[2]) == pytest.approx(0.0, abs=1e-5)
    assert float(normalizer.denormalize(torch.zeros(3))[2]) == pytest.approx(5.000005, abs=1e-6)


def test_running_statistics_equal_the_statistics_of_all_data_for_any_batches() -> None:
    x = torch.randn(1000, 4) * torch.tensor([1.0, 100.0, 1e-3, 0.0]) + torch.tensor([0.0, 1e4, 5.0, 7.0])
    normalizer = RunningNormalizer(4)
    for batch in x.split([1, 7, 500, 492]):
        normalizer.update(batch)
    torch.testing.assert_close(normalizer.mean, x.double().mean(0), rtol=1e-12, atol=1e-12)
    std = x.double().std(0, unbiased=False)
    torch.testing.assert_close(normalizer.scale.double()[:3], std[:3], rtol=1e-6, atol=0)
    assert float(normalizer.scale[3]) == 1.0  # a constant
    assert float(normalizer.normalize(torch.full((1, 4), 1e9)).max()) == 10.0


def test_running_statistics_continue_from_dataset_statistics() -> None:
    x = torch.randn(300, 2) * 3 + 5
    first = x[:200].double()
    continued, whole = RunningNormalizer(2), RunningNormalizer(2)
    continued.fit({"mean": first.mean(0), "std": first.std(0, unbiased=False), "count": [200]})
    continued.update(x[200:])
    whole.update(x)
    torch.testing.assert_close(continued.offset, whole.offset)
    torch.testing.assert_close(continued.scale, whole.scale)


def test_running_statistics_refuse_non_finite_data() -> None:
    with pytest.raises(UserError, match="not finite"):
        RunningNormalizer(2).update(torch.tensor([[1.0, float("nan")]]))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [("offset", float("nan"), "not finite"), ("scale", float("inf"), "not finite"), ("scale", 0.0, "not positive")],
)
def test_damaged_statistics_are_refused_on_load(name: str, value: float, message: str) -> None:
    normalizer = Normalizer(2, "minmax")
    state = normalizer.state_dict()
    state[name] = torch.full((2,), value)
    with pytest.raises(UserError, match=message):
        normalizer.load_state_dict(state)


def test_normalizers_without_statistics_are_listed() -> None:
    net = nn.ModuleDict({mode: make_normalizer(2, mode) for mode in ("minmax", "meanstd", "running", "identity")})
    assert unfitted_normalizers(net) == ["minmax", "meanstd", "running"]
    for mode in ("minmax", "meanstd"):
        part = net[mode]
        assert isinstance(part, Normalizer)
        part.fit({"min": [0, 0], "max": [1, 1], "mean": [0, 0], "std": [1, 1]})
    running = net["running"]
    assert isinstance(running, RunningNormalizer)
    running.update(torch.randn(3, 2))
    assert unfitted_normalizers(net) == []
    other = nn.ModuleDict({mode: make_normalizer(2, mode) for mode in net})
    other.load_state_dict(net.state_dict())
    assert unfitted_normalizers(other) == []


def test_unknown_modes_suggest_the_nearest() -> None:
    with pytest.raises(UserError, match="Did you mean 'minmax'"):
        make_normalizer(2, "min-max")
