"""Tests of the value network."""

import pytest
import torch

from robopolicy.critics.value import ValueConfig, ValueNet
from robopolicy.nets.vision import VisionConfig
from robopolicy.policies.base import PolicySpec

SPEC = PolicySpec({"state": (3,), "goal": (2,)}, action_dim=2, obs_horizon=2)


def observations(rows: int) -> dict[str, torch.Tensor]:
    return {"state": 5 + 3 * torch.randn(rows, 2, 3), "goal": torch.randn(rows, 2, 2)}


@pytest.mark.parametrize(
    "config", [ValueConfig(), ValueConfig(hidden=(16, 16, 16), residual=True, activation="mish", orthogonal_init=False)]
)
def test_one_value_per_row(config: ValueConfig) -> None:
    assert ValueNet(config, SPEC)(observations(7)).shape == (7,)


def test_value_net_may_use_privileged_observations() -> None:
    critic = ValueNet(ValueConfig(privileged_obs={"state": 3}), PolicySpec({"image.front": (3, 32, 32)}, action_dim=2))
    obs = {"state": torch.randn(4, 1, 3), "image.front": torch.zeros(4, 1, 3, 32, 32, dtype=torch.uint8)}
    values = critic(obs)
    assert torch.equal(critic({**obs, "image.front": obs["image.front"] + 1}), values)
    assert not torch.equal(critic({**obs, "state": obs["state"] + 1}), values)


@pytest.mark.parametrize("residual", [False, True])
def test_an_optimistic_value_starts_near_its_bias(residual: bool) -> None:
    value = ValueNet(ValueConfig(hidden=(16, 16, 16), residual=residual, bias=100.0), SPEC)
    assert bool((value(observations(5)) - 100.0).abs().max() < 20.0)


def test_empty_batch_gives_empty_values() -> None:
    assert ValueNet(ValueConfig(), SPEC)(observations(0)).shape == (0,)  # a rollout without truncated episodes
    pixels = PolicySpec({"image.front": (3, 32, 32)}, action_dim=2)
    critic = ValueNet(ValueConfig(vision=VisionConfig(widths=(16,), keypoints=2)), pixels)
    assert critic({"image.front": torch.zeros(0, 1, 3, 32, 32, dtype=torch.uint8)}).shape == (0,)


def test_running_statistics_come_from_the_newest_observation_only() -> None:
    critic = ValueNet(ValueConfig(), SPEC)
    obs = observations(500)
    critic.update_stats(obs)
    newest = torch.cat([obs["goal"][:, -1], obs["state"][:, -1]], -1)  # keys in sorted order
    torch.testing.assert_close(critic.encoder.normalizer.offset, newest.mean(0))
    features = critic.encoder(obs)[:, -1]
    torch.testing.assert_close(features.mean(0), torch.zeros(5), atol=1e-5, rtol=0)
    torch.testing.assert_close(features.std(0), torch.ones(5), atol=1e-2, rtol=0)


def test_update_stats_changes_nothing_without_running_statistics() -> None:
    critic = ValueNet(ValueConfig(normalization="minmax"), SPEC)
    critic.fit_normalizer({"state": {"min": [0] * 3, "max": [10] * 3}, "goal": {"min": [-1] * 2, "max": [1] * 2}})
    before = {key: value.clone() for key, value in critic.state_dict().items()}
    critic.update_stats(observations(10))
    assert all(torch.equal(value, before[key]) for key, value in critic.state_dict().items())


def test_a_critic_fits_a_linear_value() -> None:
    critic = ValueNet(ValueConfig(), SPEC)
    obs = observations(512)
    critic.update_stats(obs)
    target = obs["state"][:, -1].sum(-1) / 5
    optimizer = torch.optim.Adam(critic.parameters(), lr=1e-2)
    for _ in range(100):
        loss = torch.nn.functional.mse_loss(critic(obs), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert float(loss.detach()) < 0.05 * float(target.var())


def test_autocast_values_have_float32_resolution() -> None:
    torch.manual_seed(0)
    value, obs = ValueNet(ValueConfig(bias=3.0), SPEC), observations(256)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert len(value(obs).unique()) > 200  # in bfloat16 the next number after 3 is 3.016
