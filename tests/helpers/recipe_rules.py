"""Checks for every recipe: it loads, learns from tokens and from a denoising chain, resumes, and runs rollouts."""

import pytest
import torch
from secret_env import SecretSequenceEnv
from tabular import recipe_of, tabular, with_extras
from torch.testing import assert_close

from robopolicy.citations import citation
from robopolicy.core import registry
from robopolicy.core.decisions import Decisions
from robopolicy.core.recipe import DEFAULTS, Recipe
from robopolicy.policies.base import PolicySpec
from robopolicy.policies.exploration.flow_chains import SDEChain
from robopolicy.policies.heads.flow import FlowConfig, FlowPolicy
from robopolicy.recipe_files import read_recipe, recipe_ring
from robopolicy.text.rollouts.collector import DEFAULTS as OF_ROLLOUTS
from robopolicy.text.rollouts.collector import Collector
from robopolicy.text.rollouts.protocols import PromptPool


def gradients_of_one_update(recipe: Recipe, decisions: Decisions, score, parameters) -> float:
    """Select rows, compute advantages, step and observe, twice; returns the norm of the first gradient."""
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


def check_says_what_it_is(name: str) -> None:
    """A recipe has a title and a cited source, and its keys are in order."""
    plain = read_recipe(name)
    recipe = Recipe.from_dict(plain)
    assert plain["title"] and citation(plain["source"]) != plain["source"], "a key of docs/references.bib"
    assert list(plain) == [key for key in DEFAULTS if key in plain], "keys stand in the order of DEFAULTS"
    assert recipe.implementation != "reconstructed" or plain["deviations"]


def check_learns_from_tokens(name: str) -> None:
    """The loss of a recipe on tokens is finite and has a gradient."""
    case = tabular(drift=0.0, rollouts=6)
    case.decisions.require("reward")[1:6] = 0.0  # one success in the first group
    score = lambda rows: (case.logp()[rows], case.entropy()[rows])  # noqa: E731
    assert gradients_of_one_update(recipe_of(name), case.decisions, score, [case.logits]) > 0


def check_updates_a_denoising_chain(name: str) -> None:
    """The loss of a recipe on a robot's denoising chain is finite and has a gradient."""
    policy, decisions, obs, record = robot_batch()

    def score(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = policy.decisions({"state": obs[rows]}, {"chain": record[rows]})
        return out.logp, out.entropy

    assert gradients_of_one_update(recipe_of(name), decisions, score, list(policy.parameters())) > 0


def check_memory_survives_a_checkpoint(name: str) -> None:
    """The stateful parts of a recipe are restored from a checkpoint."""
    case, recipe, again = tabular(rollouts=6), recipe_of(name), recipe_of(name)
    if recipe.data == "rollout":
        _, info = recipe.loss(case.decisions, recipe.advantage(case.decisions), case.logp(), case.entropy())
        recipe.observe(case.decisions, info)
    again.load_state_dict(recipe.state_dict())
    if recipe.data == "rollout":
        torch.testing.assert_close(recipe.advantage(case.decisions), again.advantage(case.decisions))


def check_what_is_masked_reaches_no_part(name: str) -> None:
    """NaN in masked decisions (prompt, tool output, padding) does not affect the loss."""
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
    """Two start states with six episodes of three chunks of four denoising steps; rows in order of time."""
    groups, episodes, chunks, steps = 2, 6, 3, 4
    generator = torch.Generator().manual_seed(0)
    config = FlowConfig(
        hidden=(16,), steps=steps, normalization="identity", action_normalization="identity", action_clip=0.0
    )
    policy = SDEChain(FlowPolicy(config, PolicySpec({"state": (3,)}, action_dim=2, horizon=2, action_horizon=2)), 0.5)
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


def collector(name: str, env: SecretSequenceEnv, size: int = 4) -> Collector:
    count = len(env.secret)
    pool = PromptPool(env.tasks(), category=torch.arange(count) % 2, difficulty=torch.arange(count))
    rollout = read_recipe(name)["rollout"]
    return Collector(rollout, pool, env, group_size=size, seed=0, extra_keys=rollout)


def completed(decisions: Decisions) -> Decisions:
    """Decisions with the fields that a reference, a critic and the scoring of earlier rollouts add."""
    value = torch.linspace(0, 1, decisions.shape[1], dtype=torch.float64).expand(decisions.shape)
    extra = {**decisions.extra, "drift": value.new_zeros(len(decisions))}
    return decisions.with_fields(logp_ref=decisions.logp_old - 0.1, value=value, extra=extra)


def check_plays_and_learns(name: str, layout: str) -> None:
    """The `rollout` section of a recipe collects rollouts, updates and resumes."""
    recipe, env = Recipe.from_dict(read_recipe(name)), SecretSequenceEnv(layout, keys=6, length=4, symbols=2)
    side = collector(name, env)
    for _ in range(2):
        batch = side.collect(2)
        scored = completed(batch.decisions)
        decisions = scored.select(recipe.select(scored))
        assert len(decisions) and bool(decisions.require("reward").isfinite().all())
        advantage = recipe.advantage(decisions)
        logp = env.scored(batch.trajectories)[recipe.select(scored)]
        loss, info = recipe.loss(decisions, advantage, logp, decisions.entropy)
        (gradient,) = torch.autograd.grad(loss, env.logits)
        assert bool(gradient.isfinite().all())
        recipe.observe(decisions, info)
        if len(advantage) == len(batch.decisions):
            side.observe(batch, advantage)
    again = collector(name, env)
    again.load_state_dict(side.state_dict())
    state = env.generator.get_state()
    ahead = side.collect(2).decisions
    env.generator.set_state(state)
    assert_close(again.collect(2).decisions.logp_old, ahead.logp_old, rtol=0, atol=0)


def plays(name: str) -> bool:
    """Whether a recipe has a `rollout` section that the collector reads."""
    return bool(OF_ROLLOUTS.keys() & read_recipe(name).get("rollout", {}).keys())


def check_needs_no_other_theme(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A recipe uses only parts of the product and of its theme."""
    home, build = recipe_ring(name), registry.build
    foreign: list[str] = []

    def watched(slot, plain):
        part = plain if isinstance(plain, str) else plain.get("name", "") if isinstance(plain, dict) else ""
        if part in registry.REGISTRIES.get(slot, ()) and registry.REGISTRIES[slot].ring(part) not in ("product", home):
            foreign.append(f"{slot} {part}")
        return build(slot, plain)

    for module in ("registry", "recipe"):
        monkeypatch.setattr(f"robopolicy.core.{module}.build", watched)
    rollout = Recipe.from_dict(read_recipe(name)).rollout
    for slot in ("sampler", "strategy", "intervention", "reward"):
        given = rollout.get(slot, [])
        for plain in given if isinstance(given, list) else [given]:
            watched(slot, plain)
    assert not foreign
