"""One update of our PPO and of Stable-Baselines3's on the same steps, weights and order of rows."""

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
from robopolicy.sim.contract import VectorSim
from robopolicy.sim.registry import SimOptions, make_sim

sb3 = pytest.importorskip("stable_baselines3", reason="needs robopolicy[sb3]")
from stable_baselines3.common.callbacks import BaseCallback  # noqa: E402
from stable_baselines3.common.vec_env import VecNormalize  # noqa: E402

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


class Recorder(SimVecEnv):
    """A simulator that records its observations, rewards and ends as they are before any normalisation."""

    def __init__(self, sim: VectorSim) -> None:
        super().__init__(sim)
        self.obs: list[Tensor] = []  # (N, D), one more than the others
        self.rewards: list[Tensor] = []  # (N,)
        self.truncated: list[Tensor] = []  # (N,)
        self.terminated: list[Tensor] = []  # (N,)
        self.final_obs: list[Tensor] = [torch.zeros(0, *sim.spec.observation["state"].shape)]  # of truncated episodes

    def step_wait(self) -> Any:
        """Apply the stored actions."""
        obs, reward, done, infos = super().step_wait()
        truncated = np.array([info.get("TimeLimit.truncated", False) for info in infos])
        self.obs.append(tensor(obs))
        self.rewards.append(tensor(reward))
        self.truncated.append(tensor(truncated))
        self.terminated.append(tensor(done & ~truncated))
        rows = [tensor(info["terminal_observation"]) for info, cut in zip(infos, truncated, strict=True) if cut]
        self.final_obs += [row[None] for row in rows]
        return obs, reward, done, infos

    def clear(self, obs: Any) -> None:
        """Forget the steps before the current observations `obs` `(N, D)`."""
        self.obs, self.final_obs = [tensor(obs)], self.final_obs[:1]
        self.rewards, self.truncated, self.terminated = [], [], []

    def rollout(self, buffer: Any) -> Rollout:
        """The recorded steps, with actions and log-probabilities of the rollout buffer."""
        truncated, obs = torch.stack(self.truncated), torch.stack(self.obs)
        return Rollout(
            obs={"state": obs[:-1, :, None]},
            record={"raw": tensor(buffer.actions)[:, :, None]},
            logp=tensor(buffer.log_probs)[..., None],
            reward=torch.stack(self.rewards),
            steps=torch.ones_like(truncated, dtype=torch.int64),
            terminated=torch.stack(self.terminated),
            truncated=truncated,
            final_obs={"state": torch.cat(self.final_obs)[:, None]},
            last_obs={"state": obs[-1][:, None]},
        )


def tensor(array: Any) -> Tensor:
    """A copy of an array."""
    return torch.as_tensor(np.array(array))


def load_optimizer(ours: PPO, model: Any, policy: Any) -> None:
    """Copy weights and moments of Adam from their model."""
    weights, state = model.policy.state_dict(), model.policy.optimizer.state_dict()["state"]
    theirs = [name for name, _ in model.policy.named_parameters()]
    for name, parameter in pairs([policy, ours.critic]):
        parameter.data.copy_(weights[name].view_as(parameter))
        ours.optimizer.state[parameter] = {
            key: value.clone().reshape(() if key == "step" else parameter.shape)
            for key, value in state[theirs.index(name)].items()
        }


@pytest.mark.parametrize("normalized", [False, True], ids=["plain", "normalized"])
def test_an_update_changes_the_same_weights_by_the_same_amounts(
    monkeypatch: pytest.MonkeyPatch, normalized: bool
) -> None:
    recorder = Recorder(make_sim("toy/point_mass", SimOptions(num_envs=ENVS, reward="shaped")))
    env: Any = VecNormalize(recorder) if normalized else recorder
    model: Any = sb3.PPO("MlpPolicy", env, n_steps=STEPS, batch_size=BATCH, n_epochs=EPOCHS, device="cpu", seed=0)
    model.learn(2 * STEPS * ENVS)  # so that Adam has moments, and values differ from 0
    callback = Ignore()
    callback.init_callback(model)
    callback.on_training_start({}, {})
    if normalized:
        env.training = False  # fixed statistics
        model._last_obs = env.normalize_obs(env.get_original_obs())
    recorder.clear(env.get_original_obs() if normalized else model._last_obs)
    model.collect_rollouts(env, callback, model.rollout_buffer, n_rollout_steps=STEPS)
    rollout = recorder.rollout(model.rollout_buffer)
    assert bool(rollout.truncated.any())
    policy = from_model(model)
    settings = {"num_steps": STEPS, "batch_size": BATCH, "epochs": EPOCHS, "normalize_reward": normalized}
    critic = ValueConfig(normalization="running" if normalized else "identity")
    ours = PPO(PPOConfig(**settings, critic=critic), policy, total_updates=10)
    load_optimizer(ours, model, policy)
    if normalized:
        spread = {"count": 2.0, "mean": 0.0, "square": 2 * float(env.ret_rms.var)}
        ours.reward_normalizer.load_state_dict({"running": None, "moments": spread})
        monkeypatch.setattr(ours, "update_reward_scale", lambda batch: None)
    rows = ours.process_rollout(rollout)
    for found, expected in ((rows.value, "values"), (rows.advantage, "advantages"), (rows.value_target, "returns")):
        theirs = tensor(getattr(model.rollout_buffer, expected)).flatten()
        torch.testing.assert_close(found, theirs, rtol=1e-4, atol=1e-5)

    before = copy.deepcopy(model.policy.state_dict())
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
