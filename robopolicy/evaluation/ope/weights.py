"""Importance sampling over logged decisions, and doubly robust corrections of a value function.

N episodes of at most T steps have the weights w_t: the product up to step t of the likelihood ratios of policy and
behaviour. Every estimator is a sum over columns of a ratio of means over episodes, `Terms`, with a common bootstrap.

* `trajectory_wise`: mean of w_T G. Unbiased; its variance grows exponentially with the length of the episode.
* `per_decision`: a reward is only weighted by the decisions before it (Precup et al. 2000). Unbiased, less variance.
* Self-normalised: divided by the mean weight instead of by 1. Biased, consistent, bounded by the observed rewards.
* `doubly_robust`: a value function, corrected by weighted errors (Jiang and Li 2015; self-normalised: Thomas and
  Brunskill 2016). Unbiased if either the weights or the values are right.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from robopolicy.data.episodes import is_cloud, is_image
from robopolicy.evaluation.intervals import Interval, bootstrap_mean
from robopolicy.evaluation.ope.logs import Logs

Array = NDArray[np.float64]
_OVERFLOW = 600.0  # largest log weight; beyond it the effective sample size is 1 in any case


@dataclass(frozen=True, eq=False)
class Terms:
    """Estimator as the sum over columns of mean(numerator) / mean(denominator)."""

    numerator: Array  # (N, C)
    denominator: Array | None = None  # (N, C); None is 1


def cumulative_weights(log_ratio: Array) -> Array:
    """Return the weights `(N, T)` of all decisions up to each step, from log ratios `(N, T)`, 0 after the end."""
    return np.exp(np.minimum(np.cumsum(log_ratio, 1), _OVERFLOW))


def effective_size(weights: Array) -> float:
    """Return Kish's effective sample size of weights `(N,)`."""
    scaled = weights / max(float(np.abs(weights).max()), 1e-300)
    return float(scaled.sum() ** 2 / max((scaled**2).sum(), 1e-300))


def effective_size_per_decision(weights: Array, gamma: float) -> float:
    """Return the mean effective sample size over the steps of `weights` `(N, T)`, discounted like the rewards."""
    discounts = gamma ** np.arange(weights.shape[1])
    sizes = np.array([effective_size(column) for column in weights.T])
    return float(sizes @ discounts / discounts.sum())


def trajectory_wise(weights: Array, rewards: Array, gamma: float, *, normalised: bool = False) -> Terms:
    """Weight returns by all decisions of their episodes; `weights` and `rewards` are `(N, T)`."""
    last = weights[:, -1:]
    returns = rewards @ gamma ** np.arange(rewards.shape[1])
    return Terms(last * returns[:, None], last if normalised else None)


def per_decision(weights: Array, rewards: Array, gamma: float, *, normalised: bool = False) -> Terms:
    """Weight rewards by the decisions before them; `weights` and `rewards` are `(N, T)`."""
    return Terms(weights * rewards * gamma ** np.arange(rewards.shape[1]), weights if normalised else None)


def doubly_robust(weights: Array, start: Array, errors: Array, gamma: float, *, normalised: bool = False) -> Terms:
    """Correct the values V of the first states, `start` `(N,)`, by weighted errors.

    `errors` `(N, T)` are reward + gamma V(next) - Q(state, action), 0 where unknown; V must be the mean of Q over the
    actions of the policy.
    """
    corrections = weights * errors * gamma ** np.arange(errors.shape[1])
    numerator = np.concatenate([start[:, None], corrections], 1)
    ones = np.ones((len(start), 1))
    return Terms(numerator, np.concatenate([ones, weights], 1) if normalised else None)


def terms_interval(terms: Terms, *, level: float = 0.95, resamples: int = 2_000, seed: int = 0) -> Interval:
    """Compute the estimate and its bootstrap interval over episodes: BCa for means, percentile for ratios of means."""
    if terms.denominator is None:
        return bootstrap_mean(terms.numerator.sum(1), level=level, resamples=resamples, seed=seed)
    n = len(terms.numerator)
    counts = np.random.default_rng(seed).multinomial(n, np.full(n, 1 / n), size=resamples).astype(np.float64)
    draws = _ratios(counts @ terms.numerator, counts @ terms.denominator)
    estimate = _ratios(terms.numerator.sum(0), terms.denominator.sum(0))
    low, high = np.quantile(draws, [(1 - level) / 2, (1 + level) / 2])
    return Interval(float(estimate), float(low), float(high), n, level)


def _ratios(numerator: Array, denominator: Array) -> Array:
    """Sum the ratios over the last axis; a column of zero weights counts as 0."""
    return np.divide(numerator, denominator, out=np.zeros_like(numerator), where=denominator > 0).sum(-1)


RIDGE = 1e-4  # relative to the mean square of the features


@dataclass(frozen=True, eq=False)
class Marginal:
    """Weights of the logged windows and the resulting estimate."""

    weights: Array  # (W,) discounted visits of the policy per visit in the logs
    terms: Array  # (N,) influence of every episode; their mean is the estimate
    effective: float  # effective sample size; low where the logs lack actions of the policy


def marginal(
    phi: Array, following: Array, start: Array, reward: Array, episode: NDArray[np.int64], ridge: float = RIDGE
) -> Marginal:
    """Solve for the marginal weights in a feature space.

    `phi` `(W, K)` are features of logged states and actions; `following` `(W, K)` of the next states with actions of
    the policy, times the discount, 0 after the end; `start` `(N, K)` of the first states with actions of the policy.
    `episode` `(W,)` is the episode of each window. `ridge` 0 needs linearly independent features.
    """
    n = len(start)
    flow = phi.T @ (phi - following) / n  # (K, K)
    flow += ridge * np.trace(phi.T @ phi) / n / phi.shape[1] * np.eye(phi.shape[1])
    weights = phi @ np.linalg.solve(flow.T, start.mean(0))
    value = np.linalg.solve(flow, phi.T @ reward / n)  # (K,) of Q in the features
    errors = reward + (following - phi) @ value
    terms = corrected(start @ value, weights, errors, episode)
    return Marginal(weights, terms, effective_size(np.bincount(episode, weights, minlength=n).astype(np.float64)))


def corrected(start: Array, weights: Array, errors: Array, episode: NDArray[np.int64]) -> Array:
    """Add the weighted errors `(W,)` of each episode to the value `(N,)` of its first state."""
    return start + np.bincount(episode, weights * errors, minlength=len(start))


class RandomFeatures:
    """Cosines of random projections of standardised vectors and actions, and a constant (Rahimi and Recht 2007)."""

    def __init__(self, logs: Logs, count: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self._logs = logs
        every = self._vectors(logs.window, logs.chunks(np.arange(len(logs.window))))
        self._mean, self._std = every.mean(0), np.maximum(every.std(0), 1e-6)
        size = every.shape[1]
        self._projection = rng.normal(size=(size, count)) / np.sqrt(size)
        self._phase = rng.uniform(0, 2 * np.pi, count)

    def __call__(self, frames: NDArray[np.int64], chunks: Tensor) -> Array:
        """Return features `(B, count + 1)` of the observations at `frames` `(B,)` with `chunks` `(B, n, A)`."""
        z = (self._vectors(frames, chunks) - self._mean) / self._std
        return np.concatenate([np.cos(z @ self._projection + self._phase), np.ones((len(z), 1))], 1)

    def _vectors(self, frames: NDArray[np.int64], chunks: Tensor) -> Array:
        obs = self._logs.observations(frames)
        return torch.cat([value.flatten(1).double() for value in (*obs.values(), chunks)], 1).numpy()


def features_of(logs: Logs, count: int, seed: int) -> RandomFeatures | None:
    """Create features for vector observations; None for cameras or point clouds."""
    keys = logs.spec.observation
    return None if any(is_image(key) or is_cloud(key) for key in keys) else RandomFeatures(logs, count, seed)


def marginal_of(logs: Logs, policy_chunks: Tensor, features: RandomFeatures) -> Marginal:
    """Compute the marginal weights of the policy with `policy_chunks` `(K, F, n, A)` at the frames of the logs."""

    def averaged(frames: NDArray[np.int64]) -> Array:
        return np.mean([features(frames, chunks[frames]) for chunks in policy_chunks], 0)

    phi = features(logs.window, logs.chunks(np.arange(len(logs.window))))
    following = averaged(logs.following) * logs.discount[:, None]
    start = averaged(logs.episodes.starts)
    return marginal(phi, following, start, logs.reward, logs.episode[logs.window])
