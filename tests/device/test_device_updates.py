"""Tests of what updates keep on a device: early stopping, learning rates, metrics, generators and kernels."""

import pytest
import torch
from torch import nn

from robopolicy.algorithms.common.algorithm import make_metrics, read_metrics
from robopolicy.algorithms.common.on_policy import adapt_rate, learning_rate
from robopolicy.algorithms.common.rollout_batch import Epochs
from robopolicy.core.returns import successor_values
from robopolicy.core.trackers import RunningMoments
from robopolicy.device import GPUConfig, deterministic_kernels, device_name, random_order, restore_generator
from robopolicy.errors import UserError
from robopolicy.nets.mlp import EnsembleMLP
from robopolicy.nets.normalizer import Normalizer, make_normalizer

simulated = pytest.importorskip("simulated", exc_type=ImportError)
DEVICE = simulated.DEVICE


def test_the_optimiser_skips_its_steps_after_the_kl_limit_and_the_epochs_end_with_one_wait() -> None:
    weight = nn.Parameter(torch.zeros(2, device=DEVICE))
    optimizer = torch.optim.Adam([weight], lr=1.0, fused=True)
    epochs = Epochs(lambda: iter([0.1, 0.3, 0.1]), 5, optimizer)
    seen: list[float] = []
    with simulated.record() as found:
        for kl in epochs:
            assert not epochs.stop({"approx_kl": torch.full((), kl, device=DEVICE)}, 0.2)
            weight.grad = torch.ones_like(weight)
            optimizer.step()
            seen.append(kl)
    assert found.waits == 1, found.places()
    assert seen == [0.1, 0.3, 0.1] and epochs.completed == 0
    assert float(epochs.stats()["actor/approx_kl"]) == pytest.approx(0.3)  # the KL beyond the limit, not the last one
    assert weight.tolist() == pytest.approx([-1.0, -1.0])  # one step, before the limit
    weight.grad = torch.ones_like(weight)
    optimizer.step()  # of the next update
    assert weight.tolist() == pytest.approx([-2.0, -2.0], abs=1e-3)


def test_on_the_cpu_the_loop_stops_before_the_step_beyond_the_limit() -> None:
    epochs = Epochs(lambda: iter([0.1, 0.3]), 2)
    assert [epochs.stop({"approx_kl": torch.tensor(kl)}, 0.2) for kl in epochs] == [False, True, False, True]
    assert not epochs.stop({}, None)


@pytest.mark.parametrize("kl", [0.03, 0.015, 0.004, 1e-9])
def test_the_adaptive_rate_on_a_device_equals_the_one_on_the_cpu_without_a_wait(kl: float) -> None:
    rates: list[float] = []
    for device in (torch.device("cpu"), DEVICE):
        optimizer = torch.optim.Adam([nn.Parameter(torch.zeros(1, device=device))], lr=1e-3, fused=True)
        adapt_rate(optimizer, torch.tensor(kl, device=device), 0.01)
        value = torch.tensor(kl, device=device)
        with simulated.record() as found:
            adapt_rate(optimizer, value, 0.01)
        assert not found.waits, found.places()
        rates.append(learning_rate(optimizer))
    assert rates[1] == pytest.approx(rates[0], rel=1e-6)
    assert isinstance(rates[1], float)


def test_metrics_leave_the_device_together() -> None:
    metrics = make_metrics({"a": torch.tensor(2.0, device=DEVICE), "b": torch.ones((), device=DEVICE), "c": 3})
    with simulated.record() as found:
        numbers = read_metrics(metrics)
    assert numbers == {"a": 2.0, "b": 1.0, "c": 3.0} and found.waits == 1, found.places()
    assert make_metrics({"a": torch.tensor(2.0, requires_grad=True)}) == {"a": 2.0}  # on the CPU a number at once


def test_a_state_of_another_device_seeds_the_generator_reproducibly() -> None:
    state = torch.Generator().manual_seed(3).get_state()

    class Other:
        def __init__(self) -> None:
            self.seed = 0

        def get_state(self) -> torch.Tensor:
            return torch.zeros(16, dtype=torch.uint8)

        def manual_seed(self, seed: int) -> None:
            self.seed = seed

    first, second = Other(), Other()
    restore_generator(first, state)  # type: ignore[arg-type]
    restore_generator(second, state)  # type: ignore[arg-type]
    assert first.seed == second.seed > 0
    generator = torch.Generator().manual_seed(5)
    restore_generator(generator, state)
    assert torch.equal(generator.get_state(), state)


def test_permutations_are_drawn_on_the_device_of_the_generator() -> None:
    order = random_order(6, torch.Generator(DEVICE).manual_seed(0))
    assert order.device == DEVICE and sorted(order.tolist()) == list(range(6))
    assert torch.equal(
        random_order(6, torch.Generator().manual_seed(1)), torch.randperm(6, generator=torch.manual_seed(1))
    )


def test_values_of_last_observations_are_placed_without_a_wait() -> None:
    value, bootstrap = torch.arange(6.0).view(3, 2), torch.tensor([[True, False], [False, True], [False, False]])
    arguments = value, torch.tensor([10.0, 11.0]), bootstrap, torch.tensor([20.0, 21.0])
    expected = torch.tensor([[20.0, 3.0], [4.0, 21.0], [10.0, 11.0]])
    assert torch.equal(successor_values(*arguments), expected)
    moved = [argument.to(DEVICE) for argument in arguments]
    with simulated.record() as found:
        result = successor_values(*moved)
    assert not found.waits and torch.equal(result.cpu(), expected), found.places()


def test_running_moments_stay_on_the_device() -> None:
    values, moments = torch.tensor([1.0, 3.0, 5.0]), RunningMoments()
    moments.observe(values.to(DEVICE))
    later = values.to(DEVICE) + 1
    with simulated.record() as found:
        moments.observe(later)
    both = torch.cat([values, values + 1])
    assert not found.waits and moments.state_dict()["count"] == 6, found.places()
    assert float(moments.std) == pytest.approx(float(both.std(correction=0)), rel=1e-6)


@pytest.mark.parametrize("mode", ["minmax", "running"])
def test_a_normaliser_maps_on_a_device_as_on_the_cpu_in_few_kernels(mode: str) -> None:
    normalizer, x = make_normalizer(3, mode), torch.randn(5, 2, 3) * 4 + 100
    flat = x.reshape(-1, 3)
    low, high = flat.amin(0), flat.amax(0)
    normalizer.fit({"min": low, "max": high, "mean": flat.mean(0), "std": flat.std(0), "count": [10]})
    here = normalizer.normalize(x)
    copy = make_normalizer(3, mode)
    copy.load_state_dict(normalizer.state_dict())  # the transform of a device follows from the saved one
    copy.to(DEVICE)
    with simulated.record() as found:
        there = copy.normalize(x.to(DEVICE))
    torch.testing.assert_close(there.cpu(), here, atol=1e-4, rtol=0)
    torch.testing.assert_close(copy.denormalize(there).cpu(), normalizer.denormalize(here), atol=1e-3, rtol=0)
    assert found.launches <= 3, found.places()


def test_auto_is_the_cpu_where_there_is_no_gpu() -> None:
    assert device_name("auto") == ("cuda" if torch.cuda.is_available() else "cpu")
    assert device_name("cuda:1") == "cuda:1"


def test_kernels_repeat_only_while_asked_to() -> None:
    with deterministic_kernels(True):
        assert torch.are_deterministic_algorithms_enabled()
    with deterministic_kernels(False):
        assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.slow
def test_compiled_networks_keep_their_names_and_an_unknown_mode_is_refused() -> None:
    module = nn.ModuleDict({"critic": EnsembleMLP(2, 3, (4,), 1), "normalizer": Normalizer(3, "identity")})
    names = list(module.state_dict())
    GPUConfig(compile="default").compile_networks(module)
    assert list(module.state_dict()) == names
    assert module["critic"]._compiled_call_impl is not None and module["normalizer"]._compiled_call_impl is None
    with pytest.raises(UserError, match=r"mode of torch\.compile"):
        GPUConfig(compile="fastest")
