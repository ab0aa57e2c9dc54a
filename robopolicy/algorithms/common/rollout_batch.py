"""Rollouts as batches of rows: advantages, value targets, minibatches, epochs and reward scaling."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from robopolicy.core.distributed import all_gather, all_reduce_mean, local_size, rank, world_size
from robopolicy.core.returns import chunk_discount, gae, successor_values
from robopolicy.core.trackers import RunningMoments
from robopolicy.data.batches import Rollout
from robopolicy.device import random_order

Value = Callable[[dict[str, Tensor]], Tensor]


@dataclass(frozen=True)
class RolloutBatch:
    """A rollout flattened to B = T * N rows."""

    obs: dict[str, Tensor]  # (B, To, ...)
    record: dict[str, Tensor]  # (B, ...)
    logp: Tensor  # (B, K) at sampling time
    advantage: Tensor  # (B,)
    value_target: Tensor  # (B,) advantage + value
    value: Tensor  # (B,) critic before the update

    def __len__(self) -> int:
        return int(self.advantage.shape[0])

    def __getitem__(self, index: Tensor | slice) -> RolloutBatch:
        pick = lambda tree: {key: value[index] for key, value in tree.items()}  # noqa: E731
        return RolloutBatch(
            pick(self.obs),
            pick(self.record),
            self.logp[index],
            self.advantage[index],
            self.value_target[index],
            self.value[index],
        )

    def split(self, size: int) -> list[RolloutBatch]:
        """Consecutive batches of `size` rows; the last may be smaller."""
        return [self[slice(start, start + size)] for start in range(0, len(self), size)]


def flatten(tree: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Merge the leading (T, N) of every tensor into rows."""
    return {key: value.flatten(0, 1) for key, value in tree.items()}


@torch.no_grad()
def compute_advantages(
    rollout: Rollout,
    value: Value,
    *,
    gamma: float,
    gae_lambda: float,
    discount_unit: str = "step",
    reward_scale: Callable[[Tensor], Tensor] | None = None,
) -> RolloutBatch:
    """Evaluate a rollout `(T, N, ...)` with the critic and compute generalised advantage estimates (GAE).

    `value` maps observations `(B, To, ...)` to `(B,)`. `gamma` is per `discount_unit`, "step" or "chunk" (see
    `robopolicy.core.returns.chunk_discount`), `gae_lambda` per decision. `reward_scale` scales the rewards.
    """
    shape = rollout.shape
    obs = flatten(rollout.obs)
    values = value(obs).view(shape)  # (T, N)
    bootstrap = rollout.truncated & ~rollout.terminated
    successor = successor_values(values, value(rollout.last_obs), bootstrap, value(rollout.final_obs))
    discount = chunk_discount(gamma, rollout.steps, discount_unit)
    reward = rollout.reward if reward_scale is None else reward_scale(rollout.reward)
    advantage, target = gae(reward, values, successor, rollout.terminated, rollout.truncated, discount, gae_lambda)
    if rollout.weight is not None:
        advantage = advantage * rollout.weight
    return RolloutBatch(
        obs,
        flatten(rollout.record),
        rollout.logp.flatten(0, 1),
        advantage.flatten(),
        target.flatten(),
        values.flatten(),
    )


def minibatches(rows: RolloutBatch, size: int, generator: torch.Generator) -> Iterator[tuple[RolloutBatch, bool]]:
    """Yield minibatches of `size` shuffled rows, and whether it is the last, which may be smaller.

    In distributed training each process shuffles its own rows and yields its share of `size`.
    """
    shuffled, size = rows[random_order(len(rows), generator)], local_size(size)  # one gather, then views
    for start in range(0, len(rows), size):
        yield shuffled[slice(start, start + size)], start + size >= len(rows)


def recurrent_minibatches(
    rows: RolloutBatch, shape: tuple[int, int], size: int, generator: torch.Generator
) -> Iterator[tuple[RolloutBatch, bool]]:
    """Yield minibatches of about `size` rows, whole columns of a rollout of `shape` (T, N), time first."""
    steps, envs = shape
    indices = torch.arange(steps * envs, device=generator.device).view(shape)
    columns = max(1, local_size(size) // steps)
    order = random_order(envs, generator)
    for start in range(0, envs, columns):
        chosen = indices[:, order[start : start + columns]]
        yield rows[chosen.flatten()], start + columns >= envs


def balance(rows: RolloutBatch) -> RolloutBatch:
    """Redistribute rows so that all processes have equally many; fewer rows than processes may be dropped."""
    if world_size() == 1:
        return rows
    gather = lambda tree: {key: all_gather(value) for key, value in tree.items()}  # noqa: E731
    vectors = (all_gather(value) for value in (rows.logp, rows.advantage, rows.value_target, rows.value))
    whole = RolloutBatch(gather(rows.obs), gather(rows.record), *vectors)
    share = len(whole) // world_size()
    return whole[slice(rank() * share, (rank() + 1) * share)]


Batch = TypeVar("Batch")


class Epochs(Generic[Batch]):
    """Several passes over the same data; `draw` starts a pass, and the loop may stop early."""

    def __init__(
        self, draw: Callable[[], Iterator[Batch]], count: int, optimizer: torch.optim.Optimizer | None = None
    ) -> None:
        """Prepare `count` passes; `optimizer`, of which `stop` suppresses further steps, is fused."""
        self._draw = draw
        self._count = count
        self._optimizer = optimizer
        self._stopped: Tensor | None = None
        self._kl: Tensor | None = None
        self.completed = 0  # passes whose last minibatch has been used

    def __iter__(self) -> Iterator[Batch]:
        for _ in range(self._count):
            yield from self._draw()
            if self._stopped is not None and bool(self._stopped):
                break
            self.completed += 1
        if self._stopped is not None:
            self._optimizer.found_inf = None  # type: ignore[union-attr]

    def stop(self, info: Mapping[str, Tensor], limit: float | None) -> bool:
        """Whether to leave the loop before this step, because its KL, the mean over all processes, exceeds `limit`.

        On a device the loop goes on to the end of the pass, where the host waits once: the optimiser skips its steps.
        """
        if limit is None:
            return False
        kl = all_reduce_mean(info["approx_kl"].detach())
        if kl.device.type == "cpu":
            self._kl = kl
            return float(kl) > limit
        self._kl = kl if self._stopped is None else torch.where(self._stopped, self._kl, kl)  # type: ignore[arg-type]
        self._stopped = kl > limit if self._stopped is None else self._stopped | (kl > limit)
        self._optimizer.found_inf = self._stopped.float()  # type: ignore[union-attr]
        return False

    def stats(self) -> dict[str, Any]:
        """Completed passes, and the last KL that `stop` has compared: the one above the limit if the loop stopped."""
        kl = {} if self._kl is None else {"actor/approx_kl": self._kl}
        return {"actor/epochs": self.completed, **kl}


def normalize(advantage: Tensor) -> Tensor:
    """Standardise the advantages of the rows (of all processes); a single row is unchanged.

    Double precision makes equal advantages exactly 0.
    """
    exact = advantage.double()
    if world_size() > 1:
        rows = advantage.numel() * world_size()
        centred = exact - all_reduce_mean(exact.mean())
        std = (all_reduce_mean(centred.square().mean()) * rows / (rows - 1)).sqrt()
        return (centred / (std + 1e-8)).to(advantage.dtype)
    if advantage.numel() < 2:
        return advantage
    std, mean = torch.std_mean(exact)
    return ((exact - mean) / (std + 1e-8)).to(advantage.dtype)


def explained_variance(rows: RolloutBatch) -> Tensor:
    """Fraction `()` of the variance of the value targets explained by the critic before the update."""
    variance = rows.value_target.var(0, correction=0).sum().clamp_min(1e-12)
    return 1 - (rows.value_target - rows.value).var(0, correction=0).sum() / variance


class RewardNormalizer:
    """Division of rewards by the running standard deviation of the discounted return.

    The discounted return continues over rollouts and is reset at episode ends. With rare rewards the deviation is
    small, so scaled rewards are clipped to 10, as in the public code of DPPO and ReinFlow.
    """

    MAX_REWARD = 10.0  # largest scaled reward

    def __init__(self) -> None:
        self.running: Tensor | None = None  # (N,) return so far, discounted to the next decision
        self.moments = RunningMoments()

    def update(self, rollout: Rollout, gamma: float, discount_unit: str = "step") -> None:
        """Update with the rewards of one rollout, discounted like its advantages."""
        start = torch.zeros_like(rollout.reward[0])
        carried = start if self.running is None else self.running.to(start.device)
        returns: list[Tensor] = []
        done = rollout.terminated | rollout.truncated
        discounts = chunk_discount(gamma, rollout.steps, discount_unit)
        for reward, discount, end in zip(rollout.reward, discounts, done, strict=True):
            returns.append(carried + reward)
            carried = torch.where(end, 0.0, discount * returns[-1])
        self.running = carried
        self.moments.observe(torch.stack(returns))

    def reset_episodes(self) -> None:
        """Discard the returns of the running episodes, whose remaining steps will not be collected."""
        self.running = None

    def __call__(self, reward: Tensor) -> Tensor:
        """Scale rewards of any shape."""
        factor = self.factor.to(reward.device)
        return torch.where(factor == 1.0, reward, (reward * factor).clamp(-self.MAX_REWARD, self.MAX_REWARD))

    @property
    def factor(self) -> Tensor:
        """1 / standard deviation `()`; 1 before the first rollout and for constant rewards."""
        std = self.moments.std
        return torch.where(std > 1e-8, 1.0 / std, 1.0)

    def state_dict(self) -> dict[str, Any]:
        """Running returns and their moments."""
        return {"running": self.running, "moments": self.moments.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`."""
        self.running = state["running"]
        self.moments.load_state_dict(state["moments"])
