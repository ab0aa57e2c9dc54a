"""Tests of two-stage constrained actor-critic: rewards and loss by hand, stages, and the task trade-off."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from chunk_bandit import SMALL, batch, first_actions, flow, gaussian
from torch import Tensor

from robopolicy.contrib.control import tscac as tscac_module
from robopolicy.contrib.control.tscac import TSCAC, TSCACConfig, control_cost, main_loss, velocity_cost
from robopolicy.errors import UserError
from robopolicy.policies.heads.gaussian import GaussianPolicy
from robopolicy.training.remote_replay import dump_weights, load_weights


def tscac(seed: int = 0, total: int = 10, **config: Any) -> TSCAC:
    torch.manual_seed(seed)
    settings = {"critic": SMALL, "batch_size": 128, "lr": 3e-3, "critic_lr": 3e-3, "tau": 0.05} | config
    return TSCAC(TSCACConfig(**settings), gaussian(), total_updates=total)


def two_step_policy() -> GaussianPolicy:
    policy = gaussian()
    whole = GaussianPolicy(policy.config, replace(policy.spec, action_horizon=2))
    whole.load_state_dict(policy.state_dict())
    return whole


def peak(action: Tensor) -> Tensor:
    """Task reward with its maximum at 0.6; the control cost prefers 0."""
    return 1 - (action.squeeze(1) - 0.6).square()


def random_batch() -> Any:
    return batch(torch.rand(128, 2, 1) * 2 - 1, peak)


def weights(net: Any) -> list[Tensor]:
    return [p.detach().clone() for p in net.parameters()]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_auxiliary_rewards_equal_their_definitions() -> None:
    data, policy = replace(random_batch(), online=torch.ones(128, dtype=torch.bool)), gaussian()
    torch.testing.assert_close(control_cost(data, policy), -data.chunk[:, 0, 0].square())
    moved = data.next_obs["state"][:, 0] - data.obs["state"][:, 0]
    torch.testing.assert_close(velocity_cost(data, policy), -moved.square().mean(1))
    assert bool((velocity_cost(replace(data, next_obs=data.obs), policy) == 0).all())
    end = replace(data, online=torch.zeros(128, dtype=torch.bool), discount=torch.zeros(128))
    assert bool((velocity_cost(end, policy) == 0).all())  # a dataset has no observation after an episode's end


def test_masked_steps_are_excluded_from_the_data_distance(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    learner = TSCAC(TSCACConfig(critic=SMALL, constraint_coef=0.0, data_coef=1.0), two_step_policy(), total_updates=10)
    seen: list[Tensor] = []
    monkeypatch.setattr(tscac_module, "main_loss", lambda value, distance, data, _: seen.append(data) or value.mean())
    data = random_batch()
    repeated = replace(data, chunk=torch.cat([learner.policy.mode(data.obs)[:, :1], torch.ones(128, 1, 1)], 1).detach())
    learner.actor_loss(replace(repeated, mask=torch.tensor([[1.0, 0.0]]).expand(128, 2)))
    learner.actor_loss(replace(repeated, mask=torch.ones(128, 2)))
    assert float(seen[0].detach().abs().max()) < 1e-6 < 0.01 < float(seen[1].detach().min())


def test_main_loss_equals_weighted_distances_minus_the_scaled_value() -> None:
    value = torch.tensor([2.0, -4.0], requires_grad=True)
    distance, data = torch.tensor([[0.5, 0.0], [0.1, 0.3]]), torch.tensor([1.0, 3.0])
    config = TSCACConfig(constraint_coef=2.0, data_coef=0.5, spread=0.5)
    weight = (-torch.tensor([0.6, 0.3]) / 0.5).exp()
    expected = 2.0 * (0.25 + 0.2) + 0.5 * 2.0 - (weight * value).mean() / 3.0
    torch.testing.assert_close(main_loss(value, distance, data, config), expected)
    plain = main_loss(value, distance, data, TSCACConfig(constraint_coef=0.0))
    assert float(plain.detach()) == pytest.approx(1 / 3, rel=1e-3)


def test_teachers_train_only_in_stage_one_and_the_main_policy_only_in_stage_two() -> None:
    algorithm = tscac(stage1_fraction=0.4, policy_delay=1, aux_rewards=("control_cost", "velocity_cost"))
    main, teachers = weights(algorithm.policy), [weights(t.policy) for t in algorithm.teachers.values()]
    for _ in range(4):
        metrics = algorithm.update(random_batch())
        assert same(main, weights(algorithm.policy)) and "control_cost/critic/loss" in metrics
    learned = [weights(t.policy) for t in algorithm.teachers.values()]
    assert not any(same(a, b) for a, b in zip(teachers, learned, strict=True))
    algorithm.update(random_batch())
    assert not same(main, weights(algorithm.policy))
    assert all(same(a, weights(t.policy)) for a, t in zip(learned, algorithm.teachers.values(), strict=True))


def test_stage_one_environments_alternate_between_teachers() -> None:
    algorithm = tscac(aux_rewards=("control_cost", "velocity_cost"), noise=0.0)
    algorithm.update(random_batch())
    obs = {"state": torch.rand(4, 1, 2)}
    chunk = algorithm.act(obs).chunk
    for row in range(4):
        teacher = list(algorithm.teachers.values())[row % 2]
        torch.testing.assert_close(chunk[row], teacher.policy.mode(obs)[row])
    algorithm.updates = algorithm.stage1_updates
    assert torch.equal(algorithm.act(obs).chunk, algorithm.policy.mode(obs))


def actions_at(constraint_coef: tuple[float, ...], seed: int = 0) -> list[float]:
    """Mean action of the main policy after training at each coefficient with the same teacher."""
    algorithm = tscac(seed, total=400, stage1_fraction=0.375)
    while algorithm.updates < algorithm.stage1_updates:
        algorithm.update(random_batch())
    found = []
    for weight in constraint_coef:
        torch.manual_seed(seed)
        main = copy.deepcopy(algorithm)
        main.config = replace(main.config, constraint_coef=weight)
        while main.updates < 400:
            main.update(random_batch())
        found.append(float(first_actions(main.inference_policy()).mean()))
    return found


def test_constraint_coef_trades_the_task_against_the_auxiliary_goal() -> None:
    """At coefficient n the best action is 0.6 / (1 + n |Q|), with |Q| slightly below 1; at n = 0 the peak is flat."""
    near, between, free = actions_at((10.0, 0.5, 0.0))
    assert abs(near) < 0.25 and between == pytest.approx(0.41, abs=0.1) and free == pytest.approx(0.6, abs=0.2)
    assert free > between + 0.05


def test_unsupported_policies_and_settings_are_refused() -> None:
    with pytest.raises(UserError, match="squashed"):
        TSCAC(TSCACConfig(), flow(), total_updates=1)
    with pytest.raises(UserError, match="auxiliary reward"):
        TSCACConfig(aux_rewards=("beauty",))
    with pytest.raises(UserError, match="distinct names"):
        TSCACConfig(aux_rewards=("control_cost", "control_cost"))
    with pytest.raises(UserError, match=r"single chunks; leave algorithm.n_step=0, got 5"):
        TSCACConfig(n_step=5)
    with pytest.raises(UserError, match=r"algorithm\.action_l2=1\.0 has no effect"):
        TSCACConfig(action_l2=1.0)
    with pytest.raises(UserError, match=r"algorithm\.value_reduction=min has no effect"):
        TSCACConfig(value_reduction="min")
    with pytest.raises(UserError, match="stage1_fraction"):
        TSCACConfig(stage1_fraction=1.0)


def test_workers_receive_the_teachers() -> None:
    learner, worker = tscac(seed=0), tscac(seed=1)
    pairs = [(learner, worker), *((learner.teachers[name], worker.teachers[name]) for name in learner.teachers)]
    assert not any(same(weights(one.policy), weights(other.policy)) for one, other in pairs)
    load_weights(worker, dump_weights(learner))
    assert all(same(weights(one.policy), weights(other.policy)) for one, other in pairs)
