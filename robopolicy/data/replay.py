"""Replay buffer of control steps, sampled as chunks with n-step returns and observation histories.

Every control step is stored once, in one lane per environment (or one lane for a dataset); the last observation of an
episode takes a slot without an action. A sample is a window of slots, so one buffer serves chunks of any length, any
n-step return and any history, and windows start at any step, not only at decisions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from robopolicy.data.batches import ReplaySampleSpec, Transitions
from robopolicy.data.episodes import Array, Episodes
from robopolicy.data.priorities import Priorities
from robopolicy.errors import UserError


class Replay:
    """Ring buffer with `lanes` lanes; arrays are allocated when the first step arrives."""

    def __init__(
        self,
        capacity: int,  # slots in all lanes together; an episode of T steps takes T + 1
        lanes: int = 1,  # number of environments
        *,
        gamma: float | None = None,  # discount of `Transitions.returns` per control step; None: no returns
        prioritized: float = 0.0,  # exponent of prioritised sampling (Schaul et al. 2015); 0 samples uniformly
        online: bool = True,  # value of `Transitions.online`
    ) -> None:
        self.lanes, self.length = lanes, capacity // lanes
        if self.length < 2:
            raise UserError(f"A replay buffer needs at least 2 slots per environment, got {capacity} for {lanes}.")
        self.gamma = gamma
        self.online = online
        self._arrays: dict[str, Array] = {}  # {"obs.state": (lanes * length, ...), "action": ..., flags}
        self._head = np.zeros(lanes, np.int64)  # next slot to write
        self._filled = np.zeros(lanes, np.int64)  # slots ever written, at most `length`
        self._age = np.zeros(lanes, np.int64)  # steps of the running episodes so far
        self.priorities = Priorities(lanes * self.length, prioritized) if prioritized else None

    def __len__(self) -> int:
        """Slots in use."""
        return int(self._filled.sum())

    # Writing.

    def add(
        self,
        lanes: Tensor,  # (K,) int64 distinct environments
        obs: Mapping[str, Tensor],  # {key: (K, ...)} before the step, without history
        action: Tensor,  # (K, A) executed
        reward: Tensor,  # (K,)
        terminated: Tensor,  # (K,) bool
        truncated: Tensor,  # (K,) bool
        final_obs: Mapping[str, Tensor],  # {key: (K, ...)} true successors; used where the episode ended
        *,
        decision: bool = True,  # whether a chunk begins here
        record: Mapping[str, Tensor] | None = None,  # {name: (K, ...)} recorded by the actor; stored at decisions
    ) -> None:
        """Append one control step of K environments."""
        lane, end = _array(lanes), _array(terminated)
        done = end | _array(truncated)
        row = {f"obs.{key}": _array(value) for key, value in obs.items()}
        row |= {f"record.{key}": _array(value) for key, value in (record or {}).items()}
        row |= {"action": _array(action), "reward": _array(reward), "terminated": end, "last": done}
        row |= {
            "step": np.ones_like(done),
            "decision": np.full_like(done, decision and self._check_record(record or {})),
            "age": self._age[lane],
            "returns": np.full(len(lane), np.nan, np.float32),
        }
        self._write(lane, row)
        self._age[lane] += 1
        if done.any():
            ended = lane[done]
            final = {f"obs.{key}": _array(value)[done] for key, value in final_obs.items()}
            flags = dict.fromkeys(("step", "last", "terminated", "decision"), np.zeros(len(ended), np.bool_))
            self._write(ended, {**final, **flags, "age": self._age[ended]})
            if self.gamma is not None:
                for index in lane[end]:
                    self._fill_returns(index)
            self._age[ended] = 0

    def _write(self, lane: Array, row: Mapping[str, Array]) -> None:
        slot = self._head[lane]
        place = lane * self.length + slot
        for key, value in row.items():
            if key not in self._arrays:
                self._arrays[key] = np.zeros((self.lanes * self.length, *value.shape[1:]), value.dtype)
            self._arrays[key][place] = value
        if self.priorities is not None:
            self.priorities.add(place, is_start=bool(row["step"].all()))
        self._head[lane] = (slot + 1) % self.length
        self._filled[lane] = np.minimum(self._filled[lane] + 1, self.length)

    def _check_record(self, record: Mapping[str, Tensor]) -> bool:
        """Whether `record` is complete; a new name makes all earlier records incomplete."""
        stored = {key[7:] for key in self._arrays if key.startswith("record.")}
        if record.keys() - stored and "decision" in self._arrays:
            self._arrays["decision"][:] = False
        return stored <= record.keys()

    def _fill_returns(self, lane: int) -> None:
        """Write the returns to go of the episode that has just terminated in `lane`."""
        assert self.gamma is not None
        count = min(int(self._age[lane]), self.length - 1)
        place = (self._head[lane] - 2 - np.arange(count)) % self.length + lane * self.length  # newest first
        total, returns = 0.0, []
        for reward in self._arrays["reward"][place].tolist():
            total = reward + self.gamma * total
            returns.append(total)
        self._arrays["returns"][place] = returns

    def end_episodes(self) -> None:
        """End the running episodes; the last step of each one only serves as successor of the previous step."""
        for lane in self._age.nonzero()[0]:
            last = (self._head[lane] - 1) % self.length + lane * self.length
            if self._age[lane] > 1:
                self._arrays["last"][(self._head[lane] - 2) % self.length + lane * self.length] = True
            for flag in ("step", "last", "terminated", "decision"):
                self._arrays[flag][last] = False
            if self.priorities is not None:
                self.priorities.add(np.array([last]), is_start=False)
        self._age[:] = 0

    @classmethod
    def from_episodes(cls, episodes: Episodes, *, gamma: float | None = None, prioritized: float = 0.0) -> Replay:
        """Store a dataset with rewards; the last frame of a non-terminated episode only serves as successor."""
        if "reward" not in episodes.arrays:
            raise UserError("The dataset has no 'reward', which value learning needs; collect it again.")
        episodes = episodes.with_executed_actions()
        ends = episodes.ends - 1  # (E,) last frame of every episode
        terminated = np.zeros(len(ends), np.bool_)
        if "terminated" in episodes.arrays:
            terminated = episodes.arrays["terminated"][ends].astype(np.bool_)
        steps = episodes.lengths - ~terminated  # (E,) steps with a successor
        slots = steps + 1  # after them one slot with the last observation
        first = np.cumsum(slots) - slots  # (E,) first slot of every episode
        last = first + steps - 1
        age = np.arange(slots.sum()) - np.repeat(first, slots)
        frame = np.minimum(np.repeat(episodes.starts, slots) + age, np.repeat(ends, slots))
        replay = cls(max(len(frame), 2), gamma=gamma, prioritized=prioritized, online=False)
        arrays = {f"obs.{key}": _float32(episodes.arrays[key][frame]) for key in episodes.observation_keys}
        arrays |= {name: _float32(episodes.arrays[name][frame]) for name in ("action", "reward")}
        arrays |= {name: np.zeros(len(frame), np.bool_) for name in ("last", "terminated", "decision")}
        arrays["last"][last[steps > 0]] = True
        arrays["terminated"][last[terminated]] = True
        arrays["step"] = age < np.repeat(steps, slots)
        arrays["age"] = age
        arrays["returns"] = _returns(arrays["reward"], first[terminated], last[terminated], gamma)
        if not arrays["step"].any():
            raise UserError("The dataset has no step with a successor; its episodes need at least two frames.")
        replay._arrays = arrays
        replay._filled[0] = len(frame)
        if replay.priorities is not None:
            replay.priorities.add(np.flatnonzero(arrays["step"]))
        return replay

    # Reading.

    def sample(self, sample_spec: ReplaySampleSpec, generator: torch.Generator, *, batches: int = 1) -> Transitions:
        """Draw `batches * batch_size` windows, uniformly, by priority or by age (`UserError` if none)."""
        missing = batches * sample_spec.batch_size
        found: list[Array] = []
        drawn = kept = 0
        for _ in range(1000):
            enough = int(1.1 * missing / max((kept + 1) / (drawn + 1), 0.01)) + 8  # so that `missing` may be usable
            draw = self._draw(enough, sample_spec.age_quantile, generator)
            usable = draw[self._usable(draw, sample_spec)]
            found.append(usable[:missing])
            missing -= len(found[-1])
            if not missing:
                return self._windows(np.concatenate(found), sample_spec)
            drawn, kept = drawn + len(draw), kept + len(usable)
        raise UserError(f"The replay buffer has no window of {sample_spec.steps} steps yet; collect more steps first.")

    def take(self, index: Tensor, sample_spec: ReplaySampleSpec) -> Transitions:
        """Return the windows that start at `index` `(B,)` (lane * length + slot)."""
        return self._windows(_array(index), sample_spec)

    def _windows(self, index: Array, sample_spec: ReplaySampleSpec) -> Transitions:
        rows, arrays, reach = len(index), self._arrays, max(sample_spec.horizon, sample_spec.steps)
        place = self._ahead(index, reach)
        mask = self._in_episode(index, place)
        valid = mask[:, : sample_spec.steps]
        steps = valid.sum(1)
        rewards = np.where(valid, arrays["reward"][place[:, : sample_spec.steps]], np.float32(0))
        terminated = (arrays["terminated"][place[:, : sample_spec.steps]] & valid).any(1)
        powers = sample_spec.gamma ** np.arange(sample_spec.steps + 1)
        executed = place[:, :1]
        if sample_spec.horizon > 1:
            offset = np.minimum(np.arange(sample_spec.horizon), mask.sum(1, keepdims=True) - 1)
            executed = np.take_along_axis(place, offset, 1)
        weight = np.ones(rows, np.float32)
        if self.priorities is not None:
            weight = self.priorities.weights(index, len(self)).astype(np.float32)
        elif sample_spec.weighting is not None and self.online:  # a dataset has no age
            weight = sample_spec.weighting(self._newer(index), self._filled[index // self.length]).astype(np.float32)
        return Transitions(
            obs=self._history(index, sample_spec.obs_horizon),
            chunk=torch.from_numpy(arrays["action"][executed]),
            mask=torch.from_numpy(mask[:, : sample_spec.horizon].astype(np.float32)),
            rewards=torch.from_numpy(rewards),
            steps=torch.from_numpy(steps),
            discount=torch.from_numpy(np.where(terminated, 0.0, powers[steps]).astype(np.float32)),
            reward=torch.from_numpy((rewards @ powers[:-1]).astype(np.float32)),
            next_obs=self._history(self._move(index, steps[:, None])[:, 0], sample_spec.obs_horizon),
            returns=torch.from_numpy(arrays["returns"][index]),
            record={key[7:]: torch.from_numpy(array[index]) for key, array in arrays.items() if key[:7] == "record."},
            online=torch.full((rows,), self.online),
            weight=torch.from_numpy(weight),
            index=torch.from_numpy(index),
        )

    def observations(self, length: int, count: int = 4) -> dict[str, Tensor]:
        """Histories of `length` observations `{key: (count, length, ...)}`, spread over the buffer."""
        return self._history(np.linspace(0, self._filled[0] - 1, count).astype(np.int64), length)

    def update_priorities(self, batch: Transitions, error: Tensor) -> None:
        """Set the priorities of sampled windows to their absolute errors `(B,)`; no effect without prioritisation."""
        if self.priorities is not None:
            own = (batch.online == self.online).cpu()
            index, size = batch.index.cpu()[own], error.detach().abs().cpu()[own]
            self.priorities.update(index.numpy(), size.double().numpy())

    def _draw(self, count: int, age_quantile: Callable[[Array], Array] | None, generator: torch.Generator) -> Array:
        if not self._filled.any():
            raise UserError("The replay buffer is empty; collect steps or pass a dataset first.")
        if self.priorities is not None:
            return self.priorities.draw(torch.rand(count, generator=generator, dtype=torch.float64).numpy())
        ends = self._filled.cumsum()
        flat = torch.randint(int(ends[-1]), (count,), generator=generator).numpy()
        if self.lanes == 1 and age_quantile is None:
            return flat
        lane = np.searchsorted(ends, flat, side="right")
        filled = self._filled[lane]
        slot = flat - (ends[lane] - filled)
        if age_quantile is not None and self.online:  # a dataset has no age
            age = age_quantile(torch.rand(count, generator=generator, dtype=torch.float64).numpy())
            slot = (self._head[lane] - filled + (age * filled).astype(np.int64)) % self.length
        return slot + lane * self.length

    def _move(self, index: Array, offset: Array) -> Array:
        """Indices `(B, n)` that are `offset` slots after `index` `(B,)` in the same lane."""
        slot = index % self.length
        return (index - slot)[:, None] + (slot[:, None] + offset) % self.length

    def _ahead(self, index: Array, count: int) -> Array:
        """Indices `(B, count)` of consecutive slots from `index` `(B,)`."""
        return index[:, None] if count == 1 else self._move(index, np.arange(count))

    def _newer(self, index: Array) -> Array:
        """Slots of the lane that were written after `index` `(B,)`."""
        return (self._head[index // self.length] - 1 - index) % self.length

    def _usable(self, index: Array, sample_spec: ReplaySampleSpec) -> Array:
        """Mask of complete windows that start at a step: the episode ends in them, or the successor is stored."""
        newer = self._newer(index)
        written = np.arange(sample_spec.steps) <= newer[:, None]
        ended = (self._arrays["last"][self._ahead(index, sample_spec.steps)] & written).any(1)
        usable = self._arrays["step"][index] & (ended | (newer >= sample_spec.steps))
        if sample_spec.chunk_starts_only:
            usable &= self._arrays["decision"][index]
        if sample_spec.obs_horizon > 1:  # the observations of the history must not have been overwritten yet
            needed = np.minimum(self._arrays["age"][index], sample_spec.obs_horizon - 1)
            usable &= self._filled[index // self.length] - 1 - newer >= needed
        return usable

    def _in_episode(self, index: Array, place: Array) -> Array:
        """Mask of the steps at `place` `(B, n)` that belong to the episode of `index` and have been written."""
        if place.shape[1] == 1:
            return np.ones(place.shape, np.bool_)
        ended = np.zeros(place.shape, np.bool_)
        np.logical_or.accumulate(self._arrays["last"][place[:, :-1]], 1, out=ended[:, 1:])
        return ~ended & (np.arange(place.shape[1]) <= self._newer(index)[:, None])

    def _history(self, index: Array, length: int) -> dict[str, Tensor]:
        place = index[:, None]
        if length > 1:
            back = np.minimum(np.arange(length - 1, -1, -1), self._arrays["age"][place])
            place = self._move(index, -back)
        return {key[4:]: torch.from_numpy(array[place]) for key, array in self._arrays.items() if key[:4] == "obs."}

    def state_dict(self) -> dict[str, Any]:
        """Return the whole buffer."""
        used = int(self._filled.max())
        state: dict[str, Any] = {
            "length": self.length,
            "head": self._head.copy(),
            "filled": self._filled.copy(),
            "age": self._age.copy(),
            "arrays": {key: self._by_lane(value)[:, :used].copy() for key, value in self._arrays.items()},
        }
        if self.priorities is not None:
            state["priorities"] = self.priorities.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`, also of a smaller buffer; full lanes then begin with their oldest slots."""
        self._head, self._filled, self._age = (state[key].copy() for key in ("head", "filled", "age"))
        length, first = state.get("length", self.length), np.zeros(self.lanes, np.int64)
        if length != self.length:
            if self.priorities is not None or int(self._filled.max()) > self.length:
                raise UserError(f"The saved buffer needs replay.capacity={length * self.lanes}; set it to that value.")
            first[:] = np.where(self._filled == length, self._head, 0)  # oldest slots
            self._head = self._filled % self.length
        self._arrays = {}
        for key, value in state["arrays"].items():
            self._arrays[key] = np.zeros((self.lanes * self.length, *value.shape[2:]), value.dtype)
            for lane, rows in enumerate(value):
                self._by_lane(self._arrays[key])[lane, : len(rows)] = np.roll(rows, -first[lane], 0)
        if self.priorities is not None:
            self.priorities.load_state_dict(state["priorities"])

    def _by_lane(self, array: Array) -> Array:
        return array.reshape(self.lanes, self.length, *array.shape[1:])


class MixedReplay:
    """Batches with a fraction from a dataset and the rest from the environment (50/50 in RLPD)."""

    def __init__(self, offline: Replay, online: Replay, offline_fraction: float = 0.5) -> None:
        self.offline, self.online, self.offline_fraction = offline, online, offline_fraction

    def sample(self, sample_spec: ReplaySampleSpec, generator: torch.Generator, *, batches: int = 1) -> Transitions:
        """Draw `batches` minibatches, each with the same fractions of both buffers."""
        rows = round(self.offline_fraction * sample_spec.batch_size)
        parts: list[Transitions] = []
        for source, size in ((self.offline, rows), (self.online, sample_spec.batch_size - rows)):
            if size:
                parts.append(source.sample(replace(sample_spec, batch_size=size), generator, batches=batches))
        return parts[0] if len(parts) == 1 else Transitions.interleave(parts, batches)

    def update_priorities(self, batch: Transitions, error: Tensor) -> None:
        """Pass the errors of each part to its buffer."""
        for source in (self.offline, self.online):
            source.update_priorities(batch, error)


def _returns(reward: Array, first: Array, last: Array, gamma: float | None) -> Array:
    """Discounted returns to go of the episodes from slot `first` to `last` `(E,)`; NaN elsewhere."""
    returns = np.full(len(reward), np.nan, np.float32)
    if gamma is None or not len(first):
        return returns
    total = np.zeros(len(first))
    for back in range(int((last - first).max()) + 1):  # all episodes together, from their ends
        inside = last - back >= first
        slot = last[inside] - back
        total[inside] = reward[slot] + gamma * total[inside]
        returns[slot] = total[inside]
    return returns


def _array(tensor: Tensor) -> Array:
    return tensor.detach().cpu().numpy()


def _float32(array: Array) -> Array:
    return array.astype(np.float32) if np.issubdtype(array.dtype, np.floating) else array
