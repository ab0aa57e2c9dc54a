"""Tests of rollouts on the simulated device: their statistics and last observations are read once."""

import pytest
import torch
from budgets import check_budget
from torch import Tensor

from robopolicy.device import move
from robopolicy.rollout.on_policy import EpisodeStats, FinalObservations
from robopolicy.sim.chunk import ChunkStep
from robopolicy.sim.contract import SimSpec, TensorSpec, VectorSim

simulated = pytest.importorskip("simulated", exc_type=ImportError)
STEPS, ENVS, LOGGED = 24, 4096, 10


class Still(VectorSim):
    """Environments with nothing but a device."""

    def __init__(self, device: torch.device) -> None:
        bound = torch.ones(1)
        self.spec = SimSpec("test/still", {"state": TensorSpec((5,))}, -bound, bound, 0.1, 100)
        self.num_envs, self.device = ENVS, device

    def reset(self, seed: object = 0) -> dict[str, Tensor]:
        raise NotImplementedError

    def step(self, action: Tensor, active: Tensor | None = None) -> object:  # type: ignore[override]
        raise NotImplementedError


def steps(device: torch.device) -> list[ChunkStep]:
    """A rollout in which about 1 % of the rows terminate and as many are truncated in every step."""
    generator = torch.Generator().manual_seed(0)
    found: list[ChunkStep] = []
    for _ in range(STEPS):
        terminated, truncated = torch.rand(2, ENVS, generator=generator) < 0.01
        obs = {"state": torch.randn(ENVS, 1, 5, generator=generator)}
        reward, length = torch.randn(ENVS, generator=generator), torch.ones(ENVS, dtype=torch.int64)
        info = {f"log.{i}": torch.randn(ENVS, generator=generator) for i in range(LOGGED)} | {"success": terminated}
        found.append(ChunkStep(obs, reward, reward, length, terminated, truncated, obs, info))
    return move(tuple(found), device)


def means_and_last(device: torch.device) -> tuple[dict[str, float], Tensor]:
    stats, final = EpisodeStats(Still(device)), FinalObservations()
    rollout = steps(device)
    with simulated.record() as found:
        for step in rollout:
            stats.observe(step)
            final.add(step)
        last, means = final.result(rollout[0].obs)["state"], stats.flush()
    if device.type != "cpu":  # before: 2,185 launches and 75 waits; the waits are for truncated rows and means
        check_budget("rollout", "statistics", found.launches, found.waits, found)
    return means, last.cpu()


def test_statistics_of_a_rollout_wait_once_and_equal_those_of_the_cpu() -> None:
    (means, last), (expected, rows) = (means_and_last(torch.device(name)) for name in (simulated.NAME, "cpu"))
    assert means == pytest.approx(expected)
    assert len(rows) and torch.equal(last, rows)


def test_final_observations_of_long_rollouts_are_selected_early(monkeypatch: pytest.MonkeyPatch) -> None:
    rollout = steps(simulated.DEVICE)
    monkeypatch.setattr(FinalObservations, "MAX_BYTES", 3 * rollout[0].final_obs["state"].nbytes)
    assert torch.equal(means_and_last(torch.device("cpu"))[1], _last_of(rollout))


def _last_of(rollout: list[ChunkStep]) -> Tensor:
    final = FinalObservations()
    for step in rollout:
        final.add(step)
    return final.result(rollout[0].obs)["state"].cpu()
