"""Tests of hidden states and attention of conversations, as recipes read them."""

import pytest
import torch

from robopolicy.contrib.text_catalogue.factors import attention_distance
from robopolicy.contrib.text_catalogue.features import (
    attention,
    attention_summary,
    k_means,
    prompt_confidence,
    prompt_features,
    written_features,
)
from robopolicy.core.decisions import Decisions
from robopolicy.sim.registry import SimOptions
from robopolicy.spec import PolicySpec
from robopolicy.text.annotators import named_parts, with_features
from robopolicy.text.policy import TextConfig, TextPolicy
from robopolicy.text.recipe_trainer import TextRecipe, TextRecipeConfig
from robopolicy.text.sim import TextSim
from robopolicy.training.text_rollout_source import TextRolloutSource
from robopolicy_tasks.text.arithmetic import Arithmetic


def rows_of(policy):
    prompts = [policy.tokenizer.prompt([text]) for text in ("1+1=", "a longer one")]
    return policy.pad_rows(prompts, [[*b"2", 258], [*b"abcdef", 258]])


def test_attention_is_causal_and_sums_to_one(policy):
    before = policy.model.config._attn_implementation
    found = attention(policy, rows_of(policy)["tokens"])
    torch.testing.assert_close(found.sum(-1), torch.ones(found.shape[:2]))
    assert (found.triu(1) == 0).all() and policy.model.config._attn_implementation == before


def test_decision_attention_distance_is_taken_at_the_preceding_token(policy):
    record = rows_of(policy)
    summary = attention_summary(policy, **record)
    whole = attention_distance(attention(policy, record["tokens"]))
    start = int(record["start"][1])
    torch.testing.assert_close(summary["waad"][1], whole[1, start - 1 : start + 6])
    assert (summary["waad"][0, 2:] == 0).all() and summary["fai"].shape == record["mask"].shape


def test_padding_changes_no_summary(policy):
    record = rows_of(policy)
    alone = {"tokens": record["tokens"][:1, :7], "start": record["start"][:1], "mask": record["mask"][:1, :2]}
    for summary in (attention_summary, prompt_features):
        together, single = summary(policy, **record), summary(policy, **alone)
        for name, value in single.items():
            torch.testing.assert_close(together[name][0, : value.shape[1]], value[0], rtol=0, atol=1e-5)


def test_features_are_means_of_hidden_states(policy):
    record = rows_of(policy)
    hidden = policy.hidden(record["tokens"])
    torch.testing.assert_close(prompt_features(policy, **record)["prompt_features"][0], hidden[0, :5].mean(0))
    torch.testing.assert_close(written_features(policy, **record)[0], hidden[0, 5:7].mean(0))


def test_probe_features_contain_hidden_states_and_entropy_statistics(policy):
    record = rows_of(policy)
    mask = record["mask"]
    entropy = torch.arange(1.0, 1 + mask.numel()).view(mask.shape)
    rows = Decisions(torch.zeros(mask.shape), mask=mask, entropy=entropy, extra=record)
    found = with_features(policy, rows, {"probe_baseline": {}}).extra["features"]
    torch.testing.assert_close(found[:, :-2], written_features(policy, **record))
    for row, (own, keep) in enumerate(zip(entropy, mask, strict=True)):
        assert found[row, -2:].tolist() == [float(own[keep].mean()), float(own[keep].max())]


def test_prompt_confidence_averages_its_least_likely_tokens(policy):
    record = rows_of(policy)
    rows = Decisions(torch.zeros(record["mask"].shape), mask=record["mask"], extra=record)
    start = int(record["start"][0])
    logp = policy.model(record["tokens"][:1]).logits[0].log_softmax(1)
    chosen = logp[: start - 1].gather(1, record["tokens"][0, 1:start, None])[:, 0]
    least = chosen.sort()[0][: -(-len(chosen) // 2)]
    found = prompt_confidence(policy, rows, 0.5)["prompt_confidence"]
    torch.testing.assert_close(found[0], least.mean().exp(), rtol=1e-4, atol=1e-7)


def test_k_means_recovers_separated_clusters():
    centres = torch.tensor([[0.0, 0.0], [10.0, 0.0], [0.0, 10.0]])
    kind = torch.tensor([0, 1, 2, 1, 0, 2, 2])
    found = k_means(centres[kind] + 0.1 * torch.randn(7, 2), 3)
    assert ((found[:, None] == found) == (kind[:, None] == kind)).all()
    assert k_means(torch.zeros(4, 2), 3).unique().numel() == 1 and len(k_means(torch.randn(2, 2), 3)) == 2


def test_parts_are_found_with_their_options():
    plain = {
        "advantage": ["broadcast", {"name": "shape", "bonus": {"name": "novelty_bonus", "share": 0.4}}],
        "group_size": 8,
    }
    found = dict(named_parts(plain))
    assert set(found) == {"broadcast", "shape", "novelty_bonus"} and found["novelty_bonus"]["share"] == 0.4


@pytest.mark.parametrize("recipe", ["poise", "attention_rhythm"])
def test_recipes_with_hidden_state_or_attention_features_train(recipe):
    torch.manual_seed(0)
    policy = TextPolicy(TextConfig(width=16, layers=1, heads=2), PolicySpec({"text": (16,)}, 6))
    config = TextRecipeConfig(prompts_per_update=4, group_size=4, num_prompts=16, recipe=recipe)
    algorithm = TextRecipe(config, policy, total_updates=4)
    feed = TextRolloutSource(TextSim(Arithmetic(), SimOptions(num_envs=1)), algorithm, seed=0)
    for _ in range(2):
        metrics = algorithm.update(feed.next(algorithm))
        assert all(torch.isfinite(torch.tensor(value)) for value in metrics.values())
    feed.close()
