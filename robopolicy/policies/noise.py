"""Sources of randomness for policies: one generator for the batch, or one stream per row."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from robopolicy.device import copy_to
from robopolicy.errors import UserError
from robopolicy.rng import episode_rng


class PerRowGenerator:
    """Independent Gaussian streams, one per batch row.

    Row i draws from a counter-based generator keyed by `(seeds[i], steps[i])`, so its noise does not depend on the
    batch size, its position or the other rows. Evaluation keys rows by episode seed and decision index.
    """

    def __init__(self, seeds: Sequence[int], steps: Sequence[int]) -> None:
        self._rows = list(zip(seeds, steps, strict=True))

    def take_rows(self) -> list[tuple[int, int]] | None:
        """Seed and step of every row, for one draw of another process; None if they have been used."""
        if type(self) is not PerRowGenerator or "_streams" in vars(self):
            return None
        _ = self._streams  # used from now on
        return self._rows

    @cached_property
    def _streams(self) -> list[np.random.Generator]:
        return [episode_rng(*row) for row in self._rows]  # created when needed: many policies draw no noise

    def normal(self, shape: Sequence[int]) -> Tensor:
        """Standard normal `(B, ...)` float32; `shape[0]` must equal the number of rows."""
        if shape[0] != len(self._streams):
            raise ValueError(f"{len(self._streams)} streams cannot fill a batch of {shape[0]} rows.")
        rows = [stream.standard_normal(tuple(shape[1:]), dtype=np.float32) for stream in self._streams]
        return torch.from_numpy(np.stack(rows))


class DeviceRowGenerator(PerRowGenerator):
    """Streams of `PerRowGenerator` on the device of `seeds` and `steps` `(B,)` int64, without a wait.

    Number k of row i is a hash of `(seeds[i], steps[i], k)`, the finaliser of SplitMix64 (Steele, Lea and Flood 2014),
    so the numbers differ from the CPU's. Products wrap at 64 bits.
    """

    SEED, STEP, INDEX = -0x2ECBDABC217D106B, -0x50DAE50C4F0FDA4B, -0x61C8864680B583EB  # odd multipliers

    def __init__(self, seeds: Tensor, steps: Tensor) -> None:
        super().__init__([], [])
        self._keys = (seeds * self.SEED + steps * self.STEP)[:, None]
        self._drawn = 0  # numbers per row so far

    def normal(self, shape: Sequence[int]) -> Tensor:
        """Standard normal `(B, ...)` float32 on the device; `shape[0]` must equal the number of rows."""
        if shape[0] != len(self._keys):
            raise ValueError(f"{len(self._keys)} streams cannot fill a batch of {shape[0]} rows.")
        first, self._drawn = self._drawn + 1, self._drawn + math.prod(shape[1:])
        x = self._keys + torch.arange(first, self._drawn + 1, device=self._keys.device) * self.INDEX
        x = (x ^ (x >> 30 & (1 << 34) - 1)) * -0x40A7B892E31B1A47
        x = (x ^ (x >> 27 & (1 << 37) - 1)) * -0x6B2FB644ECCEEE15
        x = (x ^ (x >> 31 & (1 << 33) - 1)) >> 12
        probability = torch.add(0.5 + 2.0**-53, x.double(), alpha=2.0**-52)  # inside (0, 1)
        return torch.special.ndtri(probability).float().view(tuple(shape))


def row_generator(seeds: Tensor, steps: Tensor) -> PerRowGenerator:
    """Create streams keyed by `(seeds[i], steps[i])`, both `(B,)` int64, on their device."""
    if seeds.device.type == "cpu":
        return PerRowGenerator(seeds.tolist(), steps.tolist())
    return DeviceRowGenerator(seeds, steps)


class RepeatedRowGenerator(PerRowGenerator):
    """Streams for a batch with `count` consecutive copies of every row, which share the numbers of its stream."""

    def __init__(self, streams: PerRowGenerator, count: int) -> None:
        super().__init__([], [])
        self._inner, self._count = streams, count

    def normal(self, shape: Sequence[int]) -> Tensor:
        """Standard normal `(B * count, ...)`."""
        return self._inner.normal((shape[0] // self._count, self._count, *shape[1:])).flatten(0, 1)


Randomness = torch.Generator | PerRowGenerator | None
"""Type of `generator=`: a torch generator, one stream per row, or None for the global generator."""


def normal(shape: Sequence[int], generator: Randomness, device: torch.device) -> Tensor:
    """Sample standard normal noise of `shape` on `device` from any source of randomness."""
    if isinstance(generator, PerRowGenerator):
        return copy_to(generator.normal(shape), device)
    if generator is not None and generator.device != device:
        return copy_to(torch.randn(tuple(shape), generator=generator, device=generator.device), device)
    return torch.randn(tuple(shape), generator=generator, device=device)


def draw_seeds(rows: int, generator: Randomness, device: torch.device) -> Tensor:
    """Sample one seed per row, `(rows,)` int64: the bits of two normal numbers, from any source of randomness."""
    return normal((rows, 2), generator, device).view(torch.int64).squeeze(1)


def row_streams(rows: int, generator: Randomness, device: torch.device) -> Tensor:
    """Seed and step `(rows, 2)` int64, at least 0, of a stream per row for a policy in another process.

    An unused `PerRowGenerator` has the same numbers there as here; other sources of randomness draw new seeds.
    """
    if isinstance(generator, PerRowGenerator) and (taken := generator.take_rows()) is not None and len(taken) == rows:
        return torch.tensor(taken)
    seeds = draw_seeds(rows, generator, device).cpu() & (2**63 - 1)
    return torch.stack([seeds, torch.zeros_like(seeds)], 1)


class RepeatedNoise(PerRowGenerator):
    """Standard normal noise that is held for n draws, with probability proportional to 1 / n^2 (Kim et al. 2026).

    n is at most `longest` and the same for all rows; the noise differs between rows and elements.
    """

    def __init__(self, longest: int, generator: torch.Generator) -> None:
        """Draw from `generator` and on its device."""
        super().__init__([], [])
        self._generator = generator
        weights = torch.arange(1, longest + 1).double() ** -2
        self._below = (weights.cumsum(0) / weights.sum()).float().to(generator.device)  # probability of at most n
        self._noise = torch.empty(0, device=generator.device)
        self._left = torch.zeros((), dtype=torch.int64, device=generator.device)  # remaining draws of the noise

    def normal(self, shape: Sequence[int]) -> Tensor:
        """Held noise `(B, ...)`, or new noise.

        Raises:
            UserError: An earlier call had another shape, so that one decision draws several noises.
        """
        device = self._generator.device
        if len(self._noise) and self._noise.shape != torch.Size(shape):
            raise UserError(
                "replay.noise_repeat holds the one noise of a decision, and this algorithm draws several; set it to 1."
            )
        fresh = torch.randn(tuple(shape), generator=self._generator, device=device)
        length = 1 + (torch.rand((), generator=self._generator, device=device) > self._below).sum()
        done = self._left == 0
        self._noise = torch.where(done, fresh, self._noise) if len(self._noise) else fresh
        self._left = torch.where(done, length, self._left) - 1
        return self._noise

    def state_dict(self) -> dict[str, Tensor]:
        """Held noise and remaining draws."""
        return {"noise": self._noise, "left": self._left}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore `state_dict`."""
        self._noise, self._left = (state[key].to(self._generator.device) for key in ("noise", "left"))


@dataclass(frozen=True)
class SlotLayout:
    """One network call of a fixed number of rows, unused rows being filled with copies."""

    members: list[int]  # (width,) batch index of each slot
    places: list[int]  # used slots
    seated: list[int]  # batch index of each used slot


def assign_slots(seeds: Sequence[int], width: int) -> list[SlotLayout]:
    """Distribute rows over as few calls of exactly `width` rows as possible, with row i in slot `seeds[i] % width`.

    Matrix products differ in the last bit with the batch size and, for narrow layers, with the position in the batch,
    so the slot of a row is fixed, and rows with the same slot go to different calls.
    """
    calls: list[dict[int, int]] = []  # per call: slot -> batch index
    for index, seed in enumerate(seeds):
        slot = seed % width
        call = next((call for call in calls if slot not in call), None)
        if call is None:
            calls.append(call := {})
        call[slot] = index
    fill = [next(iter(call.values())) for call in calls]
    return [
        SlotLayout([call.get(slot, copy) for slot in range(width)], [*call], [*call.values()])
        for call, copy in zip(calls, fill, strict=True)
    ]


def repeated(generator: Randomness, count: int) -> Randomness:
    """Adapt a source of randomness to a batch whose rows are repeated `count` times each."""
    return RepeatedRowGenerator(generator, count) if isinstance(generator, PerRowGenerator) else generator


def uniform(shape: Sequence[int], generator: Randomness, device: torch.device) -> Tensor:
    """Sample uniform noise of `shape` on (0, 1), exclusive, from any source of randomness."""
    return torch.special.ndtr(normal(shape, generator, device)).clamp(1e-7, 1 - 1e-7)
