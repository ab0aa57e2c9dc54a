"""Tests of off-policy scores of a policy class, on a tree of six binary decisions whose values are exact sums."""

import itertools

import numpy as np
import pytest
import torch

from robopolicy.data.episodes import Episode, Episodes
from robopolicy.errors import UserError
from robopolicy.evaluation.ope import UniformPolicy, class_scores, estimate, grow_trees, score_class
from robopolicy.evaluation.ope.estimates import OPEConfig
from robopolicy.evaluation.ope.fqe import FQEConfig
from robopolicy.evaluation.ope.weights import cumulative_weights, per_decision
from robopolicy.nets.normalizer import make_normalizer
from robopolicy.policies.base import Policy
from robopolicy.policies.heads.flow import FlowConfig, FlowPolicy
from robopolicy.sim.registry import SimOptions, make_sim
from robopolicy.spec import PolicySpec

DEPTH, GAMMA = 6, 0.9
PATHS = np.array(list(itertools.product((0, 1), repeat=DEPTH)))  # (64, T): each path once, as under uniform actions
REWARD = np.random.default_rng(0).normal(size=(DEPTH, 2**DEPTH))  # per node: time and the binary number of its actions
REWARDS = np.stack([REWARD[t, PATHS[:, : t + 1] @ 2 ** np.arange(t, -1, -1)] for t in range(DEPTH)], 1)  # (64, T)


def chances(seed: int) -> np.ndarray:
    """Probability `(64, T)` that a random stochastic policy takes the action of each path at each node."""
    second = np.random.default_rng(seed).uniform(0.05, 0.95, size=(DEPTH, 2**DEPTH))
    node = np.stack([PATHS[:, :t] @ 2 ** np.arange(t - 1, -1, -1) if t else 0 * PATHS[:, 0] for t in range(DEPTH)], 1)
    here = second[np.arange(DEPTH), node]
    return np.where(PATHS == 1, here, 1 - here)


def ratios(chance: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore"):
        return np.log(chance) - np.log(0.5)


def shares(chance: np.ndarray) -> np.ndarray:
    """Contribution of each roll-out `(64,)` to the estimate."""
    return per_decision(cumulative_weights(ratios(chance)), REWARDS, GAMMA).numerator.sum(1)


def value(chance: np.ndarray) -> float:
    """True discounted return: the sum over paths weighted by their probability."""
    return float(chance.prod(1) @ (REWARDS @ GAMMA ** np.arange(DEPTH)))


def fixed(path: int) -> np.ndarray:
    """A member that follows one path regardless of its observation."""
    return (PATHS[path] == PATHS).astype(float)


def test_class_scores_are_unbiased_for_every_member():
    """The mean over all 64 equally likely roll-outs equals the true value."""
    members = {f"path{i}": fixed(i) for i in range(64)} | {f"mixed{i}": chances(i) for i in range(6)}
    for chance in members.values():
        assert shares(chance).mean() == pytest.approx(value(chance), abs=1e-12)
    scores = class_scores({name: ratios(c) for name, c in members.items()}, REWARDS, gamma=GAMMA, minimum=0)
    truth = {name: value(chance) for name, chance in members.items()}
    assert scores.best == max(truth, key=truth.__getitem__)
    assert scores.values[scores.names.index("mixed3")].estimate == pytest.approx(truth["mixed3"])
    assert sum(scores.chance) == pytest.approx(1.0) and scores.regret >= 0


def test_score_difference_depends_only_on_decisions_where_members_differ():
    base = shares(fixed(0))
    late, early = shares(fixed(1)), shares(fixed(32))  # differ in the last and in the first action
    assert (late - base)[PATHS[:, 0] == 1].any() == np.False_  # paths of neither member contribute 0
    assert (late - base).var() < (early - base).var()
    assert np.abs(late - base).max() == pytest.approx(
        2**DEPTH * GAMMA ** (DEPTH - 1) * max(abs(REWARDS[0, -1]), abs(REWARDS[1, -1]))
    )  # only the last reward differs


def test_members_with_few_effective_episodes_are_not_selected():
    members = {"path": ratios(fixed(5)), "mixed": ratios(chances(0)), "other": ratios(chances(1))}
    scores = class_scores(members, REWARDS, gamma=GAMMA, minimum=20)
    assert scores.best in ("mixed", "other") and scores.chance[0] is None and scores.values[0] is None
    assert sum(scores.chance[1:]) == pytest.approx(1.0) and scores.regret >= 0
    assert scores.table()[1][-1] == ["path", "-", f"{scores.effective[0]:.1f}", "-"]


def test_no_best_member_is_named_without_two_trusted_estimates():
    members = {"path": ratios(fixed(5)), "mixed": ratios(chances(0))}
    scores = class_scores(members, REWARDS, gamma=GAMMA, minimum=20)
    assert scores.best is None and scores.chance == (None, None) and scores.to_dict()["regret"] is None
    assert scores.values[0] is None and scores.values[1] is not None  # the one that is trusted is still shown
    assert class_scores({"mixed": ratios(chances(0))}, REWARDS, gamma=GAMMA).best is None


SPEC = PolicySpec({"state": (1,)}, 1)


class FixedProbability(Policy):
    """Actions between -1 and 1, above 0 with a fixed probability."""

    name = "leaning"

    def __init__(self, above: float) -> None:
        super().__init__()
        self.spec, self.above = SPEC, above
        self.action_normalizer = make_normalizer(1, "identity")

    def act(self, obs, *, deterministic=False, generator=None):
        return torch.full((len(obs["state"]), 1, 1), 0.5 if self.above > 0.5 else -0.5)

    def log_density(self, obs, chunk):
        return torch.where(chunk[:, 0, 0] > 0, torch.tensor(self.above), torch.tensor(1 - self.above)).log()


def uniform_logs(episodes: int) -> Episodes:
    rng = np.random.default_rng(0)

    def one() -> Episode:
        action = rng.uniform(-1, 1, (3, 1)).astype(np.float32)
        rows = {
            "state": np.zeros((3, 1), np.float32),
            "action": action,
            "reward": (action[:, 0] > 0).astype(np.float32),
        }
        return Episode({**rows, "terminated": np.arange(3) == 2})

    return Episodes.from_list([one() for _ in range(episodes)], 0.1)


def test_class_score_intervals_on_uniform_logs_cover_the_true_values():
    logs, behaviour = uniform_logs(600), UniformPolicy({"state": (1,)}, [-1.0], [1.0])
    members = {"mostly": FixedProbability(0.9), "rarely": FixedProbability(0.2)}
    config = OPEConfig(gamma=1.0, deterministic=False, fqe=FQEConfig(steps=1))
    scores = score_class(members, logs, behaviour, config)
    for interval, chance in zip(scores.values, (0.9, 0.2), strict=True):
        assert interval.low < 3 * chance < interval.high
    assert scores.best == "mostly" and scores.chance == (1.0, 0.0)
    single = estimate(members["rarely"], logs, behaviour=behaviour, config=config)
    assert single["pdis"].interval.estimate == pytest.approx(scores.values[1].estimate)


def test_uniform_policy_has_zero_density_outside_its_box():
    behaviour = UniformPolicy({"state": (1,)}, [-1.0, 0.0], [1.0, 4.0])
    obs = {"state": torch.zeros(3, 1, 1)}
    sampled = behaviour.act(obs, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(behaviour.log_density(obs, sampled).exp(), torch.tensor(1 / 8))
    assert behaviour.log_density(obs, sampled + 5).exp().eq(0).all()
    assert behaviour.act(obs, deterministic=True)[0, 0].tolist() == [0.0, 2.0]


def test_logs_outside_the_behaviour_support_are_refused():
    logs, narrow = uniform_logs(60), UniformPolicy({"state": (1,)}, [-0.5], [0.5])
    strange = int((np.abs(logs.arrays["action"]) > 0.5).sum())
    config = OPEConfig(gamma=1.0, deterministic=False, fqe=FQEConfig(steps=1))
    message = rf"'uniform'\) has zero density at {strange} of 180 logged actions, so it cannot have produced them"
    with pytest.raises(UserError, match=message):
        score_class({"narrow": narrow}, logs, narrow, config)
    with pytest.raises(UserError, match=message):
        estimate(narrow, logs, behaviour=narrow, config=config)


def test_members_without_density_are_refused():
    flow = FlowPolicy(FlowConfig(hidden=(8,)), SPEC)
    with pytest.raises(UserError, match="has no density"):
        score_class({"flow": flow}, uniform_logs(2), UniformPolicy({"state": (1,)}, [-1.0], [1.0]))


def test_tree_returns_equal_the_returns_of_simulated_rollouts():
    actions = torch.tensor([[-0.4, 0.1], [0.6, 0.3]])
    sim = make_sim("toy/point_mass", SimOptions(num_envs=3, reward="shaped"))
    trees = grow_trees(sim, actions, 4, seed=7, gamma=GAMMA)

    def choose(obs):
        return (obs["state"][:, 0] * 50).long() % 2  # any function of the observation

    obs, simulated = sim.reset(7), torch.zeros(3, dtype=torch.float64)
    for step in range(4):
        result = sim.step(actions[choose(obs)])
        simulated += GAMMA**step * result.reward.double()
        obs = result.obs
    sim.close()
    assert torch.allclose(trees.returns(choose), simulated)
    assert [tuple(reward.shape) for reward in trees.rewards] == [(3, 1, 2), (3, 2, 2), (3, 4, 2), (3, 8, 2)]


def test_trees_that_are_too_large_are_refused():
    sim = make_sim("toy/point_mass", SimOptions(num_envs=1))
    with pytest.raises(UserError, match="got 11111111; lower the actions or the depth"):
        grow_trees(sim, torch.zeros(10, 2), 8)
    sim.close()
