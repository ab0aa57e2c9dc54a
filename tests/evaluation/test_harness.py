"""Tests of evaluation: a fixed set of episodes, and results that do not depend on the number of environments."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from robopolicy.errors import UserError
from robopolicy.evaluation.actors import ExpertActor, RandomActor
from robopolicy.evaluation.harness import evaluate, run_episodes
from robopolicy.evaluation.result import EvalResult, compare
from robopolicy.policies.base import PolicySpec
from robopolicy.policies.registry import POLICIES
from robopolicy.sim.registry import SUCCESS_STEPS, SimOptions, get_task
from robopolicy.sim.registry import make_sim as make_task


def same_episodes(a: EvalResult, b: EvalResult) -> bool:
    pairs = [(a.seeds, b.seeds), (a.returns, b.returns), (a.lengths, b.lengths)]
    success = a.success is b.success if a.success is None else np.array_equal(a.success, b.success)
    return success and all(np.array_equal(x, y) for x, y in pairs)


@pytest.mark.parametrize("chunk", [(1, 1, 1), (4, 3, 2)], ids=["single", "chunked"])
@pytest.mark.parametrize("deterministic", [True, False])
def test_result_is_bitwise_the_same_with_1_7_and_64_environments(make_sim, make_policy, chunk, deterministic):
    horizon, action_horizon, obs_horizon = chunk
    policy = make_policy(horizon=horizon, action_horizon=action_horizon, obs_horizon=obs_horizon)
    one, seven, many = (
        evaluate(policy, make_sim(n), episodes=20, seed=50, deterministic=deterministic) for n in (1, 7, 64)
    )
    assert same_episodes(one, seven) and same_episodes(one, many)
    assert one.cost.decisions == seven.cost.decisions == many.cost.decisions
    assert 0 < one.success.sum() < 20 and len(set(one.lengths)) > 3  # the comparison is not trivial


@pytest.mark.parametrize(
    ("task", "name", "chunk"), [("manipulation/lift", "flow", (4, 4)), ("locomotion/hopper", "gaussian", (1, 1))]
)
def test_mujoco_episodes_are_bitwise_the_same_with_1_7_and_64_environments(task, name, chunk):
    sims = [make_task(task, SimOptions(num_envs=n, threads=1)) for n in (1, 7, 64)]
    observation = {key: tuple(spec.shape) for key, spec in sims[0].spec.observation.items()}
    policy_class = POLICIES[name]
    config_class = policy_class.config_class
    torch.manual_seed(0)
    policy = policy_class(config_class(), PolicySpec(observation, sims[0].spec.action_dim, *chunk))
    one, seven, many = (evaluate(policy, sim, episodes=10, seed=100) for sim in sims)
    assert same_episodes(one, seven) and same_episodes(one, many)
    for sim in sims:
        sim.close()


def test_rows_are_in_the_order_of_episode_seeds(make_sim, make_policy):
    policy = make_policy()
    whole = evaluate(policy, make_sim(5), episodes=12, seed=50)
    alone = evaluate(policy, make_sim(1), episodes=1, seed=57)
    assert whole.seeds.tolist() == list(range(50, 62))
    assert whole.returns[7] == alone.returns[0] and whole.lengths[7] == alone.lengths[0]


def test_the_policy_always_sees_the_same_batch_width(make_sim, make_policy):
    policy = make_policy()
    result = run_episodes(policy, make_sim(20), range(30), policy_batch=8)
    assert set(policy.batches) == {8}
    assert result.cost.policy_calls == len(policy.batches)


def test_submodule_modes_and_global_random_state_are_unchanged(make_sim, make_policy):
    policy = make_policy()
    policy.train()
    policy.net[0].eval()
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    evaluate(policy, make_sim(3), episodes=3)
    assert torch.equal(torch.rand(1), expected)
    assert policy.net.training and not policy.net[0].training


def test_success_inside_a_chunk_counts(make_sim, make_policy):
    result = evaluate(make_policy(), make_sim(4, momentary=True), episodes=10)
    assert result.success.all()


@pytest.mark.parametrize("action_horizon", [1, 3])
def test_success_of_the_last_step_counts_where_an_evaluation_asks_for_it(make_sim, make_policy, action_horizon):
    policy, sim = make_policy(action_horizon=action_horizon), make_sim(4, momentary=True)
    anywhere = evaluate(policy, sim, episodes=10)
    sim.spec = replace(sim.spec, success_step="last")
    result = evaluate(policy, sim, episodes=10)  # success holds for one step, in the middle of each episode
    assert anywhere.success.all() and not result.success.any()
    assert np.array_equal(result.returns, anywhere.returns)
    assert EvalResult.from_dict(json.loads(json.dumps(result.to_dict()))).success_step == "last"
    with pytest.raises(UserError, match="counts success at any step and the other at the last step"):
        compare(result, anywhere)


@pytest.mark.parametrize("task", ["toy/point_mass", "toy/push", "manipulation/lift"])
def test_success_ends_episodes_where_the_task_says_so(task):
    assert get_task(task).success == "end"
    found = []
    for success_step in SUCCESS_STEPS:
        sim = make_task(task, SimOptions(num_envs=4, success_step=success_step))
        found.append(evaluate(ExpertActor(get_task(task).require_expert()()), sim, episodes=4))
        sim.close()
    assert found[0].success.any() and np.array_equal(found[0].success, found[1].success)


def test_without_success_only_returns_are_reported(make_sim, make_policy):
    result = evaluate(make_policy(), make_sim(4, has_success=False), episodes=5)
    assert result.success is None and result.success_interval() is None
    assert result.summary()["success"] is None and np.isfinite(result.summary()["return_mean"])


def test_cost_counts_network_calls_per_action(make_sim, make_policy):
    cost = evaluate(make_policy(action_horizon=3), make_sim(4, momentary=True), episodes=6).cost
    assert cost.network_calls == 5
    assert 5 / 3 <= cost.network_calls_per_action < 5 / 3 * 1.2  # the last chunk of an episode is cut short
    assert 0 < cost.latency_ms <= cost.latency_p95_ms and cost.steps_per_s > 0


def test_result_survives_json_bit_for_bit(make_sim, make_policy):
    result = evaluate(make_policy(), make_sim(4), episodes=6)
    again = EvalResult.from_dict(json.loads(json.dumps(result.to_dict())))
    assert same_episodes(result, again) and again.cost == result.cost and again.summary() == result.summary()


def test_scattered_seeds_run_one_per_environment(make_sim, make_policy):
    policy = make_policy()
    scattered = run_episodes(policy, make_sim(3), [61, 50, 55])
    whole = evaluate(policy, make_sim(2), episodes=12, seed=50)
    assert scattered.returns.tolist() == whole.returns[[11, 0, 5]].tolist()


def test_random_actor_does_not_depend_on_the_number_of_environments(make_sim):
    assert same_episodes(*(evaluate(RandomActor(), make_sim(n), episodes=9) for n in (2, 5)))


def test_incompatible_policy_is_refused(make_sim, make_policy):
    policy = make_policy()
    sim = make_sim(1)
    object.__setattr__(policy.spec, "observation", {"state": (8,)})
    with pytest.raises(UserError, match=r"shape \(8,\), but fake/point provides \(7,\)"):
        evaluate(policy, sim)
    object.__setattr__(policy.spec, "observation", {"image.front": (3, 8, 8)})
    with pytest.raises(UserError, match=r"needs observation 'image.front', but fake/point provides state"):
        evaluate(policy, sim)


def test_non_finite_action_is_reported_with_its_episode(make_sim, make_policy):
    policy = make_policy()
    torch.nn.init.constant_(policy.net[0].weight, float("nan"))
    with pytest.raises(UserError, match="non-finite action in episode 10000 at decision 0"):
        evaluate(policy, make_sim(2))


def test_zero_episodes_are_refused(make_sim, make_policy):
    with pytest.raises(UserError, match="episodes >= 1"):
        evaluate(make_policy(), make_sim(1), episodes=0)
