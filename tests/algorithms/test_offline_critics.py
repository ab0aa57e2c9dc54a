"""Tests of IQL, IDQL and Cal-QL: expectiles, chunk targets on a chain, the calibrated penalty, a bimodal bandit."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from chunk_bandit import SMALL, Known, batch, first_actions, flow, gaussian, two_modes
from chunking_learners import dqc
from torch import Tensor, nn
from value_learners import VALUE, cal_ql, expo, idql, iql, peak, same, snapshot

from robopolicy.algorithms.common.offline import (
    ConservativeConfig,
    ConservativeObjective,
    ImplicitConfig,
    ImplicitObjective,
)
from robopolicy.critics.q import QEnsemble
from robopolicy.critics.value import ValueConfig, conservative_penalty
from robopolicy.data.batches import ReplaySampleSpec
from robopolicy.data.replay import Replay
from robopolicy.errors import UserError


def test_state_value_is_the_expectile_of_action_values() -> None:
    # Q is 0 or 1 with equal probability in every state, so the expectile e of Q is e.
    algorithm = iql(implicit=replace(VALUE, expectile=0.8))
    data = batch(two_modes(256), peak)
    q = (data.chunk[:, 0, 0] > 0).float()
    assert isinstance(algorithm.objective, ImplicitObjective)
    optimizer = torch.optim.Adam(algorithm.objective.parameters(), 1e-2)
    obs = {"state": torch.zeros(256, 1, 2)}
    for _ in range(150):
        loss, _ = algorithm.objective.value_loss(replace(data, obs=obs), q)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    share = float(q.mean())
    expected = 0.8 * share / (0.8 * share + 0.2 * (1 - share))
    assert algorithm.objective.value({"state": torch.zeros(1, 1, 2)}).item() == pytest.approx(expected, abs=0.02)


def test_value_network_accepts_privileged_observations() -> None:
    algorithm = iql(implicit=replace(VALUE, value=replace(VALUE.value, privileged_obs={"hidden": 5})))
    data = batch(two_modes(64), peak, discount=0.9)
    seen = [{**obs, "hidden": 3 + torch.randn(64, 1, 5)} for obs in (data.obs, data.next_obs)]
    before = snapshot(algorithm.objective.value.head)
    algorithm.update(replace(data, obs=seen[0], next_obs=seen[1]))
    assert not same(before, algorithm.objective.value.head)
    assert float(algorithm.objective.value.encoder.normalizer.offset.mean()) == pytest.approx(3.0, abs=0.5)
    value = algorithm.objective.value(seen[0])
    assert torch.equal(algorithm.objective.value(seen[0] | {"state": torch.zeros(64, 1, 2)}), value)
    assert not torch.isclose(algorithm.objective.value(seen[0] | {"hidden": torch.zeros(64, 1, 5)}), value).any()


@pytest.mark.parametrize("make", [iql, dqc])
def test_value_network_uses_the_policy_normalization_or_none(make: Callable[..., Any]) -> None:
    def made(normalization: str) -> Any:
        value = ValueConfig(hidden=(8,), normalization=normalization)
        algorithm = make(**({"value": value} if make is dqc else {"implicit": ImplicitConfig(value=value)}))
        return algorithm.value if make is dqc else algorithm.objective.value

    assert made("running").encoder.normalizer.mode == "minmax"
    assert made("identity").encoder.normalizer.mode == "identity"
    assert torch.equal(made("minmax").encoder.normalizer.scale, made("running").encoder.normalizer.scale)
    with pytest.raises(UserError, match=r"normalization 'meanstd' needs a policy with the same normalization"):
        made("meanstd")


def test_chunk_targets_equal_the_return_of_a_deterministic_chain() -> None:
    gamma, length, steps = 0.9, 8, 3
    chain = Replay(64, gamma=gamma)
    for t in range(length):
        done = torch.tensor([t == length - 1])
        obs = {"state": torch.tensor([[float(t), 0.0]])}
        after = {"state": torch.tensor([[float(t + 1), 0.0]])}
        chain.add(torch.zeros(1).long(), obs, torch.zeros(1, 1), done.float(), done, done & False, after)
    data = chain.take(torch.arange(length), ReplaySampleSpec(length, 2, steps, gamma))

    class Known(nn.Module):
        def forward(self, obs: dict[str, Tensor]) -> Tensor:
            """Return gamma ** (steps to the reward)."""
            return gamma ** (length - 1 - obs["state"][:, -1, 0])

    algorithm = iql()
    algorithm.objective.value = Known()  # type: ignore[assignment]
    torch.testing.assert_close(algorithm.target(data), data.returns)
    torch.testing.assert_close(data.returns, gamma ** torch.arange(length - 1, -1, -1.0))


def test_iql_weights_are_exponential_in_the_minimum_target_q_minus_v() -> None:
    algorithm, data = iql(beta=2.0, weight_max=1.5), batch(two_modes(64), peak)
    algorithm.target_critic = Known(lambda _, a: a[:, 0], lambda _, a: 3 * a[:, 0])  # type: ignore[assignment]
    lowest = torch.minimum(data.chunk[:, 0, 0], 3 * data.chunk[:, 0, 0])
    assert torch.equal(algorithm.q_values(data), lowest)
    with torch.no_grad():
        expected = (2 * (lowest - algorithm.objective.value(data.obs))).exp().clamp(max=1.5)
    torch.testing.assert_close(algorithm.weights(data), expected)
    assert 0 < int((expected == 1.5).sum()) < 64


def test_iql_moves_a_gaussian_to_the_better_mode_and_imitation_does_not() -> None:
    means = []
    for beta in (0.0, 20.0):
        torch.manual_seed(0)
        algorithm = iql(gaussian(imitation="mse"), beta=beta, implicit=replace(VALUE, expectile=0.7))
        for _ in range(40):
            algorithm.update(batch(two_modes(256), lambda action: (action[:, 0] > 0).float()))
        means.append(float(first_actions(algorithm.inference_policy()).mean()))
    assert abs(means[0]) < 0.2 and means[1] > 0.5


def test_idql_trains_the_policy_by_imitation_and_selects_the_better_mode() -> None:
    algorithm = idql()
    for _ in range(60):
        algorithm.update(batch(two_modes(192), lambda action: (action[:, 0] > 0).float()))
    base = first_actions(algorithm.ema.module)
    assert 0.25 < float((base > 0).float().mean()) < 0.75
    assert float((first_actions(algorithm.inference_policy()) > 0.3).float().mean()) > 0.95


@pytest.mark.parametrize("make", [idql, expo])
def test_imitation_updates_do_not_depend_on_the_critic(make: Callable[..., Any]) -> None:
    weights = []
    for sign in (1.0, -1.0):
        torch.manual_seed(0)
        algorithm = make()
        for _ in range(2):
            torch.manual_seed(1)
            algorithm.update(batch(two_modes(64), lambda action, sign=sign: sign * peak(action), online=True))
        weights.append((snapshot(algorithm.policy), snapshot(algorithm.critic)))
    assert all(torch.equal(weights[0][0][key], weights[1][0][key]) for key in weights[0][0])
    assert any(not torch.equal(weights[0][1][key], weights[1][1][key]) for key in weights[0][1])


# Cal-QL.


def test_conservative_penalty_ignores_policy_chunks_valued_below_the_return() -> None:
    critic = QEnsemble(SMALL, flow())
    data = batch(two_modes(16), peak)

    def gradient(returns: float, proposed: Tensor) -> Tensor:
        objective = ConservativeObjective(ConservativeConfig(1.0, 4), torch.Generator().manual_seed(0))
        loss, _ = objective.penalty(replace(data, returns=torch.full((16,), returns)), critic, proposed)
        return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(critic.parameters()))])

    some, others = torch.full((16, 3, 2, 1), 0.8), torch.full((16, 3, 2, 1), -0.8)
    assert torch.equal(gradient(100.0, some), gradient(100.0, others))
    for returns in (-100.0, torch.nan):
        assert not torch.allclose(gradient(returns, some), gradient(returns, others))


@pytest.mark.parametrize("normalization, reach", [("minmax", 1.0), ("meanstd", 3.0)])
def test_penalty_compares_data_actions_with_policy_and_uniform_actions(normalization: str, reach: float) -> None:
    policy = flow(action_normalization=normalization, action_clip=0.0)
    critic, data, seen = QEnsemble(SMALL, policy), batch(two_modes(16), peak), list[Tensor]()
    original = critic.candidate_values
    critic.candidate_values = lambda obs, chunks: seen.append(chunks) or original(obs, chunks)  # type: ignore[assignment]
    proposed = 0.1 * torch.randn(16, 3, 2, 1)
    objective = ConservativeObjective(ConservativeConfig(3.0, 50), torch.Generator().manual_seed(0))
    loss, _ = objective.penalty(data, critic, proposed)
    own, policy, others = seen[0].split([1, 3, 50], 1)  # executed actions only
    assert torch.equal(own[:, 0], data.chunk[:, :1]) and torch.equal(policy, proposed[:, :, :1])
    others = critic.action_normalizer.normalize(others) / reach
    assert -1 <= float(others.min()) < -0.95 and 0.95 < float(others.max()) <= 1
    assert float(others.std()) == pytest.approx(3**-0.5, rel=0.05)
    values = original(data.obs, seen[0])
    expected = conservative_penalty(values[..., 0], values[..., 1:4], values[..., 4:], data.returns).mean(1).sum()
    torch.testing.assert_close(loss, 3.0 * expected)
    assert float(objective.penalty(replace(data, weight=torch.zeros(16)), critic, proposed)[0]) == 0.0


def test_penalty_lowers_values_of_unseen_chunks_but_not_of_the_data() -> None:
    values = []
    for weight in (0.0, 0.5):
        torch.manual_seed(0)
        algorithm = cal_ql(conservative=ConservativeConfig(weight, 8), policy_delay=100)
        for _ in range(50):
            algorithm.update(batch(0.6 + 0.02 * torch.randn(64, 2, 1), lambda action: action[:, 0].sign()))
        obs = {"state": torch.zeros(1, 1, 2)}
        grid = torch.tensor([0.6, -0.8]).view(1, 2, 1, 1).expand(1, 2, 2, 1)
        values.append(algorithm.critic.candidate_values(obs, grid).mean(0)[0])
    assert values[1][0] > values[1][1] + 0.5 and values[1][1] < values[0][1] - 0.5
    assert values[1][0].item() == pytest.approx(1.0, abs=0.3)


def test_cal_ql_trains_squashed_gaussians_only() -> None:
    with pytest.raises(UserError):
        cal_ql(flow())
