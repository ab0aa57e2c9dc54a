"""Replay buffer of control steps, sampled as chunks with n-step returns and observation histories.

Every control step is stored once, in one lane per environment (or one lane for a dataset); the last observation of an
episode takes a slot without an action. A sample is a window of slots, so one buffer serves chunks of any length, any
n-step return and any history, and windows start at any step, not only at decisions.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Self

import numpy as np
import torch
from torch import Tensor

from robopolicy.data.batches import ReplaySampleSpec, Transitions
from robopolicy.data.episodes import Array, Episodes
from robopolicy.data.replay_storage import DECISION, LAST, STEP, TERMINATED, ReplayStorage, Values
from robopolicy.device import CPU, copy_to
from robopolicy.errors import UserError


class Replay(ReplayStorage):
    """Replay buffer of the steps of environments or of a dataset."""

    _sampled: ReplaySampleSpec | None = None  # on a device, the last windows that are known to exist

    @classmethod
    def from_episodes(
        cls, episodes: Episodes, *, gamma: float | None = None, prioritized: float = 0.0, device: torch.device = CPU
    ) -> Self:
        """Store a dataset with rewards.

        Without `final_obs`, the last frame of a non-terminated episode only serves as successor, without its reward.
        Windows with a step whose `bootstrap` is false have no discount, but all rewards and actions of the recording.
        """
        if "reward" not in episodes.arrays:
            raise UserError("The dataset has no 'reward', which value learning needs; collect it again.")
        episodes = episodes.with_executed_actions()
        ends = episodes.ends - 1  # (E,) last frame of every episode
        terminated = np.zeros(len(ends), np.bool_)
        if "terminated" in episodes.arrays:
            terminated = episodes.arrays["terminated"][ends].astype(np.bool_)
        keys = episodes.observation_keys
        final = episodes.final_obs if set(keys) <= set(episodes.final_obs) else {}
        dropped = ~terminated & (not final)
        _check_rewards(episodes, dropped)
        steps = episodes.lengths - dropped  # (E,) steps with a successor
        slots = steps + 1  # after them one slot with the last observation
        first = np.cumsum(slots) - slots  # (E,) first slot of every episode
        last = first + steps - 1
        age = np.arange(slots.sum()) - np.repeat(first, slots)
        frame = np.minimum(np.repeat(episodes.starts, slots) + age, np.repeat(ends, slots))
        size = max(len(frame), 2)
        replay = cls(size, gamma=gamma, prioritized=prioritized, online=False, device=device)
        frame = np.pad(frame, (0, size + 1 - len(frame)))  # to the spare row
        arrays = {f"obs.{key}": episodes.arrays[key][frame] for key in keys}
        for key in keys if final else ():
            arrays[f"obs.{key}"][last + 1] = final[key]
        arrays["action"] = episodes.arrays["action"][frame]
        arrays["reward"] = episodes.arrays["reward"][frame].astype(np.float32)
        flags = np.pad(STEP * (age < np.repeat(steps, slots)), (0, size + 1 - len(age))).astype(np.uint8)
        if not flags.any():
            raise UserError("The dataset has no step with a successor; its episodes need at least two frames.")
        flags[last[steps > 0]] |= LAST
        flags[last[terminated]] |= TERMINATED
        if "bootstrap" in episodes.arrays:
            ended = ~episodes.arrays["bootstrap"].astype(np.bool_)[frame]
            flags |= np.where((flags & STEP > 0) & ended, TERMINATED, 0).astype(np.uint8)
        arrays |= {"flags": flags, "age": np.pad(age, (0, size + 1 - len(age)))}
        if gamma is not None:
            arrays["returns"] = _returns(arrays["reward"], first[terminated], last[terminated], gamma)
        replay._columns = {key: replay._array(torch.from_numpy(_float32(array))) for key, array in arrays.items()}
        replay._written += len(age)
        if replay.priorities is not None:
            replay.priorities.add(replay._array(torch.from_numpy(np.flatnonzero(flags & STEP))))
        return replay

    def sample(self, sample_spec: ReplaySampleSpec, generator: torch.Generator, *, batches: int = 1) -> Transitions:
        """Draw `batches * batch_size` windows, uniformly, by priority or by age (`UserError` if none).

        On a device rows repeat if the buffer has fewer usable windows among the candidates, and only the first batch
        of a `sample_spec` waits for the device, to see whether there are windows at all.
        """
        missing = batches * sample_spec.batch_size
        if not self._columns:
            raise UserError("The replay buffer is empty; collect steps or pass a dataset first.")
        if self.device.type != "cpu":
            return self._windows(self._draw_usable(missing, sample_spec, generator), sample_spec)
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
        raise self._no_window(sample_spec)

    def _draw_usable(self, count: int, sample_spec: ReplaySampleSpec, generator: torch.Generator) -> Tensor:
        """Choose the first `count` usable windows of a draw on a device."""
        candidates = 2 * count * (sample_spec.steps if sample_spec.chunk_starts_only else 1) + 64
        draw = self._draw(candidates, sample_spec.age_quantile, generator)
        number = self._usable(draw, sample_spec).cumsum(0)
        if self._sampled != sample_spec:
            if not int(number[-1]):
                raise self._no_window(sample_spec)
            self._sampled = sample_spec
        wanted = torch.arange(count, device=self.device) % number[-1].clamp(min=1) + 1
        return draw[torch.searchsorted(number, wanted).clamp(max=candidates - 1)]

    def _no_window(self, sample_spec: ReplaySampleSpec) -> UserError:
        return UserError(f"The replay buffer has no window of {sample_spec.steps} steps yet; collect more steps first.")

    def take(self, index: Tensor, sample_spec: ReplaySampleSpec) -> Transitions:
        """Return the windows that start at `index` `(B,)` (lane * length + slot)."""
        return self._windows(self._array(index), sample_spec)

    def _windows(self, index: Values, sample_spec: ReplaySampleSpec) -> Transitions:
        self._update_returns()
        n, horizon, columns = sample_spec.steps, sample_spec.horizon, self._columns
        lane, slot = index // self.length, index % self.length
        place, newer = self._ahead(lane, slot, max(horizon, n)), self._newer(lane, slot)
        flags, ahead = columns["flags"].take(place), self._arange(len(place))[:, None]
        alive = self._xp.ones_like(slot)  # (B,) steps of the episode in the window
        if len(place) > 1:
            alive += self._xp.minimum(self._leading(flags[:-1] & LAST == 0), newer)
        steps = alive.clip(max=n) if horizon > n else alive
        played = ahead[:n] < steps  # (n, B)
        terminated = ((flags[:n] & TERMINATED > 0) & played).any(0)
        powers = _powers(sample_spec.gamma, n, self.device)
        discount = self._xp.where(terminated, 0.0, powers[steps])
        rewards = self._tensor(self._xp.where(played, columns["reward"].take(place[:n]), 0.0)).T.contiguous()
        mask, executed = ahead[:horizon] < alive, place[:horizon]
        if horizon > 1:  # the last action repeats
            executed = self._xp.where(mask, executed, place[alive - 1, self._arange(len(index))])
        weight = torch.ones(len(index), device=self.device)
        if self.priorities is not None:
            weight = self._tensor(self.priorities.weights(index, self._filled().sum())).float()
        elif sample_spec.weighting is not None and self.online:  # a dataset has no age
            weight = sample_spec.weighting(self._tensor(newer), self._tensor(self._filled()[lane])).float()
        returns = (
            torch.full_like(weight, math.nan) if self.gamma is None else self._tensor(columns["returns"][place[0]])
        )
        batch = Transitions(
            obs=self._history(lane, slot, sample_spec.obs_horizon),
            chunk=self._rows("action", executed.T),
            mask=self._tensor(mask).T.float(),
            rewards=rewards,
            steps=self._tensor(steps),
            discount=self._tensor(discount).float(),
            reward=rewards[:, 0] if n == 1 else (rewards.double() @ self._tensor(powers[:-1])).float(),
            next_obs=self._history(lane, slot + steps, sample_spec.obs_horizon),
            returns=returns,
            record={key[7:]: self._rows(key, place[0]) for key in columns if key[:7] == "record."},
            online=torch.full((len(index),), self.online, device=self.device),
            weight=weight,
            index=self._tensor(index),
        )
        return batch if self.return_scale is None else self.return_scale.apply(batch)

    def observations(self, length: int, count: int = 4) -> dict[str, Tensor]:
        """Histories of `length` observations `{key: (count, length, ...)}`, spread over the buffer."""
        slot = np.linspace(0, int(self._filled()[0]) - 1, count).astype(np.int64)
        return self._history(self._zeros((count,), self._xp.int64), self._array(torch.from_numpy(slot)), length)

    def update_priorities(self, batch: Transitions, error: Tensor) -> None:
        """Set the priorities of sampled windows to their absolute errors `(B,)`; no effect without prioritisation."""
        if self.priorities is not None:
            own, error = batch.online == self.online, error.abs().double()
            self.priorities.update(self._array(batch.index), self._array(error), self._array(own))

    def _draw(self, count: int, age_quantile: Callable[[Tensor], Tensor] | None, generator: torch.Generator) -> Values:
        def uniform() -> Tensor:
            return torch.rand(count, generator=generator, dtype=torch.float64, device=self.device)

        if self.priorities is not None:
            return self.priorities.draw(self._array(uniform()))
        filled = self._filled()
        ends = filled.cumsum(0)
        if self._xp is np:
            flat = torch.randint(int(ends[-1]), (count,), generator=generator).numpy()
        else:  # without reading the number of slots
            flat = (uniform() * ends[-1]).long()
        if self.lanes == 1 and age_quantile is None:
            return flat
        if self._xp is np and filled[0] == ends[-1] / self.lanes and (filled == filled[0]).all():
            lane = flat // filled[0]  # many times faster
        else:
            lane = self._xp.searchsorted(ends, flat, side="right")
        filled = filled[lane]
        slot = flat - (ends[lane] - filled)
        if age_quantile is not None and self.online:  # a dataset has no age
            newer = (age_quantile(uniform()) * self._tensor(filled)).long()
            slot = self._written[lane] - filled + self._array(newer)
        return slot % self.length + lane * self.length

    def _usable(self, index: Values, sample_spec: ReplaySampleSpec) -> Values:
        """Mask of complete windows that start at a step: the episode ends in them, or the successor is stored."""
        lane, slot = index // self.length, index % self.length
        place, newer = self._place(lane, slot), self._newer(lane, slot)
        needed = STEP | DECISION if sample_spec.chunk_starts_only else STEP
        usable = self._columns["flags"].take(place) & needed == needed
        # Only the newest windows may be incomplete; the CPU examines them alone, a device all.
        rows = (newer < sample_spec.steps).nonzero()[0] if self._xp is np else slice(None)
        flags = self._columns["flags"].take(self._ahead(lane[rows], slot[rows], sample_spec.steps))
        usable[rows] &= newer[rows] >= self._leading(flags & LAST == 0)
        if sample_spec.obs_horizon > 1:  # the observations of the history must not have been overwritten yet
            history = self._columns["age"].take(place).clip(max=sample_spec.obs_horizon - 1)
            usable &= self._filled()[lane] - 1 - newer >= history
        return usable

    def _leading(self, mask: Values) -> Values:
        """Number of set entries `(B,)` at the start of each column of `mask` `(n, B)`."""
        if len(mask) == 1:
            return mask[0]
        if self._xp is torch:
            return mask.cumprod(0, dtype=torch.int8).sum(0)
        leading, count = mask[0].copy(), mask[0].astype(np.int64)
        for row in mask[1:]:  # many times faster than `cumprod`
            leading &= row
            count += leading
        return count


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


def _check_rewards(episodes: Episodes, dropped: Array) -> None:
    """Raise a `UserError` if all rewards lie on last frames that are `dropped` `(E,)`, and warn of some episodes."""
    found = episodes.arrays["reward"] != 0
    rewarded = np.logical_or.reduceat(found, episodes.starts) & (episodes.lengths > 1)  # (E,)
    found[episodes.ends[dropped] - 1] = False
    lost = int((rewarded & ~np.logical_or.reduceat(found, episodes.starts)).sum())
    if not lost:
        return
    text = (
        f"{lost} of {int(rewarded.sum())} episodes with rewards have them only on a last frame that neither terminates "
        "nor has a next observation, so they are not learned from; in a mapping file, set 'terminated', e.g. "
        "features: {terminated: dones}, or closing: true"
    )
    if lost == rewarded.sum():
        raise UserError(f"{text}.")
    warnings.warn(f"{text}.", stacklevel=3)


def _returns(reward: Array, first: Array, last: Array, gamma: float) -> Array:
    """Discounted returns to go of the episodes from slot `first` to `last` `(E,)`; NaN elsewhere."""
    returns = np.full(len(reward), np.nan, np.float32)
    if not len(first):
        return returns
    total = np.zeros(len(first))
    for back in range(int((last - first).max()) + 1):  # all episodes together, from their ends
        inside = last - back >= first
        slot = last[inside] - back
        total[inside] = reward[slot] + gamma * total[inside]
        returns[slot] = total[inside]
    return returns


@lru_cache
def _powers(gamma: float, count: int, device: torch.device) -> Values:
    """Powers 0 to `count` of `gamma`, copied to the device once."""
    powers = gamma ** np.arange(count + 1)
    return powers if device.type == "cpu" else copy_to(torch.from_numpy(powers), device)


def _float32(array: Array) -> Array:
    return array.astype(np.float32) if np.issubdtype(array.dtype, np.floating) else array
