"""Tests of QC, FQL and DQC: chunk targets on a chain, masked chunks, expectiles and quantiles, a bimodal bandit."""

import copy
import math
from dataclasses import replace

import pytest
import torch
from chunk_bandit import (
    SMALL,
    SPEC,
    STATISTICS,
    assert_acts_without_dropout,
    batch,
    first_actions,
    flow,
    gaussian,
    output_layer,
    two_modes,
)
from chunking_learners import MAKERS, dqc, fql, qc
from torch import Tensor, nn

from robopolicy.algorithms.dqc import optimistic_loss, quantile_loss
from robopolicy.algorithms.fql import actor_loss, one_step_copy
from robopolicy.data.batches import ReplaySampleSpec, Transitions
from robopolicy.data.goals import GoalConfig
from robopolicy.data.replay import Replay
from robopolicy.errors import UserError
from robopolicy.policies.base import PolicySpec
from robopolicy.policies.heads.flow import FlowConfig, FlowPolicy
from robopolicy.policies.wrappers.best_of_n import make_best_of_n
from robopolicy.policies.wrappers.zero_noise import ZeroNoisePolicy

makers = pytest.mark.parametrize("name", MAKERS)


def positive(action: Tensor) -> Tensor:
    """Reward 1 for the better of the two modes."""
    return (action[:, 0] > 0).float()


def windows(steps: int, *, success: bool = True) -> Transitions:
    """Windows of `steps` control steps of one 8-step episode that terminates in success or is truncated."""
    memory = Replay(64, gamma=0.9)
    for t in range(8):
        done = torch.tensor([t == 7])
        ends = (done, done & False) if success else (done & False, done)
        here, after = ({"state": torch.tensor([[float(t + j), 0.0]])} for j in (0, 1))
        memory.add(torch.zeros(1).long(), here, torch.zeros(1, 1), done.float(), *ends, after)
    return memory.take(torch.arange(8), ReplaySampleSpec(8, max(steps, 2), steps, 0.9))


@makers
def test_better_mode_is_selected_where_imitation_covers_both(name: str) -> None:
    algorithm = MAKERS[name](**({"n_step": 1} if name == "dqc" else {}))
    for _ in range(80 if name == "fql" else 50):
        algorithm.update(batch(two_modes(128), positive))
    cloned, improved = first_actions(algorithm.policy), first_actions(algorithm.inference_policy())
    assert 0.2 < float((cloned > 0).float().mean()) < 0.8
    assert float((improved > 0).float().mean()) > 0.9


@pytest.mark.parametrize("name", ["qc", "dqc"])
def test_a_policy_that_starts_from_zero_noise_is_trained_and_explores_with_noise(name: str) -> None:
    deployed = ZeroNoisePolicy.wrap(flow())
    algorithm = MAKERS[name](deployed)
    assert algorithm.policy is deployed.base
    assert len(algorithm.act({"state": torch.zeros(8, 1, 2)}).chunk.flatten(1).unique(dim=0)) == 8
    selecting = make_best_of_n(deployed, algorithm.critic) if name == "qc" else algorithm.inference_policy()
    assert MAKERS[name](selecting).policy is deployed.base


def test_fql_clones_a_policy_that_starts_from_zero_noise() -> None:
    deployed = ZeroNoisePolicy.wrap(flow())
    assert MAKERS["fql"](deployed).policy is deployed.base


def test_chunk_targets_equal_the_return_of_a_deterministic_chain() -> None:
    data = windows(3)

    class Known(nn.Module):
        def forward(self, obs: dict[str, Tensor], chunk: Tensor) -> Tensor:
            """Return 0.9 ** (steps to the reward) for both members."""
            return (0.9 ** (7 - obs["state"][:, -1, 0])).expand(2, -1)

    for algorithm in (qc(n_step=3), fql(n_step=3)):
        algorithm.target_critic = Known()  # type: ignore[assignment]
        torch.testing.assert_close(algorithm.target(data), data.returns)


def test_truncated_chunks_carry_no_gradient() -> None:
    data = windows(3)
    cut = data.steps < 3
    assert cut.tolist() == [False] * 6 + [True] * 2
    for algorithm in (qc(n_step=3), fql(n_step=3)):
        algorithm.target = lambda batch: batch.reward  # type: ignore[method-assign]
        gradients: list[tuple[Tensor, ...]] = []
        for reward in (data.reward, torch.where(cut, 1e3, data.reward)):
            loss, info = algorithm.critic_loss(replace(data, reward=reward))
            assert float(info["complete"]) == pytest.approx(6 / 8)
            gradients.append(torch.autograd.grad(loss, list(algorithm.critic.parameters())))
        assert all(torch.equal(first, second) for first, second in zip(*gradients, strict=True))


@makers
def test_truncated_chunks_have_the_mean_priority_of_complete_chunks(name: str) -> None:
    data = windows(3, success=False)
    data = replace(data, reward=torch.where(data.steps < 3, 1.0, 0.0))
    algorithm = MAKERS[name](n_step=3)
    algorithm.target = lambda batch: 1e3 * batch.reward  # type: ignore[method-assign]
    errors = algorithm.critic_loss(data)[1]["td_errors"]
    torch.testing.assert_close(errors[6:], errors[:6].mean().expand(2))
    assert float(errors[:6].std()) > 0
    nothing = algorithm.critic_loss(data.select(data.steps < 3))[1]["td_errors"]
    assert nothing.tolist() == [0.0, 0.0]


@pytest.mark.parametrize(("n_step", "horizon"), [(1, 2), (2, 2), (4, 4)])
def test_dqc_samples_windows_of_the_longer_chunk(n_step: int, horizon: int) -> None:
    spec = PolicySpec({"state": (2,)}, 1, horizon=2, action_horizon=1)
    policy = FlowPolicy(FlowConfig(hidden=(8,), normalization="identity", action_normalization="identity"), spec)
    sampled = dqc(policy, n_step=n_step).sample_spec
    assert (sampled.horizon, sampled.steps) == (horizon, n_step)


def test_dqc_asks_for_goals_in_hindsight_only_with_fractions() -> None:
    goals = GoalConfig(current=0.2, trajectory=0.5, random=0.3)
    assert dqc(goals=goals).sample_spec.goals == goals and dqc().sample_spec.goals is None


@pytest.mark.parametrize("success", [False, True])
def test_dqc_trains_each_network_on_chunks_of_sufficient_length(success: bool) -> None:
    """Truncated chunks have no gradient in Q_h and Q_p, nor in V if shorter than the prefix; terminated chunks do."""
    spec = PolicySpec({"state": (2,)}, 1, horizon=2, action_horizon=2)
    policy = FlowPolicy(FlowConfig(hidden=(8,), normalization="identity", action_normalization="identity"), spec)
    algorithm = dqc(policy, n_step=4)
    data = windows(4, success=success)
    assert data.steps.tolist() == [4] * 5 + [3, 2, 1]

    def gradients(rows: slice) -> dict[str, bool]:
        """Whether the gradient of each network depends on the observations and chunks in `rows`."""
        other = replace(data, obs={"state": data.obs["state"].clone()}, chunk=data.chunk.clone())
        other.obs["state"][rows] += 1.0
        other.chunk[rows] += 0.5
        nets = {"long": algorithm.long_critic, "prefix": algorithm.critic, "state": algorithm.value}
        changed: dict[str, bool] = {}
        for name, net in nets.items():
            both = [
                torch.autograd.grad(algorithm.critic_loss(batch)[0], list(net.parameters())) for batch in (data, other)
            ]
            changed[name] = any(not torch.equal(one, two) for one, two in zip(*both, strict=True))
        return changed

    assert gradients(slice(0, 5)) == {"long": True, "prefix": True, "state": True}
    assert gradients(slice(5, 7)) == {"long": success, "prefix": success, "state": True}
    assert gradients(slice(7, 8)) == {"long": success, "prefix": success, "state": success}


def test_one_action_target_is_the_best_of_n_td_target() -> None:
    algorithm = qc()
    data = batch(two_modes(64), positive, discount=0.9)
    state = algorithm.generator.get_state()
    target = algorithm.target(data)
    algorithm.generator.set_state(state)
    chunk = algorithm.acting_policy.act(data.next_obs, generator=algorithm.generator)
    torch.testing.assert_close(target, data.reward + 0.9 * algorithm.target_critic(data.next_obs, chunk).mean(0))


def test_prefix_critic_converges_to_the_expectile_over_chunk_tails() -> None:
    tails = torch.tensor([0.1, 0.2, 0.9])  # values of three long chunks with the same prefix
    found: dict[float, float] = {}
    for expectile in (0.5, 0.8, 0.999):
        logit = torch.zeros(1, requires_grad=True)
        optimizer = torch.optim.Adam([logit], 0.05)
        for _ in range(400):
            loss = optimistic_loss(logit.expand(3), tails, expectile).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        found[expectile] = float(logit.detach().sigmoid())
    assert found[0.5] == pytest.approx(0.4, abs=0.01)  # the mean
    assert found[0.999] == pytest.approx(0.9, abs=0.02)  # the maximum
    mean = found[0.8]  # 0.8 * (0.9 - m) = 0.2 * (2 m - 0.3)
    assert mean == pytest.approx((0.8 * 0.9 + 0.2 * 0.3) / 1.2, abs=0.01)


def test_state_value_converges_to_the_quantile_of_prefix_values() -> None:
    logits = torch.linspace(-2, 2, 101)
    for quantile in (0.5, 0.9):
        state = torch.zeros(1, requires_grad=True)
        optimizer = torch.optim.Adam([state], 0.02)
        for _ in range(500):
            loss = quantile_loss(state, logits, quantile).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        assert state.item() == pytest.approx(-2 + 4 * quantile, abs=0.1)


def test_quantile_loss_gradient_does_not_depend_on_the_distance() -> None:
    target = torch.zeros(4)
    state = torch.tensor([-40.0, -1.0, 1.0, 40.0], requires_grad=True)
    quantile_loss(state, target, 0.9).sum().backward()
    torch.testing.assert_close(state.grad, torch.tensor([-0.9, -0.9, 0.1, 0.1]))


def test_dqc_critics_agree_for_equal_chunk_lengths() -> None:
    algorithm = dqc(n_step=1, expectile=0.5)
    for _ in range(60):
        algorithm.update(batch(two_modes(128), positive))
    data = batch(two_modes(256), positive)
    long, short = (
        critic(data.obs, data.chunk).sigmoid().mean(0) for critic in (algorithm.long_critic, algorithm.critic)
    )
    assert float((long - short).abs().mean()) < 0.01


def test_every_member_of_the_prefix_critic_regresses_on_its_own_long_critic() -> None:
    algorithm = dqc(n_step=1)
    data = batch(two_modes(64), positive)
    with torch.no_grad():
        long = algorithm.long_critic(data.obs, data.chunk).sigmoid()  # (M, B)
        expected = optimistic_loss(algorithm.critic(data.obs, data.chunk), long, 0.8).mean(1).sum()
        swapped = optimistic_loss(algorithm.critic(data.obs, data.chunk), long.flip(0), 0.8).mean(1).sum()
    _, info = algorithm.critic_loss(data)
    torch.testing.assert_close(info["prefix_loss"].detach(), expected)
    assert not torch.isclose(expected, swapped)
    _, info = algorithm.critic_loss(replace(data, weight=2 * data.weight))
    torch.testing.assert_close(info["prefix_loss"].detach(), 2 * expected)


def test_every_network_of_dqc_updates_running_statistics() -> None:
    policy = FlowPolicy(FlowConfig(hidden=(8,), normalization="running"), SPEC)
    policy.fit_normalizer({"action": STATISTICS["action"]})
    algorithm = dqc(policy, n_step=1)
    for _ in range(3):
        algorithm.update(batch(two_modes(64), positive))
    encoders = [policy.encoder, *(net.encoder for net in (algorithm.critic, algorithm.long_critic, algorithm.value))]
    states = [encoder.normalizer.state_dict() for encoder in encoders]
    assert [float(state["count"]) for state in states] == [3 * 64.0] * 4
    assert all(torch.equal(state["mean"], states[0]["mean"]) for state in states)


def test_dqc_refuses_rewards_outside_the_unit_interval_and_short_chunks() -> None:
    with pytest.raises(UserError, match=r"\[0, 1\]"):
        dqc(n_step=1).update(batch(two_modes(64), lambda action: 5 * action[:, 0]))
    spec = PolicySpec({"state": (2,)}, 1, horizon=4, action_horizon=4)
    policy = FlowPolicy(FlowConfig(hidden=(8,), normalization="identity", action_normalization="identity"), spec)
    with pytest.raises(UserError, match="executed steps of a chunk"):
        dqc(policy, n_step=2)
    with pytest.raises(UserError, match=r"no histogram; set algorithm.critic.bins=0"):
        dqc(critic=replace(SMALL, bins=11, value_min=0.0, value_max=1.0))


@makers
def test_settings_of_other_critics_are_refused(name: str) -> None:
    assert MAKERS[name](num_min_qs=2).config.critic.members == 2
    with pytest.raises(UserError, match="num_min_qs=1 has no effect"):
        MAKERS[name](num_min_qs=1)


def test_the_one_step_policy_starts_as_the_first_step_of_the_flow() -> None:
    base = flow()
    student = one_step_copy(base)
    obs = {"state": torch.randn(5, 1, 2)}
    noise = torch.randn(5, 2, 1)
    expected = (noise + base.field(obs, noise, torch.zeros(5))).clamp(-1, 1)
    torch.testing.assert_close(student.decode(obs, noise), expected)
    assert student.nfe == 1 and base.nfe == 4


def test_no_gradient_of_the_one_step_policy_reaches_the_flow() -> None:
    algorithm = fql()
    data = batch(two_modes(32), positive)
    loss, _ = actor_loss(algorithm.student, algorithm.policy, algorithm.critic, data.obs, algorithm.config)
    loss.backward()
    assert all(parameter.grad is None for parameter in algorithm.policy.parameters())
    assert any(bool(p.grad.any()) for p in algorithm.student.parameters() if p.grad is not None)


def test_distance_loss_uses_unclipped_actions_while_q_receives_clipped_ones() -> None:
    algorithm = fql()
    output = output_layer(algorithm.student)
    with torch.no_grad():
        output.bias.fill_(9.0)  # every output of the one-step policy is far above 1
    obs = {"state": torch.randn(32, 1, 2)}
    seen: list[Tensor] = []

    def critic(obs: dict[str, Tensor], chunk: Tensor) -> Tensor:
        """Record the chunk and value large actions highly in both members."""
        seen.append(chunk.detach())
        return chunk.sum((1, 2)).expand(2, -1)

    loss, info = actor_loss(algorithm.student, algorithm.policy, critic, obs, algorithm.config)  # type: ignore[arg-type]
    (slope,) = torch.autograd.grad(loss, [output.bias])
    assert bool((slope > 0).all())  # a gradient step lowers the output
    assert float(info["distance"]) > 4.0  # larger than the squared width of the bounds
    torch.testing.assert_close(seen[0], torch.ones(32, 2, 1))


def test_fql_needs_a_denoising_policy() -> None:
    with pytest.raises(UserError, match="gaussian"):
        fql(gaussian())


@makers
def test_an_update_in_bfloat16_is_finite_and_moves_every_network(name: str) -> None:
    algorithm = MAKERS[name](precision="bfloat16", n_step=1)
    before = {part: copy.deepcopy(value.state_dict()) for part, value in algorithm.checkpoint_items().items()}
    metrics = algorithm.update(batch(two_modes(64), positive, discount=0.9))
    assert all(math.isfinite(value) for value in metrics.values())
    for part, value in algorithm.checkpoint_items().items():
        if isinstance(value, nn.Module):
            assert all(bool(weight.isfinite().all()) for weight in value.parameters()), part
            state = value.state_dict()
            assert any(not torch.equal(weight, before[part][key]) for key, weight in state.items()), part


@makers
def test_dropout_is_active_only_in_imitation_and_critic_losses(name: str) -> None:
    algorithm = MAKERS[name](flow(hidden_dropout=0.5), critic=replace(SMALL, dropout=0.5), n_step=1)
    assert_acts_without_dropout(algorithm, batch(two_modes(64), positive, discount=0.9))
