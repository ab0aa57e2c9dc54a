"""Success detectors from images: a calibrated classifier, and a probe that predicts the state of a task predicate.

The classifier is an ensemble of small networks, trained on batches that are half successes. The prior of the data is
restored in the logits, and one temperature is fitted on held-out episodes, so that 0.8 means 80 %. A frame is uncertain
if its members disagree more than on almost all held-out frames; on unfamiliar frames (other colours, missing objects)
they may still agree.

Use it where success is labelled but states are unknown or have no predicate. It does not detect kinds of success that
are not in the data; also measure it on reconstructed frames (`robopolicy.evaluation.judge_metrics`).
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
MIN_SPREAD = 0.05  # smaller differences of probabilities are no disagreement, even if held-out frames have none


@dataclass(frozen=True)
class SuccessClassifier:
    """Success detector from `fit_classifier`."""

    ensemble: ClipEnsemble
    offset: float = 0.0  # log-odds of success in the data, added to the logits of balanced training
    temperature: float = 1.0
    threshold: float = 0.5  # probability from which a clip counts as a success
    spread: float = math.inf  # standard deviation of the members above which a clip is uncertain

    def __call__(self, images: Images, proprio: Tensor) -> Judgement:
        """Evaluate clips, without the state vectors."""
        output = self.ensemble.predict(images)
        probability = self.probabilities(output)
        progress = output[..., PROGRESS].sigmoid().mean(0)
        return Judgement(probability.mean(0), progress, member_std(probability) > self.spread)

    def probabilities(self, output: Tensor) -> Tensor:
        """Return the probabilities of success `(M, B)` for outputs `(M, B, 2)`."""
        return ((output[..., SUCCESS] + self.offset) / self.temperature).sigmoid()


def fit_classifier(
    train: Examples, held_out: Examples, config: JudgeConfig | None = None, fit: FitConfig | None = None
) -> SuccessClassifier:
    """Train on one dataset; temperature, threshold and abstention are fitted on another one.

    Both need successes and failures.
    """
    config, fit = config or JudgeConfig(), fit or FitConfig()
    success, progress = train.videos.success, train.videos.progress
    for examples, what in ((train, "training"), (held_out, "held-out")):
        rate = float(examples.videos.success.mean())
        if not 0 < rate < 1:
            raise UserError(f"{100 * rate:.0f} % of the {what} frames show success; a classifier needs both classes.")
    wins, losses = success.nonzero().flatten(), (success == 0).nonzero().flatten()

    def draw(generator: torch.Generator) -> Tensor:
        half = fit.batch_size // 2
        sides = ((wins, half), (losses, fit.batch_size - half))
        return torch.cat([rows[torch.randint(len(rows), (count,), generator=generator)] for rows, count in sides])

    def loss(output: Tensor, frames: Tensor) -> Tensor:
        goal = torch.stack([success[frames], progress[frames]], 1).to(output.device)
        return F.binary_cross_entropy_with_logits(output, goal)  # also proper for progress in [0, 1]

    rate = float(success.mean())
    raw = SuccessClassifier(fit_ensemble(config, fit, train, 2, draw, loss), math.log(rate / (1 - rate)))
    return calibrate(raw, held_out)


def calibrate(judge: SuccessClassifier, held_out: Examples) -> SuccessClassifier:
    """Return the detector with temperature, threshold and abstention fitted on all views of held-out frames."""
    output = torch.cat([judge.ensemble.predict_all(held_out, view) for view in range(len(held_out.views))], 1)
    labels = held_out.videos.success.repeat(len(held_out.views)).numpy()
    logits = output[..., SUCCESS].mean(0) + judge.offset
    judge = replace(judge, temperature=fit_temperature(logits.numpy(), labels))
    probability = judge.probabilities(output)
    spread, share = member_std(probability), judge.ensemble.config.abstain
    won = torch.from_numpy(labels) > 0
    return replace(
        judge,
        threshold=best_threshold(probability.mean(0).numpy(), labels),
        # Per class: frames far from success have no spread, and successes must not all be uncertain relative to them.
        spread=max(abstention_threshold(spread[won], share), abstention_threshold(spread[~won], share), MIN_SPREAD),
    )


def member_std(values: Tensor) -> Tensor:
    """Return the standard deviation `(B,)` over members `(M, B)`; 0 for a single one."""
    return values.std(0, correction=0)


def abstention_threshold(spread: Tensor, share: float) -> float:
    """Return the value that a fraction `share` of the spreads `(n,)` exceeds."""
    return float(spread.quantile(1 - share))


State = dict[str, Tensor]
"""{name: (B, D)} in the units of the simulator"""


Predicate = Callable[[State], Tensor]
"""Success `(B,)` bool, or progress `(B,)` in [0, 1], of states."""


@dataclass(frozen=True)
class StateProbe:
    """Success detector from `fit_probe`: predicted states and the predicate of the task."""

    ensemble: ClipEnsemble
    names: Mapping[str, int]  # observations of the state and their sizes, in order
    mean: Tensor  # (D,) in the data
    std: Tensor  # (D,)
    success: Predicate
    progress: Predicate | None = None  # None for success
    spread: float = math.inf  # disagreement in standard deviations of the data above which a clip is uncertain

    def __call__(self, images: Images, proprio: Tensor) -> Judgement:
        """Evaluate clips; the probability is the fraction of the members whose state is a success."""
        output = self.ensemble.predict(images).cpu()  # (M, B, D)
        states = self._named(output)
        won = self.success({name: value.flatten(0, 1) for name, value in states.items()})
        success = won.float().unflatten(0, output.shape[:2]).mean(0)
        mean = {name: value.mean(0) for name, value in states.items()}
        progress = success if self.progress is None else self.progress(mean).float().clamp(0, 1)
        return Judgement(success, progress, disagreement(output) > self.spread)

    def predict_state(self, images: Images) -> State:
        """Predict the state of the last frame of clips, as the mean of the members."""
        return {name: value.mean(0) for name, value in self._named(self.ensemble.predict(images).cpu()).items()}

    def _named(self, output: Tensor) -> State:
        """Split outputs of the members into observations in the units of the simulator."""
        parts = (output * self.std + self.mean).split(list(self.names.values()), -1)
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
    """Train a probe of the observations `names` on one dataset; abstention is fitted on another one.

    `success` is the predicate of the task; `progress` of a state is in [0, 1], or None for success.
    """
    config, fit = config or JudgeConfig(), fit or FitConfig()
    arrays = train.videos.episodes.arrays
    for name in names:
        if name not in arrays or arrays[name].ndim != 2:
            found = sorted(train.videos.episodes.observation_keys)
            raise UserError(f"The videos have no observation '{name}'; found {found}.")
    sizes = {name: arrays[name].shape[1] for name in names}
    state = torch.from_numpy(np.concatenate([arrays[name] for name in names], 1)).float()  # (F, D)
    mean, std = state.mean(0), state.std(0).clamp(min=1e-6)
    goal = (state - mean) / std

    def draw(generator: torch.Generator) -> Tensor:
        return torch.randint(len(train), (fit.batch_size,), generator=generator)

    def loss(output: Tensor, frames: Tensor) -> Tensor:
        return (output - goal[frames].to(output.device)).square().mean()

    ensemble = fit_ensemble(config, fit, train, state.shape[1], draw, loss)
    output = torch.cat([ensemble.predict_all(held_out, view) for view in range(len(held_out.views))], 1)
    spread = abstention_threshold(disagreement(output), config.abstain)
    return StateProbe(ensemble, sizes, mean, std, success, progress, spread)


def disagreement(states: Tensor) -> Tensor:
    """Return the largest standard deviation `(B,)` of the members over the normalised states `(M, B, D)`."""
    return states.std(0, correction=0).amax(-1)
