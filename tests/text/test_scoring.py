"""Tests of blockwise scoring against the full softmax: values, gradients, temperatures, bias."""

import pytest
import torch

from robopolicy.text import scoring
from robopolicy.text.scoring import collisions, token_scores


def case(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=dtype)

    hidden, weight, bias = draw(7, 4), draw(11, 4), draw(11)
    targets = torch.randint(0, 11, (7,), generator=generator)
    return hidden, weight, bias, targets, torch.linspace(0.5, 2.0, 7, dtype=dtype)


def whole(hidden, weight, bias, targets, temperature):
    logits = hidden @ weight.T + (0 if bias is None else bias)
    log_p = (logits / temperature[:, None]).log_softmax(1)
    return log_p.gather(1, targets[:, None]).squeeze(1), -(log_p.exp() * log_p).sum(1)


@pytest.mark.parametrize("blocks", [(1024, 8192), (3, 4)], ids=["one", "many"])
@pytest.mark.parametrize("biased", [True, False])
def test_blocks_equal_the_whole_softmax_in_value_and_gradient(blocks, biased, monkeypatch):
    monkeypatch.setattr(scoring, "ROWS", blocks[0])
    monkeypatch.setattr(scoring, "COLUMNS", blocks[1])
    hidden, weight, bias, targets, temperature = case()
    leaves = [hidden, weight, *([bias] if biased else [])]
    found = []
    for function in (token_scores, whole):
        copies = [leaf.clone().requires_grad_() for leaf in leaves]
        logp, entropy = function(copies[0], copies[1], copies[2] if biased else None, targets, temperature)
        (logp.sum() * 0.3 + (entropy * logp.detach()).sum()).backward()
        found.append([logp, entropy, *(copy.grad for copy in copies)])
    for blockwise, reference in zip(*found, strict=True):
        torch.testing.assert_close(blockwise, reference)


@pytest.mark.parametrize("draws", [2, 3])
def test_collisions_in_blocks_are_sums_of_powers(draws, monkeypatch):
    monkeypatch.setattr(scoring, "ROWS", 3)
    monkeypatch.setattr(scoring, "COLUMNS", 4)
    hidden, weight, bias, _, temperature = case()
    p = ((hidden @ weight.T + bias) / temperature[:, None]).softmax(1)
    torch.testing.assert_close(collisions(hidden, weight, bias, temperature, draws), p.pow(draws).sum(1))


def test_gradient_of_each_output_is_correct():
    hidden, weight, bias, targets, temperature = case()
    hidden.requires_grad_()
    assert torch.autograd.gradcheck(lambda h: token_scores(h, weight, bias, targets, temperature), hidden)


def test_low_precision_inputs_are_scored_in_float32():
    hidden, weight, _, targets, temperature = case(torch.float32)
    low = [hidden.bfloat16(), weight.bfloat16()]
    logp, _ = token_scores(*low, None, targets, temperature)
    expected, _ = whole(*(value.float() for value in low), None, targets, temperature)
    assert logp.dtype == torch.float32
    torch.testing.assert_close(logp, expected)


def test_no_block_exceeds_its_size(monkeypatch):
    monkeypatch.setattr(scoring, "ROWS", 3)
    monkeypatch.setattr(scoring, "COLUMNS", 4)
    sizes, inner = [], scoring._logits

    def watched(*args):
        block = inner(*args)
        sizes.append(block.shape)
        return block

    monkeypatch.setattr(scoring, "_logits", watched)
    hidden, weight, bias, targets, temperature = case()
    logp, _ = token_scores(hidden.requires_grad_(), weight, bias, targets, temperature)
    logp.sum().backward()
    assert len(sizes) == 2 * 9
    assert all(rows <= 3 and columns <= 4 for rows, columns in sizes)
