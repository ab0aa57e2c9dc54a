"""Tests of KL estimators against the exact divergence, and of the coefficient controllers."""

import pytest
import torch

from robopolicy.core.regularizers import Anneal, Constant, Dual, gaussian_kl, k1, k2, k3, ratio_variance

MEAN, STD, REF_MEAN, REF_STD = (torch.tensor(x, dtype=torch.float64) for x in (0.3, 0.9, 0.0, 1.0))


def differences(mean: torch.Tensor, n: int = 200_000) -> tuple[torch.Tensor, torch.Tensor]:
    """logp - logp_ref of samples of the policy, and logp alone, (n,)."""
    noise = torch.randn(n, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    sample = (mean + STD * noise).detach()
    logp = torch.distributions.Normal(mean, STD).log_prob(sample)
    return logp - torch.distributions.Normal(REF_MEAN, REF_STD).log_prob(sample), logp


def within_three_errors(samples: torch.Tensor, expected: float) -> bool:
    error = samples.std() / samples.numel() ** 0.5
    return abs(samples.mean().item() - expected) < 3 * error.item()


def test_gaussian_kl_equals_torch():
    expected = torch.distributions.kl_divergence(
        torch.distributions.Normal(MEAN, STD), torch.distributions.Normal(REF_MEAN, REF_STD)
    )
    torch.testing.assert_close(gaussian_kl(MEAN, STD, REF_MEAN, REF_STD), expected)
    assert gaussian_kl(MEAN, STD, MEAN, STD) == 0


def test_k1_and_k3_are_unbiased_and_k3_is_never_negative():
    difference, _ = differences(MEAN)
    exact = gaussian_kl(MEAN, STD, REF_MEAN, REF_STD).item()
    assert within_three_errors(k1(difference), exact)
    assert within_three_errors(k3(difference), exact)
    assert bool((k3(difference) >= 0).all())
    assert k3(difference).var() < k1(difference).var()


def test_only_k2_has_the_gradient_of_the_divergence():
    """The gradient of an estimator per sample is f'(d) * score; its mean is 0 for k1 and the true gradient for k2."""
    mean = MEAN.clone().requires_grad_()
    (exact,) = torch.autograd.grad(gaussian_kl(mean, STD, REF_MEAN, REF_STD), mean)
    difference, _ = differences(MEAN)
    noise = torch.randn(difference.numel(), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    score = noise / STD  # d logp / d mean
    for estimator, expected in ((k1, 0.0), (k2, exact.item())):
        leaf = difference.clone().requires_grad_()
        (slope,) = torch.autograd.grad(estimator(leaf).sum(), leaf)
        assert within_three_errors(slope * score, expected)


def test_estimators_vanish_at_the_reference(decisions):
    zero = decisions.logp_old - decisions.logp_old
    for estimator in (k1, k2, k3, ratio_variance):
        assert bool((estimator(zero) == 0).all())


def test_ratio_variance_is_about_twice_the_divergence_for_small_steps(decisions, shift):
    small = 0.01 * shift
    torch.testing.assert_close(ratio_variance(small), 2 * k3(-small), rtol=1e-2, atol=1e-9)


def test_constant_coefficient_does_not_change():
    controller = Constant(0.5)
    controller.update(100.0)
    assert controller.value == 0.5


@pytest.mark.parametrize(("shape", "middle"), [("linear", 0.5), ("cosine", 0.5)])
def test_anneal_goes_from_start_to_end_and_resumes(shape, middle):
    controller = Anneal(1.0, 0.0, 4, shape)
    values = [controller.value]
    for _ in range(2):
        controller.update(0.0)
        values.append(controller.value)
    assert values[0] == 1.0 and values[2] == pytest.approx(middle)
    resumed = Anneal(1.0, 0.0, 4, shape)
    resumed.load_state_dict(controller.state_dict())
    for _ in range(4):
        resumed.update(0.0)
    assert resumed.value == pytest.approx(0.0)
    with pytest.raises(ValueError, match="Anneal shape"):
        Anneal(1.0, 0.0, 4, "step")


def test_resumed_anneal_continues_from_its_value():
    first, again = Anneal(1.0, 0.0, 4), Anneal(1.0, 0.0, 4)
    first.update(0.0)
    again.load_state_dict(first.state_dict())
    again.update(0.0)
    assert again.value == 0.5


def test_a_multiplier_is_never_negative():
    dual = Dual(0.1, target=0.5, rate=1.0)
    dual.update(0.0)
    assert dual.value == 0.0
    dual.update(0.75)
    assert dual.value == 0.25
