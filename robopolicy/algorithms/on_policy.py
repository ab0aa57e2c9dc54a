"""Parts shared by the on-policy actor-critic algorithms: PPO, ReinFlow and their relatives.

Each algorithm keeps its own losses and its own `update`; what is the same in all of them lives here once: turning a
`Rollout` into rows with advantages and value targets, drawing minibatches, and scaling rewards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from robopolicy.core.returns import chunk_discount, gae, successor_values
from robopolicy.data.rollout import Rollout

Value = Callable[[dict[str, Tensor]], Tensor]


@dataclass(frozen=True)
class Rows:
    """A rollout flattened to B = T * N rows, ready for minibatches."""

    obs: dict[str, Tensor]  # (B, To, ...)
    record: dict[str, Tensor]  # (B, ...)
    logp: Tensor  # (B, K) when sampled
    advantage: Tensor  # (B,)
    value_target: Tensor  # (B,) advantage + value
    value: Tensor  # (B,) critic before the update

    def __len__(self) -> int:
        return int(self.advantage.shape[0])

    def __getitem__(self, index: Tensor | slice) -> Rows:
        pick = lambda tree: {key: value[index] for key, value in tree.items()}  # noqa: E731
        return Rows(
            pick(self.obs),
            pick(self.record),
            self.logp[index],
            self.advantage[index],
            self.value_target[index],
            self.value[index],
        )


def flatten(tree: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Merge the leading (T, N) of every tensor into rows."""
    return {key: value.flatten(0, 1) for key, value in tree.items()}


@torch.no_grad()
def rows_with_advantages(
    rollout: Rollout, value: Value, *, gamma: float, lam: float, discount_unit: str = "step", reward_scale: float = 1.0
) -> Rows:
    """Score a rollout with the critic and compute GAE.

    Args:
        rollout: Experience `(T, N, ...)`.
        value: Critic, maps observations `(B, To, ...)` to `(B,)`.
        gamma: Discount, per control step or per chunk.
        lam: GAE lambda, per decision.
        discount_unit: "step" or "chunk", see `robopolicy.core.returns.chunk_discount`.
        reward_scale: Factor on the rewards.
    """
    shape = rollout.shape
    obs = flatten(rollout.obs)
    values = value(obs).view(shape)  # (T, N)
    bootstrap = rollout.truncated & ~rollout.terminated
    successor = successor_values(values, value(rollout.last_obs), bootstrap, value(rollout.final_obs))
    discount = chunk_discount(gamma, rollout.steps, discount_unit)
    advantage, target = gae(
        rollout.reward * reward_scale, values, successor, rollout.terminated, rollout.truncated, discount, lam
    )
    return Rows(
        obs,
        flatten(rollout.record),
        rollout.logp.flatten(0, 1),
        advantage.flatten(),
        target.flatten(),
        values.flatten(),
    )


def minibatches(rows: Rows, size: int, generator: torch.Generator) -> Iterator[tuple[Rows, bool]]:
    """Yield the rows in random order, `size` at a time, and whether it is the last, which may be smaller."""
    shuffled = rows[torch.randperm(len(rows), generator=generator)]  # one gather, then views
    for start in range(0, len(rows), size):
        yield shuffled[slice(start, start + size)], start + size >= len(rows)


class Beside:
    """Runs a function on a second thread while the caller works: the critic's gradient beside the actor's.

    Both live in networks of their own, so the result does not depend on which of them is faster.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="critic")

    def __call__(self, function: Callable[[Rows], Tensor], rows: Rows) -> Future[Tensor]:
        """Start `function(rows)`; `.result()` waits for it and raises what it raised."""
        return self._pool.submit(function, rows)


def normalise(advantage: Tensor) -> Tensor:
    """Advantage with mean 0 and standard deviation 1 over the given rows; unchanged for a single row."""
    if advantage.numel() < 2:
        return advantage
    return (advantage - advantage.mean()) / (advantage.std() + 1e-8)


def value_loss(value: Tensor, target: Tensor, old: Tensor | None = None, clip: float | None = None) -> Tensor:
    """Mean squared error of the critic, optionally with the change from `old` clipped to `clip`."""
    if clip is not None and old is not None:
        value = old + (value - old).clamp(-clip, clip)
    return nn.functional.mse_loss(value, target)


class ReturnScale:
    """Running standard deviation of the discounted return, to divide rewards by (state in `state_dict`).

    The discounted return runs on through the rollout and is cut at episode ends; statistics are merged rollout by
    rollout (Chan et al., parallel variance).
    """

    def __init__(self) -> None:
        self.running: Tensor | None = None  # (N,) discounted return so far
        self.count, self.mean, self.square = 0.0, 0.0, 0.0

    def observe(self, rollout: Rollout, gamma: float) -> None:
        """Add the rewards of one rollout."""
        running = torch.zeros_like(rollout.reward[0]) if self.running is None else self.running
        samples: list[Tensor] = []
        done = rollout.terminated | rollout.truncated
        for reward, end in zip(rollout.reward, done, strict=True):
            running = running * gamma + reward
            samples.append(running)
            running = torch.where(end, 0.0, running)
        self.running = running
        batch = torch.stack(samples).double()
        count, mean = float(batch.numel()), float(batch.mean())
        delta, total = mean - self.mean, self.count + count
        self.square += float(((batch - mean) ** 2).sum()) + delta**2 * self.count * count / total
        self.mean += delta * count / total
        self.count = total

    @property
    def factor(self) -> float:
        """1 / standard deviation; 1 before the first rollout and where rewards have been constant."""
        deviation = (self.square / self.count) ** 0.5 if self.count else 0.0
        return 1.0 / deviation if deviation > 1e-8 else 1.0

    def state_dict(self) -> dict[str, Any]:
        """Running statistics."""
        return {"running": self.running, "count": self.count, "mean": self.mean, "square": self.square}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`."""
        self.running = state["running"]
        self.count, self.mean, self.square = float(state["count"]), float(state["mean"]), float(state["square"])
