"""Tests of synthetic trajectories: guidance in closed form, and segments as datasets."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from robopolicy.algorithms.bc import BC, BCConfig
from robopolicy.contrib.offline.posterior_mean import expected_chunk
from robopolicy.contrib.offline.segments import SegmentSampler, TransitionLayout, segment_starts
from robopolicy.contrib.offline.trajectory_diffusion import (
    PolicyGuidance,
    PolicyPull,
    TrajectoryConfig,
    TrajectoryModel,
)
from robopolicy.data.episodes import Episode, Episodes
from robopolicy.errors import UserError
from robopolicy.nets.normalizer import make_normalizer
from robopolicy.policies.base import Policy, PolicySpec
from robopolicy.policies.heads.edm import EDMConfig, preconditioning
from robopolicy.policies.heads.gaussian import GaussianConfig, GaussianPolicy

ONE = TransitionLayout(keys=("state",), sizes=(1,), action_dim=1)
RAW: dict[str, Any] = {"normalization": "identity", "action_normalization": "meanstd", "action_clip": 0.0}


class White(nn.Module):
    """EDM's network for standard normal data: the denoised point is x / (1 + sigma^2)."""

    def forward(self, x: Tensor, t: Tensor, features: Tensor) -> Tensor:
        sigma = (4 * t).exp().view(-1, 1, 1)
        c_skip, c_out, c_in = preconditioning(sigma, 1.0)
        noisy = x / c_in
        return (noisy / (1 + sigma.square()) - c_skip * noisy) / c_out


def white(length: int = 2, **settings: Any) -> TrajectoryModel:
    """A model of independent standard normal states, actions and rewards."""
    head = EDMConfig(**(RAW | {"steps": 40, "solver": "heun", "sigma_data": 1.0} | settings))
    model = TrajectoryModel(TrajectoryConfig(length=length, head=head, churn=0.0), ONE)
    model.fit(torch.tensor([[-1.0] * 4, [1.0] * 4]))
    model.low.fill_(-20)
    model.high.fill_(20)
    model.head.backbone = White()
    return model.eval()


class Line(Policy):
    """Deterministic policy `slope * state + offset` without a density."""

    name = "line"

    def __init__(self, slope: float, offset: float = 0.0, **shape: int) -> None:
        super().__init__()
        self.slope, self.offset = slope, offset
        self.spec = PolicySpec({"state": (1,)}, 1, **shape)

    def act(self, obs: dict[str, Tensor], **_: Any) -> Tensor:
        return (self.slope * obs["state"][:, -1:] + self.offset).expand(-1, self.spec.horizon, -1)


def constant(mean: float, std: float) -> GaussianPolicy:
    """A Gaussian policy that ignores its observations."""
    own = {"normalization": "identity", "action_normalization": "meanstd", "log_std_init": float(np.log(std))}
    config = GaussianConfig(hidden=(4,), **own)
    policy = GaussianPolicy(config, PolicySpec({"state": (1,)}, 1))
    for parameter in policy.actor.parameters():
        parameter.data.zero_()
    policy.action_normalizer.fit({"mean": [mean], "std": [1.0]})
    return policy


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def actions(rows: Tensor) -> Tensor:
    return rows[..., 1]


@pytest.mark.parametrize("solver", ["heun", "euler"])
def test_segments_without_guidance_or_churn_equal_the_decoded_head_output(solver):
    model = white(solver=solver, steps=8)
    noise = torch.randn(5, 2, 4, generator=seeded())
    expected = model.head.decode({"nothing": torch.zeros(5, 1, 1)}, noise)
    torch.testing.assert_close(model.generate(5, generator=seeded()), expected, atol=1e-5, rtol=1e-5)
    still = PolicyPull(model, Line(1.0), PolicyGuidance(strength=0.0))
    assert torch.equal(model.generate(5, pull=still, generator=seeded()), model.generate(5, generator=seeded()))


@pytest.mark.parametrize("solver", ["heun", "euler"])
def test_a_step_starts_from_the_noise_level_raised_by_churn(solver):
    model = white(solver=solver, steps=1, sigma_max=10.0)
    model.config = replace(model.config, churn=80.0)
    generator = seeded()
    first, again = (torch.randn(5, 2, 4, generator=generator) for _ in range(2))
    raised = 10 * first + 10 * again  # the largest increase, a factor of sqrt(2)
    torch.testing.assert_close(model.generate(5, generator=seeded()), raised / (1 + 200), atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize(("strength", "churn"), [(0.5, 0.0), (1.0, 0.0), (4.0, 0.0), (1.0, 30.0)])
def test_guided_actions_follow_the_product_of_data_and_policy(strength, churn):
    model = white(steps=60)
    model.config = replace(model.config, churn=churn)
    mean, std = 1.5, 0.5
    rows = model.generate(
        3000, pull=PolicyPull(model, constant(mean, std), PolicyGuidance(strength)), generator=seeded()
    )
    precision = 1 + strength / std**2  # N(0, 1) times N(1.5, 0.5^2)^w
    sampled = actions(rows)
    assert float(sampled.mean()) == pytest.approx(mean * strength / std**2 / precision, abs=0.03)
    assert float(sampled.std()) == pytest.approx(precision**-0.5, rel=0.06)


def test_guidance_changes_only_actions_and_raises_their_likelihood():
    model, policy = white(), Line(0.8, 0.5)
    plain = model.generate(400, generator=seeded())
    gaps = []
    for strength in (0.0, 0.3, 1.0, 3.0, 10.0):
        pull = PolicyPull(model, policy, PolicyGuidance(strength, std=0.5))
        rows = model.generate(400, pull=pull, generator=seeded())
        torch.testing.assert_close(rows[..., [0, 2, 3]], plain[..., [0, 2, 3]])
        gaps.append(float((actions(rows) - 0.8 * rows[..., 0] - 0.5).square().mean()))
        assert float(pull.distance(rows).square().mean()) == pytest.approx(gaps[-1], rel=1e-2)
    assert all(later < 0.7 * earlier for earlier, later in pairwise(gaps))


class Denoising(Line):
    """A flow trained on N(1, 0.5^2), whose actions are three times its normalised units."""

    def __init__(self) -> None:
        super().__init__(0.0)
        self.action_normalizer = make_normalizer(1, "meanstd")
        self.action_normalizer.fit({"mean": [0.0], "std": [3.0]})

    def field(self, obs: Any, x: Tensor, t: Tensor) -> Tensor:
        t = t[:, None, None]
        return 1 + (0.25 * t - (1 - t)) * (x - t) / (0.25 * t.square() + (1 - t).square())


@pytest.mark.parametrize("variance", [0.01, 0.3, 2.0])
def test_denoising_policy_guidance_equals_the_closed_form_posterior_mean(variance):
    chunk, obs = torch.randn(6, 1, 1, generator=seeded()), {"state": torch.zeros(6, 1, 1)}
    found = expected_chunk(Denoising(), obs, 3 * chunk, torch.tensor([9 * variance]), torch.ones(1))
    torch.testing.assert_close(found, 3 * (chunk + variance / (variance + 0.25) * (1 - chunk)), atol=1e-4, rtol=1e-4)
    known = constant(1.0, 0.5)
    same = expected_chunk(known, obs, chunk, torch.tensor([variance]), torch.ones(1))
    torch.testing.assert_close(same, found / 3, atol=1e-4, rtol=1e-4)


def test_a_squashed_policy_guides_towards_its_mode():
    config = GaussianConfig(hidden=(4,), normalization="identity", squash=True, log_std_init=-1.0)
    policy, obs = GaussianPolicy(config, PolicySpec({"state": (1,)}, 1)), {"state": torch.ones(3, 1, 1)}
    far = expected_chunk(policy, obs, torch.zeros(3, 1, 1), torch.tensor([1e9]), torch.ones(1))
    torch.testing.assert_close(far, policy.mode(obs))


def test_chunked_policies_guide_at_their_own_decision_frames():
    class Late(Line):  # returns the oldest observed state, then adds 10 per step
        def act(self, obs: dict[str, Tensor], **_: Any) -> Tensor:
            return obs["state"][:, :1] + 10 * torch.arange(3.0)[None, :, None]

    model = white(length=5)
    pull = PolicyPull(model, Late(0.0, horizon=3, action_horizon=2, obs_horizon=2), PolicyGuidance(1e6))
    rows = torch.zeros(1, 5, 4)
    rows[0, :, 0] = torch.arange(5.0)
    # Decisions at frames 0, 2 and 4 observe states from 0, 1 and 3 on, and execute two actions each.
    torch.testing.assert_close(actions(pull(rows, 1.0))[0], torch.tensor([0.0, 10, 1, 11, 3]), atol=1e-3, rtol=1e-3)


def test_incompatible_policies_and_settings_are_refused():
    model = white()
    other = Line(1.0)
    other.spec = PolicySpec({"goal": (2,)}, 1)
    with pytest.raises(UserError, match=r"observes 'goal' \(2,\), but segments contain nothing"):
        PolicyPull(model, other, PolicyGuidance())
    other.spec = PolicySpec({"state": (1,)}, 3)
    with pytest.raises(UserError, match="have 3 dimensions, but segments have 1"):
        PolicyPull(model, other, PolicyGuidance())
    with pytest.raises(UserError, match="strength must not be negative"):
        PolicyGuidance(strength=-1.0)
    with pytest.raises(UserError, match="Segments are standardised"):
        TrajectoryConfig(head=EDMConfig())


# Segments of a dataset.


def counting(lengths: list[int], terminated: list[bool]) -> Episodes:
    """Episodes whose state is the global frame index."""
    found, frame = [], 0
    for length, ended in zip(lengths, terminated, strict=True):
        state = np.arange(frame, frame + length, dtype=np.float32)[:, None]
        done = np.zeros(length, np.bool_)
        done[-1] = ended
        arrays = {"state": state, "action": -state, "reward": state[:, 0] / 2, "terminated": done}
        found.append(Episode(arrays, "toy/point_mass"))
        frame += length
    return Episodes.from_list(found, 0.05)


def test_segments_stay_in_their_episode_and_repeat_a_terminal_frame():
    episodes = counting([5, 3], [False, True])
    assert segment_starts(episodes, 4).tolist() == [0, 1, 5, 6, 7]
    sampler = SegmentSampler(episodes, TransitionLayout.of(episodes), length=4, batch_size=5)
    assert len(sampler) == 5 and sorted(next(sampler).chunk[:, 0, 0].tolist()) == [0, 1, 5, 6, 7]
    last = sampler.take(torch.tensor([6]))
    assert last.chunk[0].tolist() == [[6, -6, 3, 0], *[[7, -7, 3.5, 1]] * 3]
    assert bool((last.mask == 1).all())
    with pytest.raises(UserError, match="No episode has 9 frames, the longest has 5"):
        segment_starts(counting([5], [False]), 9)


def test_a_segment_becomes_an_episode_up_to_its_termination_flag():
    layout = TransitionLayout(keys=("goal", "state"), sizes=(2, 1), action_dim=1)
    rows = torch.arange(24.0).view(4, 6)
    rows[:, -1] = torch.tensor([0.1, -0.3, 0.8, 0.9])
    episode = layout.episode(rows, "toy/point_mass", "synthetic")
    assert len(episode) == 3 and episode.arrays["terminated"].tolist() == [False, False, True]
    assert episode.arrays["goal"][1].tolist() == [6, 7] and episode.arrays["state"][1].tolist() == [8]
    assert episode.arrays["action"][1].tolist() == [9] and episode.arrays["reward"][1] == 10


def test_datasets_without_rewards_or_with_images_are_refused():
    episodes = counting([4], [True])
    poor = replace(episodes, arrays={key: value for key, value in episodes.arrays.items() if key != "reward"})
    with pytest.raises(UserError, match="no 'reward'"):
        TransitionLayout.of(poor)
    seen = replace(episodes, arrays={**episodes.arrays, "image.top": np.zeros((4, 3, 8, 8), np.uint8)})
    with pytest.raises(UserError, match=r"contains \['image.top'\]"):
        TransitionLayout.of(seen)


def linear_system(episodes: int, length: int) -> Episodes:
    """States of s' = 0.8 s + 0.6 a under random actions, with reward -s^2."""
    rng, found = np.random.default_rng(0), []
    for _ in range(episodes):
        action = 0.5 * rng.normal(size=(length, 1)).astype(np.float32)
        state = np.zeros((length, 1), np.float32)
        state[0] = rng.normal()
        for step in range(length - 1):
            state[step + 1] = 0.8 * state[step] + 0.6 * action[step]
        never = np.zeros(length, np.bool_)
        arrays = {"state": state, "action": action, "reward": -np.square(state[:, 0]), "terminated": never}
        found.append(Episode(arrays, "toy/point_mass"))
    return Episodes.from_list(found, 0.05)


def rms(x: Tensor) -> float:
    return float(x.square().mean().sqrt())


def test_losses_and_samples_are_finite_under_autocast_and_nan_propagates() -> None:
    episodes = linear_system(10, 8)
    layout = TransitionLayout.of(episodes)
    torch.manual_seed(0)
    head = EDMConfig(**(RAW | {"steps": 4, "sigma_data": 1.0, "hidden": (16,)}))
    model = TrajectoryModel(TrajectoryConfig(length=3, head=head, churn=1.0), layout)
    model.fit(torch.from_numpy(layout.rows(episodes)))
    sampler = SegmentSampler(episodes, layout, length=3, batch_size=16)
    learner, pull = BC(BCConfig(), model.head, total_updates=10), PolicyPull(model, Line(-0.8), PolicyGuidance())
    with torch.autocast("cpu", torch.bfloat16):
        metrics = learner.update(next(sampler))
        assert all(np.isfinite(value) for value in metrics.values())
        for guided in (None, pull):
            assert bool(model.generate(8, pull=guided, generator=seeded()).isfinite().all())
    batch = next(sampler)
    batch.chunk[2, 1, 0] = float("nan")
    assert np.isnan(learner.update(batch)["actor/loss"])


@pytest.mark.slow
def test_trained_model_satisfies_the_dynamics_with_and_without_guidance():
    episodes, length, updates = linear_system(300, 8), 3, 700
    layout = TransitionLayout.of(episodes)
    torch.manual_seed(0)
    head = EDMConfig(**(RAW | {"steps": 16, "sigma_data": 1.0, "hidden": (96, 96, 96)}))
    model = TrajectoryModel(TrajectoryConfig(length=length, head=head, churn=8.0), layout)
    model.fit(torch.from_numpy(layout.rows(episodes)))
    sampler = SegmentSampler(episodes, layout, length=length, batch_size=128)
    learner = BC(BCConfig(lr=3e-3), model.head, total_updates=updates)
    for _ in range(updates):
        learner.update(next(sampler))
    model.head = learner.inference_policy()  # type: ignore[assignment]
    gaps = []
    for strength in (0.0, 0.5, 2.0):
        pull = PolicyPull(model, Line(-0.8), PolicyGuidance(strength))
        rows = model.generate(256, pull=pull, generator=seeded())
        state, action = rows[..., 0], rows[..., 1]
        error = rms(state[:, 1:] - 0.8 * state[:, :-1] - 0.6 * action[:, :-1])
        assert error < 0.05  # states have a standard deviation of 0.5
        gaps.append(rms(action + 0.8 * state))
    assert gaps[2] < 0.8 * gaps[1] < 0.64 * gaps[0]
