"""Rewards compared with their written formulas, and the limits in which they equal simpler rewards."""

import math

import pytest
import torch
from secret_env import SecretSequenceEnv
from torch.testing import assert_close

from robopolicy.contrib.text_catalogue.reward_ranks import ParetoRank, Rank, RankFailures
from robopolicy.contrib.text_catalogue.reward_terms import (
    ChosenCriterion,
    Debate,
    Gated,
    Minimum,
    Refinement,
    Sum,
    ZeroSum,
)
from robopolicy.contrib.text_catalogue.reward_weights import GradientWeights, HypervolumeFactor, ToolCalls, hypervolume
from robopolicy.core.gradients import influence
from robopolicy.text.rollouts.collector import REWARDS, RewardChain, collect_outcomes
from robopolicy.text.rollouts.protocols import Outcomes


def outcomes(reward, key=None, **metrics) -> Outcomes:
    def column(values):
        return torch.tensor(values, dtype=torch.float64)

    key = torch.tensor(key if key is not None else [0] * len(reward))
    return Outcomes(key, column(reward), {name: column(values) for name, values in metrics.items()})


def gives(part, expected, *args, **kwargs) -> None:
    assert_close(part(outcomes(*args, **kwargs)), torch.tensor(expected, dtype=torch.float64))


def test_sum_reward_is_the_weighted_sum_of_metrics():
    """Limit of A2FM (Chen et al. 2025): a cost of 0 leaves the reward unchanged."""
    gives(Sum({"reward": 1.0, "mode": 0.0}), [1.0, 0.0], [1.0, 0.0], mode=[3.0, 2.0])
    gives(
        Sum({"reward": 1.0, "mode": -0.1, "format": 0.5}), [1.2, -0.2], [1.0, 0.0], mode=[3.0, 2.0], format=[1.0, 0.0]
    )


def test_coach_reward_is_the_improvement_of_the_next_episode():
    """Limit of Retroformer (Yao et al. 2023): with a constant return the coach has reward 0."""
    coach = Sum({"refined": 1.0, "first": -1.0})
    gives(coach, [0.0, 0.0, 1.0], [0.5, 0.0, 0.0], first=[0.5, 0.0, 0.0], refined=[0.5, 0.0, 1.0])


def test_gated_levels_count_after_the_earlier_levels_pass():
    """ChatShopBuddy: later levels count only if the earlier ones pass; one level is the plain reward."""
    gives(Gated(["reward"], [1.0]), [1.0, 0.3], [1.0, 0.3])
    part = Gated(["safe", "reward"], [1.0, 2.0], threshold=0.5)
    gives(part, [3.0, 0.0, 1.0, 0.4, 2.5], [1.0, 1.0, 0.0, 1.0, 1.0], safe=[1.0, 0.0, 1.0, 0.4, 0.5])
    three = Gated(["a", "b", "reward"], [1.0, 1.0, 1.0])
    gives(three, [0.2, 3.0], [1.0, 1.0], a=[0.2, 1.0], b=[1.0, 1.0])  # a passed second level does not reopen the first
    with pytest.raises(ValueError, match="one weight per level"):
        Gated(["a"], [])


def test_chosen_criterion_reward_is_the_score_of_the_selected_criterion():
    """Limit of RLAC (Wu et al. 2025): a perfect critic gives the minimum, a uniform one the mean of the checklist."""
    lists = {"a": [1.0, 1.0], "b": [0.0, 1.0], "c": [1.0, 0.5]}
    gives(Minimum(["a", "b", "c"]), [0.0, 0.5], [0.0, 0.0], **lists)
    part = ChosenCriterion(["a", "b", "c"])
    gives(part, [0.0, 0.5], [0.0, 0.0], **lists, criterion=[1, 2])
    every = torch.stack([part(outcomes([0.0, 0.0], **lists, criterion=[c, c])) for c in range(3)]).mean(0)
    assert_close(every, torch.tensor([2 / 3, 2.5 / 3], dtype=torch.float64))


def test_zero_sum_rewards_of_both_roles_have_a_fixed_sum():
    """RLAC (Wu et al. 2025) and SPC (Chen et al. 2025): the rewards of both roles have a fixed sum."""
    gives(ZeroSum(total=1.0), [0.75, 0.25], [0.75, 0.75], role=[0, 1])
    gives(ZeroSum(total=0.0), [1.0, -1.0], [1.0, 1.0], role=[0, 1])


def test_debate_reward_mixes_reward_and_verdict_by_its_share():
    """Limit of debate rewards (Sukovic and Radanovic 2024): share 0 gives the environment reward."""
    gives(Debate(share=0.0), [1.0, 0.0], [1.0, 0.0], verdict=[0.0, 1.0])
    gives(Debate(share=0.25), [0.75, 0.25], [1.0, 0.0], verdict=[0.0, 1.0])


def test_refinement_reward_switches_from_verdict_to_refinement_success():
    """Limit of Critique-RL: stage one gives +-1 for the verdict; stage two gives the refinement plus 0.2, or -1."""
    first = Refinement(first=math.inf)
    for _ in range(3):
        gives(first, [1.0, 1.0, -1.0], [0.0] * 3, verdict=[1, 1, 0], refined=[1.0, 0.0, 1.0])
    both = Refinement(first=1)
    gives(both, [1.0, 1.0, -1.0], [0.0] * 3, verdict=[1, 1, 0], refined=[1.0, 0.0, 1.0])
    gives(both, [1.2, 0.2, -1.0], [0.0] * 3, verdict=[1, 1, 0], refined=[1.0, 0.0, 1.0])


def test_tool_call_reward_decreases_with_calls_above_the_fewest():
    """Limit of OTC: the fewest calls give 1, unlimited calls 0, a failure 0; the part stores the minimum."""
    part = ToolCalls(scale=4.0)
    gives(part, [1.0, math.sin(2 * 2 * 4 / 6 * math.pi / 4), 0.0], [1.0, 1.0, 0.0], calls=[2, 4, 2])
    gives(part, [math.sin(2 * 2 * 3 / 5 * math.pi / 4)], [1.0], calls=[3])
    gives(part, [1.0], [1.0], [7], calls=[0])
    gives(part, [math.cos(3 * math.pi / 10), 1.0], [1.0, 1.0], [7, 7], calls=[3, 0])
    assert float(part(outcomes([1.0], calls=[1e9]))) < 1e-6
    assert float(part(outcomes([1.0], [7], calls=[1e9]))) < 1e-6
    again = ToolCalls(scale=4.0)
    again.load_state_dict(part.state_dict())
    gives(again, [1.0], [1.0], calls=[2])


def test_failures_do_not_lower_the_minimum_of_calls():
    gives(ToolCalls(), [1.0, 0.0], [1.0, 0.0], calls=[4, 1])
    gives(ToolCalls(weight=2.0), [2.0], [1.0], calls=[3])
    gives(ToolCalls(), [math.cos(3 * math.pi / 10), 1.0], [1.0, 1.0], calls=[3, 0])  # c = 4


def test_the_first_stage_of_refinements_lasts_200_batches():
    part = Refinement()
    part.load_state_dict({"batches": 199})
    gives(part, [1.0], [0.0], verdict=[1], refined=[0.5])
    gives(part, [0.7], [0.0], verdict=[1], refined=[0.5])


def test_rank_reward_is_computed_within_groups():
    gives(Rank(), [1.0, 0.0, 0.5, 0.5], [9.0, 3.0, 5.0, 7.0], [0, 0, 0, 1])
    gives(Rank(), [0.75, 0.75, 0.0], [1.0, 1.0, 0.0])
    gives(Rank("judge", where="open"), [1.0, 0.0, 0.3], [0.1, 0.2, 0.3], [0, 0, 1], judge=[5, 4, 9], open=[1, 1, 0])


def test_only_selected_trajectories_are_ranked():
    gives(Rank("judge", where="open"), [0.0, 1.0, 9.0], [0.0, 0.0, 9.0], judge=[1, 2, 3], open=[1, 1, 0])
    rewards = torch.tensor([0.2, 0.4], dtype=torch.float64)
    given = Outcomes(torch.zeros(2, dtype=torch.int64), rewards, {"open": torch.ones(2)})
    Rank(where="open")(given)
    assert rewards.tolist() == [0.2, 0.4]  # the input is unchanged


def test_verified_tasks_keep_their_rewards():
    """Limit of URPO (Lu et al. 2025): without open tasks nothing is ranked."""
    gives(Rank("judge", where="open"), [0.1, 0.7], [0.1, 0.7], judge=[5, 4], open=[0, 0])


def test_failures_are_rewarded_by_rank_and_successes_keep_their_reward():
    """Limit of R3 (Jiang et al. 2026): a share of 0 changes nothing; successes always keep their reward."""
    gives(RankFailures(share=0.0), [1.0, 0.0, 0.0], [1.0, 0.0, 0.0], progress=[0, 1, 2])
    gives(RankFailures(), [1.0, 0.0, 0.1], [1.0, 0.0, 0.0], progress=[9, 1, 2])
    gives(RankFailures(), [0.51, 0.6, 0.25], [0.51, 0.5, 0.25], progress=[9, 2, 1])  # a reward of 0.5 is a failure


def test_pareto_rank_equals_rank_for_one_objective_and_ties_incomparable_rows():
    """Limit of FATE (Yin et al. 2026): one objective gives the rank; incomparable rollouts tie."""
    values = [3.0, 1.0, 2.0, 2.0]
    gives(ParetoRank(["a"]), Rank("a")(outcomes([0.0] * 4, a=values)).tolist(), [0.0] * 4, a=values)
    gives(ParetoRank(["a", "b"]), [1.0, 1.0, 0.0], [0.0] * 3, a=[2.0, 1.0, 1.0], b=[1.0, 2.0, 0.5])


def test_hypervolumes():
    assert hypervolume([(2.0,), (3.0,)], (1.0,)) == 2.0
    assert hypervolume([(1.0, 2.0), (2.0, 1.0)], (0.0, 0.0)) == 3.0
    assert hypervolume([(1.0, 1.0, 1.0), (0.5, 0.5, 3.0)], (0.0, 0.0, 0.0)) == pytest.approx(1.5)
    assert hypervolume([(2.0, -1.0)], (0.0, 0.0)) == 0.0


def test_batches_that_extend_the_pareto_front_increase_their_reward():
    """Hypervolume weighting (Lu et al. 2025)."""
    part = HypervolumeFactor(["a", "b"], [0.0, 0.0])
    gives(part, [0.5 + 1.5 * math.tanh(1.0)] * 2, [1.0, 1.0], a=[0.0, 2.0], b=[1.5, 0.5])  # their mean is (1, 1)
    gives(part, [0.5], [1.0], a=[0.5], b=[0.5])
    assert part.front == [(1.0, 1.0)]
    gives(part, [0.5 + 1.5 * math.tanh(1.0)], [1.0], a=[2.0], b=[1.0])
    assert part.front == [(2.0, 1.0)]
    gives(part, [0.5 + 1.5 * math.tanh(1.0)], [1.0], a=[1.0], b=[2.0])
    assert part.front == [(2.0, 1.0), (1.0, 2.0)]
    with pytest.raises(ValueError, match="one reference per metric"):
        HypervolumeFactor(["a"], [0.0, 0.0])


def test_gradient_weights_increase_for_aligned_objectives():
    """A rate of 0 keeps the weights; they stay on the simplex; the aligned objective gains, the opposed one loses."""
    gradients = torch.tensor([[1.0, 0.0], [0.0, 2.0], [-1.0, 0.0]])
    still = GradientWeights(["a", "b", "c"], rate=0.0)
    still.set_influence(influence(gradients))
    assert_close(still.weight, torch.full((3,), 1 / 3, dtype=torch.float64))
    part = GradientWeights(["a", "b", "c"], rate=0.5, regularization=2.0)
    for _ in range(20):
        part.set_influence(influence(gradients))
        assert_close(part.weight.sum(), torch.tensor(1.0, dtype=torch.float64))
    assert int(part.weight.argmax()) == 1
    once = GradientWeights(["a", "b"], rate=0.5, regularization=2.0)
    once.set_influence(influence(torch.tensor([[1.0], [2.0]])))
    assert_close(once.weight, torch.softmax(torch.tensor([0.75, 1.5], dtype=torch.float64), 0))
    gives(once, [float(once.weight @ torch.tensor([3.0, 4.0]).double())], [0.0], a=[3.0], b=[4.0])


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("refinement", {"first": 2}),
        ("tool_calls", {}),
        ("hypervolume", {"metrics": ["calls"], "reference": [0.0]}),
        ("gradient_weights", {"objectives": ["calls", "refined"]}),
    ],
)
def test_state_resumes(name, settings):
    case = outcomes([1.0, 1.0, 0.0], verdict=[1, 0, 1], refined=[1.0, 0.0, 0.0], calls=[3, 2, 1])
    part, again = REWARDS[name](**settings), REWARDS[name](**settings)
    for _ in range(2):
        part(case)
    again.load_state_dict(part.state_dict())
    assert_close(again(case), part(case))


def test_reward_chain_passes_the_influence_to_each_part():
    first, second = GradientWeights(["a", "b"]), GradientWeights(["c"])
    composed = RewardChain([first, Sum({"reward": 1.0}), second])
    assert composed.weighted_objectives == ("a", "b", "c")
    assert RewardChain([ParetoRank(["a", "b"])]).weighted_objectives == ()  # ranks by its objectives without gradients
    composed.set_influence(torch.tensor([1.0, 0.0, 5.0]))
    assert_close(first.weight, torch.softmax(torch.tensor([1.0, 0.0], dtype=torch.float64), 0))
    assert_close(second.weight, torch.ones(1, dtype=torch.float64))


def test_rewards_compose_from_left_to_right():
    composed = RewardChain([Sum({"reward": 2.0}), Debate(share=0.5)])
    gives(composed, [1.5, 0.0], [1.0, 0.0], verdict=[1.0, 0.0])
    gives(RewardChain([]), [1.0, 0.0], [1.0, 0.0])


def test_collected_outcomes_and_the_error_for_a_missing_metric():
    env = SecretSequenceEnv()
    trajectories = env.rollout(env.tasks())
    made = collect_outcomes(trajectories)
    assert made.key.tolist() == [0, 1, 2, 3] and {"share", "length"} <= set(made.metrics)
    with pytest.raises(
        ValueError, match="needs the metric 'questions'; the environment measures: advantage, analysis, brevity"
    ):
        ToolCalls("questions")(made)
