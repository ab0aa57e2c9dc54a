"""Parts shared by the on-policy actor-critic algorithms; `fine_tuner.py` builds the fine-tuners' frame on them.

They turn a `Rollout` into rows with advantages and value targets, draw minibatches, and scale rewards.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor, nn

from robopolicy.core.distributed import mean_over_ranks, rank, world_size
from robopolicy.core.returns import chunk_discount, gae, successor_values
from robopolicy.core.trackers import RunningMoments
from robopolicy.data.batches import Rollout

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
    rollout: Rollout,
    value: Value,
    *,
    gamma: float,
    lam: float,
    discount_unit: str = "step",
    scale: Callable[[Tensor], Tensor] | None = None,
) -> Rows:
    """Score a rollout with the critic and compute GAE.

    Args:
        rollout: Experience `(T, N, ...)`.
        value: Critic, maps observations `(B, To, ...)` to `(B,)`.
        gamma: Discount, per control step or per chunk.
        lam: GAE lambda, per decision.
        discount_unit: "step" or "chunk", see `robopolicy.core.returns.chunk_discount`.
        scale: Maps the rewards to those that are learned from; None learns from them as they are.
    """
    shape = rollout.shape
    obs = flatten(rollout.obs)
    values = value(obs).view(shape)  # (T, N)
    bootstrap = rollout.truncated & ~rollout.terminated
    successor = successor_values(values, value(rollout.last_obs), bootstrap, value(rollout.final_obs))
    discount = chunk_discount(gamma, rollout.steps, discount_unit)
    reward = rollout.reward if scale is None else scale(rollout.reward)
    advantage, target = gae(reward, values, successor, rollout.terminated, rollout.truncated, discount, lam)
    return Rows(
        obs,
        flatten(rollout.record),
        rollout.logp.flatten(0, 1),
        advantage.flatten(),
        target.flatten(),
        values.flatten(),
    )


def minibatches(rows: Rows, size: int, generator: torch.Generator) -> Iterator[tuple[Rows, bool]]:
    """Yield the rows in random order, `size` at a time, and whether it is the last, which may be smaller.

    Each of several processes, which know the same rows, gets its share of them.
    """
    shuffled = rows[torch.randperm(len(rows), generator=generator)]  # one gather, then views
    for start in range(0, len(rows), size):
        end = min(start + size, len(rows))
        yield shuffled[slice(start + rank(), end, world_size())], end == len(rows)


def sequences(rows: Rows, shape: tuple[int, int], size: int, generator: torch.Generator) -> Iterator[tuple[Rows, bool]]:
    """As `minibatches` of about `size` rows, which are whole columns of a rollout of `shape` (T, N), time first."""
    steps, envs = shape
    places, columns = torch.arange(steps * envs).view(shape), max(1, size // steps)
    order = torch.randperm(envs, generator=generator)
    for start in range(0, envs, columns):
        chosen = places[:, order[start : start + columns]]
        yield rows[chosen.flatten()], start + columns >= envs


Work = Callable[[Rows], Tensor]


class Beside:
    """Runs a function on a second thread while the caller works: the critic's gradient beside the actor's.

    Both live in networks of their own, so the result does not depend on which of them is faster. Minibatches too small
    to pay for the hand-over are computed by the caller.

    Args:
        networks: What the function trains.
    """

    SMALLEST = 2_000_000  # rows times weights; measured with two hidden layers of 64

    def __init__(self, networks: Iterable[nn.Module]) -> None:
        weights = sum(parameter.numel() for network in networks for parameter in network.parameters())
        self._fewest = self.SMALLEST / max(1, weights)  # rows
        self._calls: SimpleQueue[tuple[Work, Rows] | None] = SimpleQueue()
        self._results: SimpleQueue[Tensor | Exception] = SimpleQueue()
        threading.Thread(target=_serve, args=(self._calls, self._results), daemon=True, name="critic").start()

    def start(self, function: Work, rows: Rows) -> None:
        """Begin `function(rows)`; `wait` must follow."""
        if len(rows) < self._fewest:
            self._results.put(function(rows))
        else:
            self._calls.put((function, rows))

    def wait(self) -> Tensor:
        """Result of the call begun last; raises what it raised."""
        result = self._results.get()
        if isinstance(result, Exception):
            raise result
        return result

    def __del__(self) -> None:
        self._calls.put(None)


def _serve(calls: SimpleQueue[tuple[Work, Rows] | None], results: SimpleQueue[Tensor | Exception]) -> None:
    while (call := calls.get()) is not None:
        function, rows = call
        try:
            results.put(function(rows))
        except Exception as error:
            results.put(error)


def normalize(advantage: Tensor) -> Tensor:
    """Advantage with mean 0 and standard deviation 1 over the given rows; unchanged for a single row.

    Several processes count the rows of all of them. Equal advantages become 0: rounding must not tell them apart.
    """
    exact = advantage.double()
    if world_size() > 1:
        rows = advantage.numel() * world_size()
        centred = exact - mean_over_ranks(exact.mean())
        std = (mean_over_ranks(centred.square().mean()) * rows / (rows - 1)).sqrt()
        return (centred / (std + 1e-8)).to(advantage.dtype)
    if advantage.numel() < 2:
        return advantage
    return ((exact - exact.mean()) / (exact.std() + 1e-8)).to(advantage.dtype)


def explained_variance(rows: Rows) -> float:
    """Share of the variance of the value targets that the critic predicted before the update; 1 is perfect."""
    variance = rows.value_target.var(0, correction=0).sum().clamp_min(1e-12)
    return float(1 - (rows.value_target - rows.value).var(0, correction=0).sum() / variance)


class ReturnScale:
    """Running standard deviation of the discounted return, to divide rewards by (state in `state_dict`).

    The discounted return runs on from rollout to rollout and is cut at episode ends. Where hardly any episode is
    rewarded the deviation is small, and a reward many times as large: it is cut at 10, as in the public code of DPPO
    and ReinFlow.
    """

    LARGEST = 10.0  # scaled reward

    def __init__(self) -> None:
        self.running: Tensor | None = None  # (N,) return so far, discounted to the next decision
        self.moments = RunningMoments()

    def observe(self, rollout: Rollout, gamma: float, discount_unit: str = "step") -> None:
        """Add the rewards of one rollout, discounted as its advantages are."""
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

    def cut(self) -> None:
        """Forget the running episodes, of which the rest will not be played."""
        self.running = None

    def __call__(self, reward: Tensor) -> Tensor:
        """Scaled rewards, of any shape."""
        factor = self.factor
        return reward if factor == 1.0 else (reward * factor).clamp(-self.LARGEST, self.LARGEST)

    @property
    def factor(self) -> float:
        """1 / standard deviation; 1 before the first rollout and where rewards have been constant."""
        return 1.0 / self.moments.std if self.moments.std > 1e-8 else 1.0

    def state_dict(self) -> dict[str, Any]:
        """Running returns and their moments."""
        return {"running": self.running, "moments": self.moments.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`."""
        self.running = state["running"]
        self.moments.load_state_dict(state["moments"])
