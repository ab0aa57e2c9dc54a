"""One update of our PPO and of Stable-Baselines3's on the same rollout, weights and order of rows."""

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from robopolicy.algorithms.common import rollout_batch
from robopolicy.algorithms.ppo import PPO, PPOConfig
from robopolicy.critics.value import ValueConfig
from robopolicy.data.batches import Rollout
from robopolicy.interop.sb3_actor import from_model
from robopolicy.sim.registry import SimOptions, make_sim

sb3 = pytest.importorskip("stable_baselines3", reason="needs robopolicy[sb3]")
from stable_baselines3.common.callbacks import BaseCallback  # noqa: E402

from robopolicy.interop.stable_baselines3 import SimVecEnv  # noqa: E402

STEPS, ENVS, BATCH, EPOCHS = 32, 4, 32, 3
NAMES = {"log_std": "log_std"}
NAMES |= {f"actor.{i}": f"mlp_extractor.policy_net.{i}" for i in (0, 2)} | {"actor.4": "action_net"}
NAMES |= {f"head.{i}": f"mlp_extractor.value_net.{i}" for i in (0, 2)} | {"head.4": "value_net"}


class Ignore(BaseCallback):
    """A callback that does nothing."""

    def _on_step(self) -> bool:
        return True


def pairs(networks: list[nn.Module]) -> Iterator[tuple[str, Tensor]]:
    """Their name and our parameter."""
    for network in networks:
        for name, parameter in network.named_parameters():
            layer, _, part = name.rpartition(".")
            yield (f"{NAMES[layer]}.{part}" if layer else NAMES[part]), parameter


def test_an_update_changes_the_same_weights_by_the_same_amounts(monkeypatch: pytest.MonkeyPatch) -> None:
    sim = make_sim("toy/point_mass", SimOptions(num_envs=ENVS, reward="shaped"))
    model: Any = sb3.PPO(
        *("MlpPolicy", SimVecEnv(sim)), n_steps=STEPS, batch_size=BATCH, n_epochs=EPOCHS, device="cpu", seed=0
    )
    model.learn(2 * STEPS * ENVS)  # so that Adam has moments, and values differ from 0
    before, optimizer = (copy.deepcopy(each.state_dict()) for each in (model.policy, model.policy.optimizer))
    callback = Ignore()
    callback.init_callback(model)
    callback.on_training_start({}, {})
    buffer = model.rollout_buffer
    model.collect_rollouts(model.env, callback, buffer, n_rollout_steps=STEPS)
    tensor = lambda array: torch.as_tensor(np.array(array))  # noqa: E731
    ends = torch.cat([tensor(buffer.episode_starts)[1:], tensor(model._last_episode_starts)[None]]).bool()
    assert bool(ends.any())
    never, zero = torch.zeros_like(ends), torch.zeros(0, 1, buffer.observations.shape[-1])
    rollout = Rollout(
        obs={"state": tensor(buffer.observations)[:, :, None]},
        record={"raw": tensor(buffer.actions)[:, :, None]},
        logp=tensor(buffer.log_probs)[..., None],
        reward=tensor(buffer.rewards),  # includes their bootstrap of truncated episodes
        steps=torch.ones_like(ends, dtype=torch.int64),
        terminated=ends,
        truncated=never,
        final_obs={"state": zero},
        last_obs={"state": tensor(model._last_obs)[:, None]},
    )
    policy = from_model(model)
    settings = {"num_steps": STEPS, "batch_size": BATCH, "epochs": EPOCHS, "normalize_reward": False}
    ours = PPO(PPOConfig(**settings, critic=ValueConfig(normalization="identity")), policy, total_updates=10)
    theirs = [name for name, _ in model.policy.named_parameters()]
    for name, parameter in pairs([policy, ours.critic]):
        parameter.data.copy_(before[name].view_as(parameter))
        state = optimizer["state"][theirs.index(name)]
        ours.optimizer.state[parameter] = {
            key: state[key].clone().reshape(() if key == "step" else parameter.shape) for key in state
        }

    orders = [np.random.default_rng(epoch).permutation(STEPS * ENVS) for epoch in range(EPOCHS)]
    by_time = iter([tensor(order % STEPS * ENVS + order // STEPS) for order in orders])  # theirs is by environment
    by_env = iter(orders)
    monkeypatch.setattr(np.random, "permutation", lambda count: next(by_env))
    monkeypatch.setattr(rollout_batch, "random_order", lambda count, generator: next(by_time))
    model.train()
    ours.update(rollout)
    after = model.policy.state_dict()
    for name, parameter in pairs([policy, ours.critic]):
        assert not torch.equal(after[name], before[name])
        torch.testing.assert_close(parameter.detach(), after[name].view_as(parameter), rtol=1e-4, atol=1e-6)
