"""Success and progress straight from frames: an ensemble of small networks, balanced in training, calibrated after it.

Half of the frames of a batch show success, however rare it is; the prior that this takes away is put back into the
logits, and one temperature is fitted on held-out episodes, so that 0.8 means 80 %. Frames on which the members disagree
more than on almost all held-out frames are called uncertain; frames of a kind that none of them knows (other colours,
an object gone) may well find them in agreement.

Use it where success is labelled but states are not known, or have no predicate. It cannot know successes of a kind that
it has never seen; measure it on reconstructed frames, too (`robopolicy.evaluation.judging`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from robopolicy.errors import UserError
from robopolicy.worldmodel.contract import Images, Judgement
from robopolicy.worldmodel.judge.calibration import best_threshold, fit_temperature
from robopolicy.worldmodel.judge.clips import ClipEnsemble, Examples, FitConfig, JudgeConfig, fit_ensemble

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
