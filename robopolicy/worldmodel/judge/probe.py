"""The simulator's state, read off the frames: success is then what the task itself calls success.

A small network regresses the state vector; the task's own predicate is applied to what it reads, so that judge and
simulator mean the same thing. Train it on frames as the world model shows them, too: a probe that has seen sharp frames
alone misreads blurred ones.

Use it wherever films hold the states. What is hidden from the cameras cannot be read, and then the members disagree.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from robopolicy.errors import UserError
from robopolicy.worldmodel.contract import Images, Judgement
from robopolicy.worldmodel.judge.classifier import limit_of
from robopolicy.worldmodel.judge.clips import ClipEnsemble, Examples, FitConfig, JudgeConfig, fit_ensemble

State = dict[str, Tensor]
"""{name: (B, D)} in the units of the simulator"""
Predicate = Callable[[State], Tensor]
"""Success `(B,)` bool, or progress `(B,)` in [0, 1], of states."""


@dataclass(frozen=True)
class StateProbe:
    """A `Judge` that was fitted by `fit_probe`."""

    ensemble: ClipEnsemble
    names: Mapping[str, int]  # parts of the state and their sizes, in order
    mean: Tensor  # (D,) in the data
    std: Tensor  # (D,)
    success: Predicate
    progress: Predicate | None = None  # success itself by default
    spread: float = math.inf  # disagreement of the members, in standard deviations of the data, that is uncertain

    def __call__(self, images: Images, proprio: Tensor) -> Judgement:
        """Judge clips; the probability is the share of the members that read a success."""
        read = self.ensemble.judge(images).cpu()  # (M, B, D)
        states = self._named(read)
        won = self.success({name: value.flatten(0, 1) for name, value in states.items()})
        success = won.float().unflatten(0, read.shape[:2]).mean(0)
        mean = {name: value.mean(0) for name, value in states.items()}
        progress = success if self.progress is None else self.progress(mean).float().clamp(0, 1)
        return Judgement(success, progress, disagreement(read) > self.spread)

    def read(self, images: Images) -> State:
        """State of the last frame of clips, the mean of the members."""
        return {name: value.mean(0) for name, value in self._named(self.ensemble.judge(images).cpu()).items()}

    def _named(self, read: Tensor) -> State:
        parts = (read * self.std + self.mean).split(list(self.names.values()), -1)
        return dict(zip(self.names, parts, strict=True))


def fit_probe(
    train: Examples,
    held_out: Examples,
    names: Sequence[str],
    success: Predicate,
    *,
    progress: Predicate | None = None,
    config: JudgeConfig | None = None,
    fit: FitConfig | None = None,
) -> StateProbe:
    """Train on one set of films; abstention comes from another one.

    Args:
        train: Films to learn from.
        held_out: Films to judge by.
        names: Observations of the films that make up the state.
        success: The task's predicate.
        progress: How far a state is, in [0, 1].
        config: Architecture.
        fit: Training.

    Raises:
        UserError: The films lack a part of the state.
    """
    config, fit = config or JudgeConfig(), fit or FitConfig()
    arrays = train.films.episodes.arrays
    for name in names:
        if name not in arrays or arrays[name].ndim != 2:
            raise UserError(f"The films hold no state '{name}'; found {sorted(train.films.episodes.observation_keys)}.")
    sizes = {name: arrays[name].shape[1] for name in names}
    state = torch.from_numpy(np.concatenate([arrays[name] for name in names], 1)).float()  # (F, D)
    mean, std = state.mean(0), state.std(0).clamp(min=1e-6)
    goal = (state - mean) / std

    def draw(generator: torch.Generator) -> Tensor:
        return torch.randint(len(train), (fit.batch_size,), generator=generator)

    def loss(output: Tensor, frames: Tensor) -> Tensor:
        return (output - goal[frames].to(output.device)).square().mean()

    ensemble = fit_ensemble(config, fit, train, state.shape[1], draw, loss)
    read = torch.cat([ensemble.over(held_out, view) for view in range(len(held_out.views))], 1)
    return StateProbe(ensemble, sizes, mean, std, success, progress, limit_of(disagreement(read), config.abstain))


def disagreement(read: Tensor) -> Tensor:
    """Largest standard deviation `(B,)` of the members over the normalised state `(M, B, D)`."""
    return read.std(0, correction=0).amax(-1)
