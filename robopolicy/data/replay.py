"""Replay memory of control steps, from which chunks, n-step returns and observation histories are sampled.

Every control step is stored once, in one lane per environment (or one lane for a dataset), the last observation of an
episode as a slot of its own without an action. A sample is a window of such slots, so chunks of any length, any n-step
return and any history come out of the same memory, starting at any step and not only where a decision was made.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from robopolicy.data.episodes import Episodes
from robopolicy.data.priorities import Priorities
from robopolicy.errors import UserError

_FLAGS = ("step", "last", "terminated", "decision")


@dataclass(frozen=True)
class Request:
    """What an algorithm wants sampled."""

    batch_size: int  # B, rows per gradient step
    horizon: int  # H, actions per chunk
    steps: int  # n, control steps until the bootstrap; the executed part of the chunk, or more for n-step returns
    gamma: float  # discount per control step
    obs_horizon: int = 1  # To
    decisions_only: bool = False  # windows start only where a chunk was chosen, so that its record is known


@dataclass(frozen=True)
class Transitions:
    """B windows; everything a temporal-difference loss or an imitation loss on replayed chunks needs."""

    obs: dict[str, Tensor]  # {key: (B, To, ...)}
    chunk: Tensor  # (B, H, A) actions played, in env units; the last one repeated after the end of the episode
    mask: Tensor  # (B, H) float32, 0 on steps after the end
    rewards: Tensor  # (B, n) per control step, 0 after the end
    steps: Tensor  # (B,) int64, control steps until the bootstrap; fewer than n where the episode ended
    discount: Tensor  # (B,) gamma ** steps, 0 where the episode terminated
    reward: Tensor  # (B,) sum of gamma ** j * rewards_j
    next_obs: dict[str, Tensor]  # {key: (B, To, ...)} after `steps` control steps
    returns: Tensor  # (B,) discounted return to go of the stored episode; NaN while it is unfinished or was truncated
    record: dict[str, Tensor]  # {name: (B, ...)} what the actor noted at the decision, e.g. its latent noise
    online: Tensor  # (B,) bool, played in this run rather than read from a dataset
    weight: Tensor  # (B,) importance weight of prioritised sampling, else 1
    index: Tensor  # (B,) int64, place in the memory, for `update_priorities`

    def __len__(self) -> int:
        return len(self.reward)

    def split(self, size: int) -> Iterator[Transitions]:
        """Consecutive minibatches of `size` rows."""
        for start in range(0, len(self), size):
            yield _map(self, lambda x, rows=slice(start, start + size): x[rows])

    @staticmethod
    def concat(parts: list[Transitions]) -> Transitions:
        """Join batches with the same keys."""
        return parts[0] if len(parts) == 1 else _map_all(parts, torch.cat)


class Replay:
    """Ring buffer with `lanes` lanes; arrays are allocated when the first step arrives.

    Args:
        capacity: Slots in all lanes together; an episode of T steps takes T + 1.
        lanes: Environments that are added to.
        gamma: Discount of `Transitions.returns`, per control step; None does not track returns.
        prioritized: Exponent of prioritised sampling (Schaul et al. 2016); 0 samples uniformly.
        online: What `Transitions.online` says.
    """

    def __init__(
        self,
        capacity: int,
        lanes: int = 1,
        *,
        gamma: float | None = None,
        prioritized: float = 0.0,
        online: bool = True,
    ) -> None:
        self.lanes, self.length = lanes, capacity // lanes
        if self.length < 2:
            raise UserError(f"A replay memory needs at least 2 slots per environment, got {capacity} for {lanes}.")
        self.gamma = gamma
        self.online = online
        self._arrays: dict[str, Tensor] = {}  # {"obs.state": (lanes, length, ...), "action": ..., flags}
        self._head = torch.zeros(lanes, dtype=torch.int64)  # next slot to write
        self._filled = torch.zeros(lanes, dtype=torch.int64)  # slots ever written, at most `length`
        self._age = torch.zeros(lanes, dtype=torch.int64)  # steps of the running episodes so far
        self._priorities = Priorities(lanes * self.length, prioritized) if prioritized else None

    def __len__(self) -> int:
        """Slots in use."""
        return int(self._filled.sum())

    # Writing.

    def add(
        self,
        lanes: Tensor,
        obs: Mapping[str, Tensor],
        action: Tensor,
        reward: Tensor,
        terminated: Tensor,
        truncated: Tensor,
        final_obs: Mapping[str, Tensor],
        *,
        decision: bool = True,
        record: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Append one control step of some environments.

        Args:
            lanes: (K,) int64, which environments.
            obs: {key: (K, ...)} seen before the step, without history.
            action: (K, A) played.
            reward: (K,).
            terminated: (K,) bool.
            truncated: (K,) bool.
            final_obs: {key: (K, ...)} true successors; used where the episode ended.
            decision: Whether a chunk begins here.
            record: {name: (K, ...)} what the actor noted; kept where `decision`.
        """
        done = terminated | truncated
        row: dict[str, Tensor] = {f"obs.{key}": value for key, value in obs.items()}
        row |= {f"record.{key}": value for key, value in (record or {}).items()}
        row |= {
            "action": action,
            "reward": reward,
            "terminated": terminated,
            "last": done,
            "step": torch.ones_like(done),
            "decision": torch.full_like(done, decision),
            "age": self._age[lanes],
            "returns": torch.full_like(reward, torch.nan),
        }
        self._write(lanes, row)
        self._age[lanes] += 1
        if bool(done.any()):
            ended = lanes[done]
            final = {f"obs.{key}": value[done] for key, value in final_obs.items()}
            no = torch.zeros_like(ended).bool()
            self._write(ended, {**final, "step": no, "last": no, "terminated": no, "age": self._age[ended]})
            if self.gamma is not None:
                for lane in lanes[terminated].tolist():
                    self._fill_returns(lane)
            self._age[ended] = 0

    def _write(self, lanes: Tensor, row: Mapping[str, Tensor]) -> None:
        place = self._head[lanes]
        for key, value in row.items():
            if key not in self._arrays:
                shape = (self.lanes, self.length, *value.shape[1:])
                self._arrays[key] = torch.zeros(shape, dtype=value.dtype)
            self._arrays[key][lanes, place] = value.cpu()
        if self._priorities is not None:
            self._priorities.admit((lanes * self.length + place).numpy())
        self._head[lanes] = (place + 1) % self.length
        self._filled[lanes] = (self._filled[lanes] + 1).clamp(max=self.length)

    def _fill_returns(self, lane: int) -> None:
        """Write the returns to go of the episode that has just terminated in `lane`."""
        assert self.gamma is not None
        count = min(int(self._age[lane]), self.length - 1)
        slots = (self._head[lane] - 1 - torch.arange(1, count + 1)) % self.length  # newest first
        reward = self._arrays["reward"][lane, slots].double().numpy()
        total, returns = 0.0, np.empty(count)
        for j, value in enumerate(reward):
            total = returns[j] = float(value) + self.gamma * total
        self._arrays["returns"][lane, slots] = torch.from_numpy(returns).float()

    @classmethod
    def from_episodes(cls, episodes: Episodes, *, gamma: float | None = None, prioritized: float = 0.0) -> Replay:
        """All steps of a dataset.

        The last frame of an episode that did not terminate has no successor: it only serves as one.

        Raises:
            UserError: The dataset has no rewards.
        """
        if "reward" not in episodes.arrays:
            raise UserError("The dataset has no 'reward', which value learning needs; collect it anew.")
        replay = cls(len(episodes) + episodes.num_episodes + 1, gamma=gamma, prioritized=prioritized, online=False)
        for index in range(episodes.num_episodes):
            replay._append(episodes.episode(index).arrays, episodes.observation_keys)
        return replay

    def _append(self, frames: Mapping[str, np.ndarray], keys: tuple[str, ...]) -> None:
        """Write a whole episode into lane 0."""
        count = len(frames["action"])
        terminated = bool(frames["terminated"][-1]) if "terminated" in frames else False
        steps = count if terminated else count - 1
        lane = torch.zeros(1, dtype=torch.int64)
        tensor = {key: torch.from_numpy(np.ascontiguousarray(frames[key])) for key in (*keys, "action", "reward")}
        for t in range(steps):
            last = t == steps - 1
            obs = {key: tensor[key][t : t + 1] for key in keys}
            after = {key: tensor[key][min(t + 1, count - 1)][None] for key in keys}
            ends = torch.tensor([last and terminated]), torch.tensor([last and not terminated])
            action, reward = tensor["action"][t : t + 1].float(), tensor["reward"][t : t + 1].float()
            self.add(lane, obs, action, reward, *ends, after)

    # Reading.

    def sample(self, request: Request, generator: torch.Generator, *, batches: int = 1) -> Transitions:
        """Draw `batches * batch_size` windows, uniformly or by priority.

        Raises:
            UserError: The memory holds no complete window yet.
        """
        count = batches * request.batch_size
        found: list[Tensor] = []
        for _ in range(1000):
            draw = self._draw(2 * count if request.decisions_only else count, generator)
            draw = draw[self._usable(draw, request)]
            found.append(draw)
            if sum(map(len, found)) >= count:
                return self.take(torch.cat(found)[:count], request)
        raise UserError(f"The replay memory holds no window of {request.steps} steps yet; play more steps first.")

    def take(self, index: Tensor, request: Request) -> Transitions:
        """The windows that start at `index` `(B,)` (lane * length + slot)."""
        lane, slot = index // self.length, index % self.length
        reach = max(request.horizon, request.steps)
        ahead = (slot[:, None] + torch.arange(reach)) % self.length  # (B, reach)
        mask = self._alive(lane, slot, ahead)
        steps = mask[:, : request.steps].sum(1)
        valid = mask[:, : request.steps]
        rewards = torch.where(valid, self._arrays["reward"][lane[:, None], ahead[:, : request.steps]], 0.0)
        terminated = (self._arrays["terminated"][lane[:, None], ahead[:, : request.steps]] & valid).any(1)
        powers = request.gamma ** torch.arange(request.steps)
        final = (mask.sum(1) - 1).clamp(min=0)[:, None]  # (B, 1) last step within reach
        offset = torch.minimum(torch.arange(request.horizon)[None], final)
        played = self._arrays["action"][lane[:, None], (slot[:, None] + offset) % self.length]
        records = {key[7:]: array[lane, slot] for key, array in self._arrays.items() if key.startswith("record.")}
        weight = torch.ones(len(index))
        if self._priorities is not None:
            weight = torch.from_numpy(self._priorities.weights(index.numpy(), len(self))).float()
        return Transitions(
            obs=self._history(lane, slot, request.obs_horizon),
            chunk=played,
            mask=mask[:, : request.horizon].float(),
            rewards=rewards,
            steps=steps,
            discount=torch.where(terminated, 0.0, request.gamma**steps),
            reward=(rewards * powers).sum(1),
            next_obs=self._history(lane, (slot + steps) % self.length, request.obs_horizon),
            returns=self._arrays["returns"][lane, slot],
            record=records,
            online=torch.full((len(index),), self.online),
            weight=weight,
            index=index,
        )

    def update_priorities(self, batch: Transitions, error: Tensor) -> None:
        """Set the priorities of sampled windows to their absolute errors `(B,)`; nothing without prioritisation."""
        if self._priorities is not None:
            own = (batch.online == self.online).cpu()
            index, size = batch.index.cpu()[own], error.detach().abs().cpu()[own]
            self._priorities.update(index.numpy(), size.double().numpy())

    def _draw(self, count: int, generator: torch.Generator) -> Tensor:
        if len(self) == 0:
            raise UserError("The replay memory is empty; play some steps or give a dataset first.")
        if self._priorities is not None:
            return torch.from_numpy(self._priorities.draw(torch.rand(count, generator=generator).double().numpy()))
        ends = self._filled.cumsum(0)
        flat = torch.randint(int(ends[-1]), (count,), generator=generator)
        lane = torch.searchsorted(ends, flat, right=True)
        slot = flat - (ends[lane] - self._filled[lane])
        return lane * self.length + slot

    def _usable(self, index: Tensor, request: Request) -> Tensor:
        """Which windows start at a step and are complete: the episode ends in them, or their successor is known."""
        lane, slot = index // self.length, index % self.length
        ahead = (slot[:, None] + torch.arange(request.steps)) % self.length
        newest = (self._head[lane] - 1 - slot) % self.length  # slots written after this one
        ended = (self._arrays["last"][lane[:, None], ahead] & (torch.arange(request.steps) <= newest[:, None])).any(1)
        start = self._arrays["step"][lane, slot] & (ended | (newest >= request.steps))
        if request.decisions_only:
            start &= self._arrays["decision"][lane, slot]
        # The observations of the history must not have been overwritten yet.
        oldest = (slot - self._head[lane]) % self.length
        needed = torch.minimum(self._arrays["age"][lane, slot], torch.tensor(request.obs_horizon - 1))
        return start & ((self._filled[lane] < self.length) | (oldest >= needed))

    def _alive(self, lane: Tensor, slot: Tensor, ahead: Tensor) -> Tensor:
        """Which of the steps `ahead` `(B, n)` belong to the episode of `slot` and have been written."""
        newest = (self._head[lane] - 1 - slot) % self.length
        ended = self._arrays["last"][lane[:, None], ahead]
        before = torch.cat([torch.zeros_like(ended[:, :1]), ended[:, :-1]], 1).cumsum(1) > 0
        return ~before & (torch.arange(ahead.shape[1]) <= newest[:, None])

    def _history(self, lane: Tensor, slot: Tensor, length: int) -> dict[str, Tensor]:
        back = torch.arange(length - 1, -1, -1)[None]
        back = torch.minimum(back, self._arrays["age"][lane, slot][:, None])
        place = (slot[:, None] - back) % self.length
        return {key[4:]: array[lane[:, None], place] for key, array in self._arrays.items() if key.startswith("obs.")}

    def state_dict(self) -> dict[str, Any]:
        """The whole memory."""
        state: dict[str, Any] = {
            "head": self._head.clone(),
            "filled": self._filled.clone(),
            "age": self._age.clone(),
            "arrays": {key: value[:, : int(self._filled.max())].clone() for key, value in self._arrays.items()},
        }
        if self._priorities is not None:
            state["priorities"] = self._priorities.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`."""
        self._head, self._filled, self._age = (state[key].clone() for key in ("head", "filled", "age"))
        self._arrays = {}
        for key, value in state["arrays"].items():
            array = torch.zeros((self.lanes, self.length, *value.shape[2:]), dtype=value.dtype)
            array[:, : value.shape[1]] = value
            self._arrays[key] = array
        if self._priorities is not None:
            self._priorities.load_state_dict(state["priorities"])


class MixedReplay:
    """Batches of which `offline_share` comes from a dataset and the rest from what was played (RLPD's 50/50)."""

    def __init__(self, offline: Replay, online: Replay, offline_share: float = 0.5) -> None:
        self.offline, self.online, self.offline_share = offline, online, offline_share

    def sample(self, request: Request, generator: torch.Generator, *, batches: int = 1) -> Transitions:
        """Draw `batches` minibatches, each with its share of both."""
        rows = round(self.offline_share * request.batch_size)
        parts: list[Transitions] = []
        for source, size in ((self.offline, rows), (self.online, request.batch_size - rows)):
            if size:
                parts.append(source.sample(replace(request, batch_size=size), generator, batches=batches))
        if len(parts) == 1:
            return parts[0]
        columns = [list(part.split(len(part) // batches)) for part in parts]
        return Transitions.concat([piece for pair in zip(*columns, strict=True) for piece in pair])

    def update_priorities(self, batch: Transitions, error: Tensor) -> None:
        """Hand the errors of each half to the memory it came from."""
        for source in (self.offline, self.online):
            source.update_priorities(batch, error)


def _map(batch: Transitions, function: Any) -> Transitions:
    values = {}
    for entry in fields(batch):
        value = getattr(batch, entry.name)
        tree = isinstance(value, dict)
        values[entry.name] = {key: function(item) for key, item in value.items()} if tree else function(value)
    return Transitions(**values)


def _map_all(batches: list[Transitions], function: Any) -> Transitions:
    values = {}
    for entry in fields(Transitions):
        column = [getattr(batch, entry.name) for batch in batches]
        if isinstance(column[0], dict):
            shared = set.intersection(*(set(item) for item in column))
            values[entry.name] = {key: function([item[key] for item in column]) for key in column[0] if key in shared}
        else:
            values[entry.name] = function(column)
    return Transitions(**values)
