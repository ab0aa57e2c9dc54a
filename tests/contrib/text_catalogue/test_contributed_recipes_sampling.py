"""Rollout recipes compared with their written formulas, value and gradient, and their limiting cases.

The tests in tests/rollout cover the rollouts (hints, trees, replays); the tests here cover the losses on their rows.
"""

from __future__ import annotations

import pytest
import torch
from tabular import Tabular, check, check_recipe, ppo, recipe_of, rewards, seq_mean, standardised, tabular
from torch import Tensor
from torch.testing import assert_close

from robopolicy.core.returns import sequence_gae

GRPO = {  # recipe -> lower and upper clip, aggregation, weight of the KL
    "craft_gui": (0.2, 0.2, "sequence_mean", 0.0),
    "arpo_gui": (0.2, 0.3, "token_mean", 0.0),
    "mashost": (0.2, 0.2, "token_mean", 0.0),
    "fate": (0.2, 0.2, "sequence_mean", 0.0),
    "otc": (0.2, 0.2, "sequence_mean", 0.0),
    "a2fm": (0.2, 0.2, "sequence_mean", 0.0),
    "videochat_m1": (0.2, 0.2, "sequence_mean", 0.0),
    "urpo": (0.2, 0.2, "sequence_mean", 0.0),
    "supo": (0.2, 0.2, "token_mean", 0.0),
    "scaf_grpo": (0.2, 0.2, "sequence_mean", 0.0),
    "clpo": (0.2, 0.2, "sequence_mean", 1e-3),
    "gui_critic_r1": (0.2, 0.2, "sequence_mean", 0.0),
    "ghpo": (0.2, 0.2, "sequence_mean", 0.0),
    "sec": (0.2, 0.2, "sequence_mean", 0.0),
    "gradient_weights": (0.2, 0.2, "sequence_mean", 0.0),
    "inspo": (0.2, 0.2, "sequence_mean", 0.0),
    "patho_r1": (0.2, 0.28, "token_mean", 0.0),
    "docthinker": (0.2, 0.2, "sequence_mean", 0.04),
    "xiangqi_r1": (0.2, 0.2, "sequence_mean", 0.0),
    "debate": (0.2, 0.2, "sequence_mean", 0.0),
    "llava_critic_r1": (0.2, 0.2, "sequence_mean", 0.0),
    "arpo_agentic": (0.2, 0.2, "token_mean", 0.0),
    "ssb": (0.2, 0.2, "sequence_mean", 0.0),
    "r3": (0.2, 0.2, "sequence_mean", 0.0),
    "critique_coder": (0.2, 0.2, "sequence_mean", 0.0),
    "search_r2": (0.2, 0.2, "token_mean", 0.0),
}


def mean_of(how: str, losses: Tensor, mask: Tensor) -> Tensor:
    return losses[mask].mean() if how == "token_mean" else seq_mean(losses, mask)


def centred(case: Tabular) -> Tensor:
    """Outcomes (N,) minus the group mean."""
    values, group = rewards(case), case.decisions.require("group")
    return torch.stack([value - values[group == key].mean() for value, key in zip(values, group, strict=True)])


def others(case: Tabular) -> Tensor:
    """Outcomes (N,) minus the mean of the other rows of the group (leave-one-out)."""
    values, group = rewards(case), case.decisions.require("group")
    result = torch.zeros_like(values)
    for row in range(len(values)):
        peers = (group == group[row]) & (torch.arange(len(values)) != row)
        result[row] = values[row] - values[peers].mean()
    return result


def k3(case: Tabular) -> Tensor:
    change = case.logp() - case.decisions.require("logp_ref")
    return torch.expm1(-change) + change


@pytest.mark.parametrize("name", GRPO)
def test_grpo_loss_equals_the_hand_computed_sum(name):
    low, high, how, kl = GRPO[name]

    def formula(case: Tabular) -> Tensor:
        advantage = standardised(rewards(case), case.decisions.require("group"))
        mask = case.decisions.valid()
        loss = mean_of(how, ppo(case, advantage, low, high), mask)
        return loss + kl * mean_of(how, k3(case), mask) if kl else loss

    check_recipe(name, formula)


@pytest.mark.parametrize("name", ["pcl", "daslam"])
def test_pcl_and_daslam_use_centred_policy_gradients_without_scaling(name):
    how, kl = {"pcl": ("token_mean", 0.0), "daslam": ("sequence_mean", 0.1)}[name]

    def formula(case: Tabular) -> Tensor:
        losses = -centred(case)[:, None] * (case.logp() - case.decisions.logp_old) + kl * k3(case)
        return mean_of(how, losses, case.decisions.valid())

    check_recipe(name, formula)


def test_hypervolume_recipe_centres_rewards_without_scaling():
    """Hypervolume weighting uses Dr. GRPO, because a scale would cancel a factor on all rewards."""
    check_recipe("hypervolume", lambda case: seq_mean(ppo(case, centred(case)), case.decisions.valid()))


def test_retroformer_applies_ppo_to_reflections_with_centred_rewards():
    """Retroformer (Yao et al. 2023): PPO on the first unit, the reflection, with rewards centred in the group."""
    check_recipe("retroformer", lambda case: ppo(case, centred(case))[first_units(case)].mean())


def first_units(case: Tabular) -> Tensor:
    """Decisions of the first unit, a reflection or critique; the actor that receives it is not trained."""
    return case.decisions.valid() & (case.decisions.require("unit") == 0)


def test_critique_rl_and_rlac_use_leave_one_out_advantages():
    """Critique-RL (Xi et al. 2025) and RLAC (Wu et al. 2025) use leave-one-out advantages."""

    def critique(case: Tabular) -> Tensor:
        losses = -others(case)[:, None] * (case.logp() - case.decisions.logp_old) + 0.01 * k3(case)
        return seq_mean(losses, first_units(case))

    check_recipe("critique_rl", critique)
    check_recipe("rlac", lambda case: seq_mean(ppo(case, others(case)), case.decisions.valid()))


@pytest.mark.parametrize("name", ["asyncflow", "policy_rollout"])
def test_behaviour_ratio_is_applied_once_as_a_capped_weight(name):
    """AsyncFlow and TriMPI apply old / behaviour once, as a capped weight, and new / old as the ratio."""

    def formula(case: Tabular) -> Tensor:
        d = case.decisions
        weight = (d.logp_old - d.require("logp_behaviour")).exp().clamp(max=2.0)
        return (weight * ppo(case, standardised(rewards(case), d.require("group"))))[d.valid()].mean()

    check_recipe(name, formula)


TAUGHT = torch.tensor([0, 0, 0, 0, 2, 2, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0])


def ampo(case: Tabular) -> Tensor:
    d, chance = case.decisions, case.logp().exp()
    taught = (d.require("source") == 2)[:, None]
    advantage = centred(case)[:, None]
    losses = torch.where(taught, -advantage * chance / (chance + 0.1), ppo(case, advantage[:, 0]))
    return losses[d.valid()].mean() - 1e-3 * case.entropy()[d.valid()].mean()


def test_ampo_teacher_rows_use_the_policy_probability_instead_of_a_ratio():
    """AMPO averages one loss over all rows; teacher rows use the policy probability instead of a ratio."""
    check_recipe("ampo", ampo, source=TAUGHT)


def test_ampo_without_teacher_rows_equals_unscaled_grpo():
    """Limit of AMPO (Yuan et al. 2025): without teacher rows it equals GRPO without scale."""
    recipe = recipe_of("ampo", objective=None)
    check(recipe, tabular(), ampo)


def test_ampo_teacher_rows_are_never_clipped():
    """Limit of AMPO: teacher rows keep their gradient at any distance between the policy and the recorded logp."""
    case = tabular(source=TAUGHT)
    away = case.decisions.with_fields(logp_old=torch.where(TAUGHT[:, None] == 2, -9.0, case.decisions.logp_old))
    recipe, advantage = recipe_of("ampo"), torch.ones(16, 1, dtype=torch.float64)
    logp = case.logp().detach().requires_grad_()
    found = [
        torch.autograd.grad(recipe.loss(d, advantage, logp, case.entropy())[0], logp)[0] for d in (case.decisions, away)
    ]
    rows = TAUGHT == 2
    assert_close(found[0][rows], found[1][rows])
    assert bool((found[1][rows][case.decisions.valid()[rows]] < 0).all())


def test_hila_imitates_expert_rows_and_excludes_them_from_group_statistics():
    """HILA (Yang et al. 2026): rewards of experts do not enter the group statistics."""

    def formula(case: Tabular) -> Tensor:
        d, own = case.decisions, (case.decisions.require("source") == 0)[:, None]
        rows, advantage = own[:, 0], torch.zeros(16, dtype=torch.float64)
        advantage[rows] = standardised(rewards(case)[rows], d.require("group")[rows])
        losses = ppo(case, advantage) * own
        return seq_mean(losses, d.valid()) - case.logp()[d.valid() & ~own].mean()

    check_recipe("hila", formula, source=TAUGHT)
    solved = torch.zeros(16, dtype=torch.long).index_fill(0, torch.tensor([0, 3, 12]), 2)  # expert rows have reward 1
    check_recipe("hila", formula, source=solved)


def test_spc_equals_sequence_ratio_ppo_with_kl_and_imitation_of_the_best():
    """SPC (Chen et al. 2025): the ratio of a row is exp of the mean log-ratio to the recorded log-probabilities."""

    def formula(case: Tabular) -> Tensor:
        d, mask, values = case.decisions, case.decisions.valid(), rewards(case)
        change = case.logp() - d.logp_old
        ratio = torch.stack([row[keep].mean() for row, keep in zip(change, mask, strict=True)]).exp()[:, None]
        advantage = values[:, None]
        losses = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).expand(mask.shape)
        best = torch.zeros_like(values, dtype=torch.bool)
        for key in d.require("group").unique():
            rows = d.require("group") == key
            best[rows] = (values[rows] == values[rows].max()) & (values[rows].max() > values[rows].mean())
        imitation = -case.logp()[mask & best[:, None]].mean()
        return seq_mean(losses, mask) + 0.1 * seq_mean(k3(case), mask) + 0.15 * imitation

    check_recipe("spc", formula)


def test_critic_v_uses_the_dpo_objective():
    """Critic-V (Zhang et al. 2024) has the loss of the baseline `dpo`."""
    critic_v, dpo = recipe_of("critic_v"), recipe_of("dpo")
    assert type(critic_v.objective) is type(dpo.objective) and critic_v.estimator is None is dpo.estimator


def test_adhint_standardises_hinted_and_plain_rows_separately():
    """ADHint (Zhang et al. 2025) standardises rows with and without hints separately; without hints it is GRPO."""

    def formula(case: Tabular) -> Tensor:
        d = case.decisions
        advantage = standardised(rewards(case), d.require("group") * 10 + d.require("source"))
        return seq_mean(ppo(case, advantage), d.valid())

    check_recipe("adhint", formula)
    check_recipe("adhint", formula, source=torch.tensor([0, 0, 3, 3] * 4))


def test_agentflow_standardises_the_final_reward_over_turn_rows():
    """AgentFlow (Li et al. 2025) computes statistics over rows, so long rollouts weigh more in their group."""
    trajectory = torch.tensor([0, 0, 0, 1, 2, 2, 3, 3, 4, 5, 6, 7, 8, 8, 9, 10])

    def formula(case: Tabular) -> Tensor:
        d, own = case.decisions, rewards(case)
        final = torch.stack([own[d.require("trajectory") == t].sum() for t in d.require("trajectory")])
        return ppo(case, standardised(final, d.require("group")))[d.valid()].mean()

    check_recipe("agentflow", formula, trajectory=trajectory)
    check_recipe("agentflow", formula, trajectory=torch.arange(16))  # limit: with one turn it is GRPO


def test_dialtree_masks_structural_tokens_at_negative_advantages():
    """DialTree (Guo et al. 2025) masks structural markers at negative advantages; without markers it is GRPO."""

    def formula(case: Tabular) -> Tensor:
        d, advantage = case.decisions, standardised(rewards(case), case.decisions.require("group"))
        keep = d.valid() & ~(d.require_extra("structural") & (advantage < 0)[:, None])
        return ppo(case, advantage)[keep].mean()

    check_recipe("dialtree", formula)
    check_recipe("dialtree", formula, extra={"structural": torch.zeros(16, 6, dtype=torch.bool)})


def test_t_ppo_bootstraps_at_the_cut_and_skips_tokens_of_earlier_windows():
    """T-PPO (Fan et al. 2025): at the cut V(next) = V(last); tokens of earlier windows are not trained again."""

    def formula(case: Tabular) -> Tensor:
        d, mask = case.decisions, case.decisions.valid()
        advantage = torch.zeros_like(d.logp_old)
        for row in range(len(d)):
            places = mask[row].nonzero().flatten().tolist()
            following = 0.0 if bool(d.require_extra("finished")[row]) else float(d.require("value")[row, places[-1]])
            running = 0.0
            for t in reversed(places):
                value = float(d.require("value")[row, t])
                running = float(d.require("reward")[row, t]) + following - value + 0.95 * running
                following, advantage[row, t] = value, running
        return ppo(case, advantage)[mask & ~d.require_extra("seen")].mean()

    check_recipe("t_ppo", formula)


def test_t_ppo_advantage_of_finished_rows_equals_gae():
    """Limit of T-PPO (Fan et al. 2025): finished rows have the advantage of ordinary GAE."""
    case = tabular(extra={"finished": torch.ones(16, dtype=torch.bool)})
    d = case.decisions
    expected, _ = sequence_gae(d.require("reward"), d.require("value"), 1.0, 0.95, d.valid())
    assert_close(recipe_of("t_ppo").advantage(d), expected)


def whitened_gae(case: Tabular) -> Tensor:
    """GAE (N, T) of each row, standardised over all decisions."""
    d = case.decisions
    advantage, _ = sequence_gae(d.require("reward"), d.require("value"), 1.0, 0.95, d.valid())
    valid = advantage[d.valid()]
    return (advantage - valid.mean()) / (valid.std() + 1e-6)


def test_dr_po_equals_ppo_on_the_unmasked_tokens():
    """DR-PO (Chang et al. 2024) is PPO that masks the given tokens; without resets it is plain PPO."""

    def formula(case: Tabular) -> Tensor:
        d = case.decisions
        return (ppo(case, whitened_gae(case)) + 0.05 * k3(case))[d.valid()].mean()

    check_recipe("dr_po", formula)
    given = tabular().decisions.valid() & (torch.arange(6) > 0)
    check_recipe("dr_po", formula, mask=given)


def test_epo_weights_log_probabilities_by_discounted_turn_returns():
    """EPO: the turn return, discounted per turn, times the mean log-probability; with one turn it is REINFORCE."""
    trajectory, unit = torch.arange(16) // 2, (torch.arange(16) % 2)[:, None].expand(16, 6)

    def formula(case: Tabular) -> Tensor:
        d, own = case.decisions, rewards(case)
        first = torch.arange(16) % 2 == 0
        togo = own if d.trajectory is None else own + torch.where(first, 0.99 * own.roll(-1), 0.0)
        return seq_mean(-togo[:, None] * (case.logp() - d.logp_old), d.valid())

    check_recipe("epo", formula, trajectory=trajectory, unit=unit)
    check_recipe("epo", formula, unit=torch.zeros(16, 6, dtype=torch.long))
