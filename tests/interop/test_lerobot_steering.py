"""Tests of steering LeRobot policies with DSRL; `make test-lerobot` runs them."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("lerobot.policies", reason="needs robopolicy[lerobot]: make test-lerobot")

from lerobot_saved import observations, save_diffusion, save_smolvla

from robopolicy.algorithms.dsrl_na import DSRLNA, DSRLNAConfig
from robopolicy.algorithms.dsrl_sac import DSRLSAC, DSRLSACConfig
from robopolicy.critics.q import CriticConfig
from robopolicy.data.replay import Replay
from robopolicy.interop.lerobot.loading import load_lerobot
from robopolicy.policies.wrappers.latent import STEERING_ACTOR, LatentPolicy, NoiseSpace
from robopolicy.policies.wrappers.zero_noise import ZeroNoisePolicy
from robopolicy.rollout.off_policy import ReplaySampler
from robopolicy.sim.chunk import ChunkedSim
from robopolicy.sim.contract import Observation, Step, TensorSpec
from robopolicy.sim.registry import SimOptions
from robopolicy.training.checkpoint import load_policy, save_checkpoint, verify_checkpoint
from robopolicy_tasks.toy.point_mass import PointMassSim

ACTOR = replace(STEERING_ACTOR, hidden=(16, 16))


class GoalPointMass(PointMassSim):
    """The point mass with its goal as environment state, which LeRobot needs in addition to the robot state."""

    def __init__(self, num_envs: int) -> None:
        super().__init__(SimOptions(num_envs=num_envs, reward="shaped"))
        goal = {"environment_state": TensorSpec((2,))}
        self.spec = replace(self.spec, observation={**self.spec.observation, **goal})

    def reset(self, seed: int | Sequence[int] = 0) -> Observation:
        return with_goal(super().reset(seed))

    def step(self, action: Tensor, active: Tensor | None = None) -> Step:
        step = super().step(action, active)
        return replace(step, obs=with_goal(step.obs), final_obs=with_goal(step.final_obs))


def with_goal(obs: Observation) -> Observation:
    return {**obs, "environment_state": obs["state"][:, -2:].clone()}


@pytest.mark.parametrize(("kind", "config"), [(DSRLSAC, DSRLSACConfig), (DSRLNA, DSRLNAConfig)])
def test_dsrl_trains_the_actor_and_leaves_the_diffusion_policy_unchanged(
    kind: Any, config: Any, tmp_path: Path
) -> None:
    save_diffusion(tmp_path / "p", num_inference_steps=2)
    base = load_lerobot(tmp_path / "p")
    before = {key: item.clone() for key, item in base.original.policy.state_dict().items()}
    torch.manual_seed(0)
    settings = config(actor=ACTOR, critic=CriticConfig(hidden=(16, 16)), batch_size=16)
    algorithm = kind(settings, base, total_updates=3)
    assert algorithm.policy.actor.spec.horizon == 8  # all rows of the network; the chunk has seven
    untrained = {key: item.clone() for key, item in algorithm.policy.actor.state_dict().items()}
    sim = ChunkedSim(GoalPointMass(4), action_horizon=base.spec.action_horizon, obs_horizon=base.spec.obs_horizon)
    sampler = ReplaySampler(sim, Replay(1000, 4), seed=0)
    sampler.collect(algorithm.explore, 4)
    for _ in range(3):
        sampler.collect(algorithm.act)
        metrics = algorithm.update(sampler.replay.sample(algorithm.request, algorithm.generator, batches=2))
        assert all(torch.isfinite(torch.tensor(number)) for number in metrics.values())
    after = base.original.policy.state_dict()
    assert all(torch.equal(item, after[key]) for key, item in before.items())
    assert any(not torch.equal(item, algorithm.policy.actor.state_dict()[key]) for key, item in untrained.items())
    obs = observations(3, camera=False)
    save_checkpoint(tmp_path / "c", algorithm.inference_policy(), task="toy/point_mass", obs_sample=obs)
    assert verify_checkpoint(tmp_path / "c").ok
    steered, _ = load_policy(tmp_path / "c")
    assert isinstance(steered, LatentPolicy)
    w = steered.actor.act(obs, deterministic=True)
    assert torch.equal(steered.act(obs, deterministic=True), base.decode(obs, w))


@pytest.mark.parametrize(("space", "rows"), [(NoiseSpace("repeat"), 1), (NoiseSpace(), 6)])
def test_steering_a_language_policy_covers_its_padded_noise(space: NoiseSpace, rows: int, tmp_path: Path) -> None:
    save_smolvla(tmp_path / "p")
    base = load_lerobot(tmp_path / "p", instructions=["push the block"])
    steered = LatentPolicy.from_base(base, space, ACTOR)
    assert (steered.actor.spec.horizon, steered.actor.spec.action_dim) == (rows, 4)
    obs = observations(2, camera=True, history=1)
    sample = steered.sample(obs, generator=torch.Generator().manual_seed(0))
    assert sample.chunk.shape == (2, 6, 2)
    assert torch.equal(sample.chunk, base.decode(obs, sample.record["noise"].expand(-1, 6, -1)))


def test_zero_noise_starts_at_the_mode(tmp_path: Path) -> None:
    save_diffusion(tmp_path / "p")
    base, obs = load_lerobot(tmp_path / "p"), observations(2, camera=False)
    assert torch.equal(ZeroNoisePolicy.wrap(base).act(obs), base.decode(obs, torch.zeros(2, *base.noise_shape)))
