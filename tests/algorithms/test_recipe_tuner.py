"""Tests of recipes on denoising chains: ratios, first gradient, reference policy, invalid recipes, resume, learning."""

import itertools
import math
import re
import warnings
from pathlib import Path
from typing import Any

import fine_tuning_tools as tools
import pytest
import torch
import yaml
from recipe_tuners import HEADS, check_updates_a_flow, tuner
from theme_names import recipes_of

from robopolicy.algorithms.recipe import RecipeFineTuner, ScoredBatch, decisions_of, group_minibatches
from robopolicy.core.advantage import outcome
from robopolicy.core.recipe import Recipe
from robopolicy.core.registry import REGISTRIES
from robopolicy.errors import UserError
from robopolicy.policies.heads.diffusion import DiffusionPolicy
from robopolicy.policies.heads.flow import FlowPolicy
from robopolicy.recipe_files import read_recipe


def scored_batch(algorithm: RecipeFineTuner, rollout: Any) -> ScoredBatch:
    decisions = algorithm._scored(decisions_of(rollout, algorithm.dimensions, 0))
    return ScoredBatch(decisions, algorithm.recipe.advantage(decisions))


both = pytest.mark.parametrize("head", HEADS)


def test_an_ignored_rollout_section_gives_a_warning() -> None:
    with pytest.warns(UserWarning, match=r"the section 'rollout' \(sampler\) of recipe 'single_stream'") as found:
        tuner(recipe="single_stream")
    (page,) = re.findall(r"docs/[\w/]+\.md", str(found[0].message))
    assert (Path(__file__).parents[2] / page).exists()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tuner(recipe="grpo")


@both
def test_every_ratio_of_fresh_data_is_one_and_the_gradient_is_the_policy_gradient(head: str) -> None:
    algorithm = tuner(head)
    sampler = tools.sampler_for(algorithm)
    algorithm.update(sampler.collect(algorithm.act))
    rows = scored_batch(algorithm, sampler.collect(algorithm.act))
    loss, info = algorithm.loss(rows)
    assert float(info["ratio_max"]) < 1e-3 and float(info["clip_fraction"]) == 0.0
    logp = algorithm.policy.decisions(
        {"state": rows.decisions.extra["obs.state"]}, {"chain": rows.decisions.extra["record.chain"]}
    ).logp
    episodes = rows.decisions.require("trajectory")
    share = 1.0 / torch.bincount(episodes)[episodes] / len(episodes.unique()) / logp.shape[1]  # mean of episode means
    plain = -(share[:, None] * rows.advantage * logp * algorithm.dimensions).sum()
    tools.assert_close(
        tools.gradient(loss, tools.actor_parameters(algorithm)),
        tools.gradient(plain, tools.actor_parameters(algorithm)),
    )


def test_entropies_are_sums_over_the_dimensions_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm = tuner("flow")
    rows, seen = scored_batch(algorithm, tools.sampler_for(algorithm).collect(algorithm.act)), []
    monkeypatch.setattr(algorithm.recipe, "loss", lambda *given: seen.append(given))
    algorithm.loss(rows)
    extra = rows.decisions.extra
    _, log_std = algorithm.policy.transitions({"state": extra["obs.state"]}, {"chain": extra["record.chain"]})
    per_step = (log_std + 0.5 * math.log(2 * math.pi * math.e)).flatten(2).sum(2)
    torch.testing.assert_close(seen[0][3], per_step.expand_as(seen[0][3]), rtol=1e-4, atol=1e-3)


@both
def test_log_probabilities_are_per_denoising_step(head: str) -> None:
    algorithm = tuner(head)
    policy = algorithm.policy
    rows = scored_batch(algorithm, tools.sampler_for(algorithm).collect(algorithm.act)).decisions
    obs, chain = {"state": rows.extra["obs.state"]}, rows.extra["record.chain"]
    mean, log_std = policy.transitions(obs, {"chain": chain})
    density = torch.distributions.Normal(mean, log_std.exp()).log_prob(chain[:, 1:])
    if head == "diffusion":  # executed actions only, clamped
        density = density[..., : policy.spec.action_horizon, :].clamp(-5.0, 2.0)
    torch.testing.assert_close(rows.logp_old, density.flatten(2).sum(2), rtol=1e-4, atol=1e-3)


def test_rows_are_episode_chunks_in_time_order() -> None:
    algorithm = tuner()
    rollout = tools.sampler_for(algorithm).collect(algorithm.act)
    rows = decisions_of(rollout, 1.0, 3)
    episodes = rows.require("trajectory")
    for episode in range(16):
        own = episodes == episode
        assert rows.require("unit")[own, 0].tolist() == list(range(int(own.sum())))
        torch.testing.assert_close(outcome(rows)[own][0, 0], rollout.returns[episode])
        assert rows.require("group")[own].unique().item() == int(rollout.group[episode]) + 3 * 16
    assert float(rows.require("reward")[:, :-1].abs().sum()) == 0.0 and rows.require("version").unique().item() == 3


def test_a_minibatch_holds_whole_groups() -> None:
    group = torch.tensor([0, 1, 2, 3, 3, 2, 1, 0, 0])
    parts = list(group_minibatches(group, 4, torch.Generator().manual_seed(0)))
    assert sorted(torch.cat(parts).tolist()) == list(range(9))
    assert all(not set(group[a].tolist()) & set(group[b].tolist()) for a, b in itertools.pairwise(parts))
    assert all(len(part) >= 4 for part in parts[:-1])


@both
def test_the_base_is_the_reference_and_stays_bit_identical(head: str, tmp_path: Path) -> None:
    file = tmp_path / "with_kl.yaml"
    file.write_text(yaml.safe_dump({"estimator": {"kl": "k2", "kl_coef": 0.1}}))
    algorithm = tuner(head, recipe=str(file), lr=1e-3)
    base, before = tools.snapshot(algorithm.base), tools.snapshot(algorithm.policy)
    sampler = tools.sampler_for(algorithm)
    kl = [algorithm.update(sampler.collect(algorithm.act))["actor/kl_ref"] for _ in range(3)]
    assert 0.0 < kl[0] < kl[2] and all(math.isfinite(value) for value in kl)
    assert not tools.changed(base, algorithm.base) and algorithm.reference_policy.head is algorithm.base
    assert tools.changed(before, algorithm.policy)
    assert type(algorithm.inference_policy()) is (FlowPolicy if head == "flow" else DiffusionPolicy)


@both
def test_a_resumed_run_ends_with_the_same_weights_and_recipe_state(head: str, tmp_path: Path) -> None:
    file = tmp_path / "tracked.yaml"
    stages = [{"name": "tracker_baseline", "tracker": {"name": "beta"}}]
    ramp = {"name": "anneal", "start": 0.1, "end": 0.0, "steps": 5}
    file.write_text(yaml.safe_dump({"advantage": stages, "controllers": {"kl": ramp}, "epochs": 2}))
    straight, again = tools.resumed(lambda seed=0: tuner(head, seed, recipe=str(file)))
    assert not tools.changed(tools.snapshot(straight.policy), again.policy)
    assert straight.recipe.estimator.controllers["kl"].value == pytest.approx(0.06)
    assert again.recipe.estimator.controllers["kl"].value == straight.recipe.estimator.controllers["kl"].value
    first, second = straight.recipe.state_dict(), again.recipe.state_dict()
    torch.testing.assert_close(first["pipeline"]["0"]["counts"], second["pipeline"]["0"]["counts"])


def test_a_rollout_without_selected_rows_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = {"nothing": lambda decisions, generator: torch.zeros(0, dtype=torch.long)}
    monkeypatch.setitem(REGISTRIES, "selector", nothing)
    algorithm = tuner()
    algorithm.recipe = Recipe.from_dict(read_recipe("grpo") | {"select": ["nothing"]})
    before = tools.snapshot(algorithm.policy)
    metrics = algorithm.update(tools.sampler_for(algorithm).collect(algorithm.act))
    assert metrics["actor/row_fraction"] == metrics["actor/epochs"] == 0.0 and algorithm.updates == 1
    assert not tools.changed(before, algorithm.policy)


def test_invalid_recipes_are_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"Unknown recipe 'grop'\. Did you mean 'grpo'"):
        tuner(recipe="grop")
    file = tmp_path / "mine.yaml"

    def written(**plain: Any) -> str:
        file.write_text(yaml.safe_dump(plain))
        return str(file)

    with pytest.raises(UserError, match=r"mine.yaml': Unknown key 'advantages' of a recipe"):
        tuner(recipe=written(advantages=[]))
    with pytest.raises(UserError, match="has data: pairs; algorithm=recipe needs"):
        tuner(recipe=written(data="pairs"))
    with pytest.raises(UserError, match="cannot be read"):
        tuner(recipe=str(tmp_path / "missing.yaml"))
    algorithm = tuner(recipe=written(advantage=[{"name": "given_baseline", "field": "greedy"}]))
    with pytest.raises(UserError, match=r"needs a field that is not recorded: .*extra\['greedy'\]"):
        algorithm.update(tools.sampler_for(algorithm).collect(algorithm.act))


@pytest.mark.parametrize("name", recipes_of("product", "rollout"))
def test_each_recipe_updates_a_flow_or_names_the_missing_fields(name: str) -> None:
    check_updates_a_flow(name)


def test_grpo_improves_an_untrained_flow() -> None:
    algorithm = tuner(group_size=8, batch_size=256, noise_level=1.0, epochs=4, lr=1e-2, lr_final=1e-3)
    sampler = tools.sampler_for(algorithm, num_envs=64)
    returns = []
    for _ in range(14):
        rollout = sampler.collect(algorithm.act)
        returns.append(float(rollout.returns.mean()))
        algorithm.update(rollout)
    assert sum(returns[-3:]) / 3 > sum(returns[:3]) / 3 + 1.2
