"""Evaluation of a class of policies on one set of rollouts (agnostic policy search, Li 2025).

Two unbiased estimates of the value of every member use data that all members share, without rollouts of the members:

* `class_scores`: importance-weighted rollouts of uniformly random actions (`UniformPolicy`, or any behaviour with a
  density). Members share the data where they agree, so the variance of a difference depends on their disagreement.
* `grow_trees`: trees of all sequences of K actions from common starts (Kearns et al. 1999); a member that chooses among
  them has one path in each. They need no weights, but K ** depth steps per start, and a simulator that can save its
  state.

Reconstructed from the abstract of the thesis and the textbook estimators it is based on.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from robopolicy.data.episodes import Episodes
from robopolicy.errors import UserError
from robopolicy.evaluation.intervals import Interval
from robopolicy.evaluation.ope.estimates import OPEConfig, behavior_density, log_density, weighting_problem
from robopolicy.evaluation.ope.logs import Logs
from robopolicy.evaluation.ope.weights import (
    cumulative_weights,
    effective_size_per_decision,
    per_decision,
    terms_interval,
)
from robopolicy.nets.normalizer import make_normalizer
from robopolicy.policies.base import Observation, Policy
from robopolicy.policies.noise import Randomness, uniform
from robopolicy.sim.contract import VectorSim
from robopolicy.spec import PolicySpec

Array = NDArray[np.float64]
Choose = Callable[[Observation], Tensor]
"""Function from observations `{key: (N, ...)}` to indices of the K actions `(N,)`."""

MAX_NODES = 20_000  # per tree


class UniformPolicy(Policy):
    """Uniformly random actions between bounds, as the behaviour of `collect --policy random`."""

    name = "uniform"

    def __init__(self, observation: Mapping[str, tuple[int, ...]], low: ArrayLike, high: ArrayLike) -> None:
        """Sample between `low` and `high` `(A,)`; `observation` gives the shapes of the inputs."""
        super().__init__()
        self.low, self.high = (torch.as_tensor(np.asarray(bound, np.float32)) for bound in (low, high))
        self.spec = PolicySpec(dict(observation), len(self.low))
        self.action_normalizer = make_normalizer(len(self.low), "identity")

    def act(self, obs: Observation, *, deterministic: bool = False, generator: Randomness = None) -> Tensor:
        """Return random actions `(B, 1, A)`, or the centre with `deterministic`."""
        rows = len(next(iter(obs.values())))
        if deterministic:
            return ((self.low + self.high) / 2).expand(rows, 1, -1)
        share = uniform((rows, 1, len(self.low)), generator, self.low.device)
        return self.low + share * (self.high - self.low)

    def log_density(self, obs: Observation, chunk: Tensor) -> Tensor:
        """Return the log-density `(B,)`, constant for actions `(B, H, A)` between the bounds and -inf outside."""
        action = chunk[:, 0]
        inside = ((action >= self.low) & (action <= self.high)).all(1)
        return torch.where(inside, -(self.high - self.low).log().sum(), -torch.inf)


@dataclass(frozen=True)
class ClassScores:
    """Values of all members on the same episodes."""

    names: tuple[str, ...]
    values: tuple[Interval | None, ...]  # discounted return of each; None for members that are not trusted
    effective: tuple[float, ...]  # effective episodes of each
    chance: tuple[float | None, ...]  # fraction of the resamples in which it is the best; None without a best
    best: str | None  # best of the trusted members; None with fewer than two
    regret: float  # `level` quantile of the loss of choosing it; NaN without a best

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Return the header and one row per member, sorted by value; members that are not trusted are last."""
        order = sorted(range(len(self.names)), key=lambda i: -value.estimate if (value := self.values[i]) else math.inf)
        rows: list[list[str]] = []
        for i in order:
            value, chance = self.values[i], self.chance[i]
            shown = "-" if value is None else f"{value}", "-" if chance is None else f"{100 * chance:.0f} %"
            rows.append([self.names[i], shown[0], f"{self.effective[i]:.1f}", shown[1]])
        return ["policy", "discounted return", "effective episodes", "chance to be best"], rows

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form."""
        rows = zip(self.names, self.values, self.effective, self.chance, strict=True)
        members = {n: {"interval": v and v.to_dict(), "effective": e, "chance": c} for n, v, e, c in rows}
        return {"members": members, "best": self.best, "regret": None if self.best is None else self.regret}


def class_scores(
    log_ratios: Mapping[str, Array],
    rewards: Array,
    *,
    gamma: float = 1.0,
    minimum: float = 10.0,
    level: float = 0.95,
    resamples: int = 2_000,
    seed: int = 0,
) -> ClassScores:
    """Evaluate every member by per-decision importance sampling, with one bootstrap over the shared episodes.

    `log_ratios` `(N, T)` per member are log-densities of every decision minus those under the behaviour; they and
    `rewards` `(N, T)` are 0 after the end of an episode. Members are trusted from `minimum` effective episodes, and the
    best one is named if at least two are, because one estimate compares nothing.
    """
    weights = {name: cumulative_weights(ratio) for name, ratio in log_ratios.items()}
    terms = {name: per_decision(weight, rewards, gamma) for name, weight in weights.items()}
    names = tuple(log_ratios)
    effective = tuple(effective_size_per_decision(weight, gamma) for weight in weights.values())
    values = tuple(
        terms_interval(term, level=level, resamples=resamples, seed=seed) if size >= minimum else None
        for term, size in zip(terms.values(), effective, strict=True)
    )
    trusted = [i for i, value in enumerate(values) if value is not None]
    chance: list[float | None] = [None] * len(names)
    if len(trusted) < 2:
        return ClassScores(names, values, effective, tuple(chance), None, float("nan"))
    shares = np.stack([term.numerator.sum(1) for term in terms.values()])[trusted]  # (P, N)
    episodes = shares.shape[1]
    counts = np.random.default_rng(seed).multinomial(episodes, np.full(episodes, 1 / episodes), size=resamples)
    draws = counts @ shares.T / episodes  # (R, P)
    chosen = int(shares.mean(1).argmax())
    for i, wins in zip(trusted, np.bincount(draws.argmax(1), minlength=len(trusted)).tolist(), strict=True):
        chance[i] = wins / resamples
    regret = float(np.quantile(draws.max(1) - draws[:, chosen], level))
    return ClassScores(names, values, effective, tuple(chance), names[trusted[chosen]], regret)


def score_class(
    policies: Mapping[str, Policy], episodes: Episodes, behaviour: Policy, config: OPEConfig | None = None
) -> ClassScores:
    """Evaluate single-action policies with a density on the episodes of `behaviour`, which needs a density, too."""
    config, episodes = config or OPEConfig(deterministic=False), episodes.without_closing_frames()
    if reason := next(filter(None, (weighting_problem(policy, behaviour, False) for policy in policies.values())), ""):
        raise UserError(f"The policies cannot be evaluated together: {reason}.")
    logs = Logs(episodes, behaviour.spec, config.gamma)
    behavior = behavior_density(behaviour, logs)
    ratios: dict[str, Array] = {}
    for name, policy in policies.items():
        table = np.zeros_like(logs.rewards)
        table[logs.episode, logs.age] = log_density(policy, Logs(episodes, policy.spec, config.gamma)) - behavior
        ratios[name] = table
    options: dict[str, Any] = {"gamma": config.gamma, "minimum": config.minimum_size}
    return class_scores(ratios, logs.rewards, level=config.level, seed=config.seed, **options)


@dataclass(frozen=True, eq=False)
class TrajectoryTrees:
    """N trees of all sequences of K actions; node i of a level has the children i K to i K + K - 1."""

    obs: tuple[Observation, ...]  # per level d: {key: (N, K ** d, ...)}
    rewards: tuple[Tensor, ...]  # per level: (N, K ** d, K), 0 after the end of an episode
    gamma: float

    def returns(self, choose: Choose) -> Tensor:
        """Return the discounted returns `(N,)` of one member along its path through every tree."""
        rows = torch.arange(len(self.rewards[0]))
        node, total = torch.zeros(len(rows), dtype=torch.int64), torch.zeros(len(rows), dtype=torch.float64)
        for depth, (obs, reward) in enumerate(zip(self.obs, self.rewards, strict=True)):
            action = choose({key: value[rows, node] for key, value in obs.items()}).cpu()
            total += self.gamma**depth * reward[rows, node, action].double()
            node = node * reward.shape[2] + action
        return total


def grow_trees(
    sim: VectorSim, actions: Tensor, depth: int, *, seed: int | Sequence[int] = 0, gamma: float = 1.0
) -> TrajectoryTrees:
    """Run all sequences of `depth` of the `actions` `(K, A)` from the start of one episode per environment.

    The simulator must be able to save its state.
    """
    nodes = sum(len(actions) ** level for level in range(depth))
    if depth < 1 or not len(actions) or nodes > MAX_NODES:
        raise UserError(
            f"Trajectory trees must have 1 to {MAX_NODES} nodes, got {nodes}; lower the actions or the depth."
        )
    obs = sim.reset(seed)
    try:
        states: list[Any] = [copy.deepcopy(sim.state_dict())]
    except RuntimeError as error:
        raise UserError(f"The backend of {sim.spec.task} cannot save its state; choose another backend.") from error
    observations, running = [obs], [torch.ones(sim.num_envs, dtype=torch.bool)]  # per node of the level
    levels: list[Observation] = []
    rewards: list[Tensor] = []
    for level in range(depth):
        levels.append({key: torch.stack([node[key].cpu() for node in observations], 1) for key in obs})
        found: list[Tensor] = []
        children: list[tuple[Any, Observation, Tensor]] = []
        for state, alive in zip(states, running, strict=True):
            for action in actions:
                sim.load_state_dict(copy.deepcopy(state))
                step = sim.step(action.to(sim.device).expand(sim.num_envs, -1))
                found.append(torch.where(alive, step.reward.cpu(), 0.0))
                after = copy.deepcopy(sim.state_dict()) if level + 1 < depth else None
                children.append((after, step.final_obs, alive & ~step.done.cpu()))
        rewards.append(torch.stack(found, 1).view(sim.num_envs, len(states), len(actions)))
        states, observations, running = (list(column) for column in zip(*children, strict=True))
    return TrajectoryTrees(tuple(levels), tuple(rewards), gamma)


def sharpe_ratio(estimated: Mapping[str, float], real: Mapping[str, float], behaviour: str, k: int) -> float:
    """Compute SharpeRatio@k of an estimator; NaN without a variance.

    `estimated` and `real` have the values of the same candidates, `behaviour` among them; `k` is the portfolio size.
    """
    if set(estimated) != set(real) or behaviour not in real:
        raise UserError(f"SharpeRatio@k needs estimated and real values of the same policies, including '{behaviour}'.")
    if not 1 <= k <= len(real):
        raise UserError(f"SharpeRatio@k of {len(real)} candidates needs 1 <= k <= {len(real)}, got {k}.")
    chosen = sorted(estimated, key=lambda name: -estimated[name])[:k]
    values = np.array([real[name] for name in chosen])
    if values.max() == values.min():  # the computed deviation may differ from zero by rounding
        return math.nan
    return max(float(values.max()) - real[behaviour], 0.0) / float(values.std())


def sharpe_table(
    estimators: Mapping[str, Mapping[str, float]], real: Mapping[str, float], behaviour: str
) -> tuple[list[str], list[list[str]]]:
    """Return the header and one row per estimator: SharpeRatio@k for every k >= 2."""
    sizes = range(2, len(real) + 1)
    rows = [
        [name, *(f"{sharpe_ratio(values, real, behaviour, k):.2f}" for k in sizes)]
        for name, values in estimators.items()
    ]
    return ["estimator", *(f"k = {k}" for k in sizes)], rows
