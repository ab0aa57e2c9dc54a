"""Scale of replayed rewards from the discounted returns of the running episodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from robopolicy.data.batches import Transitions
from robopolicy.device import copy_to


class ReturnScale:
    """Division of rewards by `max(std(G), max|G| / bound)`, as in FlashSAC (Kim et al. 2026).

    G is the return of an episode so far, in which each reward is discounted by its age. The scale applies to rewards
    when they are sampled, so older ones follow it. Unlike in FlashSAC's code, G restarts after the last step of an
    episode, not with it.
    """

    def __init__(self, bound: float, gamma: float, envs: int, device: torch.device) -> None:
        """Start at 0 for `envs` environments on `device`; `gamma` is the discount per control step."""
        self.bound, self.gamma = bound, gamma
        self._returns = torch.zeros(envs, dtype=torch.float64, device=device)  # (N,) G
        self._moments = torch.zeros(4, dtype=torch.float64, device=device)  # count, mean, squared deviations, max|G|

    def observe(self, reward: Tensor, done: Tensor, active: Tensor | None = None) -> None:
        """Update with a control step `(N,)` of the `active` environments, or of all; `done` ends their episodes."""
        device = self._returns.device
        active = torch.ones_like(done) if active is None else active
        reward, done, active = (copy_to(each, device) for each in (reward, done, active))
        returns = torch.where(active, self.gamma * self._returns + reward, self._returns)
        count, mean, square, most = self._moments
        rows = active.sum()
        own = torch.where(active, returns, 0.0)
        batch_mean = own.sum() / rows.clamp_min(1)
        total, delta = (count + rows).clamp_min(1), batch_mean - mean
        square = (
            square + torch.where(active, returns - batch_mean, 0.0).square().sum() + delta**2 * count * rows / total
        )
        self._moments = torch.stack([count + rows, mean + delta * rows / total, square, most.maximum(own.abs().amax())])
        self._returns = torch.where(active & done, 0.0, returns)

    def factor(self) -> Tensor:
        """Factor `()` float32 of the rewards."""
        count, _, square, most = self._moments
        return ((square / count.clamp_min(1) + 1e-8).sqrt().maximum(most / self.bound)).reciprocal().float()

    def apply(self, batch: Transitions) -> Transitions:
        """Scale the rewards and returns of `batch`."""
        factor = self.factor()
        scaled = {name: getattr(batch, name) * factor for name in ("reward", "rewards", "returns")}
        return replace(batch, **scaled)

    def reset_episodes(self) -> None:
        """Start new episodes in all environments."""
        self._returns = torch.zeros_like(self._returns)

    def state_dict(self) -> dict[str, Tensor]:
        """Running returns and statistics."""
        return {"returns": self._returns, "moments": self._moments}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore `state_dict`."""
        device = self._returns.device
        self._returns, self._moments = state["returns"].to(device), state["moments"].to(device)
