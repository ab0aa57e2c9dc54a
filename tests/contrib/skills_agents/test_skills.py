"""Tests of skill codes: sampling, limits of the bonus, and exact resume."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from robopolicy.contrib.skills_agents.skill_discriminator import SkillDecoder
from robopolicy.contrib.skills_agents.skills import SKILL_KEY, SkillSim
from robopolicy.errors import UserError
from robopolicy.sim.checker import check_simulator
from robopolicy.sim.registry import SimOptions, make_sim, observation_options
from robopolicy.sim.wrappers.registry import WrapperSpec, evaluation_wrappers

K = 4


def open_sim(bonus: float = 0.0, num_envs: int = 64) -> SkillSim:
    torch.manual_seed(0)
    wrappers = (WrapperSpec("skills", {"count": K, "bonus": bonus}),)
    sim = make_sim("toy/point_mass", SimOptions(num_envs=num_envs, wrappers=wrappers))
    assert isinstance(sim, SkillSim)
    return sim


def run_steps(sim: SkillSim, steps: int, revealing: bool) -> torch.Tensor:
    """Bonuses `(steps,)` while actions reveal the code, or are independent of it."""
    obs, bonuses = sim.reset(0), []
    directions = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]])
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        action = 2 * torch.rand(sim.num_envs, 2, generator=generator) - 1
        step = sim.step(obs[SKILL_KEY] @ directions if revealing else action)
        bonuses.append(step.info["reward.skill"].mean())
        obs = step.obs
    return torch.stack(bonuses)


def test_an_untrained_decoder_gives_zero_bonus():
    decoder = SkillDecoder(6, K)
    decoder.normalizer.update(torch.randn(8, 6))
    behaviour, skill = torch.randn(8, 6), torch.arange(8) % K
    assert_close(decoder.bonus(behaviour, skill), torch.zeros(8))
    assert_close(decoder.loss(behaviour, skill), torch.full((8,), math.log(K)))


def test_the_bonus_of_a_certain_decoder_is_log_k():
    decoder, skill = SkillDecoder(K, K, hidden=()), torch.arange(16) % K
    behaviour = torch.nn.functional.one_hot(skill, K).float()
    decoder.normalizer.update(behaviour)
    decoder.body[0].weight.data = 50.0 * torch.eye(K)
    assert_close(decoder.bonus(behaviour, skill), torch.full((16,), math.log(K)), atol=1e-4, rtol=0)
    assert bool((decoder.bonus(behaviour, (skill + 1) % K) < -10).all())  # negative for a wrong code


def test_rollout_bonus_is_log_k_for_revealing_behaviour_and_zero_otherwise():
    assert float(run_steps(open_sim(1.0), 300, revealing=True)[-20:].mean()) > 0.95 * math.log(K)
    assert abs(float(run_steps(open_sim(1.0), 300, revealing=False)[-20:].mean())) < 0.1


def test_without_a_bonus_only_the_observation_changes():
    sim = open_sim(num_envs=3)
    assert check_simulator(sim, lambda n: open_sim(num_envs=n)) == []
    plain = make_sim("toy/point_mass", SimOptions(num_envs=3))
    obs, bare = sim.reset(5), plain.reset(5)
    assert torch.equal(obs["state"], bare["state"]) and sim.spec.seeded_episodes
    action = torch.full((3, 2), 0.3)
    assert torch.equal(sim.step(action).reward, plain.step(action).reward)


def test_with_a_bonus_the_contract_holds_except_seeded_episodes():
    assert check_simulator(open_sim(0.1, num_envs=3)) == []
    assert not open_sim(0.1).spec.seeded_episodes


def test_a_code_depends_on_the_episode_seed_and_codes_are_uniform():
    sim = open_sim(num_envs=2000)
    first, again = sim.reset(7)[SKILL_KEY], sim.reset(7)[SKILL_KEY]
    assert torch.equal(first, again) and torch.equal(first.sum(1), torch.ones(2000))
    assert torch.equal(sim.reset(8)[SKILL_KEY][:-1], first[1:])
    assert float((first.mean(0) - 1 / K).abs().max()) < 0.05


def test_the_final_observation_contains_the_code_of_its_episode():
    sim = open_sim(num_envs=16)
    shown = sim.reset(0)[SKILL_KEY]
    for _ in range(40):
        step = sim.step(torch.zeros(16, 2))
    assert step.truncated.all() and torch.equal(step.final_obs[SKILL_KEY], shown)
    assert not torch.equal(step.obs[SKILL_KEY], shown)


def test_it_resumes_exactly_with_the_decoder_state():
    sim, again = open_sim(1.0, num_envs=8), open_sim(1.0, num_envs=8)
    run_steps(sim, 5, revealing=True)
    again.reset(3)
    assert_close(again.load_state_dict(sim.state_dict()), dict(sim._obs))
    for _ in range(3):
        one, other = (each.step(torch.full((8, 2), 0.5)) for each in (sim, again))
        assert torch.equal(one.reward, other.reward)


def test_checkpoints_set_the_number_of_skills():
    found = observation_options([{"state": (6,), SKILL_KEY: (K,)}])
    assert found == {"wrappers": (WrapperSpec("skills", {"count": K}),)}
    with pytest.raises(
        UserError, match=r"'skills' with different options, count=2, bonus=0\.0 and count=4, bonus=0\.0"
    ):
        observation_options([{SKILL_KEY: (2,)}, {SKILL_KEY: (4,)}])


def test_evaluation_has_no_bonus():
    trained = WrapperSpec("skills", {"count": K, "bonus": 0.5})
    assert evaluation_wrappers([trained]) == (WrapperSpec("skills", {"count": K}),)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"count": 1}, "skills.count must be at least 2"), ({"bonus": -1.0}, "skills.bonus must not")],
)
def test_invalid_settings_are_refused(options: dict[str, Any], message: str):
    with pytest.raises(UserError, match=message):
        WrapperSpec("skills", options)
