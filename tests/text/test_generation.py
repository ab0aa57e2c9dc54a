"""Tests of generation: scoring reproduces the sampling log-probabilities, for any other rows in the batch."""

import pytest
import torch

from robopolicy.policies.noise import PerRowGenerator
from robopolicy.text.policy import TextConfig, TextPolicy
from robopolicy.text.task import pack

PROMPTS = ("1+1=", "a much longer prompt than the first one", "x")


def rescored(policy, prompts, made, temperature):
    record = policy.pad_rows(prompts, made.completions())
    return policy.score(**record, temperature=torch.as_tensor(temperature).expand(len(prompts)))


def tokens_of(policy, texts=PROMPTS, repeats=1):
    return [policy.tokenizer.prompt([text]) for text in texts for _ in range(repeats)]


@pytest.mark.parametrize("temperature", [1.0, 0.5, 1.7])
def test_the_ratio_of_fresh_tokens_is_one_with_padding_and_temperature(policy, temperature):
    generator = torch.Generator().manual_seed(0)
    prompts = tokens_of(policy, repeats=4)
    made = policy.generate(prompts, generator, temperature=temperature)
    out = rescored(policy, prompts, made, temperature)
    assert made.mask.any(1).all()
    torch.testing.assert_close(out.logp, made.logp, rtol=0, atol=2e-5)
    torch.testing.assert_close(out.entropy, made.entropy, rtol=0, atol=1e-4)
    assert (out.logp[~made.mask] == 0).all() and (out.entropy[made.mask] > 0).all()


def test_the_ratio_is_one_with_a_temperature_per_row(policy):
    temperatures = torch.tensor([0.5, 1.0, 2.0])
    prompts = tokens_of(policy)
    made = policy.generate(prompts, torch.Generator().manual_seed(0), temperature=temperatures)
    torch.testing.assert_close(rescored(policy, prompts, made, temperatures).logp, made.logp, rtol=0, atol=2e-5)


def test_the_ratio_is_near_one_in_half_precision(policy):
    low = TextPolicy(TextConfig(width=32, layers=2, heads=2, context=96, dtype="bfloat16"), policy.spec)
    prompts = tokens_of(low, repeats=8)
    made = low.generate(prompts, torch.Generator().manual_seed(0))
    ratio = (rescored(low, prompts, made, 1.0).logp - made.logp).exp()[made.mask].detach()
    assert abs(float(ratio.mean()) - 1) < 2e-3
    assert float((ratio - 1).abs().max()) < 0.05


def test_the_policy_contract_scores_its_own_samples(policy):
    obs = {"text": pack(PROMPTS, 48)[:, None]}
    sample = policy.sample(obs, generator=torch.Generator().manual_seed(0))
    assert sample.chunk.shape == (3, 1, 12)
    torch.testing.assert_close(policy.decisions(obs, sample.record).logp, sample.logp, rtol=0, atol=2e-5)


def test_rows_do_not_depend_on_the_batch(policy):
    """Rows have separate random streams and leave the batch early: only rounding may differ."""
    alone = [policy.generate([row], PerRowGenerator([seed], [0])) for seed, row in enumerate(tokens_of(policy))]
    together = policy.generate(tokens_of(policy), PerRowGenerator(range(3), [0] * 3))
    assert [made.completions()[0] for made in alone] == together.completions()


def test_rows_that_have_ended_leave_the_batch(policy, monkeypatch):
    from robopolicy.text import generation

    sizes, inner = [], generation.run_body

    def watched(model, tokens, *args, **named):
        sizes.append(len(tokens))
        return inner(model, tokens, *args, **named)

    monkeypatch.setattr(generation, "run_body", watched)
    with torch.no_grad():  # token 258 ends a message; make it likely
        policy.model.get_output_embeddings().weight[258] = 0
    prompts = tokens_of(policy, repeats=32)
    made = policy.generate(prompts, torch.Generator().manual_seed(3), temperature=9.0, budget=40)
    assert sizes[0] == 3 and sizes[1] == 96 and sizes[-1] <= 96
    lengths = made.mask.sum(1)
    assert (made.mask.long().diff(dim=1) <= 0).all()  # no holes
    assert ((lengths < 40) == ~made.truncated)[lengths < 40].all()
    torch.testing.assert_close(rescored(policy, prompts, made, 9.0).logp, made.logp, rtol=0, atol=2e-5)


def test_greedy_tokens_match_transformers(policy):
    for row in tokens_of(policy):
        made = policy.generate([row], deterministic=True)
        inputs = torch.tensor([row])
        output = policy.model.generate(inputs, max_new_tokens=12, do_sample=False, eos_token_id=258, pad_token_id=256)
        expected = output[0, len(row) :].tolist()
        assert made.completions()[0] == expected


def test_samples_follow_the_distribution(policy):
    made = policy.generate(tokens_of(policy, ["1+1="], 4000), torch.Generator().manual_seed(0), budget=1)
    with torch.no_grad():
        p = policy.model(input_ids=torch.tensor(tokens_of(policy, ["1+1="]))).logits[0, -1].softmax(0)
    counts = torch.bincount(made.tokens[:, 0], minlength=259) / 4000
    assert float((counts - p).abs().max()) < 4 * 0.5 / 4000**0.5
