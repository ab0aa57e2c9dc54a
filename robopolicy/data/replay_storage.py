"""Memory of a replay buffer: a ring of control steps per environment, on the CPU or on a device.

Columns are numpy arrays on the CPU and tensors on a device, and most of the code is the same for both. On a device
nothing waits: a step is written for all environments, those that are not stored to a spare row.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from robopolicy.data.priorities import DevicePriorities, Priorities
from robopolicy.data.return_scale import ReturnScale
from robopolicy.device import CPU, copy_to
from robopolicy.errors import UserError

Values = Any  # numpy array on the CPU, tensor on a device
FLAGS = {"step": 1, "last": 2, "terminated": 4, "decision": 8}  # bits of the flags of a slot
STEP, LAST, TERMINATED, DECISION = FLAGS.values()


class ReplayStorage:
    """Ring buffer with `lanes` lanes; memory is allocated when the first step arrives."""

    def __init__(
        self,
        capacity: int,  # slots in all lanes together; an episode of T steps takes T + 1
        lanes: int = 1,  # number of environments
        *,
        gamma: float | None = None,  # discount of `Transitions.returns` per control step; None: no returns
        prioritized: float = 0.0,  # exponent of prioritised sampling (Schaul et al. 2015); 0 samples uniformly
        online: bool = True,  # value of `Transitions.online`
        device: torch.device = CPU,  # of the buffer, its batches and the generators of `sample`
    ) -> None:
        self.lanes, self.length = lanes, capacity // lanes
        if self.length < 2:
            raise UserError(f"A replay buffer needs at least 2 slots per environment, got {capacity} for {lanes}.")
        self.gamma, self.online, self.device = gamma, online, device
        self._xp: Any = np if device.type == "cpu" else torch
        # {"obs.state": (length * lanes + 1, ...), "action", "reward", "flags", "age", ...}: all lanes of slot 0, then
        # of slot 1, ..., so that a step of all environments fills adjacent memory; then the spare row.
        self._columns: dict[str, Values] = {}
        self._written = self._zeros((lanes,), self._xp.int64)  # slots ever written
        self._age = self._zeros((lanes,), self._xp.int64)  # steps of the running episodes so far
        self._returns_due = False  # on a device, whether episodes have ended since the returns were computed
        self.return_scale: ReturnScale | None = None  # of the rewards of all samples; then `add` gets all lanes
        self.priorities: Any = None
        if prioritized and device.type == "cpu":
            self.priorities = Priorities(lanes * self.length, prioritized)
        elif prioritized:
            self.priorities = DevicePriorities(lanes * self.length, prioritized, device=device)

    def __len__(self) -> int:
        """Slots in use."""
        return int(self._filled().sum())

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
        active: Tensor | None = None,  # (K,) bool, rows to store; None: all
    ) -> None:
        """Append one control step of K environments."""
        if self.return_scale is not None:
            self.return_scale.observe(reward, terminated | truncated, active)
        rows: Any = slice(None)
        if active is not None and self._xp is np:  # the CPU selects the rows, a device writes all of them
            rows = self._array(active).nonzero()[0]
            active, rows = None, slice(None) if len(rows) == len(active) else rows

        def chosen(prefix: str, values: Mapping[str, Tensor]) -> dict[str, Values]:
            return {prefix + key: self._array(value)[rows] for key, value in values.items()}

        lane, end = self._array(lanes)[rows], self._array(terminated)[rows]
        if not len(lane):
            return
        stored = True if active is None else self._array(active)
        ended = (end | self._array(truncated)[rows]) & stored
        row = chosen("obs.", obs) | chosen("record.", record or {}) | chosen("", {"action": action, "reward": reward})
        kind = STEP + DECISION * (decision and self._check_record(record or {}))
        row["flags"] = ended.view(self._xp.uint8) * LAST + (end.view(self._xp.uint8) * TERMINATED + kind)
        row["age"] = age = self._age[lane]
        if self.gamma is not None:
            row["returns"] = self._xp.full_like(row["reward"], math.nan)
        written = self._written[lane]
        self._write(lane, written, row, None if active is None else stored)
        written, age = written + stored, age + stored
        if self._xp is torch or ended.any():
            # The CPU copies the last observations of the ended episodes, a device all, most of them to the spare row.
            last = ended.nonzero()[0] if self._xp is np else rows
            final = {key: value[last] for key, value in chosen("obs.", final_obs).items()}
            final |= {"flags": 0 * row["flags"][last], "age": age[last]}
            self._write(lane[last], written[last], final, ended[last])
            self._end(lane, written, age, end & ended)
            written, age = written + ended, age * ~ended
        self._written[lane], self._age[lane] = written, age

    def _write(self, lane: Values, slot: Values, row: Mapping[str, Values], active: Values | None) -> None:
        """Write one slot of each lane, where `active`."""
        slot = slot % self.length
        place = slot * self.lanes + lane
        if active is not None:
            place = self._xp.where(active, place, self.length * self.lanes)
        for key, value in row.items():
            if key not in self._columns:
                self._columns[key] = self._zeros((self.length * self.lanes + 1, *value.shape[1:]), value.dtype)
            self._columns[key][place] = value
        if self.priorities is not None:
            self.priorities.add(lane * self.length + slot, is_start="action" in row, active=active)

    def _zeros(self, shape: tuple[int, ...], dtype: Any) -> Values:
        """Allocate zeros; on the CPU they take memory when they are first written."""
        return np.zeros(shape, dtype) if self._xp is np else torch.zeros(shape, dtype=dtype, device=self.device)

    def _array(self, value: Tensor) -> Values:
        """Copy to the device of the buffer; only copies to the CPU wait."""
        return value.detach().cpu().numpy() if self._xp is np else copy_to(value.detach(), self.device)

    def _tensor(self, value: Values) -> Tensor:
        return torch.from_numpy(value) if self._xp is np else value

    def _arange(self, *limits: int) -> Values:
        return np.arange(*limits) if self._xp is np else torch.arange(*limits, device=self.device)

    def _check_record(self, record: Mapping[str, Tensor]) -> bool:
        """Whether `record` is complete; a new name makes all earlier records incomplete."""
        stored = {key[7:] for key in self._columns if key.startswith("record.")}
        if record.keys() - stored and self._columns:
            self._columns["flags"] &= 255 - DECISION
        return stored <= record.keys()

    def _end(self, lanes: Values, ends: Values, ages: Values, terminated: Values) -> None:
        """Write the returns to go of the episodes that have `terminated` before slots `ends`; on a device, later."""
        if self.gamma is None:
            return
        if self._xp is not np:
            self._returns_due = True
            return
        for row in terminated.nonzero()[0]:
            slot = ends[row] - 1 - np.arange(min(ages[row], self.length - 1))  # newest first
            place = self._place(lanes[row], slot)
            total, returns = 0.0, []
            for reward in self._columns["reward"][place].tolist():
                total = reward + self.gamma * total
                returns.append(total)
            self._columns["returns"][place] = returns

    def _update_returns(self) -> None:
        """On a device, compute the returns to go of all terminated episodes in a logarithmic number of passes."""
        if self.gamma is None or not self._returns_due:
            return
        self._returns_due = False
        flags, reward = (self._by_slot(self._columns[key]) for key in ("flags", "reward"))  # (length, lanes)
        newest = (self._written - 1) % self.length
        follows = (flags & (STEP | LAST) == STEP) & (self._arange(self.length)[:, None] != newest)  # the next slot
        total = torch.where(follows | (flags & TERMINATED > 0), reward.double(), math.nan)
        shift = 1
        while shift < self.length:  # `total` is the sum over `shift` steps, or over all until the end
            total = torch.where(follows, total + self.gamma**shift * total.roll(-shift, 0), total)
            follows &= follows.roll(-shift, 0)
            shift *= 2
        self._by_slot(self._columns["returns"])[:] = total

    def end_episodes(self) -> None:
        """End the running episodes; the last step of each one only serves as successor of the previous step."""
        if self.return_scale is not None:
            self.return_scale.reset_episodes()
        lane = self._xp.where(self._age > 0)[0]
        if not len(lane):
            return
        slot, age, flags = self._written[lane] - 1, self._age[lane], self._columns["flags"]
        flags[self._place(lane, slot - 1)[age > 1]] |= LAST
        flags[self._place(lane, slot)] = 0
        if self.priorities is not None:
            self.priorities.add(lane * self.length + slot % self.length, is_start=False)
        self._age[:] = 0

    def _filled(self) -> Values:
        """Slots in use of every lane `(lanes,)`."""
        return self._xp.where(self._written < self.length, self._written, self.length)

    def _place(self, lane: Values, slot: Values) -> Values:
        """Rows of the columns; `slot` may be beyond the ring."""
        return slot % self.length if self.lanes == 1 else slot % self.length * self.lanes + lane

    def _ahead(self, lane: Values, slot: Values, count: int) -> Values:
        """Rows `(count, B)` of consecutive slots, of which the first is in the ring."""
        place = self._place(lane, slot)[None]
        if count == 1:
            return place
        place = place + self.lanes * self._arange(count)[:, None]
        place %= self.lanes * self.length
        return place

    def _newer(self, lane: Values, slot: Values) -> Values:
        """Slots of the lane that were written after `slot` `(B,)`."""
        return (self._written[lane] - 1 - slot) % self.length

    def _rows(self, key: str, place: Values) -> Tensor:
        """Rows of a column; the libraries read whole rows fastest by these functions."""
        column = self._columns[key]
        if self._xp is np:
            return torch.from_numpy(column.take(place, 0))
        return column.index_select(0, place.flatten()).unflatten(0, place.shape)

    def _history(self, lane: Values, slot: Values, length: int) -> dict[str, Tensor]:
        place = self._place(lane, slot)[:, None]
        if length > 1:
            back = self._xp.minimum(self._arange(length - 1, -1, -1), self._columns["age"][place])
            place = self._place(lane[:, None], slot[:, None] - back)
        return {key[4:]: self._rows(key, place) for key in self._columns if key[:4] == "obs."}

    def state_dict(self) -> dict[str, Any]:
        """Return the whole buffer, in a format that depends neither on the device nor on the layout."""
        self._update_returns()
        filled = self._tensor(self._filled())
        columns = {key: self._tensor(self._by_slot(value)) for key, value in self._columns.items()}
        if columns:
            flags = columns.pop("flags")
            columns |= {name: flags & bit > 0 for name, bit in FLAGS.items()}
        rows = {key: value[: int(filled.max())].transpose(0, 1) for key, value in columns.items()}
        state: dict[str, Any] = {
            "length": self.length,
            "head": self._tensor(self._written % self.length),
            "filled": filled,
            "age": self._tensor(self._age).clone(),
            "arrays": {key: value.clone(memory_format=torch.contiguous_format) for key, value in rows.items()},
        }
        if self.priorities is not None:
            state["priorities"] = self.priorities.state_dict()
        if self.return_scale is not None:
            state["return_scale"] = self.return_scale.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`, also of a smaller buffer; full lanes then begin with their oldest slots."""
        head, filled, age = (torch.as_tensor(state[key]) for key in ("head", "filled", "age"))
        length, first = state.get("length", self.length), torch.zeros_like(head)
        written = torch.where(filled == length, head + length, filled)
        if length != self.length:
            if self.priorities is not None or int(filled.max()) > self.length:
                raise UserError(f"The saved buffer needs replay.capacity={length * self.lanes}; set it to that value.")
            first, written = torch.where(filled == length, head, 0), filled  # oldest slots
        self._written, self._age = (self._array(value.clone()) for value in (written, age))
        arrays = {key: torch.as_tensor(value) for key, value in state["arrays"].items()}
        if arrays:
            bits = [arrays.pop(name).byte() * bit for name, bit in FLAGS.items()]
            arrays["flags"] = torch.stack(bits).sum(0, dtype=torch.uint8)
        self._columns = {}
        for key, value in arrays.items():
            if first.any():
                value = torch.stack([rows.roll(-int(first[lane]), 0) for lane, rows in enumerate(value)])
            rows = self._array(value.transpose(0, 1))
            self._columns[key] = self._zeros((self.length * self.lanes + 1, *rows.shape[2:]), rows.dtype)
            self._by_slot(self._columns[key])[: len(rows)] = rows
        if self.priorities is not None:
            self.priorities.load_state_dict(state["priorities"])
        if self.return_scale is not None:
            self.return_scale.load_state_dict(state["return_scale"])

    def _by_slot(self, column: Values) -> Values:
        """View `(length, lanes, ...)` of a column."""
        return column[:-1].reshape(self.length, self.lanes, *column.shape[1:])
