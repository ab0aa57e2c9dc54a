"""Tests of advantage parts at their thresholds, against hand-computed values."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from robopolicy.contrib.text_catalogue.advantage_sources import WindowGae
from robopolicy.contrib.text_catalogue.bonuses import FutureClarity
from robopolicy.contrib.text_catalogue.comparisons import BetaScale, ImprovementBaseline, MinGroupSize
from robopolicy.contrib.text_catalogue.factors import AttentionRhythm, LongestSuccess, OutcomeEntropy
from robopolicy.contrib.text_catalogue.probe_baselines import ContextBaseline, ProbeBaseline
from robopolicy.contrib.text_catalogue.smooth import SmoothStandardize
from robopolicy.core.advantage import Scope
from robopolicy.core.decisions import Decisions, by_group, by_trajectory
from robopolicy.core.recipe import Recipe
from robopolicy.recipe_files import read_recipe


def episodes(reward: list[float], group: list[int], length: int = 1, **fields: object) -> Decisions:
    """Rollouts of one row each, with their outcome at the first decision."""
    placed = torch.zeros(len(reward), length, dtype=torch.float64)
    placed[:, 0] = torch.tensor(reward)
    return Decisions(torch.zeros_like(placed), reward=placed, group=torch.tensor(group), **fields)  # pyright: ignore


def double(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_longest_success_excludes_overlong_failures() -> None:
    mask = torch.arange(4) < torch.tensor([3, 4, 2, 2, 2]).unsqueeze(1)
    case = episodes([1, 0, 0, 1, 0], [0, 0, 0, 1, 1], 4, mask=mask)
    assert LongestSuccess(low=0.1, overlong=4.0)(case)[:, 0].tolist() == pytest.approx(
        [1.0] * 3 + [0.1] * 2
    )  # 3 > 2, not 2 > 2


def test_forced_local_weights_vanish_where_rewards_tie() -> None:
    """COPO (Han et al. 2025): this also holds if the answers differ; the complementary weight is then 1."""
    case = episodes([1, 1, 1, 0], [0, 0, 1, 1], extra={"answer": torch.arange(4)})  # 1 bit in both groups
    local = 1.0 / (1.0 + math.exp(-20.0 * 0.5))
    assert_close(OutcomeEntropy()(case)[:, 0], double(*[local] * 4))
    assert_close(OutcomeEntropy(forced=True)(case)[:, 0], double(0.0, 0.0, local, local))
    assert_close(OutcomeEntropy(forced=True, complement=True)(case)[:, 0], double(1.0, 1.0, 1 - local, 1 - local))


def test_anchors_of_low_distance_share_their_bonus_with_the_peak_before() -> None:
    """Attention rhythm (Li et al. 2025): the peak before the anchor gets half of the bonus."""
    distance, attention = double(9.0, 2.0, 1.0, 2.0, 3.0), double(0.0, 0.0, 1.0, 0.0, 0.0)
    case = Decisions(torch.zeros(1, 5), extra={"waad": distance[None], "fai": attention[None]})
    assert AttentionRhythm("coupled", gain=1.0, share=0.2)(case).tolist() == [[1.5, 1.0, 1.5, 1.0, 1.0]]


def test_units_before_a_low_entropy_unit_get_the_bonus() -> None:
    """EMPG (Wang et al. 2025): the bonus depends on the next unit, and the last unit gets none."""
    case = Decisions(torch.zeros(1, 3), entropy=double(0.0, 1.0, 0.5)[None], unit=torch.arange(3)[None])
    assert_close(FutureClarity(scale=1.0)(case), double(math.exp(-1.0), math.exp(-0.5), 0.0)[None].to(torch.float64))


def test_improvement_baseline_stores_a_window_of_batches() -> None:
    stage, fresh = ImprovementBaseline(window=2), {"source": torch.zeros(2, dtype=torch.long)}
    for reward in (0.0, 0.5, 1.0):
        stage.observe(episodes([reward, reward], [0, 0], **fresh))
    assert stage.rewards == [0.5, 1.0]
    assert stage.gain(episodes([1.0, 1.0], [0, 0], **fresh)) == pytest.approx(1.0)  # one deviation above the mean
    replayed = episodes([1.0, 0.0, 1.0, 1.0], [0] * 4, source=torch.tensor([1, 1, 0, 0]))
    limited = ImprovementBaseline(window=2, limit=0.75)
    limited.rewards = [0.5, 1.0]
    assert_close(limited(double(0.5, -0.5, 0.2, 0.2)[:, None], replayed)[:, 0], double(0.75, -0.75, 0.2, 0.2))


def test_the_minimum_group_size_is_five() -> None:
    """CM2 (Zhang et al. 2026)."""
    case = episodes([0.0] * 9, [0] * 5 + [1] * 4)
    kept = MinGroupSize(Scope(by_group, reduce_over=by_trajectory))(torch.ones(9, 1), case)
    assert kept[:, 0].tolist() == [1.0] * 5 + [0.0] * 4


def test_beta_scale_divides_by_the_reward_range() -> None:
    """BNPO (Xiao et al. 2025): with a uniform density only the division by the range remains."""
    case = episodes([3, -1, 3, -1, 3, 3, 3, 3, -1, -1, -1, -1], [0] * 4 + [1] * 4 + [2] * 4)
    assert_close(BetaScale(-1.0, 3.0)(torch.ones(12, 1, dtype=torch.float64), case)[:4, 0], double(*[0.25] * 4))


def test_the_context_contains_only_the_latest_outcomes() -> None:
    """V0 (Zhang et al. 2026): the prior of 1/2 counts as one outcome."""
    features = torch.zeros(3, 2, dtype=torch.float64)
    stage = ContextBaseline(size=2)
    stage.observe(episodes([1, 0, 0], [0, 1, 2], extra={"prompt_features": features}))
    assert_close(stage.predict(features), double(*[0.5 / 3.0] * 3))


def test_a_single_rollout_uses_its_own_reward_as_probe_target() -> None:
    stage = ProbeBaseline()
    stage.observe(episodes([1.0, 0.25, 0.75], [0, 1, 1], extra={"features": torch.eye(3, dtype=torch.float64)}))
    assert stage.probe.targets is not None and stage.probe.targets.tolist() == [1.0, 0.75, 0.25]


def test_the_values_of_unfinished_windows_are_not_fitted() -> None:
    """T-PPO (Fan et al. 2025)."""
    value = torch.full((2, 2), 0.5, dtype=torch.float64)
    case = episodes([0.0, 0.0], [0, 1], 2, value=value, extra={"finished": torch.tensor([True, False])})
    targets, fitted = WindowGae()(case), WindowGae().targets(case)
    assert_close(targets, torch.tensor([[-0.5, -0.5], [0.0, 0.0]], dtype=torch.float64))  # unfinished: advantage 0
    assert_close(fitted[0][0], double(0.0, 0.0))
    assert fitted[1].tolist() == [[True, True], [False, False]]


def test_steps_shared_by_successes_and_failures_have_zero_advantage() -> None:
    """SALT (Li et al. 2025): both rollouts share the first step and then differ."""
    case = Decisions(
        torch.zeros(2, 2, dtype=torch.float64),
        reward=torch.tensor([[0.0, 1.0], [0.0, 0.0]], dtype=torch.float64),
        group=torch.zeros(2, dtype=torch.long),
        unit=torch.arange(2).expand(2, 2),
        extra={"observation": torch.tensor([[0, 1], [0, 1]]), "action": torch.tensor([[3, 4], [3, 5]])},
    )
    own = 0.5 / math.sqrt(0.5)
    found = Recipe.from_dict(read_recipe("salt")).advantage(case)
    assert_close(found, torch.tensor([[0.0, own], [0.0, -own]], dtype=torch.float64), atol=1e-5, rtol=0)


def test_rankings_use_a_leave_one_out_baseline() -> None:
    """PG-RANK (Gao et al. 2023)."""
    case = episodes([1.0, 0.0, 0.0, 0.5], [0, 0, 0, 0])
    found = Recipe.from_dict(read_recipe("pg_rank")).advantage(case)[:, 0]
    assert_close(found, double(1.0 - 0.5 / 3.0, -0.5, -0.5, 0.5 - 1.0 / 3.0))


def test_a_tied_group_has_a_small_advantage_from_earlier_visits() -> None:
    """DCPO (Yang et al. 2025): on visit i the advantage is 1 / i of the standardised reward over all visits."""
    stage, mixed = SmoothStandardize(), episodes([1.0, 0.0], [0, 0])
    stage.observe(mixed)
    stage.observe(mixed)
    whole = (1.0 - 4.0 / 6.0) / math.sqrt(6.0 * (2.0 / 3.0) * (1.0 / 3.0) / 5.0)  # four successes in six rollouts
    found = stage(torch.ones(2, 1, dtype=torch.float64), episodes([1.0, 1.0], [0, 0]))
    assert_close(found[:, 0], double(whole / 3.0, whole / 3.0), atol=1e-5, rtol=0)
