"""Tests of PMOE on rollouts: router gradient, initial ratio, the Q function, and a bandit with two optima."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from chunk_bandit import flow, gaussian
from test_pmoe import mixture, peaks, shares
from torch import Tensor, nn

from robopolicy.algorithms.common.rollout_batch import RolloutBatch
from robopolicy.algorithms.registry import make_algorithm
from robopolicy.contrib.control.pmoe import frequency_loss
from robopolicy.contrib.control.pmoe_ppo import PMOEPPO, PMOEPPOConfig
from robopolicy.data.batches import Rollout
from robopolicy.errors import UserError

FAST = {"lr": 3e-3, "q_lr": 3e-3, "epochs": 4, "q_epochs": 4, "batch_size": 64, "normalize_reward": False}


def learner(seed: int = 0, **config: Any) -> PMOEPPO:
    torch.manual_seed(seed)
    policy = mixture(squash=False, state_dependent_std=False)
    return PMOEPPO(PMOEPPOConfig(**(FAST | config)), policy, total_updates=100)


def rollout_of(algorithm: PMOEPPO, rows: int = 256) -> Rollout:
    """Episodes of one decision."""
    obs = {"state": torch.rand(rows, 1, 2) * 2 - 1}
    sample = algorithm.act(obs)
    end = torch.ones(1, rows, dtype=torch.bool)
    record = {key: value[None] for key, value in sample.record.items()}
    reward, first = peaks(sample.chunk[:, 0])[None], {key: value[None] for key, value in obs.items()}
    return Rollout(first, record, sample.logp[None], reward, end.long(), end, ~end, {"state": obs["state"][:0]}, obs)


def rows_of(algorithm: PMOEPPO) -> RolloutBatch:
    return super(PMOEPPO, algorithm).process_rollout(rollout_of(algorithm))


class Always(nn.Module):
    """A Q network that always values expert 1 most."""

    def candidate_values(self, obs: dict[str, Tensor], chunks: Tensor) -> Tensor:
        return torch.tensor([0.0, 1.0, 0.5]).expand(1, len(chunks), 3)


def test_ratio_starts_at_one_and_frequency_loss_updates_only_the_router() -> None:
    algorithm = learner()
    rows, policy = rows_of(algorithm), algorithm.policy
    algorithm.q = Always()  # type: ignore[assignment]
    loss, info = algorithm.loss(rows, log_stats=True)
    assert float(info["approx_kl"]) == pytest.approx(0.0, abs=1e-9)
    plain, _ = super(PMOEPPO, algorithm).loss(rows, log_stats=True)
    names, parameters = zip(*policy.named_parameters(), strict=True)
    gradients = [torch.autograd.grad(part, parameters, retain_graph=True) for part in (loss, plain)]
    router, _ = frequency_loss(policy.experts(policy.features(rows.obs)).log_weight, torch.ones(256).long())
    expected = torch.autograd.grad(router, parameters, allow_unused=True)
    for name, with_it, without, own in zip(names, *gradients, expected, strict=True):
        assert (own is not None) == name.startswith("router"), name
        torch.testing.assert_close(with_it - without, torch.zeros_like(with_it) if own is None else own)


def test_q_learns_the_reward_of_each_action() -> None:
    algorithm = learner(q_epochs=60)
    algorithm.update(rollout_of(algorithm))
    obs = {"state": torch.zeros(1, 1, 2)}
    actions = torch.linspace(-0.9, 0.9, 19)
    values = algorithm.q.candidate_values(obs, actions.view(1, -1, 1, 1).expand(1, 19, 2, 1)).detach().flatten()
    assert float((values - peaks(actions[:, None])).abs().mean()) < 0.15


def test_experts_and_router_concentrate_on_the_optimal_actions() -> None:
    algorithm = learner()
    for _ in range(30):
        metrics = algorithm.update(rollout_of(algorithm))
    assert sum(shares(algorithm.policy)) > 0.9  # the optima are equal: one or both
    assert {"actor/router_loss", "actor/router_entropy", "critic/q_loss"} <= set(metrics)


def test_unsupported_policies_and_settings_are_refused() -> None:
    for policy in (gaussian(), flow()):
        with pytest.raises(UserError, match="policy=mixture"):
            make_algorithm("pmoe_ppo", PMOEPPOConfig(), policy, total_updates=1)
    with pytest.raises(UserError, match="q_epochs"):
        PMOEPPOConfig(q_epochs=0)
