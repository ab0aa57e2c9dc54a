"""Tests of interventions on groups without a signal: changed rollouts, replacements and their log-probabilities."""

from dataclasses import replace

import pytest
import torch
from intervention_rules import check_leaves_solved_groups_alone, check_memory_resumes, failing, make, with_rewards
from secret_env import SecretSequenceEnv
from theme_names import names_of
from torch.testing import assert_close

from robopolicy.contrib.text_catalogue.interventions import (
    Demonstration,
    Drop,
    GradedHints,
    Hint,
    ReplayTrajectories,
    SampleBuffer,
    SelfCorrect,
    Teacher,
    failed,
)
from robopolicy.text.rollouts.collector import INTERVENTIONS
from robopolicy.text.rollouts.protocols import HINTED, POLICY, REPAIRED, REPLAYED, TEACHER, Task, rewards_of
from robopolicy.text.rollouts.trajectories import stack


@pytest.fixture(params=["tokens", "chain"])
def env(request) -> SecretSequenceEnv:
    return SecretSequenceEnv(request.param)


@pytest.mark.parametrize("name", names_of(INTERVENTIONS, "text_catalogue"))
def test_solved_groups_are_unchanged(name):
    check_leaves_solved_groups_alone(name)


@pytest.mark.parametrize("name", ["hint", "graded_hints", "teacher", "demonstration", "replay"])
def test_interventions_apply_to_failed_groups(name):
    assert make(name).applies(torch.zeros(4))


@pytest.mark.parametrize("name", names_of(INTERVENTIONS, "text_catalogue"))
def test_state_resumes(env, name):
    check_memory_resumes(env, name)


def test_drop_removes_failed_groups(env):
    assert Drop().apply(failing(env), env) == []


def test_hint_share_increases_until_a_rollout_succeeds(env):
    """GHPO (Liu et al. 2025) trains on the hinted task, with the log-probabilities under the hint."""
    group = Hint(shares=(0.0, 0.5, 1.0)).apply(failing(env), env)
    assert len(group) == 4 and {trajectory.source for trajectory in group} == {HINTED}
    assert {trajectory.task.context["share"] for trajectory in group} == {1.0}
    assert_close(stack(group).logp_old, env.scored(group).detach())  # ratio 1 only under the stored conditioning
    plain = torch.cat([env.score(trajectory, Task(0)) for trajectory in group])
    assert bool((plain < stack(group).logp_old - 1e-3).any())


def test_smallest_solving_hint_replaces_one_failed_rollout(env):
    """Limit of Scaf-GRPO (Zhang et al. 2025): at most one rollout is replaced."""
    group = failing(env)
    after = GradedHints(kinds=["plan", "solution"], levels=2, warmup=0).apply(group, env)
    changed = [place for place, (a, b) in enumerate(zip(after, group, strict=True)) if a is not b]
    assert len(changed) == 1 and after[changed[0]].success and after[changed[0]].source == HINTED
    tried = [(task.context["kind"], task.context["share"]) for task in env.completed if task.context]
    assert tried == [("plan", 0.5), ("plan", 1.0), ("solution", 0.5), ("solution", 1.0)][: len(tried)]


def test_relabelled_rollouts_are_scored_without_the_hint(env):
    """Pitfall h: logp_old excludes the hint, and logp_behaviour includes it."""
    (trajectory, *_) = GradedHints(kinds=["solution"], levels=1, warmup=0, relabel=True).apply(failing(env), env)
    assert trajectory.task.context is None
    assert_close(trajectory.decisions.logp_old, env.score(trajectory).detach())
    assert float(trajectory.decisions.logp_behaviour.sum()) > float(trajectory.decisions.logp_old.sum()) + 1.0


def test_graded_hints_wait_for_the_warmup():
    part = GradedHints(warmup=2)
    assert not part.applies(torch.zeros(4))
    part.observe([])
    part.observe([])
    assert part.applies(torch.zeros(4))


def test_teacher_solutions_replace_failed_rollouts(env):
    """AMPO: teacher rows are tagged, succeed, and have log-probability 0, so their ratio is the policy probability."""
    group = failing(env)
    after = Teacher(count=2).apply(group, env)
    assert [trajectory.source for trajectory in after] == [TEACHER, POLICY, POLICY, POLICY]  # it has one solution
    assert after[1:] == group[1:] and after[0].success
    assert float(after[0].decisions.logp_old.abs().sum()) == 0.0


def test_gate_selects_imitation_or_reinforcement(env):
    """Limit of HPT (Lv et al. 2025): gate -1 is RL, gate G is imitation."""
    rewards = torch.tensor([1.0, 0.0, 1.0, 0.0])
    assert not Demonstration(gate=-1).applies(torch.zeros(4)) and not Demonstration(gate=1).applies(rewards)
    assert Demonstration(gate=2).applies(rewards) and Demonstration(gate=4).applies(torch.ones(4))
    assert [trajectory.source for trajectory in Demonstration().apply(failing(env), env)] == [TEACHER]


def test_repaired_rollouts_replace_failures(env):
    group = with_rewards(failing(env), 1.0, 0.0, 0.0, 0.0)
    after = SelfCorrect(count=2).apply(group, env)
    assert after[0] is group[0] and after[3] is group[3]
    repaired = [trajectory for trajectory in after if trajectory.source == REPAIRED]
    assert repaired and all(
        trajectory.success and trajectory.task.context["kind"] == "repair" for trajectory in repaired
    )


def test_self_correction_without_improvement_leaves_the_group_unchanged(env):
    """Limit of Search-R2 (He et al. 2026): repairs without an improvement change nothing."""
    group = failing(env)
    env.repair = lambda trajectory: Task(trajectory.task.key)
    assert SelfCorrect(count=4).apply(group, env) == group


def test_repairs_may_improve_one_objective_at_the_cost_of_another(env):
    """FATE (Yin et al. 2026): a repair replaces a failure if it improves an objective, even at the cost of another."""
    part = SelfCorrect(objectives=["safe", "share"])
    base = replace(failing(env)[0], metrics={"safe": 0.5, "share": 0.5})
    for safe, share, better in ((1.0, 0.5, True), (1.0, 0.0, True), (0.5, 0.5, False), (0.0, 0.5, False)):
        assert part._better(replace(base, metrics={"safe": safe, "share": share}), base) == better
    with pytest.raises(ValueError, match="intervention needs the metric 'safe'; the environment measures: share"):
        part._better(base, replace(base, metrics={"share": 0.5}))


def test_empty_replay_buffers_leave_the_group_unchanged(env):
    """Limit of ARPO for GUIs (Lu et al. 2025): with an empty buffer it is GRPO."""
    group = failing(env)
    assert ReplayTrajectories().apply(group, env) == group
    assert SampleBuffer().apply(group, env) == group


def test_replayed_rollouts_keep_their_behaviour_log_probabilities(env):
    """Pitfall c: the denominator is the behaviour log-probability, however far the policy has moved."""
    env.know(0)
    success = env.rollout([Task(0)])[0]
    part = ReplayTrajectories(size=2)
    part.observe([[success]])
    group = failing(env)
    after = part.apply(group, env)
    assert [trajectory.source for trajectory in after] == [REPLAYED, POLICY, POLICY, POLICY] and after[1:] == group[1:]
    assert torch.equal(after[0].decisions.logp_old, success.decisions.logp_old)
    assert float(env.score(after[0]).detach().sum()) < float(after[0].decisions.logp_old.sum()) - 1.0
    part.observe([after])
    assert len(part._stored[0]) == 1, "a replay is not stored again"
    assert part.apply(env.rollout([Task(1)] * 2), env)[0].source == POLICY, "successes belong to their task"


def test_the_buffer_is_first_in_first_out(env):
    part, stored = ReplayTrajectories(size=2), []
    for _ in range(3):
        stored.append(replace(env.rollout([Task(0)])[0], reward=1.0))
        part.observe([stored[-1:]])
    assert list(part._stored[0]) == stored[1:]


def test_latest_success_is_replayed_and_a_restored_buffer_has_its_size(env):
    part, again = ReplayTrajectories(size=2), ReplayTrajectories(size=2)
    completed = [replace(trajectory, reward=1.0) for trajectory in env.rollout([Task(0)] * 4)]
    part.observe([completed[:2]])
    assert part.apply(failing(env), env)[0].decisions is completed[1].decisions
    again.load_state_dict(part.state_dict())
    again.observe([completed[2:]])
    assert [trajectory.decisions for trajectory in again._stored[0]] == [
        trajectory.decisions for trajectory in completed[2:]
    ]


def test_replay_applies_to_groups_with_low_and_nearly_equal_rewards():
    """ARPO for GUIs (Lu et al. 2025): stores rewards above .1; applies below a deviation of .05 and a mean of .2."""
    part = ReplayTrajectories()
    for rewards, needed in (
        ([0.0, 0.0, 0.0, 0.08], True),  # deviation 0.035
        ([0.0, 0.0, 0.0, 0.2], False),  # 0.087
        ([0.3, 0.3, 0.3, 0.3], False),
        ([0.19, 0.19, 0.19, 0.19], True),
    ):
        assert part.applies(torch.tensor(rewards)) == needed
    env = SecretSequenceEnv("tokens")
    trajectories = with_rewards(env.rollout([Task(0)] * 10), 0.1, *[0.11] * 9)
    part.observe([trajectories])
    assert list(part._stored[0]) == trajectories[2:], "eight at most"


def test_sample_buffer_stores_the_latest_groups_and_samples_by_spread():
    env = SecretSequenceEnv("tokens")
    equal, weak, strong = (
        with_rewards(env.rollout([Task(key)] * 2), *rewards)
        for key, rewards in ((1, (1, 1)), (2, (0, 1e-5)), (3, (0, 1)))
    )
    for seed in range(6):
        part = SampleBuffer(size=2, age=9, seed=seed)
        part.observe([strong, weak, strong])
        assert [group for _, group in part._stored] == [weak, strong]
        after = part.apply(equal, env)
        assert [trajectory.task.key for trajectory in after] == [3, 3], "almost surely, by 100000 to 1"
        part.observe([after])
        assert [group for _, group in part._stored] == [weak], "what was replayed is not stored again"


def test_defaults_match_the_catalogue():
    assert Hint().shares == (0.25, 0.5, 0.75)
    assert (GradedHints().levels, GradedHints().warmup, GradedHints().relabel) == (4, 50, False)
    assert (Teacher().count, Demonstration().gate, Demonstration().count) == (2, 0, 1)


def test_count_limits_repairs_and_teacher_rollouts(env):
    group = failing(env)
    requests: list[int] = []
    env.repair = lambda trajectory: requests.append(trajectory.task.key) or Task(trajectory.task.key)
    SelfCorrect(count=2).apply(group, env)
    assert len(requests) == 2
    env.teach = lambda task, count: requests.append(count) or []
    Teacher(count=3).apply(group[:2], env)
    Teacher(count=3).apply(group, env)
    assert requests[2:] == [2, 3]


def test_tied_groups_are_replaced_by_earlier_informative_groups(env):
    """Skywork R1V2: an informative group is replayed once, with its own log-probabilities, unless it is too old."""
    part = SampleBuffer(age=2)
    informative = with_rewards(env.rollout([Task(1)] * 4), 1.0, 0.0, 1.0, 0.0)
    part.observe([informative, with_rewards(env.rollout([Task(2)] * 4), 1.0, 1.0, 1.0, 1.0)])
    tied = failing(env)
    after = part.apply(tied, env)
    assert [trajectory.task.key for trajectory in after] == [1] * 4 and {trajectory.source for trajectory in after} == {
        REPLAYED
    }
    assert_close(rewards_of(after), torch.tensor([1.0, 0.0, 1.0, 0.0], dtype=torch.float64))
    assert torch.equal(stack(after).logp_old, stack(informative).logp_old)
    assert part.apply(tied, env) == tied
    part.observe([informative])
    part.observe([])
    part.observe([])
    assert part.apply(tied, env) == tied, "forgotten"


def test_group_without_a_success_has_failed():
    assert failed(torch.tensor([0.5, 0.0])) and not failed(torch.tensor([0.6, 0.0]))
