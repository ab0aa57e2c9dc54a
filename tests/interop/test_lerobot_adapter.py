"""Tests of robopolicy policies as LeRobot policies; `make test-lerobot` runs them."""

from typing import Any

import gymnasium
import numpy as np
import pytest
import torch

pytest.importorskip("lerobot.policies", reason="needs robopolicy[lerobot]: make test-lerobot")

from lerobot.policies.pretrained import PreTrainedPolicy

from robopolicy.errors import UserError
from robopolicy.interop.lerobot.adapter import as_lerobot, identity_processors
from robopolicy.policies.base import PolicySpec
from robopolicy.policies.heads.flow import FlowConfig, FlowPolicy
from robopolicy.policies.heads.gaussian import GaussianConfig, GaussianPolicy

SPEC = PolicySpec({"state": (4,), "image.front": (3, 16, 16)}, 2, horizon=5, action_horizon=3, obs_horizon=2)
VECTORS = PolicySpec({"state": (2,), "environment_state": (2,)}, 2, horizon=4, action_horizon=2, obs_horizon=2)


def flow() -> FlowPolicy:
    torch.manual_seed(0)
    return FlowPolicy(
        FlowConfig(hidden=(16,), steps=2, normalization="identity", action_normalization="identity"), SPEC
    ).eval()


def frames(steps: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (3, steps, 3, 16, 16), generator=generator, dtype=torch.uint8)
    return {"state": torch.randn(3, steps, 4, generator=generator), "image.front": images}


def batch(obs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {"observation.state": obs["state"], "observation.images.front": obs["image.front"].float() / 255}


def test_adapter_is_a_lerobot_policy_with_our_features_and_horizons() -> None:
    adapted = as_lerobot(flow())
    assert isinstance(adapted, PreTrainedPolicy)
    config: Any = adapted.config
    assert (config.n_obs_steps, config.n_action_steps, config.action_delta_indices) == (2, 3, [0, 1, 2, 3, 4])
    assert set(config.image_features) == {"observation.images.front"}
    assert config.robot_state_feature.shape == (4,) and config.action_feature.shape == (2,)


def test_adapter_chunk_for_given_noise_equals_our_decoder() -> None:
    policy, obs = flow(), frames(2)
    noise = torch.randn(3, 5, 2)
    with torch.no_grad():
        expected = policy.decode(obs, noise)
    assert torch.equal(as_lerobot(policy).predict_action_chunk(batch(obs), noise=noise), expected)


def test_select_action_returns_single_actions_of_chunks_from_the_latest_history() -> None:
    policy, frames_seen = flow(), frames(7)
    adapted, noise = as_lerobot(policy), torch.randn(3, 5, 2)
    found = [adapted.select_action(batch({k: v[:, t] for k, v in frames_seen.items()}), noise=noise) for t in range(7)]
    with torch.no_grad():
        for start, history in ((0, [0, 0]), (3, [2, 3]), (6, [5, 6])):  # the first observation fills the history
            chunk = policy.decode({key: value[:, history] for key, value in frames_seen.items()}, noise)
            for offset in range(min(3, 7 - start)):
                assert torch.equal(found[start + offset], chunk[:, offset])
    adapted.reset()
    again = adapted.select_action(batch({key: value[:, 6] for key, value in frames_seen.items()}), noise=noise)
    with torch.no_grad():
        assert torch.equal(
            again, policy.decode({key: value[:, [6, 6]] for key, value in frames_seen.items()}, noise)[:, 0]
        )


def test_adapter_loss_equals_our_imitation_loss() -> None:
    policy, obs = flow(), frames(2)
    chunk, padded = torch.randn(3, 5, 2), torch.tensor([[False] * 4 + [True]] * 3)
    torch.manual_seed(5)
    loss, _ = as_lerobot(policy).forward(batch(obs) | {"action": chunk, "action_is_pad": padded})
    torch.manual_seed(5)
    assert torch.equal(loss, policy.imitation_loss(obs, chunk, mask=~padded)[0].mean())


def test_missing_and_misshapen_observations_are_refused() -> None:
    adapted, obs = as_lerobot(flow()), frames(2)
    with pytest.raises(UserError, match=r"expects 'observation.images.front', found observation.state"):
        adapted.predict_action_chunk({"observation.state": obs["state"]})
    with pytest.raises(UserError, match=r"'observation.state' of shape \(4,\), found \(2, 3\)"):
        adapted.predict_action_chunk(batch(obs) | {"observation.state": obs["state"][..., :3]})
    with pytest.raises(UserError, match=r"2 steps of 'observation\.state', found 1"):
        adapted.predict_action_chunk(batch(frames(1)))
    with pytest.raises(UserError, match=r"keys has 'image\.top', but the policy observes state, image.front"):
        as_lerobot(flow(), keys={"image.top": "observation.images.top"})


class Drift(gymnasium.Env[Any, Any]):
    """A pushed point with observations in lerobot's keys."""

    metadata = {"render_fps": 10}  # noqa: RUF012 - as in gymnasium
    _max_episode_steps = 7
    task, task_description = "drift", "push the point"

    def __init__(self) -> None:
        box = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float32)
        self.observation_space = gymnasium.spaces.Dict({"agent_pos": box, "environment_state": box})
        self.action_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float32)
        self.position, self.steps = np.zeros(2, np.float32), 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.position, self.steps = np.float32(self.np_random.normal(size=2)), 0
        return self.shown(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.position, self.steps = np.float32(0.9 * self.position + 0.1 * action), self.steps + 1
        return self.shown(), 0.0, False, self.steps == 7, {"is_success": False}

    def shown(self) -> dict[str, Any]:
        return {"agent_pos": self.position.copy(), "environment_state": self.position**2}


def test_lerobot_rollout_executes_the_adapter() -> None:
    evaluation = pytest.importorskip("lerobot.scripts.lerobot_eval")
    torch.manual_seed(0)
    policy = GaussianPolicy(GaussianConfig(hidden=(16,), normalization="identity"), VECTORS).eval()
    before, after = identity_processors()
    env = gymnasium.vector.SyncVectorEnv([Drift, Drift])
    result = evaluation.rollout(env, as_lerobot(policy), before, lambda actions: actions, before, after, seeds=[3, 4])
    obs, _ = env.reset(seed=[3, 4])
    history, expected, chunk = [obs, obs], [], torch.empty(0)
    for step in range(7):
        if step % 2 == 0:
            names = {"state": "agent_pos", "environment_state": "environment_state"}
            frames_seen = {
                k: torch.stack([torch.as_tensor(shown[name]) for shown in history], 1) for k, name in names.items()
            }
            chunk = policy.act(frames_seen, deterministic=True)
        expected.append(chunk[:, step % 2])
        obs, *_ = env.step(expected[-1].numpy())
        history = [history[-1], obs]
    torch.testing.assert_close(result["action"], torch.stack(expected, 1))
