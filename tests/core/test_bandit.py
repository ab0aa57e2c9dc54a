"""The closed-form policy gradient on a 1-D Gaussian bandit, within 3 standard errors.

The action is a sum of K steps x_k ~ N(theta, 1), a chain (or a sentence of K tokens); the reward is -(action - 2)^2.
Its expectation is -((K theta - 2)^2 + K), so the gradient is -2 K (K theta - 2).
"""

import pytest
import torch

from robopolicy.core.advantage import Baseline, Broadcast, Pipeline, Scope
from robopolicy.core.decisions import Decisions, by_batch
from robopolicy.core.estimator import Estimator, EstimatorConfig
from robopolicy.core.surrogates import SURROGATES

N = 40_000


def score_and_logp(theta: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
    return torch.distributions.Normal(theta, 1.0).log_prob(steps)


@pytest.mark.parametrize("surrogate", SURROGATES.product())
@pytest.mark.parametrize("level", ["token", "unit", "sequence"])
@pytest.mark.parametrize(("layout", "count"), [("tokens", 1), ("tokens", 3), ("chain", 3)])
def test_gradient_on_a_gaussian_bandit(surrogate, level, layout, count):
    generator = torch.Generator().manual_seed(count)
    steps = torch.randn(N, count, generator=generator, dtype=torch.float64)  # sampled at theta = 0
    old = score_and_logp(torch.zeros(()), steps)
    reward = -((steps.sum(1) - 2.0) ** 2)
    if layout == "chain":
        decisions = Decisions(old)
    else:  # two tokens of padding with garbage log-probabilities
        mask = torch.cat([torch.ones(N, count), torch.zeros(N, 2)], 1).bool()
        steps = torch.cat([steps, torch.full((N, 2), 1e6, dtype=torch.float64)], 1)
        decisions = Decisions(score_and_logp(torch.zeros(()), steps), mask=mask)
    advantage = Pipeline([Baseline("leave_one_out", Scope(by_batch)), Broadcast()])(reward, decisions)

    theta = torch.zeros((), dtype=torch.float64, requires_grad=True)
    aggregate = "sequence_sum" if level == "token" else "sequence_mean"
    config = EstimatorConfig(level=level, surrogate=surrogate, aggregate=aggregate)
    loss, _ = Estimator(config)(decisions, advantage, score_and_logp(theta, steps))
    (gradient,) = torch.autograd.grad(loss, theta)

    per_sample = -(reward - reward.mean()) * steps[:, :count].sum(1)
    error = per_sample.std() / N**0.5
    closed_form = -(-2.0 * count * (0.0 - 2.0))
    assert abs(gradient.item() - closed_form) < 3 * error.item()
    assert gradient.item() == pytest.approx(per_sample.sum().item() / (N - 1), rel=1e-6)


def test_following_the_gradient_finds_the_optimum():
    theta = torch.zeros((), requires_grad=True)
    optimiser, estimator = torch.optim.SGD([theta], lr=0.05), Estimator(EstimatorConfig())
    generator = torch.Generator().manual_seed(0)
    for _ in range(60):
        steps = theta.detach() + torch.randn(512, 1, generator=generator)
        decisions = Decisions(score_and_logp(theta.detach(), steps))
        reward = -((steps[:, 0] - 2.0) ** 2)
        advantage = Baseline("mean", Scope(by_batch))(reward.unsqueeze(1), decisions)
        loss, _ = estimator(decisions, advantage, score_and_logp(theta, steps))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    assert theta.item() == pytest.approx(2.0, abs=0.2)
