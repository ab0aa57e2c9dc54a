"""Tests of mjlab and Isaac Lab on the simulated device: launches and waits in addition to the library's own."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lab_rail import Rail

from robopolicy.sim.backends.isaac_style import IsaacStyleSim
from robopolicy.sim.chunk import ChunkedSim
from robopolicy.training.build import build, resolve_config
from robopolicy.training.compose import compose_config

simulated = pytest.importorskip("simulated", exc_type=ImportError)
ENVS, STEPS = 8, 24


class Cost:
    """Launches and waits of wrapped functions."""

    def __init__(self) -> None:
        self.launches = self.waits = 0

    def of(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **options: Any) -> Any:
            with simulated.record() as found:
                result = function(*args, **options)
            self.launches, self.waits = self.launches + found.launches, self.waits + found.waits
            return result

        return counted


class CountedRail(Rail):
    """Rail whose own waits are counted."""

    def __init__(self, kind: str, library: Cost) -> None:
        super().__init__(kind, ENVS, device=simulated.NAME)
        self.step = library.of(super().step)  # type: ignore[method-assign]
        self.reset = library.of(super().reset)  # type: ignore[method-assign]


@pytest.mark.parametrize("action_horizon", [1, 4])
@pytest.mark.parametrize("kind", ["mjlab", "fast mjlab"])
def test_the_adapter_waits_once_per_decision(kind: str, action_horizon: int) -> None:
    library = Cost()
    sim = IsaacStyleSim(
        CountedRail(kind, library), task="test/rail", action_bound=2.0, exact_final_obs="fast" not in kind
    )
    chunked = ChunkedSim(sim, action_horizon=action_horizon)
    chunk = torch.linspace(0.5, 2.0, ENVS, device=simulated.DEVICE)[:, None, None].expand(-1, action_horizon, 1)
    chunked.reset()
    library.waits = 0
    with simulated.record() as found:
        for _ in range(STEPS // action_horizon):
            step = chunked.step(chunk)
    assert found.waits - library.waits == STEPS // action_horizon, found.places()
    assert step.obs["actor"].device == sim.device


@pytest.mark.compiles
def test_a_rollout_of_go1_launches_fewer_kernels_than_rsl_rl(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """rsl_rl launches 101 kernels and waits 5.0 times per step in addition to mjlab, for the same networks."""
    pytest.importorskip("mjlab")
    from mjlab_on_device import put_mjlab_on_device

    put_mjlab_on_device(monkeypatch)
    settings = ["experiment=mjlab_go1_ppo", f"device={simulated.NAME}", f"sim.num_envs={ENVS}", "evaluation.episodes=0"]
    settings += [f"algorithm.num_steps={STEPS}", "algorithm.batch_size=48", f"out={tmp_path}"]
    parts = build(resolve_config(compose_config(settings)))
    source, algorithm, library = parts.source, parts.algorithm, Cost()
    algorithm.update(source.next(algorithm))
    env = source.sampler.sim.sim.env
    env.episode_length_buf[:] = torch.arange(ENVS, device=simulated.DEVICE) * 120 + 100  # half of them end
    env.step = library.of(env.step)
    with simulated.record() as found:
        source.next(algorithm)
    assert found.launches - library.launches <= 70 * STEPS, found.places()
    assert found.waits - library.waits <= STEPS + 4, found.places()  # for the rows to reset; 4 for the statistics
    parts.close()
