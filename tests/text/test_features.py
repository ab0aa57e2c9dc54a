"""Tests of the features that recipes read from hidden states of conversations."""

import torch

from robopolicy.core.decisions import Decisions
from robopolicy.text.annotators import collision_features


def rows_of(policy):
    prompts = [policy.tokenizer.prompt([text]) for text in ("1+1=", "a longer one")]
    return policy.pad_rows(prompts, [[*b"2", 258], [*b"abcdef", 258]])


def test_collisions_are_sums_of_powers_at_the_temperature(policy):
    record = rows_of(policy)
    temperatures = torch.tensor([0.5, 2.0])
    rows = Decisions(
        torch.zeros(record["mask"].shape), mask=record["mask"], extra={**record, "temperature": temperatures}
    )
    found = collision_features(policy, rows, 2, 3)
    start = int(record["start"][1])
    logits = policy.model(record["tokens"][1:]).logits[0, start - 1 : start + 6] / 2.0
    for name, power in (("collision", 2), ("collision3", 3)):
        torch.testing.assert_close(found[name][1], logits.softmax(1).pow(power).sum(1), rtol=1e-4, atol=1e-6)
        assert (found[name][0, 2:] == 0).all()
