"""Tests of mjlab and Isaac Lab on the simulated device: launches and waits in addition to the library's own."""

import contextlib
import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from budgets import check_budget
from lab_rail import Rail

from benchmarks.rsl_rl import mjlab_runner_settings
from robopolicy.sim.backends.isaac_style import IsaacStyleSim
from robopolicy.sim.backends.mjlab import mjlab_config
from robopolicy.sim.chunk import ChunkedSim
from robopolicy.training.build import build, resolve_config
from robopolicy.training.compose import compose_config

simulated = pytest.importorskip("simulated", exc_type=ImportError)
ENVS, STEPS = 8, 24
GO1 = "Mjlab-Velocity-Flat-Unitree-Go1"


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


@pytest.fixture(scope="module")
def mjlab() -> Iterator[None]:
    pytest.importorskip("mjlab")
    from mjlab_on_device import put_mjlab_on_device

    with pytest.MonkeyPatch.context() as patch:
        put_mjlab_on_device(patch)
        yield


def end_half_of_the_episodes(env: Any) -> None:
    """Let the episodes of half of the rows end by time within the next `STEPS` steps."""
    left = torch.arange(1, ENVS + 1, device=simulated.DEVICE) * STEPS // (ENVS // 2)
    env.episode_length_buf[:] = int(env.max_episode_length) - left


def count_ours(place: Any) -> tuple[Any, Cost]:
    """A rollout of the preset `mjlab_go1_ppo` as `robopolicy train` builds it, and the share of mjlab's own step."""
    settings = ["experiment=mjlab_go1_ppo", f"device={simulated.NAME}", f"sim.num_envs={ENVS}", "evaluation.episodes=0"]
    settings += [f"algorithm.num_steps={STEPS}", "algorithm.batch_size=48", f"out={place}"]
    parts, library = build(resolve_config(compose_config(settings))), Cost()
    source: Any = parts.source
    algorithm = parts.algorithm
    algorithm.update(source.next(algorithm))
    env = source.sampler.sim.sim.env
    end_half_of_the_episodes(env)
    env.step = library.of(env.step)
    with simulated.record() as found:
        source.next(algorithm)
    parts.close()
    return found, library


def count_theirs() -> tuple[Cost, Cost]:
    """A rollout of rsl_rl's runner with the same settings, and the share of mjlab's own step."""
    from mjlab.envs import ManagerBasedRlEnv
    from mjlab.rl import MjlabOnPolicyRunner, RslRlVecEnvWrapper

    settings = mjlab_runner_settings(GO1) | {"num_steps_per_env": STEPS}
    whole, library, update = Cost(), Cost(), Cost()
    with contextlib.redirect_stdout(io.StringIO()):
        env = ManagerBasedRlEnv(mjlab_config(GO1, ENVS), device=simulated.NAME)
        runner = MjlabOnPolicyRunner(RslRlVecEnvWrapper(env), settings, None, simulated.NAME)
        runner.learn(1)
        end_half_of_the_episodes(env)
        env.step = library.of(env.step)
        for name in ("compute_returns", "update"):
            setattr(runner.alg, name, update.of(getattr(runner.alg, name)))
        whole.of(runner.learn)(1)
        env.close()
    whole.launches, whole.waits = whole.launches - update.launches, whole.waits - update.waits
    return whole, library


@pytest.mark.compiles
def test_a_rollout_of_go1_launches_no_more_kernels_than_rsl_rl(tmp_path: Any, mjlab: None) -> None:
    """Per step, rsl_rl launches 781 kernels, 88 of them outside mjlab's step, and waits 5.0 times outside of it."""
    found, library = count_ours(tmp_path)
    theirs, their_library = count_theirs()
    assert found.launches <= theirs.launches, found.places()
    own = found.launches - library.launches, found.waits - library.waits
    assert own[0] <= theirs.launches - their_library.launches
    assert own[1] <= theirs.waits - their_library.waits
    check_budget("mjlab", "go1", own[0] / STEPS, own[1] / STEPS, found)
