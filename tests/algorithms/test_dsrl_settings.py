"""Tests of settings of DSRL that OGBench's public code uses: the actor's value, clipped noise, a trained base."""

from dataclasses import replace

import pytest
import torch
from chunk_bandit import Known
from dsrl_bandit import BOUND, LINEAR, bandit, flow, linear, make
from torch import Tensor

from robopolicy.algorithms.dsrl_na import DSRLNA
from robopolicy.policies.base import Observation
from robopolicy.policies.wrappers.black_box import CallablePolicy


@pytest.mark.parametrize(("actor_value", "expected"), [("min", -2.0), ("mean", -1.0)])
def test_the_actor_maximises_the_minimum_or_the_mean_of_the_members(actor_value: str, expected: float) -> None:
    """The entropy has no weight, so the loss is minus the value of critics 0 and -2."""
    algorithm = make(DSRLNA, CallablePolicy.wrap("linear", linear, LINEAR), actor_value=actor_value, temperature=1e-9)

    class Constant(Known):
        def min_q(self, obs: Observation, chunk: Tensor) -> Tensor:
            return self(obs, chunk).amin(0)

        encoder = algorithm.noise_critic.encoder

    algorithm.noise_critic = Constant(lambda s, a: 0 * a.sum(-1), lambda s, a: 0 * a.sum(-1) - 2)
    algorithm.distill_step = lambda obs: {}
    metrics = algorithm.update(bandit(32, 0))
    assert metrics["actor/loss"] == pytest.approx(-expected, abs=1e-5)


@pytest.mark.parametrize("clip_noise", [True, False])
def test_noise_of_the_distillation_is_clipped_only_on_request(clip_noise: bool) -> None:
    algorithm = make(DSRLNA, CallablePolicy.wrap("linear", linear, LINEAR), clip_noise=clip_noise)
    drawn: list[Tensor] = []
    output = algorithm.noise_critic.output
    algorithm.noise_critic.output = lambda features, w: (drawn.append(w), output(features, w))[1]
    algorithm.distill_step(bandit(512, 0).obs)
    assert bool((drawn[0].abs() > BOUND).any()) != clip_noise


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_the_distillation_runs_in_the_configured_precision(precision: str) -> None:
    algorithm = make(DSRLNA, CallablePolicy.wrap("linear", linear, LINEAR), precision=precision)
    active: list[bool] = []
    algorithm.distill_step = lambda obs: (active.append(torch.is_autocast_enabled("cpu")), {})[1]
    algorithm.update(bandit(32, 0))
    assert active == [precision == "bfloat16"]


def test_a_trained_base_is_the_average_of_a_policy_that_imitates() -> None:
    base = flow(normalization="identity")
    algorithm = make(DSRLNA, base, train_base=True, tau=0.1)
    before = {key: item.clone() for key, item in algorithm.policy.base.named_parameters()}
    rows = 128
    obs = {"state": torch.rand(rows, 1, 6)}
    data = replace(bandit(rows, 0), obs=obs, next_obs=obs, chunk=torch.rand(rows, 4, 2), mask=torch.ones(rows, 4))
    algorithm.update(data)
    assert algorithm.clone is not None
    clone = dict(algorithm.clone.named_parameters())
    for key, item in algorithm.policy.base.named_parameters():
        assert not item.requires_grad and not torch.equal(clone[key], before[key])
        torch.testing.assert_close(item, before[key] + 0.1 * (clone[key] - before[key]))
    other = make(DSRLNA, base, train_base=True, tau=0.1)
    other.load_state_dict(algorithm.state_dict())
    torch.testing.assert_close(other.clone.state_dict(), algorithm.clone.state_dict())
