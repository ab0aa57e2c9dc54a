"""Tests of parts by name and of recipes: refused input, order, shared functions, controllers, the formula."""

import re
from pathlib import Path

import pytest
import torch
from tabular import EXTRAS, check_recipe, ppo, recipe_of, rewards, seq_mean, standardised, tabular

from robopolicy.core import surrogates
from robopolicy.core.advantage import Baseline, Mix, TrackerBaseline
from robopolicy.core.decisions import by_group, by_trajectory
from robopolicy.core.estimator import SURROGATES, EstimatorConfig
from robopolicy.core.ratios import ConstantBounds, Hierarchy
from robopolicy.core.recipe import Recipe
from robopolicy.core.registry import REGISTRIES, build
from robopolicy.core.trackers import BetaTracker


def test_a_stage_is_built_with_its_nested_parts() -> None:
    stage = build(
        "stage", {"name": "baseline", "kind": "median", "scope": {"partition": "group", "reduce_over": "trajectory"}}
    )
    assert isinstance(stage, Baseline)
    assert stage.scope.partition is by_group and stage.scope.reduce_over is by_trajectory and stage.scope.source is None
    tracked = build("stage", {"name": "tracker_baseline", "tracker": {"name": "beta", "forgetting": 0.9}})
    assert isinstance(tracked, TrackerBaseline) and isinstance(tracked.tracker, BetaTracker)
    mixed = build(
        "stage",
        {"name": "mix", "weights": [0.25, 0.75], "branches": [[], [{"name": "constant_scale", "divisor": 2.0}]]},
    )
    assert isinstance(mixed, Mix) and mixed.weights == (0.25, 0.75) and len(mixed.branches[1].stages) == 1


def test_an_estimator_is_built_with_its_parts() -> None:
    config = build(
        "estimator",
        {
            "level": "hierarchical",
            "hierarchy": {"budget_up": 0.5},
            "bounds": {"name": "constant", "low": 0.3},
            "weights": [{"name": "clip_covariance", "share": 0.5}],
        },
    )
    assert isinstance(config, EstimatorConfig) and config.bounds == ConstantBounds(0.3)
    assert config.hierarchy == Hierarchy(budget_up=0.5) and len(config.weights) == 1


@pytest.mark.parametrize(
    ("slot", "plain", "message"),
    [
        ("stage", {"name": "baselin"}, "Unknown stage 'baselin'; known: .*baseline"),
        ("stage", {"name": "baseline"}, "Option 'kind' of stage 'baseline' is missing"),
        (
            "stage",
            {"name": "given_baseline", "kye": "a"},
            "Unknown option 'kye' of stage 'given_baseline'; known: field",
        ),
        ("stage", {"name": "broadcast", "partition": "grup"}, "Unknown partition 'grup'; known: all, "),
        (
            "scope",
            {"partitions": "group"},
            "Unknown option 'partitions' of scope; known: partition, reduce_over, source",
        ),
        ("scope", "group", "Expected a mapping of options for scope, found 'group'"),
        ("pipeline", {"name": "indicator"}, "Expected a list for pipeline"),
        ("partition", {"name": "group", "size": 3}, "Unknown option 'size' of partition 'group'; known: none"),
        ("surrogate", "clap", "Unknown surrogate 'clap'"),
        ("stages", "clip", "Unknown component type 'stages'"),
        ("scope", {"partition": 3}, "Expected a name or a mapping of options for partition, found 3"),
        ("bounds", {"name": "constant", "high": "abc"}, "'high' of bounds 'constant' must be a number, got 'abc'"),
        ("bounds", {"name": "constant", "low": -0.1}, "'low' of bounds 'constant' must not be negative, got"),
        ("bounds", {"name": "constant", "low": "1e-3"}, "got '1e-3', a text to YAML; write it with a point, e.g. 1.0e"),
        ("bounds", {"name": "constant", "low": None}, "must be a number, got None"),
        ("bounds", {"name": "constant", "low": True}, "must be a number, got True"),
        ("estimator", {"kl_coef": float("nan")}, "'kl_coef' of estimator must be a number, at most .*, got nan"),
        ("estimator", {"entropy_coef": float("inf")}, "'entropy_coef' .* must be a number, at most .*, got inf"),
        ("estimator", {"entropy_coef": 10**400}, "'entropy_coef' .* must be a number, at most .*, got 1000"),
        ("estimator", {"surrogate": ["clip"]}, r"'surrogate' of estimator must be a text, got \['clip'\]"),
        (
            "estimator",
            {"surrogate": "dual_clip", "surrogate_options": {"cap": 0}},
            "Option 'cap' of surrogate 'dual_clip' must be positive, got 0",
        ),
        ("estimator", {"hierarchy": {"outer": "token"}}, "Hierarchy.outer must be 'sequence' or 'unit', got 'token'"),
        ("estimator", {"masks": [3]}, "Expected a name or a mapping of options for mask, found 3"),
        ("stage", {"name": "mix", "weights": [1, "a"], "branches": [[], []]}, "Every entry of option 'weights' .*'a'"),
        ("estimator", {"entropy_coef": float("nan")}, "'entropy_coef' .* must be a number, at most .*, got nan"),
        ("stage", {"name": "mix", "weights": [], "branches": []}, "'weights' .* must be a list with entries"),
        (
            "advantage_source",
            {"name": "gae", "gamma": 1.5},
            r"'gamma' of advantage_source 'gae' must lie in \[0, 1\], got 1.5",
        ),
    ],
)
def test_unknown_names_and_options_are_refused_in_one_line(slot: str, plain: object, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        build(slot, plain)
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("plain", "message"),
    [
        ({"epoch": 2}, "Unknown key 'epoch' of a recipe; known: source"),
        ({"title": [1]}, r"'title' of a recipe must be a text, got \[1\]"),
        ({"epochs": True}, "'epochs' of a recipe must be a whole number, got True"),
        ({"regularizers": [{"name": "kl_to", "coef": "a"}]}, "'coef' of regularizer 'kl_to' must be a number, got 'a'"),
        ({"epochs": 0}, "'epochs' of a recipe must be at least 1, got 0"),
        ({"data": "fine"}, "'data' of a recipe must be one of rollout, pairs, demonstrations, offline, got 'fine'"),
        ({"implementation": "works"}, "'implementation' of a recipe must be one of complete, partial, reconstructed"),
        ({"advantage": {}}, "'advantage' of a recipe must be a list, got {}"),
        ({"rollout": []}, r"'rollout' of a recipe must be a mapping, got \[\]"),
        (
            {"data": "offline", "rollout": {"max_resample_rounds": 1}},
            "with data: offline samples no rollouts; leave out 'rollout'",
        ),
        ({"estimator": None}, "A recipe needs an estimator or an objective"),
        (
            {"controllers": {"kll": {"name": "anneal", "start": 1, "end": 0, "steps": 1}}},
            "No term for controller 'kll'; terms: kl, ",
        ),
    ],
)
def test_invalid_recipes_are_refused(plain: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Recipe.from_dict(plain)


def test_recipes_and_robot_algorithms_share_their_surrogates() -> None:
    """Text has no fork of the estimator: a recipe names the same function that PPO, DPPO and ReinFlow call."""
    assert REGISTRIES["surrogate"] is SURROGATES is surrogates.SURROGATES
    assert build("surrogate", "clip") is surrogates.clip
    recipe = recipe_of("grpo")
    assert recipe.estimator is not None and SURROGATES[recipe.estimator.config.surrogate] is surrogates.clip


def test_grpo_is_its_formula() -> None:
    check_recipe(
        "grpo",
        lambda case: seq_mean(
            ppo(case, standardised(rewards(case), case.decisions.require("group"))), case.decisions.valid()
        ),
    )


def test_selectors_run_on_the_rows_of_the_previous_selector(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(REGISTRIES, "selector", {"last_half": lambda d, _: torch.arange(len(d) // 2, len(d))})
    case = tabular()
    recipe = Recipe.from_dict({"select": ["last_half", "last_half"]})
    assert recipe.select(case.decisions).tolist() == [12, 13, 14, 15]
    assert recipe_of("grpo").select(case.decisions).tolist() == list(range(16))


def test_regularizers_and_objectives_add_to_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    penalties = {
        "decisions": lambda d, advantage, logp, entropy: logp.square(),
        "scalar": lambda d, advantage, logp, entropy: entropy.mean(),
    }
    monkeypatch.setitem(REGISTRIES, "regularizer", penalties)
    monkeypatch.setitem(
        REGISTRIES, "objective", {"mean": lambda d, advantage, logp: (logp.mean(), {"seen": logp.detach().mean()})}
    )
    case = tabular()
    d, logp, entropy = case.decisions, case.logp(), case.entropy()
    plain = {"regularizers": [{"name": "decisions", "coef": 0.5}, "scalar"], "objective": {"name": "mean", "coef": 2.0}}
    base, _ = Recipe.from_dict({}).loss(d, torch.ones(16, 1), logp, entropy)
    loss, info = Recipe.from_dict(plain).loss(d, torch.ones(16, 1), logp, entropy)
    squares = logp.square()[d.valid()].mean()
    torch.testing.assert_close(loss, base + 0.5 * squares + entropy.mean() + 2.0 * logp.mean())
    torch.testing.assert_close(info["decisions"], squares.detach())
    assert "seen" in info and "approx_kl" in info
    alone, info = Recipe.from_dict(plain | {"estimator": None}).loss(d, torch.ones(16, 1), logp, entropy)
    torch.testing.assert_close(alone, loss - base)
    assert "approx_kl" not in info


def test_controllers_move_the_weights_of_their_terms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(REGISTRIES, "regularizer", {"size": lambda d, advantage, logp, entropy: logp.square()})
    ramp = {"name": "anneal", "start": 0.0, "end": 1.0, "steps": 2}
    plain = {"regularizers": ["size"], "controllers": {"size": ramp, "kl": ramp}}
    case, recipe = tabular(), Recipe.from_dict(plain)
    for expected in (0.5, 1.0):
        _, info = recipe.loss(case.decisions, torch.ones(16, 1), case.logp())
        recipe.observe(case.decisions, info | {"kl_ref": torch.tensor(0.1)})
        assert recipe.controllers["size"].value == expected
    assert recipe.estimator is not None and recipe.estimator.controllers["kl"].value == 1.0
    again = Recipe.from_dict(plain)
    again.load_state_dict(recipe.state_dict())
    assert again.controllers["size"].value == 1.0


def test_trackers_see_each_trajectory_once_and_after_the_update() -> None:
    case = tabular()
    recipe = Recipe.from_dict({"advantage": [{"name": "tracker_baseline", "tracker": "beta"}]})
    before = recipe.advantage(case.decisions)
    torch.testing.assert_close(before[:, 0], rewards(case) - 0.5)
    torch.testing.assert_close(recipe.advantage(case.decisions), before)
    recipe.observe(case.decisions, {})
    first = rewards(case)[:4]
    won = lost = 1.0
    for value in first.tolist():
        won, lost = 0.96 * won + value, 0.96 * lost + 1.0 - value
    torch.testing.assert_close(recipe.advantage(case.decisions)[:4, 0], first - won / (won + lost))


def test_weights_multiply_the_losses_without_a_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(REGISTRIES, "weight", {"ratio": lambda d, advantage, ratio: ratio.exp()})
    case = tabular()
    logp = case.logp()
    ratio = (logp - case.decisions.logp_old).exp()
    loss, _ = Recipe.from_dict({"estimator": {"surrogate": "policy_gradient", "weights": ["ratio"]}}).loss(
        case.decisions, torch.ones(16, 1), logp
    )
    formula = -(ratio.detach() * (logp - case.decisions.logp_old))[case.decisions.valid()].mean()
    (found,) = torch.autograd.grad(loss, case.logits, retain_graph=True)
    (wanted,) = torch.autograd.grad(formula, case.logits)
    torch.testing.assert_close(loss, formula)
    torch.testing.assert_close(found, wanted)


def test_guide_names_every_extra_that_a_part_requires() -> None:
    root = Path(__file__).parents[2]
    guide = set(re.findall(r"`(\w+)`", (root / "docs" / "text" / "recipes.md").read_text(encoding="utf-8")))
    parts = (root / "robopolicy" / "core").rglob("*.py")
    required = {
        key for path in parts for key in re.findall(r'require_extra\("(\w+)"', path.read_text(encoding="utf-8"))
    }
    assert required and not (required | set(EXTRAS)) - guide, sorted((required | set(EXTRAS)) - guide)


def test_a_tracker_may_hold_one_estimate_per_task() -> None:
    case = tabular()
    decisions = case.decisions
    task = decisions.require("group")
    per, tracker = "group", {"name": "beta", "forgetting": 1.0}
    recipe = Recipe.from_dict({"advantage": [{"name": "tracker_baseline", "partition": per, "tracker": tracker}]})
    recipe.observe(decisions, {})
    reward = rewards(case)
    rate = torch.stack([(1.0 + reward[task == key].sum()) / (2.0 + (task == key).sum()) for key in task])
    torch.testing.assert_close(recipe.advantage(decisions)[:, 0], reward - rate)
