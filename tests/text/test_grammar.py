"""Tests of generation under a grammar."""

import torch

from robopolicy.spec import PolicySpec
from robopolicy.text.policy import TextConfig, TextPolicy


def untrained(budget=6):
    torch.manual_seed(0)
    return TextPolicy(TextConfig(width=16, layers=1, heads=2, context=160), PolicySpec({"text": (16,)}, budget))


def test_permissive_grammar_leaves_generation_unchanged():
    """The test checks a limit of ShIOEnv (Ragsdale and Boppana 2025)."""
    policy = untrained()
    prompts, everything = [policy.tokenizer.prompt(["1+1="])] * 4, torch.ones(policy.vocabulary, dtype=torch.bool)
    written = policy.generate(prompts, torch.Generator().manual_seed(1), allowed=lambda _: everything)
    plain = policy.generate(prompts, torch.Generator().manual_seed(1))
    assert torch.equal(written.tokens, plain.tokens) and torch.equal(written.logp, plain.logp)
    assert bool(written.support.all())
