"""Every recipe of `configs/text`: it loads, has a finite loss on tokens, and updates a robot's denoising chain."""

from __future__ import annotations

import re

import pytest
import torch
from tabular import recipe_of, tabular, with_extras

from robopolicy.core.decisions import Decisions
from robopolicy.core.recipe import Recipe
from robopolicy.core.recipe_keys import DEFAULTS
from robopolicy.policies.base import PolicySpec
from robopolicy.policies.exploration.flow_chains import SDEChain
from robopolicy.policies.heads.flow import FlowConfig, FlowPolicy
from robopolicy.recipe_files import read_recipe, recipe_names

NAMES = recipe_names()
ROLLOUTS = [name for name in NAMES if read_recipe(name).get("data", "rollout") == "rollout"]


def gradients_of_one_update(recipe: Recipe, decisions: Decisions, score, parameters) -> float:
    """Select, compare, step and observe, twice; the norm of the first gradient."""
    generator = torch.Generator().manual_seed(0)
    rows = recipe.select(decisions, generator)
    chosen = decisions.select(rows)
    advantage = recipe.advantage(chosen)
    assert advantage.shape in ((len(rows), 1), chosen.shape) and bool(advantage.isfinite().all())
    first = 0.0
    optimiser = torch.optim.SGD(parameters, lr=1e-3)
    for step in range(2):
        logp, entropy = score(rows)
        loss, info = recipe.loss(chosen, advantage, logp, entropy)
        assert loss.dim() == 0 and bool(loss.isfinite())
        assert all(value.dim() == 0 and not value.requires_grad for value in info.values())
        optimiser.zero_grad()
        loss.backward()
        norm = sum(float(p.grad.square().sum()) for p in parameters if p.grad is not None) ** 0.5
        assert norm == norm and norm < float("inf")
        first = norm if step == 0 else first
        optimiser.step()
        recipe.observe(decisions, info)
    return first


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_says_what_it_is(name: str) -> None:
    plain = read_recipe(name)
    recipe = Recipe.from_plain(plain)
    assert plain["title"] and re.fullmatch(r"\d+\.\d\d", plain["section"])
    assert list(plain) == [key for key in DEFAULTS if key in plain], "keys stand in the order of DEFAULTS"
    source = re.match(r"s\d{3}(?=_)", name)
    assert plain["source"] == (source[0].upper() if source else "")
    assert recipe.status != "reconstructed" or plain["deviations"]


@pytest.mark.parametrize("name", ROLLOUTS)
def test_a_recipe_learns_from_tokens(name: str) -> None:
    case = tabular(drift=0.0, rollouts=6)
    case.decisions.need("reward")[1:6] = 0.0  # one success in the first group
    score = lambda rows: (case.logp()[rows], case.entropy()[rows])  # noqa: E731
    assert gradients_of_one_update(recipe_of(name), case.decisions, score, [case.logits]) > 0


@pytest.mark.parametrize("name", ROLLOUTS)
def test_a_recipe_updates_a_denoising_chain(name: str) -> None:
    policy, decisions, obs, record = robot_batch()

    def score(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = policy.decisions({"state": obs[rows]}, {"chain": record[rows]})
        return out.logp, out.entropy

    assert gradients_of_one_update(recipe_of(name), decisions, score, list(policy.parameters())) > 0


@pytest.mark.parametrize("name", NAMES)
def test_the_memory_of_a_recipe_survives_a_checkpoint(name: str) -> None:
    case, recipe, again = tabular(rollouts=6), recipe_of(name), recipe_of(name)
    if recipe.data == "rollout":
        _, info = recipe.loss(case.decisions, recipe.advantage(case.decisions), case.logp(), case.entropy())
        recipe.observe(case.decisions, info)
    again.load_state_dict(recipe.state_dict())
    if recipe.data == "rollout":
        torch.testing.assert_close(recipe.advantage(case.decisions), again.advantage(case.decisions))


@pytest.mark.parametrize("name", [name for name in NAMES if name != "oppo"])  # which needs an encoder
def test_what_is_masked_reaches_no_part_of_a_recipe(name: str) -> None:
    """Prompt, tool output and padding may hold anything, even what is not a number."""
    case = tabular()
    off = ~case.decisions.valid()
    named = ("logp_old", "logp_ref", "logp_behaviour", "reward", "value", "entropy")
    fields = {key: getattr(case.decisions, key).masked_fill(off, torch.nan) for key in named}
    found = []
    for decisions, fill in ((case.decisions, None), (case.decisions.with_fields(**fields), torch.nan)):
        torch.manual_seed(0)
        recipe = recipe_of(name)
        rows = recipe.select(decisions, torch.Generator().manual_seed(0))
        chosen = decisions.select(rows)
        logp = case.logp()[rows] if fill is None else torch.where(off, fill, case.logp())[rows]
        loss, _ = recipe.loss(chosen, recipe.advantage(chosen), logp, case.entropy()[rows])
        found.append((loss, *torch.autograd.grad(loss, case.logits)))
    torch.testing.assert_close(found[1], found[0])


def robot_batch() -> tuple[SDEChain, Decisions, torch.Tensor, torch.Tensor]:
    """Two start states, six episodes each of three chunks, every chunk four denoising steps; rows in order of time."""
    groups, episodes, chunks, steps = 2, 6, 3, 4
    generator = torch.Generator().manual_seed(0)
    config = FlowConfig(
        hidden=(16,), steps=steps, normalization="identity", action_normalization="identity", action_clip=0.0
    )
    policy = SDEChain(FlowPolicy(config, PolicySpec({"state": (3,)}, action_dim=2, horizon=2, execute=2)), 0.5)
    rows = groups * episodes * chunks
    obs = torch.randn(rows, 1, 3, generator=generator)
    sample = policy.sample({"state": obs}, generator=generator)
    trajectory = torch.arange(groups * episodes).repeat(chunks)
    success = torch.tensor([1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 1.0, 0.0, 0.0, 1.0])
    reward = torch.zeros(rows, steps)
    reward[-len(success) :, -1] = success
    decisions = Decisions(
        sample.logp,
        logp_behaviour=sample.logp.clone(),
        logp_ref=sample.logp - 0.05,
        reward=reward,
        value=torch.randn(rows, steps, generator=generator),
        entropy=policy.decisions({"state": obs}, sample.record).entropy.detach(),
        unit=torch.arange(chunks).repeat_interleave(groups * episodes)[:, None].expand(rows, steps),
        group=trajectory // episodes,
        trajectory=trajectory,
        domain=torch.zeros(rows, dtype=torch.long),
        source=torch.zeros(rows, dtype=torch.long),
        version=torch.zeros(rows, dtype=torch.long),
    )
    return policy, with_extras(decisions, generator), obs, sample.record["chain"]
