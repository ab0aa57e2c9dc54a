"""Tests of the causal transformer: its attention mask, and cached token-by-token evaluation."""

import pytest
import torch

from robopolicy.errors import UserError
from robopolicy.nets.transformer import AttentionBlock, CausalTransformer


def transformer() -> CausalTransformer:
    return CausalTransformer(16, layers=2, heads=4, length=7)


def test_cached_token_by_token_output_equals_the_full_pass() -> None:
    net, x = transformer(), torch.randn(3, 7, 16)
    whole, _ = net(x)
    part, past = net(x[:, :3])
    outputs = [part]
    for index in range(3, 7):
        part, past = net(x[:, index : index + 1], past)
        outputs.append(part)
    torch.testing.assert_close(torch.cat(outputs, 1), whole, atol=1e-6, rtol=1e-5)
    assert past[0][0].shape == (3, 4, 7, 4)


def test_cached_pass_accepts_several_tokens_at_once() -> None:
    net, x = transformer(), torch.randn(2, 7, 16)
    first, past = net(x[:, :2])
    rest, _ = net(x[:, 2:], past)
    torch.testing.assert_close(torch.cat([first, rest], 1), net(x)[0], atol=1e-6, rtol=1e-5)


def test_tokens_depend_only_on_themselves_and_earlier_tokens() -> None:
    net = transformer()
    for index in range(7):
        x = torch.randn(1, 7, 16, requires_grad=True)
        gradient = torch.autograd.grad(net(x)[0][0, index].square().sum(), x)[0][0].abs().sum(1)  # (7,)
        assert bool((gradient[: index + 1] > 0).all()) and not bool(gradient[index + 1 :].any())


def test_noncausal_attention_depends_on_all_tokens() -> None:
    block = AttentionBlock(8, 2)
    x = torch.randn(1, 4, 8, requires_grad=True)
    gradient = torch.autograd.grad(block(x)[0, 0].square().sum(), x)[0][0].abs().sum(1)
    assert bool((gradient > 0).all())


def test_widths_that_do_not_divide_are_refused() -> None:
    with pytest.raises(UserError, match="multiple of the number of heads"):
        AttentionBlock(10, 4)
