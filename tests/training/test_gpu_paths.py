"""Tests of GPU paths: updates, resume points and deployed policies have no tensor on the CPU with networks on a GPU."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from emulated_gpu import GPU, emulated_gpu
from run_rules import check_learns_on_a_gpu
from torch import nn

from docs.compatibility import allowed, workplace
from robopolicy.algorithms.registry import ALGORITHMS


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    with workplace(ALGORITHMS.product()) as folder:
        yield folder


def test_emulated_gpu_raises_the_errors_of_a_gpu() -> None:
    with emulated_gpu() as gpu:
        numbers = torch.ones(3, device="cuda")
        assert (numbers.device, (numbers + 1).tolist(), numbers.sum().item()) == (GPU, [2.0, 2.0, 2.0], 3.0)
        with pytest.raises(RuntimeError, match="same device"):
            numbers + torch.ones(3)
        with pytest.raises(RuntimeError, match="another device"):
            torch.rand(3, device=gpu, generator=torch.Generator())
        with pytest.raises(RuntimeError, match="another device"):
            torch.rand(3, generator=torch.Generator(gpu))
        with pytest.raises(TypeError, match="numpy"):
            numbers.numpy()
        assert numbers.cpu().numpy().tolist() == [1.0, 1.0, 1.0]


def test_emulated_gpu_training_matches_the_cpu() -> None:
    def trained(device: torch.device) -> list[float]:
        torch.manual_seed(0)
        network = nn.Sequential(nn.Linear(2, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 1)).to(device)
        optimizer = torch.optim.Adam(network.parameters(), 0.01)
        for _ in range(3):
            loss = (network(torch.randn(16, 2).to(device)) - 1).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return torch.cat([parameter.flatten() for parameter in network.parameters()]).tolist()

    with emulated_gpu() as gpu:
        found = trained(gpu)
    assert found == pytest.approx(trained(torch.device("cpu")), abs=1e-6)


@pytest.mark.parametrize("name", [name for name in ALGORITHMS.product() if allowed(name)])
def test_algorithm_trains_resumes_and_acts_on_a_gpu(
    name: str, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_learns_on_a_gpu(name, place, tmp_path, monkeypatch)
