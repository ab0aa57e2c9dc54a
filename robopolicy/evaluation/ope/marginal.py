"""Marginal importance sampling: one weight per state and action, learned without the density of the behaviour.

Minimax weight learning (Uehara et al. 2020) with weights and test functions linear in the same features has a closed
form: the weights that balance the flow of the policy through the logged transitions. With one feature per state and
action it is exact. The weights also correct a value function, as in double reinforcement learning (Kallus & Uehara
2020); corrected by the value function of its own features it reproduces itself, which gives its interval.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from robopolicy.data.episodes import is_cloud, is_image
from robopolicy.evaluation.ope.importance import effective_size
from robopolicy.evaluation.ope.logs import Logs

Array = NDArray[np.float64]
RIDGE = 1e-4  # relative to the mean square of the features


@dataclass(frozen=True, eq=False)
class Marginal:
    """Weights of the logged windows, and the values in the features that go with them."""

    weights: Array  # (W,) visits of the policy per visit in the logs, discounted
    terms: Array  # (N,) influence of every episode on the estimate; their mean is the estimate
    effective: float  # number of equally weighted episodes; few where the logs do not show what the policy does


def marginal(
    phi: Array, following: Array, start: Array, reward: Array, episode: NDArray[np.int64], ridge: float = RIDGE
) -> Marginal:
    """Solve for the weights.

    Args:
        phi: (W, K) features of logged states and actions.
        following: (W, K) features of the next states with the policy's actions, times the discount, 0 after the end.
        start: (N, K) features of the first states of the episodes with the policy's actions.
        reward: (W,).
        episode: (W,) which episode a window belongs to.
        ridge: Regularisation; 0 needs features that are independent in the logs.
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
    """Values of the first states `(N,)` plus weighted errors `(W,)` of their episodes."""
    return start + np.bincount(episode, weights * errors, minlength=len(start))


class RandomFeatures:
    """Cosines of random projections of standardised vectors and actions, and a constant (Rahimi & Recht 2007)."""

    def __init__(self, logs: Logs, count: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self._logs = logs
        every = self._vectors(logs.window, logs.chunks(np.arange(len(logs.window))))
        self._mean, self._std = every.mean(0), np.maximum(every.std(0), 1e-6)
        size = every.shape[1]
        self._projection = rng.normal(size=(size, count)) / np.sqrt(size)
        self._phase = rng.uniform(0, 2 * np.pi, count)

    def __call__(self, frames: NDArray[np.int64], chunks: Tensor) -> Array:
        """Features `(B, count + 1)` of the observations at `frames` `(B,)` with `chunks` `(B, n, A)`."""
        z = (self._vectors(frames, chunks) - self._mean) / self._std
        return np.concatenate([np.cos(z @ self._projection + self._phase), np.ones((len(z), 1))], 1)

    def _vectors(self, frames: NDArray[np.int64], chunks: Tensor) -> Array:
        obs = self._logs.observations(frames)
        return torch.cat([value.flatten(1).double() for value in (*obs.values(), chunks)], 1).numpy()


def features_of(logs: Logs, count: int, seed: int) -> RandomFeatures | None:
    """Features of logs whose policy sees vectors alone; None where it has cameras."""
    seen = logs.spec.observation
    return None if any(is_image(key) or is_cloud(key) for key in seen) else RandomFeatures(logs, count, seed)


def marginal_of(logs: Logs, decided: Tensor, features: RandomFeatures) -> Marginal:
    """Marginal weights of the policy that plays `decided` `(K, F, n, A)` at the frames of the logs."""

    def averaged(frames: NDArray[np.int64]) -> Array:
        return np.mean([features(frames, chunks[frames]) for chunks in decided], 0)

    phi = features(logs.window, logs.chunks(np.arange(len(logs.window))))
    following = averaged(logs.following) * logs.discount[:, None]
    start = averaged(logs.episodes.starts)
    return marginal(phi, following, start, logs.reward, logs.episode[logs.window])
