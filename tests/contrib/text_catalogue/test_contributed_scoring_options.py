"""Tests of the keys of `rollout` that the learner reads: scoring, reference and overlapped rollouts."""

from pathlib import Path

import pytest
import torch

from robopolicy.errors import UserError
from robopolicy.sim.registry import SimOptions
from robopolicy.spec import PolicySpec
from robopolicy.text.policy import TextConfig, TextPolicy
from robopolicy.text.recipe_trainer import TextRecipe, TextRecipeConfig
from robopolicy.text.scoring_options import scoring_options
from robopolicy.text.sim import TextSim
from robopolicy.text.text_env import score
from robopolicy.training.checkpoint import save_checkpoint
from robopolicy.training.text_file_source import recipe_source
from robopolicy.training.text_rollout_source import AsyncTextRolloutSource, TextRolloutSource
from robopolicy_tasks.text.grid import Grid

SPEC = PolicySpec({"text": (Grid.prompt_bytes,)}, Grid.completion_bytes)


def policy(seed=0, width=16):
    torch.manual_seed(seed)
    return TextPolicy(TextConfig(width=width, layers=2, heads=2, context=128), SPEC)


def learner(recipe, start=None, **settings):
    config = TextRecipeConfig(recipe=recipe, prompts_per_update=4, num_prompts=50, warmup=0, **settings)
    algorithm = TextRecipe(config, start or policy(), total_updates=10)
    return algorithm, TextSim(Grid(), SimOptions(num_envs=1))


@pytest.mark.parametrize(
    ("rollout", "message"),
    [
        ({"layer": {"number": -1, "updates": 3}}, "rollout.layer.number must be at least 0, got -1"),
        ({"judge": 3}, "rollout.judge must be policy or teacher, got 3"),
        (
            {"score_temperatures": {"logp_cool": 0}},
            "'logp_cool' in rollout.score_temperatures must be positive",
        ),
        ({"support": {"top_p": "all", "refresh": 1}}, "rollout.support.top_p must be a number, got 'all'"),
        ({"segments": 5}, "rollout.segments must be a mapping, got 5"),
        ({"segments": {"every": 5, "below": 2}}, r"rollout.segments.below must lie in \(0, 1\], got 2"),
    ],
)
def test_invalid_values_raise_a_clear_error(rollout, message):
    with pytest.raises(ValueError, match=message):
        scoring_options(rollout)


def test_rows_are_scored_at_other_temperatures():
    algorithm, sim = learner("distribution_dcpo", group_size=2)
    batch = TextRolloutSource(sim, algorithm, seed=0).next(algorithm)
    prepared = algorithm._preprocess(batch)
    temperatures = {**batch.extra, "temperature": batch.extra["temperature"] * 0.8}
    cool = score(algorithm.policy, batch.with_fields(extra=temperatures)).logp
    assert torch.equal(prepared.extra["logp_cool"], cool)
    warm = prepared.extra["logp_warm"][batch.valid()]
    assert (warm - batch.logp_old[batch.valid()]).abs().max() > 1e-3
    assert torch.isfinite(torch.tensor(list(algorithm.update(batch).values()))).all()


def test_bupo_first_updates_change_no_layer_above_the_scored_one():
    algorithm, sim = learner("bupo", group_size=2)
    batch = TextRolloutSource(sim, algorithm, seed=0).next(algorithm)
    reward = torch.zeros_like(batch.logp_old)
    reward[::2, 0] = 1.0
    before = {key: value.clone() for key, value in algorithm.policy.state_dict().items()}
    metrics = algorithm.update(batch.with_fields(reward=reward))
    assert metrics["actor/ratio_max"] < 1e-4  # the same layer computes both log-probabilities
    changed = {key for key, value in algorithm.policy.state_dict().items() if not torch.equal(value, before[key])}
    assert any("layers.0" in key for key in changed) and not any("layers.1" in key for key in changed)
    algorithm.updates = 30
    assert algorithm.score_settings == {}


def test_scoring_with_the_last_layer_equals_the_policy_log_probability():
    algorithm, sim = learner("grpo", group_size=2)
    batch = TextRolloutSource(sim, algorithm, seed=0).next(algorithm)
    algorithm.policy.__dict__["_shares_prompts"] = False  # scoring by layer uses whole rows
    assert torch.equal(score(algorithm.policy, batch, layer=2).logp, score(algorithm.policy, batch).logp)
    assert torch.equal(score(algorithm.policy, batch, layer=9).logp, score(algorithm.policy, batch, layer=1).logp)


def test_nlpo_samples_and_scores_only_tokens_likely_under_a_lagged_policy():
    peaked = policy()
    peaked.model.get_output_embeddings().weight.data.mul_(30.0)
    algorithm, sim = learner("nlpo", start=peaked, minibatches=1, lr=1e-2)
    source = TextRolloutSource(sim, algorithm, seed=0)
    batch = source.next(algorithm)
    support, own = batch.extra["support"], batch.valid()
    row, step = own.nonzero(as_tuple=True)
    chosen = batch.extra["tokens"][row, batch.extra["start"][row] + step]
    assert support[row, step, chosen].all() and (support[own].sum(1) < 200).all()
    out = score(algorithm.policy, batch)
    torch.testing.assert_close(out.logp, batch.logp_old, rtol=0, atol=2e-5)
    torch.testing.assert_close(out.entropy, batch.entropy, rtol=0, atol=1e-4)
    free = batch.with_fields(extra={**batch.extra, "support": torch.ones_like(support)})
    assert (score(algorithm.policy, free).logp <= batch.logp_old + 1e-5).all()

    def head(model):
        return model.state_dict()["model.lm_head.weight"].clone()

    before = head(algorithm.options["support"].guide)
    algorithm.update(batch.with_fields(reward=torch.rand_like(batch.logp_old)))
    assert torch.equal(head(algorithm.options["support"].guide), before) and not torch.equal(
        head(algorithm.policy), before
    )
    algorithm.updates = 19
    algorithm.update(source.next(algorithm))
    assert torch.equal(head(algorithm.options["support"].guide), head(algorithm.policy))


@pytest.fixture
def other(tmp_path) -> Path:
    obs = {"text": torch.zeros(1, 1, Grid.prompt_bytes, dtype=torch.uint8)}
    save_checkpoint(tmp_path / "other", policy(seed=1), task="text/grid", obs_sample=obs)
    return tmp_path / "other"


def test_salsa_reference_is_the_weight_average_and_is_restored_on_resume(other):
    algorithm, sim = learner("salsa", group_size=2, teacher=str(other))
    recipe_source(sim, algorithm, 0)
    key = "model.model.embed_tokens.weight"
    mean = (policy().state_dict()[key] + policy(seed=1).state_dict()[key]) / 2
    torch.testing.assert_close(algorithm.reference_policy.state_dict()[key], mean)
    again, _ = learner("salsa", start=policy(seed=2), group_size=2, teacher=str(other))
    again.load_state_dict(algorithm.state_dict())
    assert torch.equal(again.reference_policy.state_dict()[key], algorithm.reference_policy.state_dict()[key])


def test_salsa_needs_a_teacher_with_the_tokens_of_the_policy():
    algorithm, _ = learner("salsa")
    teacher = policy(seed=1)
    teacher.tokenizer.eos = 0
    with pytest.raises(UserError, match=r"algorithm\.teacher must score the tokens .* has another tokenizer"):
        algorithm.set_teacher(teacher)


def test_asyncflow_uses_the_async_source_unless_staleness_is_zero():
    for settings, kind in (({}, AsyncTextRolloutSource), ({"staleness": 0}, TextRolloutSource)):
        algorithm, sim = learner("asyncflow", group_size=2, **settings)
        source = recipe_source(sim, algorithm, 0)
        assert type(source) is kind
        source.close()


def test_missing_or_invalid_options_raise(other, tmp_path):
    algorithm, _ = learner("salsa", start=policy(width=32))
    with pytest.raises(UserError, match="must have the architecture of the policy"):
        algorithm.set_teacher(policy())
    invalid = [
        {"reference": "salad"},
        {"score_temperatures": {"a": 0.0}},
        {"layer": 5},
        {"layer": {"number": 5}},
    ]
    invalid += [{"segments": {"every": 5}}, {"segments": {"every": 0, "below": 0.9}}]
    for options in [*invalid, {"grammar": 3}, {"support": {"top_p": 2.0, "refresh": 1}}]:
        with pytest.raises(ValueError, match=r"rollout\."):
            scoring_options(options)
