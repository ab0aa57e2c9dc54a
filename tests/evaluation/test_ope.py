"""Tests of off-policy estimators on a small Markov decision process whose values are known in closed form."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from robopolicy.critics.q import CriticConfig
from robopolicy.data.episodes import Episode, Episodes
from robopolicy.errors import UserError
from robopolicy.evaluation.ope import FQE, FQEConfig, Logs, OPEConfig, estimate
from robopolicy.evaluation.ope.estimates import log_density, unsupported_fraction, weighting_problem
from robopolicy.evaluation.ope.policy_class import sharpe_ratio, sharpe_table
from robopolicy.evaluation.ope.weights import (
    corrected,
    cumulative_weights,
    doubly_robust,
    effective_size,
    effective_size_per_decision,
    marginal,
    per_decision,
    terms_interval,
    trajectory_wise,
)
from robopolicy.nets.normalizer import make_normalizer
from robopolicy.policies.base import Policy
from robopolicy.policies.heads.gaussian import GaussianConfig, GaussianPolicy
from robopolicy.spec import PolicySpec

GAMMA, STAY = 0.9, 0.75
REWARD = np.array([[0.0, 1.0], [0.5, 0.0], [1.0, -0.5]])  # (S, A)
NEXT = np.array(
    [[[0.6, 0.4, 0.0], [0.0, 0.5, 0.5]], [[0.2, 0.2, 0.6], [0.9, 0.1, 0.0]], [[1 / 3] * 3, [0.0, 0.0, 1.0]]]
)
BEHAVIOUR, TARGET = np.array([0.5, 0.6, 0.4]), np.array([0.7, 0.45, 0.25])  # (S,) probability of the second action
SPEC = PolicySpec({"state": (3,)}, 1)


class TablePolicy(Policy):
    """Policy with actions -1 or 1 from tabulated probabilities for three one-hot states."""

    name = "table"

    def __init__(self, second: np.ndarray) -> None:
        super().__init__()
        self.spec, self.second = SPEC, torch.tensor(second, dtype=torch.float32)
        self.action_normalizer = make_normalizer(1, "identity")

    def act(self, obs, *, deterministic=False, generator=None) -> Tensor:
        chance = self.second[obs["state"][:, -1].argmax(-1)]
        sampled = torch.rand(len(chance), generator=generator) < (0.5 if deterministic else chance)
        return (2.0 * sampled - 1)[:, None, None]

    def log_density(self, obs, chunk) -> Tensor:
        chance = self.second[obs["state"][:, -1].argmax(-1)]
        return torch.where(chunk[:, 0, 0] > 0, chance, 1 - chance).log()


def mix(second: np.ndarray) -> np.ndarray:
    return np.stack([1 - second, second], 1)  # (S, A)


def solve(second: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """True Q `(S, A)` and V `(S,)`; an episode ends after every step with probability 1 - STAY."""
    policy = mix(second)
    flow = np.einsum("sa,sat->st", policy, NEXT)
    v = np.linalg.solve(np.eye(3) - GAMMA * STAY * flow, (policy * REWARD).sum(1))
    return REWARD + GAMMA * STAY * NEXT @ v, v


def rollout(episodes: int, seed: int = 0, second: np.ndarray = BEHAVIOUR, limit: int = 200) -> Episodes:
    """Episodes from random start states."""
    rng, recorded = np.random.default_rng(seed), []
    for number in range(episodes):
        state, rows = int(rng.integers(3)), []
        while len(rows) < limit and (not rows or not rows[-1][3]):
            action = int(rng.random() < second[state])
            rows.append((np.eye(3)[state], [2.0 * action - 1], REWARD[state, action], rng.random() > STAY))
            state = int(rng.choice(3, p=NEXT[state, action]))
        columns = zip(("state", "action", "reward", "terminated"), zip(*rows, strict=True), strict=True)
        arrays = {key: np.array(values, np.bool_ if key == "terminated" else np.float32) for key, values in columns}
        recorded.append(Episode(arrays, "table", number))
    return Episodes.from_list(recorded, 0.1)


def indices(logs: Logs) -> tuple[np.ndarray, np.ndarray]:
    """State and action `(F,)` of every frame."""
    arrays = logs.episodes.arrays
    return arrays["state"].argmax(1), (arrays["action"][:, 0] > 0).astype(int)


def weights_of(logs: Logs) -> np.ndarray:
    state, action = indices(logs)
    table = np.zeros_like(logs.rewards)
    table[logs.episode, logs.age] = np.log(mix(TARGET) / mix(BEHAVIOUR))[state, action]
    return cumulative_weights(table)


# The squared weights grow by less than 1 / STAY per step, so that all estimates have a finite variance.
TRUTH = float(solve(TARGET)[1].mean())


MAKERS = [(make, normalised) for make in (trajectory_wise, per_decision) for normalised in (False, True)]


@pytest.fixture(scope="module")
def many_logs() -> list[Logs]:
    return [Logs(rollout(300, seed), SPEC, GAMMA) for seed in range(30)]


@pytest.mark.parametrize(("make", "normalised"), MAKERS)
def test_weighted_estimates_cover_the_true_value(many_logs, make, normalised):
    hits, estimates = 0, []
    for seed, logs in enumerate(many_logs):
        interval = terms_interval(
            make(weights_of(logs), logs.rewards, GAMMA, normalised=normalised), resamples=400, seed=seed
        )
        hits += interval.low <= TRUTH <= interval.high
        estimates.append(interval.estimate)
    assert hits >= 25, hits
    assert np.mean(estimates) == pytest.approx(TRUTH, abs=4 * np.std(estimates) / np.sqrt(30))  # unbiased
    assert abs(Logs(rollout(4000), SPEC, GAMMA).returns.mean() - TRUTH) > 0.2  # the return of the logs differs


def test_a_bandit_by_hand():
    weights, rewards = np.array([[2.0], [0.5], [0.5]]), np.array([[1.0], [3.0], [0.0]])
    assert terms_interval(trajectory_wise(weights, rewards, 1.0)).estimate == pytest.approx((2 + 1.5) / 3)
    assert terms_interval(trajectory_wise(weights, rewards, 1.0, normalised=True)).estimate == pytest.approx(3.5 / 3)
    assert effective_size(weights[:, 0]) == pytest.approx(9 / 4.5)


def test_per_decision_weights_a_reward_by_the_actions_before_it():
    weights = cumulative_weights(np.log([[2.0, 3.0]]))
    assert weights.tolist() == [[2.0, pytest.approx(6.0)]]
    rewards = np.array([[1.0, 10.0]])
    assert per_decision(weights, rewards, 0.5).numerator.sum() == pytest.approx(2 * 1 + 0.5 * 6 * 10)
    assert trajectory_wise(weights, rewards, 0.5).numerator.sum() == pytest.approx(6 * (1 + 0.5 * 10))


def test_effective_size_discounts_steps_like_rewards():
    weights = np.array([[1.0, 2.0], [1.0, 0.0]])  # effective size 2 in the first step, 1 in the second
    assert effective_size_per_decision(weights, 0.5) == pytest.approx((2 + 0.5 * 1) / 1.5)


def test_extreme_weights_stay_finite():
    weights = cumulative_weights(np.array([[500.0, 500.0], [0.0, -np.inf]]))
    assert np.isfinite(weights).all() and weights[1].tolist() == [1.0, 0.0]
    assert effective_size(weights[:, -1]) == pytest.approx(1.0)


def test_equal_policies_have_weight_one_and_the_return_of_the_logs():
    logs = Logs(rollout(50), SPEC, GAMMA)
    ones = np.ones_like(logs.rewards)
    for make, normalised in MAKERS:
        found = terms_interval(make(ones, logs.rewards, GAMMA, normalised=normalised)).estimate
        assert found == pytest.approx(logs.returns.mean())
    assert effective_size(ones[:, 0]) == pytest.approx(50)


def model_terms(logs: Logs, q: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Values of the first states `(N,)` and errors `(W,)` of a tabular value function."""
    state, action = indices(logs)
    errors = logs.reward + logs.discount * v[state[logs.following]] - q[state[logs.window], action[logs.window]]
    return v[state[logs.episodes.starts]], errors


def test_doubly_robust_needs_only_correct_values_or_correct_weights():
    logs = Logs(rollout(3000), SPEC, GAMMA)
    weights, wrong = weights_of(logs), np.random.default_rng(0).uniform(-1, 1, np.shape(weights_of(logs)))
    q, v = solve(TARGET)
    start, errors = model_terms(logs, q, v)
    right = terms_interval(doubly_robust(weights, start, logs.by_episode(errors), GAMMA))
    plain = terms_interval(per_decision(weights, logs.rewards, GAMMA))
    assert right.low <= TRUTH <= right.high and right.high - right.low < plain.high - plain.low
    misled = terms_interval(doubly_robust(np.exp(wrong), start, logs.by_episode(errors), GAMMA))
    assert misled.estimate == pytest.approx(TRUTH, abs=0.15)  # right values, wrong weights
    wrong_q = q + np.random.default_rng(1).normal(size=q.shape)
    start, errors = model_terms(logs, wrong_q, (mix(TARGET) * wrong_q).sum(1))
    for normalised in (False, True):
        saved = terms_interval(doubly_robust(weights, start, logs.by_episode(errors), GAMMA, normalised=normalised))
        assert saved.low <= TRUTH <= saved.high  # wrong values, right weights


def test_doubly_robust_is_exact_in_a_deterministic_environment():
    """Two deterministic steps: every error of the true values is zero, so the estimate has no variance."""
    start = np.full(5, 1.7)
    weights = cumulative_weights(np.random.default_rng(0).normal(size=(5, 2)))
    interval = terms_interval(doubly_robust(weights, start, np.zeros((5, 2)), GAMMA))
    assert (interval.low, interval.estimate, interval.high) == (1.7, 1.7, 1.7)


def test_marginal_weights_balance_the_flow_and_give_the_value():
    logs = Logs(rollout(4000), SPEC, GAMMA)
    state, action = indices(logs)
    one = np.eye(6)[2 * state + action]  # (F, 6) one feature per state and action
    policy = np.einsum("fs,sa->fsa", np.eye(3)[state], mix(TARGET)).reshape(-1, 6)
    episode = logs.episode[logs.window]
    following = policy[logs.following] * logs.discount[:, None]
    found = marginal(one[logs.window], following, policy[logs.episodes.starts], logs.reward, episode, ridge=0.0)
    weighted = float((found.weights * logs.reward).sum() / 4000)
    assert found.terms.mean() == pytest.approx(weighted)  # both forms of the estimate are equal
    half = 2.5 * found.terms.std() / np.sqrt(4000)
    assert abs(found.terms.mean() - TRUTH) < half < 0.2
    flow = np.einsum("sa,sat->st", mix(TARGET), NEXT)
    visits = np.linalg.solve((np.eye(3) - GAMMA * STAY * flow).T, np.full(3, 1 / 3))[:, None] * mix(TARGET)
    logged = np.bincount(2 * state + action, minlength=6).reshape(3, 2) / 4000
    table = np.array([[found.weights[(state == s) & (action == a)].mean() for a in (0, 1)] for s in range(3)])
    assert table == pytest.approx(visits / logged, rel=0.1)
    start, errors = model_terms(logs, *solve(TARGET))
    assert corrected(start, found.weights, errors, episode).mean() == pytest.approx(TRUTH, abs=half)


FAST = FQEConfig(CriticConfig(members=4, hidden=(32, 32), activation="relu"), steps=800, tau=0.05, learning_rate=3e-3)


def test_fitted_q_evaluation_finds_the_tabular_values():
    logs = Logs(rollout(1500), SPEC, GAMMA)
    decided = logs.decide(TablePolicy(TARGET), samples=8, deterministic=False, seed=0)
    fqe = FQE(FAST, logs, decided)
    q, v = solve(TARGET)
    state, action = indices(logs)
    learned, true = fqe.q().mean(0), q[state[logs.window], action[logs.window]]
    assert np.abs(learned - true).mean() < 0.12 and np.corrcoef(learned, true)[0, 1] > 0.97
    interval = fqe.interval()
    assert interval.estimate == pytest.approx(TRUTH, abs=0.1) and interval.low < interval.estimate < interval.high
    assert np.abs(fqe.v(logs.episodes.starts).mean(0) - v[state[logs.episodes.starts]]).mean() < 0.2
    assert abs(fqe.errors().mean()) < 0.05


def test_fqe_is_a_function_of_its_seed():
    logs = Logs(rollout(30), SPEC, GAMMA)
    decided = logs.decide(TablePolicy(TARGET), samples=2, deterministic=False, seed=0)
    quick = FQEConfig(FAST.critic, steps=5)
    first, second, other = (FQE(quick, logs, decided, seed=seed).interval() for seed in (1, 1, 2))
    assert first == second != other


def test_all_estimators_agree_in_one_table():
    episodes, policy = rollout(800), TablePolicy(TARGET)
    config = OPEConfig(gamma=GAMMA, deterministic=False, fqe=replace(FAST, steps=500), features=40)
    found = estimate(
        policy, episodes, behaviour=TablePolicy(BEHAVIOUR), rollouts=rollout(800, 1, second=TARGET), config=config
    )
    for row in found.rows:
        assert row.interval is not None, row
        if row.name != "behaviour":
            assert row.interval.low - 0.1 <= TRUTH <= row.interval.high + 0.1, row
    header, rows = found.table()
    assert len(rows) == 11 and all(len(row) == len(header) for row in rows)
    assert set(found.to_dict()["estimates"]) == {row.name for row in found.rows}


QUICK = OPEConfig(gamma=GAMMA, deterministic=False, fqe=FQEConfig(FAST.critic, steps=5), features=20)


def test_unsupported_fraction_is_low_for_logged_and_high_for_shifted_actions():
    rng = np.random.default_rng(0)

    def one() -> Episode:
        state = rng.normal(size=(20, 3)).astype(np.float32)
        action = np.tanh(state[:, :1]) + rng.normal(0, 0.1, (20, 1)).astype(np.float32)
        return Episode({"state": state, "action": action, "reward": action[:, 0], "terminated": np.arange(20) == 19})

    logs = Logs(Episodes.from_list([one() for _ in range(20)], 0.1), SPEC, 0.9)
    same = torch.from_numpy(logs.episodes.arrays["action"])[None, :, None]
    near, far = unsupported_fraction(logs, same), unsupported_fraction(logs, same + 2.0)
    assert near is not None and near < 0.1 and far is not None and far > 0.9
    few = Logs(logs.episodes.subset([0]), SPEC, 0.9)
    assert unsupported_fraction(few, same[:, :20]) is None


def test_missing_estimates_state_the_reason():
    episodes, policy = rollout(30), TablePolicy(TARGET)
    alone = estimate(policy, episodes, config=QUICK)
    assert alone["pdis"].interval is None and "--behavior-policy" in alone["pdis"].note
    assert alone["fqe"].interval is not None and alone["marginal"].interval is not None
    still = OPEConfig(gamma=GAMMA, fqe=QUICK.fqe, features=20)
    assert "--stochastic" in estimate(policy, episodes, behaviour=policy, config=still)["is"].note
    disturbed = replace(episodes, arrays={**episodes.arrays, "executed": episodes.arrays["action"]})
    assert "collect --noise" in estimate(policy, disturbed, behaviour=policy, config=QUICK)["is"].note
    policy.spec = PolicySpec({"state": (3,)}, 1, horizon=2, action_horizon=2)
    assert "2 actions per decision" in weighting_problem(policy, policy, deterministic=False)


def test_small_effective_samples_are_refused_and_moderate_ones_give_a_warning():
    episodes = rollout(30)
    sharp = TablePolicy(np.array([0.999, 0.001, 0.999]))
    found = estimate(sharp, episodes, behaviour=TablePolicy(BEHAVIOUR), config=QUICK)["is"]
    assert found.interval is None and "refused" in found.note and found.effective is not None and found.effective < 10
    assert effective_size(np.array([1.0, -1.0, 1e-9])) < 1  # cancelling weights of features absent from the logs
    near = estimate(TablePolicy(BEHAVIOUR), episodes, behaviour=TablePolicy(BEHAVIOUR), config=QUICK)["is"]
    assert near.interval is not None and near.effective == pytest.approx(30) and "few" in near.note


def test_time_limits_are_noted_and_not_treated_as_termination():
    episodes = rollout(60, limit=3)
    logs = Logs(episodes, SPEC, GAMMA)
    cut = int((~episodes.arrays["terminated"][episodes.ends - 1].astype(bool)).sum())
    assert cut and len(logs.window) == len(episodes) - cut and logs.cut_weight == pytest.approx(GAMMA**3)
    assert any("Time limits" in note for note in estimate(TablePolicy(TARGET), episodes, config=QUICK).notes)


def test_windows_of_chunks_sum_rewards_and_stop_at_the_end():
    arrays = {
        "state": np.zeros((3, 3), np.float32),
        "action": np.arange(3, dtype=np.float32)[:, None],
        "reward": np.array([1.0, 2.0, 4.0], np.float32),
    }
    ended = arrays | {"terminated": np.array([False, False, True])}
    spec = PolicySpec({"state": (3,)}, 1, horizon=2, action_horizon=2)
    logs = Logs(Episodes.from_list([Episode(ended)], 0.1), spec, 0.5)
    assert logs.window.tolist() == [0, 1, 2] and logs.reward.tolist() == [2.0, 4.0, 4.0]
    assert logs.discount.tolist() == [0.25, 0.0, 0.0] and logs.following.tolist() == [2, 2, 2]
    assert logs.chunks(np.array([1, 2]))[:, :, 0].tolist() == [[1.0, 2.0], [2.0, 2.0]]
    cut = Logs(Episodes.from_list([Episode(arrays)], 0.1), spec, 0.5)
    assert cut.window.tolist() == [0] and cut.returns.tolist() == [3.0]


def test_densities_are_per_unit_of_unnormalised_action():
    logs = Logs(rollout(20), SPEC, GAMMA)
    policy = GaussianPolicy(GaussianConfig(normalization="identity", action_normalization="minmax"), SPEC)
    policy.action_normalizer.fit({"min": [-3.0], "max": [5.0]})
    frames = np.arange(len(logs.episodes))
    mean, log_std = policy.distribution(logs.observations(frames))
    density = torch.distributions.Normal(1 + 4 * mean[:, 0, 0], 4 * log_std.exp().squeeze())  # in units of the action
    expected = density.log_prob(torch.from_numpy(logs.episodes.arrays["action"][:, 0]))
    assert log_density(policy, logs) == pytest.approx(expected.detach().numpy(), abs=1e-5)


def test_logs_without_exploration_or_rewards_are_refused():
    episodes = rollout(10)
    policy = TablePolicy(np.array([0.999999] * 3))
    modes = Episodes.from_list(
        [
            Episode({**episode.arrays, "action": np.ones_like(episode.arrays["action"])})
            for episode in map(episodes.episode, range(10))
        ],
        0.1,
    )
    policy.act = lambda obs, **_: torch.ones(len(obs["state"]), 1, 1)  # type: ignore[method-assign]
    with pytest.raises(UserError, match="--stochastic"):
        estimate(policy, modes, behaviour=policy, config=QUICK)
    bare = Episodes(
        {k: v for k, v in episodes.arrays.items() if k != "reward"},
        *[getattr(episodes, name) for name in ("ends", "tasks", "seeds", "control_dt")],
    )
    with pytest.raises(UserError, match="reward"):
        Logs(bare, SPEC, GAMMA)
    with pytest.raises(UserError, match="shape"):
        Logs(episodes, PolicySpec({"state": (4,)}, 1), GAMMA)
    with pytest.raises(UserError, match="discount"):
        Logs(episodes, SPEC, 1.5)


def test_closing_frame_is_not_a_decision():
    episodes = rollout(5)
    extended = []
    for episode in map(episodes.episode, range(5)):
        longer = {key: np.concatenate([array, array[-1:]]) for key, array in episode.arrays.items()}
        longer["terminated"][-2] = False
        extended.append(Episode(longer | {"closing": np.arange(len(episode) + 1) == len(episode)}))
    plain, closed = (Logs(data, SPEC, GAMMA) for data in (episodes, Episodes.from_list(extended, 0.1)))
    assert closed.returns.tolist() == plain.returns.tolist() and closed.window.tolist() == plain.window.tolist()


REAL = {"behaviour": 5.0, "a": 9.0, "b": 6.0, "c": 1.0, "d": 7.0}


def test_sharpe_ratio_equals_hand_computed_values():
    careful = {"a": 4.0, "d": 3.0, "b": 2.0, "behaviour": 1.0, "c": 0.0}
    assert sharpe_ratio(careful, REAL, "behaviour", 2) == pytest.approx((9 - 5) / 1.0)  # 9 and 7
    assert sharpe_ratio(careful, REAL, "behaviour", 3) == pytest.approx(4 / np.std([9, 7, 6]))
    risky = {"a": 4.0, "c": 3.0, "b": 2.0, "d": 1.0, "behaviour": 0.0}
    for k in (2, 3):  # the same best policy, a worse second one
        assert sharpe_ratio(risky, REAL, "behaviour", k) < sharpe_ratio(careful, REAL, "behaviour", k)
    assert sharpe_ratio({"c": 1.0, "behaviour": 0.5, "a": 0, "b": 0, "d": 0}, REAL, "behaviour", 2) == 0
    assert np.isnan(sharpe_ratio(careful, REAL, "behaviour", 1))
    equal = {"behaviour": 0.0, "a": 0.1, "b": 0.1, "c": 0.1}
    assert np.isnan(sharpe_ratio(equal, equal, "behaviour", 3)) and np.std([0.1] * 3) > 0


def test_sharpe_ratio_is_invariant_to_a_common_offset_and_scale():
    guess = {name: value + np.sin(7 * value) for name, value in REAL.items()}
    for k in range(2, 6):
        moved = {name: 10 + 3 * value for name, value in REAL.items()}
        expected = sharpe_ratio(guess, REAL, "behaviour", k)
        assert sharpe_ratio(guess, moved, "behaviour", k) == pytest.approx(expected)
    header, rows = sharpe_table({"fqe": guess}, REAL, "behaviour")
    assert header == ["estimator", "k = 2", "k = 3", "k = 4", "k = 5"] and rows[0][0] == "fqe"


def test_sharpe_ratio_refuses_other_candidates():
    with pytest.raises(UserError, match="same policies"):
        sharpe_ratio({"a": 1.0}, REAL, "behaviour", 1)
    with pytest.raises(UserError, match="k <= 5"):
        sharpe_ratio(REAL, REAL, "behaviour", 6)
