"""Tests of ReinFlow on heads with a step length, which it treats as flows, also with a single step."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from robopolicy.algorithms.reinflow import ReinFlow, ReinFlowConfig
from robopolicy.policies.base import PolicySpec
from robopolicy.policies.exploration.flow_chains import NoiseConfig, StochasticFlow
from robopolicy.policies.heads.average_velocity import MeanFlowConfig, ShortcutConfig
from robopolicy.policies.registry import make_policy
from robopolicy.rollout.on_policy import RolloutSampler
from robopolicy.sim.chunk import ChunkedSim
from robopolicy.sim.registry import SimOptions, make_sim
from robopolicy.training.checkpoint import load_policy, save_checkpoint, verify_checkpoint

CONFIGS: dict[str, Any] = {"shortcut": ShortcutConfig(hidden=(32,), steps=2), "meanflow": MeanFlowConfig(hidden=(32,))}
names = pytest.mark.parametrize("name", CONFIGS)


def reinflow(name: str) -> tuple[ReinFlow, RolloutSampler]:
    torch.manual_seed(0)
    policy = make_policy(name, CONFIGS[name], PolicySpec({"state": (6,)}, 2, horizon=4, action_horizon=2))
    policy.fit_normalizer({key: {"min": [-2.0] * n, "max": [2.0] * n} for key, n in (("state", 6), ("action", 2))})
    config = ReinFlowConfig(num_steps=8, batch_size=64, bc_coef=0.1)
    algorithm = ReinFlow(config, policy, total_updates=4)
    sim = make_sim("toy/point_mass", SimOptions(num_envs=16, reward="shaped"))
    chunked = ChunkedSim(sim, action_horizon=2, obs_horizon=1, gamma=algorithm.step_discount)
    return algorithm, RolloutSampler(chunked, decisions=8, seed=0)


@names
def test_fresh_rollout_ratios_are_one_before_and_after_an_update(name: str) -> None:
    algorithm, sampler = reinflow(name)
    before = copy.deepcopy(algorithm.policy.head.state_dict())
    for _ in range(2):
        rollout = sampler.collect(algorithm.act)
        obs = {key: value.flatten(0, 1) for key, value in rollout.obs.items()}
        record = {key: value.flatten(0, 1) for key, value in rollout.record.items()}
        logp = algorithm.policy.decisions(obs, record).logp.detach()
        assert logp.shape[1] == CONFIGS[name].steps
        assert float((torch.exp(logp - rollout.logp.flatten(0, 1)) - 1).abs().max()) < 1e-5
        algorithm.update(rollout)
    head = algorithm.policy.head.state_dict()
    assert any(not torch.equal(before[key], value) for key, value in head.items())
    assert all(torch.equal(before[key], value) for key, value in algorithm.base.state_dict().items())


@names
def test_the_fine_tuned_head_is_deployed_with_its_original_type(name: str, tmp_path: Path) -> None:
    algorithm, sampler = reinflow(name)
    rollout = sampler.collect(algorithm.act)
    algorithm.update(rollout)
    obs = {key: value[0] for key, value in rollout.obs.items()}
    save_checkpoint(tmp_path / "best", algorithm.inference_policy(), task="toy/point_mass", obs_sample=obs)
    assert verify_checkpoint(tmp_path / "best").ok
    assert load_policy(tmp_path / "best")[0].name == name


@names
@pytest.mark.parametrize("backbone", ["mlp", "unet", "transformer"])
def test_minibatch_scores_equal_whole_batch_scores_in_double_precision(name: str, backbone: str) -> None:
    config_class = type(CONFIGS[name])
    small = {"hidden": (16,), "unet_channels": (8, 16), "transformer_width": 16, "transformer_layers": 1}
    raw = {"normalization": "identity", "action_normalization": "identity", "steps": 2}
    head = make_policy(name, config_class(backbone=backbone, **small, **raw), PolicySpec({"state": (3,)}, 2, 5))
    chain = StochasticFlow(head, NoiseConfig()).double()  # type: ignore[arg-type]
    features, x = torch.randn(40, 1, 3).double(), torch.randn(40, 5, 2).double()
    k = torch.arange(40) % 2
    mean, log_std = chain.transition(features, x, k)
    sample = mean + log_std.exp() * torch.randn_like(mean)
    logp = chain.step_logp(sample, mean, log_std)
    for rows in (slice(0, 1), slice(7, 30), slice(39, 40)):
        again = chain.step_logp(sample[rows], *chain.transition(features[rows], x[rows], k[rows]))
        torch.testing.assert_close(again, logp[rows], atol=1e-10, rtol=0)
