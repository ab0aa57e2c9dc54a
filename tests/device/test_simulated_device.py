"""Tests of the simulated device: it refuses and counts as CUDA does, and computes as the CPU does."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

simulated = pytest.importorskip("simulated", exc_type=ImportError)
DEVICE = simulated.DEVICE


@pytest.mark.parametrize(
    ("attempt", "message"),
    [
        (lambda x: x + torch.ones(5, 3), "same device"),
        (lambda x: x @ torch.ones(3, 3), "same device"),
        (lambda x: torch.cat([x, torch.ones(5, 3)]), "same device"),
        (lambda x: torch.where(x > 0, x, torch.ones(5, 3)), "same device"),
        (lambda x: torch.ones(3, 3)[torch.tensor([0], device=x.device)], "same device"),
        (lambda x: x.numpy(), "numpy"),
        (lambda x: torch.randn(3, device=x.device, generator=torch.Generator()), "generator"),
        (lambda x: torch.randn(3, generator=torch.Generator(x.device)), "same device"),
    ],
)
def test_devices_do_not_mix(attempt: Callable[[Tensor], Tensor], message: str) -> None:
    with pytest.raises((RuntimeError, TypeError, ValueError), match=message):
        attempt(torch.randn(5, 3, device=DEVICE))


def test_scalars_and_indices_of_the_cpu_are_accepted() -> None:
    x = torch.arange(6.0, device=DEVICE).view(2, 3)
    assert (x + torch.tensor(1.0)).tolist() == [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]
    assert x[torch.tensor([1])].tolist() == x[[1]].tolist() == [[3.0, 4.0, 5.0]]


def test_fresh_memory_is_not_a_number() -> None:
    assert torch.empty(4, device=DEVICE).isnan().all()


@pytest.mark.parametrize(
    ("work", "kinds"),
    [
        (lambda x: x.sum().item(), ["item"]),
        (lambda x: x.cpu(), ["d2h"]),
        (lambda x: torch.tensor([1.0], device=x.device), ["h2d"]),
        (lambda x: x[x > 0], ["size"]),
        (lambda x: x.nonzero(), ["size"]),
        (lambda x: bool((x > 0).any()), ["item"]),
        (lambda x: x.masked_fill_(x > 0, 0.0), []),
        (lambda x: x.__setitem__(x > 0, 0.0), []),
        (lambda x: torch.where(x > 0, x, 0.0), []),
        (lambda x: torch.simulated.synchronize(), ["sync"]),
    ],
)
def test_waits_are_counted_with_their_kind(work: Callable[[Tensor], object], kinds: list[str]) -> None:
    x = torch.randn(5, 3, device=DEVICE)
    with simulated.record() as found:
        work(x)
    assert [kind for kind, _, _ in found.events] == kinds, found.places()


def test_launches_are_counted_as_cuda_launches() -> None:
    network = nn.Sequential(nn.Linear(3, 8), nn.LayerNorm(8), nn.ELU(), nn.Linear(8, 2)).to(DEVICE)
    optimizer = torch.optim.Adam(network.parameters(), fused=False, foreach=True)
    x = torch.randn(5, 3, device=DEVICE)
    with simulated.record() as forward:
        loss = network(x).square().mean()
    assert forward.operators["aten::addmm"] == 2 and forward.launches <= 7 and forward.waits == 0
    loss.backward()
    optimizer.step()
    with simulated.record() as step:
        optimizer.step()
    assert step.launches <= 10 and step.waits == 0, step.places()


def test_peak_memory_is_measured() -> None:
    with simulated.record() as found:
        torch.empty(1000, device=DEVICE)
        torch.empty(500, device=DEVICE)
    assert found.peak_bytes == 4000


def test_training_on_the_device_matches_the_cpu() -> None:
    def trained(device: torch.device) -> list[float]:
        torch.manual_seed(0)
        network = nn.Sequential(nn.Conv1d(2, 4, 3), nn.Flatten(), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 1)).to(
            device
        )
        optimizer = torch.optim.Adam(network.parameters(), 0.01)
        for _ in range(3):
            loss = (network(torch.randn(16, 2, 4).to(device)) - 1).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return torch.cat([parameter.flatten() for parameter in network.parameters()]).tolist()

    assert trained(DEVICE) == pytest.approx(trained(torch.device("cpu")), abs=1e-6)


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.GRU(3, 4, batch_first=True),
        lambda: nn.TransformerEncoderLayer(3, 1, 8, batch_first=True),
        lambda: nn.LSTM(3, 4, batch_first=True),
    ],
    ids=["gru", "attention", "lstm"],
)
def test_networks_compute_as_on_the_cpu(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    network, x = make().eval(), torch.randn(2, 5, 3)

    def output(device: torch.device) -> Tensor:
        found = network.to(device)(x.to(device))
        return (found[0] if isinstance(found, tuple) else found).cpu()

    torch.testing.assert_close(output(DEVICE), output(torch.device("cpu")))


def test_generators_of_the_device_are_seeded() -> None:
    generator = torch.Generator(DEVICE)
    drawn = [torch.randn(4, device=DEVICE, generator=generator.manual_seed(seed)).tolist() for seed in (3, 3, 4)]
    assert drawn[0] == drawn[1] != drawn[2]
    state = generator.get_state()
    after = torch.randn(4, device=DEVICE, generator=generator)
    generator.set_state(state)
    assert torch.equal(torch.randn(4, device=DEVICE, generator=generator), after)
