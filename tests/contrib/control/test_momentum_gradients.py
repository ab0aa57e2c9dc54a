"""Tests of N-PG-IGT and HARPG: unbiased averages against quadratics, enumeration and finite differences."""

from __future__ import annotations

import copy
import math
from typing import Any

import fine_tuning_tools as tools
import pytest
import torch
from torch import Tensor
from torch.nn.utils import parameters_to_vector

from robopolicy.algorithms.common.rollout_batch import RolloutBatch, compute_advantages, normalize
from robopolicy.algorithms.registry import make_algorithm
from robopolicy.contrib.control.harpg import HARPG, HARPGConfig, hessian_vector
from robopolicy.contrib.control.momentum import MomentumGradient, MomentumState
from robopolicy.contrib.control.npg_igt import NPGIGT, NPGIGTConfig, look_ahead
from robopolicy.errors import UserError
from robopolicy.policies.base import PolicySpec
from robopolicy.policies.heads.gaussian import GaussianConfig, GaussianPolicy

CONFIGS = {"npg_igt": NPGIGTConfig, "harpg": HARPGConfig}


def algorithm(name: str, seed: int = 0, **overrides: Any) -> Any:
    torch.manual_seed(seed)
    policy = GaussianPolicy(GaussianConfig(normalization="running"), PolicySpec({"state": (6,)}, 2))
    settings = {"num_steps": 16, "batch_size": 64, "critic_epochs": 2} | overrides
    return make_algorithm(name, CONFIGS[name](**settings), policy, total_updates=20)


def rows_of(learner: MomentumGradient, num_envs: int = 8) -> RolloutBatch:
    rollout = tools.sampler_for(learner, num_envs).collect(learner.act)
    return compute_advantages(rollout, learner.critic, gamma=0.99, gae_lambda=0.95)


def test_transported_average_equals_the_gradient_of_a_quadratic_at_every_step() -> None:
    torch.manual_seed(0)
    root = torch.randn(5, 5, dtype=torch.float64)
    hessian, optimum = -(root @ root.T), torch.randn(5, dtype=torch.float64)
    gradient = lambda w: hessian @ (w - optimum)  # noqa: E731
    trace = MomentumState(torch.zeros(5, dtype=torch.float64))
    for t in range(20):
        share = 2 / (2 + t)
        average = trace.direction.lerp(gradient(look_ahead(trace, share)), share)
        torch.testing.assert_close(average, gradient(trace.weights))
        trace.move(average, 0.05, normalized=True)


def test_look_ahead_extrapolates_along_the_last_step() -> None:
    trace = MomentumState(torch.zeros(2))
    trace.move(torch.tensor([0.0, 2.0]), 0.5, normalized=True)
    assert trace.weights.tolist() == [0.0, 0.5]
    assert look_ahead(trace, 1.0).tolist() == [0.0, 0.5]
    assert look_ahead(trace, 0.25).tolist() == [0.0, 2.0]
    trace.move(torch.tensor([0.0, 2.0]), 0.5, normalized=False)
    assert trace.weights.tolist() == [0.0, 1.5]


def test_expected_hessian_vector_product_equals_the_exact_return_hessian() -> None:
    torch.manual_seed(0)
    reward, vector = torch.randn(4, dtype=torch.float64), torch.randn(4, dtype=torch.float64)
    logits = torch.randn(4, dtype=torch.float64, requires_grad=True)
    expected = torch.autograd.functional.hvp(lambda w: w.softmax(0) @ reward, logits, vector)[1]
    total = torch.zeros(4, dtype=torch.float64)
    for action, p in enumerate(logits.detach().softmax(0)):  # the expectation over the policy, one term per action
        logp = logits.log_softmax(0)[action].view(1, 1)
        total += p * hessian_vector(logp, reward[action].view(1, 1), [logits], vector)
    torch.testing.assert_close(total, expected)


def test_hessian_vector_product_matches_finite_differences() -> None:
    learner: HARPG = algorithm("harpg")
    learner.policy.double()
    rows = rows_of(algorithm("harpg"))
    rows = RolloutBatch(
        {key: value.double() for key, value in rows.obs.items()},
        {key: value.double() for key, value in rows.record.items()},
        *(value.double() for value in (rows.logp, rows.advantage, rows.value_target, rows.value)),
    )
    advantage = normalize(rows.advantage).view(16, -1)
    vector = torch.randn_like(parameters_to_vector(learner.learned))

    def slope(sign: float) -> tuple[Tensor, Tensor]:
        moved = copy.deepcopy(learner.policy)
        weights = parameters_to_vector(moved.parameters()) + sign * 1e-5 * vector
        torch.nn.utils.vector_to_parameters(weights, moved.parameters())
        logp = moved.decisions(rows.obs, rows.record).logp.view(16, -1)
        gradient = torch.autograd.grad((advantage * logp).sum(0).mean(), list(moved.parameters()), retain_graph=True)
        return torch.cat([g.flatten() for g in gradient]), logp.sum(0).detach()

    (ahead, score_ahead), (behind, score_behind) = slope(1.0), slope(-1.0)
    score = (score_ahead - score_behind) / 2e-5  # derivative of each trajectory's log-probability
    logp = learner.log_probabilities(rows).view(16, -1)
    each = (score * (advantage * logp).sum(0)).mean()
    first = torch.cat([g.flatten() for g in torch.autograd.grad(each, learner.learned, retain_graph=True)])
    actual = hessian_vector(logp, advantage, learner.learned, vector)
    torch.testing.assert_close(actual, first + (ahead - behind) / 2e-5, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["npg_igt", "harpg"])
def test_the_first_step_has_the_given_length_along_the_policy_gradient(name: str) -> None:
    learner = algorithm(name, step_size=0.03)
    rollout = tools.sampler_for(learner, 8).collect(learner.act)
    rows = compute_advantages(rollout, learner.critic, gamma=0.99, gae_lambda=0.95)
    before = learner.trace.weights.clone()
    if name == "harpg":
        rows = rows[torch.arange(8).expand(16, 8).flatten() < 4]
    gradient = learner.gradient(rows)
    learner.config = type(learner.config)(**(vars(learner.config) | {"normalize_reward": False}))
    learner.update(rollout)
    step = learner.trace.weights - before
    assert step.norm() == pytest.approx(0.03, rel=1e-5)
    assert torch.cosine_similarity(step, gradient, dim=0) == pytest.approx(1.0, abs=1e-5)


def test_harpg_transports_its_average_before_adding_the_new_gradient() -> None:
    learner: HARPG = algorithm("harpg", momentum=0.6, normalize_reward=False)
    sampler = tools.sampler_for(learner, 8)
    learner.update(sampler.collect(learner.act))
    rollout = sampler.collect(learner.act)
    rows = learner.process_rollout(rollout)
    trace, between = copy.deepcopy(learner.trace), copy.deepcopy(learner.policy)
    first = torch.arange(8).expand(16, 8).flatten() < 4
    moved = rows[~first]
    weights = list(between.parameters())
    change = hessian_vector(
        between.decisions(moved.obs, moved.record).logp.view(16, 4),
        normalize(moved.advantage).view(16, 4) / 16,
        weights,
        trace.weights - trace.previous,
    )
    learner.current.requires_grad_(True)
    present = learner.current.decisions(rows[first].obs, rows[first].record).logp.sum(1)
    objective = (normalize(rows[first].advantage) * present).mean()
    gradient = parameters_to_vector(torch.autograd.grad(objective, list(learner.current.parameters())))
    learner.current.requires_grad_(False)
    learner.update(rollout)
    share = 0.6 * 2 / 3
    expected = (1 - share) * (trace.direction + change) + share * gradient
    assert change.norm() > 0.05 * trace.direction.norm()
    torch.testing.assert_close(learner.trace.direction, expected, rtol=1e-4, atol=1e-6)
    assert (learner.trace.weights - trace.weights).norm() == pytest.approx(0.1 * 2 / 3, rel=1e-4)


def test_npg_igt_averages_gradients_with_a_decaying_weight() -> None:
    learner: NPGIGT = algorithm("npg_igt", momentum=0.6, normalize_reward=False)
    sampler = tools.sampler_for(learner, 8)
    learner.update(sampler.collect(learner.act))
    rollout = sampler.collect(learner.act)
    direction, gradient = learner.trace.direction.clone(), learner.gradient(learner.process_rollout(rollout))
    learner.update(rollout)
    torch.testing.assert_close(learner.trace.direction, 0.6 * direction + 0.4 * gradient)


@pytest.mark.parametrize("name", ["npg_igt", "harpg"])
def test_averaging_weights_and_step_lengths_follow_their_schedules(
    name: str,
) -> None:
    normalised = algorithm(name, step_size=0.3, momentum=0.5)
    plain = algorithm(name, step_size=0.3, momentum=0.5, normalize_step=False)
    for updates in (0, 1, 2, 6, 98):
        normalised.updates = plain.updates = updates
        assert normalised.share == plain.share == pytest.approx(0.5 * 2 / (2 + updates))
        assert normalised.length == pytest.approx(0.3 * 2 / (2 + updates))
        assert plain.length == pytest.approx(0.3 * math.sqrt(2 / (2 + updates)))


@pytest.mark.parametrize("name", ["npg_igt", "harpg"])
def test_an_unnormalised_step_is_the_average_times_the_step_size(name: str) -> None:
    learner = algorithm(name, step_size=0.03, normalize_step=False)
    sampler = tools.sampler_for(learner, 8)
    for length in (0.03, 0.03 * math.sqrt(2 / 3)):
        before = learner.trace.weights.clone()
        metrics = learner.update(sampler.collect(learner.act))
        assert metrics["actor/step_size"] == pytest.approx(length)
        step = learner.trace.weights - before
        torch.testing.assert_close(step, length * learner.trace.direction, rtol=1e-3, atol=1e-6)


def test_harpg_acts_with_the_learned_weights_in_half_of_the_environments() -> None:
    learner = algorithm("harpg")
    with torch.no_grad():
        learner.policy.log_std.fill_(-5.0)
        learner.current.log_std.fill_(2.0)
    obs = {"state": torch.zeros(64, 1, 6)}
    raw = learner.act(obs).record["raw"]
    assert raw[:32].std() > 100 * raw[32:].std()
    with pytest.raises(UserError, match="even"):
        learner.act({"state": torch.zeros(3, 1, 6)})


def test_inference_policy_has_the_learned_and_not_the_look_ahead_weights() -> None:
    learner: NPGIGT = algorithm("npg_igt")
    sampler = tools.sampler_for(learner, 8)
    for _ in range(3):
        learner.update(sampler.collect(learner.act))
    weights = lambda policy: parameters_to_vector(policy.parameters())  # noqa: E731
    assert torch.equal(weights(learner.inference_policy()), learner.trace.weights)
    assert torch.equal(weights(learner.policy), look_ahead(learner.trace, learner.share))
    assert not torch.equal(weights(learner.policy), learner.trace.weights)


def regulated(gains: Tensor, generator: torch.Generator, spread: float) -> tuple[Tensor, Tensor]:
    """Return and score of one episode of two masses under noisy feedback, for each row of gains `(S, 2)`."""
    noise = torch.randn(11, 2, *gains.shape, generator=generator, dtype=torch.float64)
    place, total, score = noise[0, 0], torch.zeros(len(gains), dtype=torch.float64), torch.zeros_like(gains)
    for push, drift in noise[1:]:
        action = gains * place + spread * push
        total = total - (place.square() + action.square()).sum(1)
        score = score + push * place / max(spread, 1e-9)
        place = place + 0.5 * action + 0.1 * drift
    return total, score


def regulation(step_size: float, normalize_step: bool, seeds: int = 4) -> Tensor:
    """Mean returns `(S,)` after 200 gradient steps of one episode each; -21 at the start, -5.6 at the optimum."""
    learner: NPGIGT = algorithm("npg_igt", step_size=step_size, normalize_step=normalize_step)
    traces = [MomentumState(torch.zeros(2, dtype=torch.float64)) for _ in range(seeds)]
    generator, baseline = torch.Generator().manual_seed(0), torch.full((seeds,), -20.0, dtype=torch.float64)
    for learner.updates in range(200):
        points = torch.stack([look_ahead(trace, learner.share) for trace in traces])
        total, score = regulated(points, generator, 0.3)
        gradients, baseline = (total - baseline)[:, None] * score, baseline.lerp(total, 0.1)
        for trace, gradient in zip(traces, gradients, strict=True):
            trace.move(trace.direction.lerp(gradient, learner.share), learner.length, normalized=normalize_step)
    weights = torch.stack([trace.weights for trace in traces])
    return torch.stack([regulated(weights, torch.Generator().manual_seed(k), 0.0)[0] for k in range(50)]).mean(0)


def test_only_normalised_steps_tolerate_a_tenfold_range_of_step_sizes() -> None:
    for length in (0.03, 0.3):
        assert float(regulation(length, True).min()) > -18
    assert float(regulation(3e-4, False).min()) > -14
    assert int((regulation(3e-3, False) > -100).sum()) <= 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["npg_igt", "harpg"])
def test_both_improve_on_the_point_mass(name: str) -> None:
    learner = algorithm(name, num_steps=40, batch_size=512, critic_epochs=4, step_size=0.2)
    sampler = tools.sampler_for(learner, num_envs=64)
    returns = []
    for _ in range(25):
        learner.update(sampler.collect(learner.act))
        returns.append(sampler.episode_stats().get("rollout/return", float("nan")))
    assert sum(returns[-4:]) / 4 > sum(returns[:4]) / 4 + 1.5, returns
