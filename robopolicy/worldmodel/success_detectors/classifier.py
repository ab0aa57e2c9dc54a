"""Success and progress straight from frames: an ensemble of small networks, balanced in training, calibrated after it.

Half of the frames of a batch show success, however rare it is; the prior that this takes away is put back into the
logits, and one temperature is fitted on held-out episodes, so that 0.8 means 80 %. Frames on which the members disagree
more than on almost all held-out frames are called uncertain; frames of a kind that none of them knows (other colours,
an object gone) may well find them in agreement.

Use it where success is labelled but states are not known, or have no predicate. It cannot know successes of a kind that
it has never seen; measure it on reconstructed frames, too (`robopolicy.evaluation.judge_metrics`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from robopolicy.errors import UserError
from robopolicy.worldmodel.contract import Images, Judgement
from robopolicy.worldmodel.success_detectors.clips import (
    ClipEnsemble,
    Examples,
    FitConfig,
    JudgeConfig,
    best_threshold,
    fit_ensemble,
    fit_temperature,
)

SUCCESS, PROGRESS = 0, 1  # outputs of the networks
LEAST_SPREAD = 0.05  # probabilities that differ less are no disagreement, however alike they were on held-out frames


@dataclass(frozen=True)
class SuccessClassifier:
    """A `Judge` that was fitted by `fit_classifier`."""

    ensemble: ClipEnsemble
    offset: float = 0.0  # log-odds of success in the data, added to the logits of balanced training
    temperature: float = 1.0
    threshold: float = 0.5  # probability from which a clip counts as a success
    spread: float = math.inf  # disagreement of the members above which a clip is uncertain

    def __call__(self, images: Images, proprio: Tensor) -> Judgement:
        """Judge clips; the state vectors are not looked at."""
        output = self.ensemble.judge(images)
        probability = self.probabilities(output)
        progress = output[..., PROGRESS].sigmoid().mean(0)
        return Judgement(probability.mean(0), progress, spread_of(probability) > self.spread)

    def probabilities(self, output: Tensor) -> Tensor:
        """Probabilities of success `(M, B)` from outputs `(M, B, 2)`."""
        return ((output[..., SUCCESS] + self.offset) / self.temperature).sigmoid()


def fit_classifier(
    train: Examples, held_out: Examples, config: JudgeConfig | None = None, fit: FitConfig | None = None
) -> SuccessClassifier:
    """Train on one set of films; temperature, threshold and abstention come from another one.

    Raises:
        UserError: One of the sets lacks successes or failures.
    """
    config, fit = config or JudgeConfig(), fit or FitConfig()
    success, progress = train.films.success, train.films.progress
    for examples, what in ((train, "training"), (held_out, "held-out")):
        rate = float(examples.films.success.mean())
        if not 0 < rate < 1:
            raise UserError(
                f"{100 * rate:.0f} % of the {what} frames show success; a judge needs both kinds to learn from."
            )
    wins, losses = success.nonzero().flatten(), (success == 0).nonzero().flatten()

    def draw(generator: torch.Generator) -> Tensor:
        half = fit.batch_size // 2
        sides = ((wins, half), (losses, fit.batch_size - half))
        return torch.cat([rows[torch.randint(len(rows), (count,), generator=generator)] for rows, count in sides])

    def loss(output: Tensor, frames: Tensor) -> Tensor:
        goal = torch.stack([success[frames], progress[frames]], 1).to(output.device)
        return F.binary_cross_entropy_with_logits(output, goal)  # least at the target for progress, too

    rate = float(success.mean())
    raw = SuccessClassifier(fit_ensemble(config, fit, train, 2, draw, loss), math.log(rate / (1 - rate)))
    return calibrated(raw, held_out)


def calibrated(judge: SuccessClassifier, held_out: Examples) -> SuccessClassifier:
    """The judge with temperature, threshold and abstention from held-out frames, in every view they have."""
    output = torch.cat([judge.ensemble.over(held_out, view) for view in range(len(held_out.views))], 1)
    labels = held_out.films.success.repeat(len(held_out.views)).numpy()
    logits = output[..., SUCCESS].mean(0) + judge.offset
    judge = replace(judge, temperature=fit_temperature(logits.numpy(), labels))
    probability = judge.probabilities(output)
    spread, share = spread_of(probability), judge.ensemble.config.abstain
    won = torch.from_numpy(labels) > 0
    return replace(
        judge,
        threshold=best_threshold(probability.mean(0).numpy(), labels),
        # Frames far from success agree on it to the last digit; successes must not all look uncertain beside them.
        spread=max(limit_of(spread[won], share), limit_of(spread[~won], share), LEAST_SPREAD),
    )


def spread_of(values: Tensor) -> Tensor:
    """Disagreement `(B,)` of members `(M, B)`: their standard deviation; 0 of a single one."""
    return values.std(0, correction=0)


def limit_of(spread: Tensor, share: float) -> float:
    """What `share` of the spreads `(n,)` exceed."""
    return float(spread.quantile(1 - share))


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
