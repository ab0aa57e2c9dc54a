"""Replay memory of control steps, from which chunks, n-step returns and observation histories are sampled.

Every control step is stored once, in one lane per environment (or one lane for a dataset), the last observation of an
episode as a slot of its own without an action. A sample is a window of such slots, so chunks of any length, any n-step
return and any history come out of the same memory, starting at any step and not only where a decision was made.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from robopolicy.data.episodes import Episodes
from robopolicy.data.priorities import Priorities
from robopolicy.data.transitions import Request, Transitions
from robopolicy.errors import UserError


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
        self._arrays: dict[str, Tensor] = {}  # {"obs.state": (lanes * length, ...), "action": ..., flags}
        self._head = torch.zeros(lanes, dtype=torch.int64)  # next slot to write
        self._filled = torch.zeros(lanes, dtype=torch.int64)  # slots ever written, at most `length`
        self._age = torch.zeros(lanes, dtype=torch.int64)  # steps of the running episodes so far
        self.priorities = Priorities(lanes * self.length, prioritized) if prioritized else None

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
            lanes: (K,) int64, which environments, each at most once.
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
            "decision": torch.full_like(done, decision and self._note(record or {})),
            "age": self._age[lanes],
            "returns": torch.full_like(reward, torch.nan),
        }
        self._write(lanes, row)
        self._age[lanes] += 1
        if bool(done.any()):
            ended = lanes[done.cpu()]
            final = {f"obs.{key}": value[done] for key, value in final_obs.items()}
            no = torch.zeros(len(ended), dtype=torch.bool)
            flags = dict.fromkeys(("step", "last", "terminated", "decision"), no)
            self._write(ended, {**final, **flags, "age": self._age[ended]})
            if self.gamma is not None:
                for lane in lanes[terminated.cpu()].tolist():
                    self._fill_returns(lane)
            self._age[ended] = 0

    def _write(self, lanes: Tensor, row: Mapping[str, Tensor]) -> None:
        slot = self._head[lanes]
        place = lanes * self.length + slot
        for key, value in row.items():
            if key not in self._arrays:
                self._arrays[key] = torch.zeros((self.lanes * self.length, *value.shape[1:]), dtype=value.dtype)
            self._arrays[key][place] = value.cpu()
        if self.priorities is not None:
            self.priorities.admit(place.numpy(), playable=bool(row["step"].all()))
        self._head[lanes] = (slot + 1) % self.length
        self._filled[lanes] = (self._filled[lanes] + 1).clamp(max=self.length)

    def _note(self, record: Mapping[str, Tensor]) -> bool:
        """Whether `record` is complete; a name never seen before makes all earlier records incomplete."""
        known = {key[7:] for key in self._arrays if key.startswith("record.")}
        if record.keys() - known and "decision" in self._arrays:
            self._arrays["decision"].zero_()
        return known <= record.keys()

    def _fill_returns(self, lane: int) -> None:
        """Write the returns to go of the episode that has just terminated in `lane`."""
        assert self.gamma is not None
        count = min(int(self._age[lane]), self.length - 1)
        slots = (self._head[lane] - 2 - torch.arange(count)) % self.length + lane * self.length  # newest first
        total, returns = 0.0, []
        for reward in self._arrays["reward"][slots].tolist():
            total = reward + self.gamma * total
            returns.append(total)
        self._arrays["returns"][slots] = torch.tensor(returns)

    def cut(self) -> None:
        """End the running episodes without successors, because what follows will belong to other episodes.

        The last step of each only serves as successor of the one before it.
        """
        for lane in self._age.nonzero().flatten().tolist():
            last = (int(self._head[lane]) - 1) % self.length + lane * self.length
            if self._age[lane] > 1:
                self._arrays["last"][(int(self._head[lane]) - 2) % self.length + lane * self.length] = True
            for flag in ("step", "last", "terminated", "decision"):
                self._arrays[flag][last] = False
            if self.priorities is not None:
                self.priorities.admit(np.array([last]), playable=False)
        self._age.zero_()

    @classmethod
    def from_episodes(cls, episodes: Episodes, *, gamma: float | None = None, prioritized: float = 0.0) -> Replay:
        """All steps of a dataset.

        The last frame of an episode that did not terminate has no successor: it only serves as one.

        Raises:
            UserError: The dataset has no rewards.
        """
        if "reward" not in episodes.arrays:
            raise UserError("The dataset has no 'reward', which value learning needs; collect it anew.")
        ends = episodes.ends - 1  # (E,) last frame of every episode
        terminated = np.zeros(len(ends), np.bool_)
        if "terminated" in episodes.arrays:
            terminated = episodes.arrays["terminated"][ends].astype(np.bool_)
        steps = episodes.lengths - ~terminated  # (E,) steps with a successor
        slots = steps + 1  # after them one slot with the last observation
        first = np.cumsum(slots) - slots  # (E,) first slot of every episode
        age = np.arange(slots.sum()) - np.repeat(first, slots)
        played = age < np.repeat(steps, slots)
        frame = np.minimum(np.repeat(episodes.starts, slots) + age, np.repeat(ends, slots))
        last = first + steps - 1
        if not played.any():
            raise UserError("The dataset has no step with a successor; its episodes need at least two frames.")

        replay = cls(max(len(frame), 2), gamma=gamma, prioritized=prioritized, online=False)
        arrays = {f"obs.{key}": _float32(episodes.arrays[key][frame]) for key in episodes.observation_keys}
        flags = {name: np.zeros(len(frame), np.bool_) for name in ("last", "terminated", "decision")}
        flags["last"][last[steps > 0]] = True
        flags["terminated"][last[terminated]] = True
        rewards = episodes.arrays["reward"][frame].astype(np.float32)
        returns = _returns(rewards, first[terminated], last[terminated], gamma)
        arrays |= {name: torch.from_numpy(value) for name, value in flags.items()}
        arrays |= {
            "action": _float32(episodes.arrays["action"][frame]),
            "reward": torch.from_numpy(rewards),
            "step": torch.from_numpy(played),
            "age": torch.from_numpy(age),
            "returns": torch.from_numpy(returns),
        }
        replay._arrays = arrays
        replay._filled[0] = len(frame)
        if replay.priorities is not None:
            replay.priorities.admit(np.flatnonzero(played))
        return replay

    # Reading.

    def sample(self, request: Request, generator: torch.Generator, *, batches: int = 1) -> Transitions:
        """Draw `batches * batch_size` windows, uniformly or by priority.

        Raises:
            UserError: The memory holds no complete window yet.
        """
        missing = batches * request.batch_size
        found: list[Tensor] = []
        drawn = kept = 0
        for _ in range(1000):
            draw = self._draw(_enough(missing, (kept + 1) / (drawn + 1)), generator)
            usable = draw[self._usable(draw, request)]
            found.append(usable[:missing])
            missing -= len(found[-1])
            if not missing:
                return self.take(torch.cat(found), request)
            drawn, kept = drawn + len(draw), kept + len(usable)
        raise UserError(f"The replay memory holds no window of {request.steps} steps yet; play more steps first.")

    def take(self, index: Tensor, request: Request) -> Transitions:
        """The windows that start at `index` `(B,)` (lane * length + slot)."""
        slot = index % self.length
        base = index - slot  # first slot of the lane
        reach = max(request.horizon, request.steps)
        place = base[:, None] + (slot[:, None] + torch.arange(reach)) % self.length  # (B, reach)
        mask = self._alive(index, place)
        valid = mask[:, : request.steps]
        steps = valid.sum(1)
        rewards = torch.where(valid, self._arrays["reward"][place[:, : request.steps]], 0.0)
        terminated = (self._arrays["terminated"][place[:, : request.steps]] & valid).any(1)
        powers = request.gamma ** torch.arange(request.steps + 1)
        if request.horizon == 1:
            chunk = self._arrays["action"][place[:, :1]]
        else:
            offset = torch.minimum(torch.arange(request.horizon), mask.sum(1, keepdim=True) - 1)
            chunk = self._arrays["action"][place.gather(1, offset)]
        weight = torch.ones(len(index))
        if self.priorities is not None:
            weight = torch.from_numpy(self.priorities.weights(index.numpy(), len(self))).float()
        return Transitions(
            obs=self._history(index, request.obs_horizon),
            chunk=chunk,
            mask=mask[:, : request.horizon].float(),
            rewards=rewards,
            steps=steps,
            discount=powers[steps].masked_fill_(terminated, 0.0),
            reward=rewards @ powers[:-1],
            next_obs=self._history(base + (slot + steps) % self.length, request.obs_horizon),
            returns=self._arrays["returns"][index],
            record={key[7:]: array[index] for key, array in self._arrays.items() if key.startswith("record.")},
            online=torch.full((len(index),), self.online),
            weight=weight,
            index=index,
        )

    def observations(self, length: int, count: int = 4) -> dict[str, Tensor]:
        """Some histories of `length` observations `{key: (count, length, ...)}`, spread over the memory."""
        return self._history(torch.linspace(0, int(self._filled[0]) - 1, count).long(), length)

    def update_priorities(self, batch: Transitions, error: Tensor) -> None:
        """Set the priorities of sampled windows to their absolute errors `(B,)`; nothing without prioritisation."""
        if self.priorities is not None:
            own = (batch.online == self.online).cpu()
            index, size = batch.index.cpu()[own], error.detach().abs().cpu()[own]
            self.priorities.update(index.numpy(), size.double().numpy())

    def _draw(self, count: int, generator: torch.Generator) -> Tensor:
        if len(self) == 0:
            raise UserError("The replay memory is empty; play some steps or give a dataset first.")
        if self.priorities is not None:
            return torch.from_numpy(self.priorities.draw(torch.rand(count, generator=generator).double().numpy()))
        ends = self._filled.cumsum(0)
        flat = torch.randint(int(ends[-1]), (count,), generator=generator)
        if self.lanes == 1:
            return flat
        lane = torch.searchsorted(ends, flat, right=True)
        return flat - (ends[lane] - self._filled[lane]) + lane * self.length

    def _usable(self, index: Tensor, request: Request) -> Tensor:
        """Which windows start at a step and are complete: the episode ends in them, or their successor is known."""
        lane, slot = index // self.length, index % self.length
        newest = (self._head[lane] - 1 - slot) % self.length  # slots written after this one
        ahead = torch.arange(request.steps)
        place = (index - slot)[:, None] + (slot[:, None] + ahead) % self.length
        ended = (self._arrays["last"][place] & (ahead <= newest[:, None])).any(1)
        usable = self._arrays["step"][index] & (ended | (newest >= request.steps))
        if request.decisions_only:
            usable &= self._arrays["decision"][index]
        if request.obs_horizon > 1:  # the observations of the history must not have been overwritten yet
            oldest = (slot - self._head[lane]) % self.length
            needed = self._arrays["age"][index].clamp(max=request.obs_horizon - 1)
            usable &= (self._filled[lane] < self.length) | (oldest >= needed)
        return usable

    def _alive(self, index: Tensor, place: Tensor) -> Tensor:
        """Which of the steps at `place` `(B, n)` belong to the episode of `index` and have been written."""
        if place.shape[1] == 1:
            return torch.ones_like(place, dtype=torch.bool)
        lane, slot = index // self.length, index % self.length
        newest = (self._head[lane] - 1 - slot) % self.length
        ended = self._arrays["last"][place[:, :-1]].cumsum(1) > 0
        before = torch.nn.functional.pad(ended, (1, 0))
        return ~before & (torch.arange(place.shape[1]) <= newest[:, None])

    def _history(self, index: Tensor, length: int) -> dict[str, Tensor]:
        place = index[:, None]
        if length > 1:
            back = torch.minimum(torch.arange(length - 1, -1, -1), self._arrays["age"][index][:, None])
            slot = index % self.length
            place = (index - slot)[:, None] + (slot[:, None] - back) % self.length
        return {key[4:]: array[place] for key, array in self._arrays.items() if key.startswith("obs.")}

    def state_dict(self) -> dict[str, Any]:
        """The whole memory."""
        used = int(self._filled.max())
        state: dict[str, Any] = {
            "head": self._head.clone(),
            "filled": self._filled.clone(),
            "age": self._age.clone(),
            "arrays": {key: self._by_lane(value)[:, :used].clone() for key, value in self._arrays.items()},
        }
        if self.priorities is not None:
            state["priorities"] = self.priorities.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`."""
        self._head, self._filled, self._age = (state[key].clone() for key in ("head", "filled", "age"))
        self._arrays = {}
        for key, value in state["arrays"].items():
            self._arrays[key] = torch.zeros((self.lanes * self.length, *value.shape[2:]), dtype=value.dtype)
            self._by_lane(self._arrays[key])[:, : value.shape[1]] = value
        if self.priorities is not None:
            self.priorities.load_state_dict(state["priorities"])

    def _by_lane(self, array: Tensor) -> Tensor:
        return array.unflatten(0, (self.lanes, self.length))


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
        return parts[0] if len(parts) == 1 else Transitions.interleave(parts, batches)

    def update_priorities(self, batch: Transitions, error: Tensor) -> None:
        """Hand the errors of each half to the memory it came from."""
        for source in (self.offline, self.online):
            source.update_priorities(batch, error)


def _enough(missing: int, share: float) -> int:
    """How many to draw so that `missing` are probably usable, when about `share` of them are."""
    return int(1.1 * missing / max(share, 0.01)) + 8


def _returns(
    reward: NDArray[np.float32], first: NDArray[np.int64], last: NDArray[np.int64], gamma: float | None
) -> NDArray[np.float32]:
    """Discounted returns to go of the episodes from slot `first` to `last` `(E,)`; NaN elsewhere."""
    returns = np.full(len(reward), np.nan, np.float32)
    if gamma is None or not len(first):
        return returns
    total = np.zeros(len(first))
    for back in range(int((last - first).max()) + 1):  # all episodes at once, from their ends
        inside = last - back >= first
        slot = last[inside] - back
        total[inside] = reward[slot] + gamma * total[inside]
        returns[slot] = total[inside]
    return returns


def _float32(array: NDArray[Any]) -> Tensor:
    """As a tensor of its own, floats in single precision."""
    return torch.from_numpy(array.astype(np.float32) if np.issubdtype(array.dtype, np.floating) else array)
