"""Tests of CAMEL: masked actions stay in their band, the mask decays, and a scripted prior helps exploration."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from chunk_bandit import SMALL, batch, flow, gaussian
from torch import Tensor

from robopolicy.algorithms.registry import ALGORITHMS, make_algorithm
from robopolicy.contrib.control.action_masking import MaskConfig, update_mask
from robopolicy.contrib.control.camel_sac import CAMELSAC, CAMELSACConfig
from robopolicy.contrib.control.prior_mask import MaskSchedule, PriorMask
from robopolicy.data.replay import Replay
from robopolicy.errors import UserError
from robopolicy.nets.normalizer import make_normalizer
from robopolicy.policies.base import PolicySpec
from robopolicy.policies.heads.gaussian import GaussianConfig, GaussianPolicy
from robopolicy.policies.wrappers.black_box import CallableConfig, CallablePolicy, register_callable
from robopolicy.rollout.off_policy import ReplaySampler
from robopolicy.sim.chunk import ChunkedSim
from robopolicy.sim.registry import SimOptions, make_sim

BANDS = ["camel_sac", "camel_td3"]
OBS = {"state": torch.rand(200, 1, 2, generator=torch.Generator().manual_seed(0)) * 2 - 1}


def lean(obs: dict[str, Tensor]) -> Tensor:
    """A prior on the bandit whose action is the first number of the state."""
    return obs["state"][:, -1:, :1]


register_callable("lean", lean)


def learner(name: str, seed: int = 0, mask: MaskConfig | None = None, **config: Any) -> Any:
    torch.manual_seed(seed)
    settings = {"critic": SMALL, "batch_size": 64, "lr": 3e-3, "critic_lr": 3e-3, "tau": 0.05} | config
    if name in BANDS:
        settings["mask"] = mask or MaskConfig("lean", width=0.2)
    return make_algorithm(name, ALGORITHMS[name].config_class(**settings), gaussian(), total_updates=100)


def random_batch() -> Any:
    return batch(torch.rand(64, 2, 1) * 2 - 1, lambda action: 1 - (action.squeeze(1) - 0.4).square(), discount=0.9)


@pytest.mark.parametrize("name", BANDS)
def test_masked_actions_stay_within_the_band_around_the_prior_action(name: str) -> None:
    algorithm = learner(name, noise=1.0) if name == "camel_td3" else learner(name)
    low, high = algorithm.mask.bounds(OBS)
    prior = lean(OBS)
    torch.testing.assert_close(low, (prior - 0.2).clamp(min=-1))
    torch.testing.assert_close(high, (prior + 0.2).clamp(max=1))
    for draw in (algorithm.act, algorithm.warmup_action):
        chunk = draw(OBS, generator=torch.Generator().manual_seed(0)).chunk.detach()
        assert bool(((chunk >= low) & (chunk <= high)).all())
        assert float((chunk - low).abs().min()) < 0.02 and float((chunk - high).abs().min()) < 0.02


def test_mask_maps_the_whole_action_range_into_the_band() -> None:
    spec = PolicySpec({"state": (2,)}, action_dim=1)
    normalizer = make_normalizer(1, "minmax")
    normalizer.fit({"min": [-2.0], "max": [6.0]})  # one unit is 4
    prior = CallablePolicy.wrap("four", lambda obs: torch.full((3, 1, 1), 4.0), spec, noise=False)
    mask = PriorMask(prior, 0.25, MaskSchedule(), normalizer)
    obs = {"state": torch.zeros(3, 1, 2)}
    asked = torch.tensor([-2.0, 2.0, 6.0]).view(3, 1, 1)
    assert mask.inside(obs, asked).flatten().tolist() == pytest.approx([3.0, 4.0, 5.0])


@pytest.mark.parametrize("name", BANDS)
def test_zero_mask_run_is_bit_identical_to_the_unmasked_run(name: str) -> None:
    plain = learner(name.removeprefix("camel_"))
    masked = learner(name, mask=MaskConfig("lean", 0.2, MaskSchedule(initial=0.0)))
    for seed in range(3):
        generators = [torch.Generator().manual_seed(seed) for _ in range(2)]
        for verb in ("warmup_action", "act"):
            one, two = (getattr(a, verb)(OBS, generator=g) for a, g in zip((plain, masked), generators, strict=True))
            assert torch.equal(one.chunk, two.chunk)
        torch.manual_seed(seed)
        data = random_batch()
        plain.update(data)
        masked.update(data)
    for expected, found in zip(plain.policy.parameters(), masked.policy.parameters(), strict=True):
        assert torch.equal(expected, found)


def test_initial_sets_the_fraction_of_masked_decisions() -> None:
    algorithm: CAMELSAC = learner("camel_sac", mask=MaskConfig("lean", 0.01, MaskSchedule(initial=0.3)))
    obs = {"state": torch.rand(4000, 1, 2) * 2 - 1}
    chunk = algorithm.warmup_action(obs, generator=torch.Generator().manual_seed(0)).chunk
    near = ((chunk - lean(obs)).abs() < 0.0101).all(2).all(1)
    assert float(near.float().mean()) == pytest.approx(0.3, abs=0.03)


def test_mask_decays_faster_if_the_policy_is_preferred_and_reaches_zero() -> None:
    schedule = MaskSchedule(decay=0.1, least=0.2)
    start = torch.tensor(0.5)
    assert float(schedule.after(start, torch.tensor(1.0))) == pytest.approx(0.45)
    assert float(schedule.after(start, torch.tensor(0.0))) == pytest.approx(0.49)
    epsilon, steps = torch.tensor(1.0), 0
    while float(epsilon):
        epsilon, steps = schedule.after(epsilon, torch.tensor(0.0)), steps + 1
    assert 300 < steps < 400


@pytest.mark.parametrize(("better", "share"), [(1.0, 1.0), (-1.0, 0.0)])
def test_critic_decides_which_action_is_preferred(better: float, share: float) -> None:
    algorithm: CAMELSAC = learner("camel_sac", mask=MaskConfig("lean", 0.2, MaskSchedule(decay=0.1)))
    prior = lean(OBS)

    def min_q(obs: Any, chunk: Tensor) -> Tensor:  # increases or decreases with the distance to the prior
        return better * (chunk - lean(obs)).abs().sum((1, 2))

    algorithm.critic.min_q = min_q  # type: ignore[method-assign]
    algorithm.policy.mode = lambda obs: -lean(obs).sign()  # type: ignore[method-assign]
    assert bool(prior.abs().max() <= 1)
    assert algorithm.update(random_batch())["mask/policy_preferred_fraction"] == share


def test_preferred_actions_are_compared_without_dropout(monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm = learner("camel_sac", critic=replace(SMALL, dropout=0.5))
    data, seen, min_q = random_batch(), [], algorithm.critic.min_q

    def spy(obs: Any, chunk: Tensor) -> Tensor:
        seen.append(any(module.training for module in algorithm.critic.modules()))
        return min_q(obs, chunk)

    monkeypatch.setattr(algorithm.critic, "min_q", spy)
    update_mask(algorithm.mask, algorithm, data)
    assert seen == [False, False] and algorithm.critic.training


def successes(prior: str) -> int:
    """Number of 40-step point-mass episodes that reach the goal in 4,000 warm-up steps."""
    sim = make_sim("toy/point_mass", SimOptions(num_envs=20))  # registers the prior
    spec = PolicySpec({"state": (6,)}, action_dim=2)
    config = GaussianConfig(squash=True, normalization="identity", action_normalization="minmax")
    policy = GaussianPolicy(config, spec)
    policy.fit_normalizer({"action": {"min": [-1.0] * 2, "max": [1.0] * 2}})
    mask = MaskConfig(prior, 0.3, MaskSchedule(initial=1.0 if prior else 0.0))
    algorithm = CAMELSAC(CAMELSACConfig(mask=mask), policy, total_updates=10)
    replay = Replay(8000, 20)
    ReplaySampler(ChunkedSim(sim), replay).collect(algorithm.warmup_action, 200)
    return int(replay.state_dict()["arrays"]["terminated"].sum())


def test_warmup_around_a_scripted_prior_finds_more_reward_than_uniform_warmup() -> None:
    torch.manual_seed(0)
    assert successes("point_mass_pd") > 50 > 5 * successes("")


def test_a_prior_for_another_task_is_refused() -> None:
    make_sim("toy/point_mass", SimOptions(num_envs=1))  # registers the prior
    for obs in ({"state": torch.zeros(2, 1, 39)}, {"image.front": torch.zeros(2, 1, 3, 8, 8)}):
        spec = PolicySpec({key: tuple(value.shape[2:]) for key, value in obs.items()}, 2)
        prior = CallablePolicy(CallableConfig(function="point_mass_pd", noise=False), spec)
        with pytest.raises(UserError, match=r"'point_mass_pd' is for toy/point_mass, .* found (39|nothing)\."):
            prior.act(obs)


def test_invalid_settings_are_refused() -> None:
    with pytest.raises(UserError, match="squashed"):
        CAMELSAC(CAMELSACConfig(), flow(), total_updates=1)
    with pytest.raises(UserError, match="'nothing'"):
        learner("camel_sac", mask=MaskConfig("nothing"))
    with pytest.raises(UserError, match="width"):
        learner("camel_td3", mask=MaskConfig("lean", width=0.0))
    with pytest.raises(UserError, match="initial"):
        MaskSchedule(initial=2.0)
