"""Search over network architectures by `ask` and `tell`: which layers to remove and how far to shrink the others.

Source: Ashok et al. 2017, N2N. An architecture is a tuple of layer widths. `Controllers` draws it by two recurrent
policies in sequence: a bidirectional LSTM reads the teacher's layers and keeps or removes each; a second one reads the
best result of the first stage and scales the width of each layer. Both learn by REINFORCE from

    R = accuracy / accuracy_teacher * C (2 - C),    C = 1 - parameters / parameters_teacher

with the running mean of rewards as baseline. With a limit on the parameters, an architecture that exceeds it gets
`(e - 1) + e R` instead, where `e = (1 - round / 15)^4` falls to 0, so that the limit becomes strict over time.

Use `RandomWidths` as the baseline: for small networks and a few dozen students it is often as good, and needs no
stages.

Deviations: every architecture is rewarded separately (the authors' code rewards a batch by its mean, and keeps the
gradient of the last action only); the second controller is bidirectional as well, and starts from the best of the first
stage instead of a chosen model; a controller's input describes layers by their widths and positions.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from robopolicy.constraints import Layers, NonNegativeInt, Positive, PositiveInt, Validated
from robopolicy.errors import UserError
from robopolicy.text.rollouts.protocols import Part

Widths = tuple[int, ...]

SHARES = tuple(round(0.1 * step, 1) for step in range(1, 11))  # fractions of a layer's width
LIMIT_ROUNDS = 15  # rounds until an architecture above the limit gets no reward
INVALID_REWARD = -1.0  # reward of an invalid architecture


def compression_reward(accuracy: float, teacher_accuracy: float, compression: float) -> float:
    """R of a student that has lost the fraction `compression` of the teacher's parameters.

    Raises:
        UserError: The teacher's accuracy is not positive.
    """
    if teacher_accuracy <= 0:
        raise UserError(f"The teacher scores {teacher_accuracy:.3g}; pass a teacher that is better than random.")
    return accuracy / teacher_accuracy * compression * (2 - compression)


def constrained_reward(reward: float, violated: bool, round_: int) -> float:
    """The reward; if a limit is violated, its remaining value in a round (from 0)."""
    if not violated:
        return reward
    leniency = max(0.0, 1 - round_ / LIMIT_ROUNDS) ** 4
    return (leniency - 1) + leniency * reward


@dataclass(frozen=True)
class ControllersConfig(Validated):
    """Settings of the two stages."""

    removal_rounds: NonNegativeInt = 6  # rounds of the first stage
    population: PositiveInt = 4  # students per round
    lr: Positive = 0.003  # of Adam
    width: PositiveInt = 30  # hidden units of a controller, per direction
    layers: Layers = 2  # of a controller


def smallest(teacher: Widths, *, removes: bool, shrinks: bool) -> list[Widths]:
    """Architectures that include the smallest one of a search: no layer or a single one, as narrow as possible.

    Args:
        teacher: Start of the search.
        removes: Whether it removes layers.
        shrinks: Whether it shrinks them.
    """
    narrow = tuple(max(1, round(width * SHARES[0])) for width in teacher) if shrinks else teacher
    return [(), *((width,) for width in narrow)] if removes else [narrow]


class ArchitectureSearch(Part):
    """Proposes architectures and learns from their rewards."""

    @abstractmethod
    def ask(self) -> list[Widths]:
        """Return the next architectures."""

    @abstractmethod
    def tell(self, rewards: Sequence[float]) -> None:
        """Set the rewards of the architectures of the last `ask`."""


class ArchitectureController(nn.Module):
    """A recurrent policy with one categorical action per layer of a network."""

    def __init__(self, actions: int, config: ControllersConfig) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, config.width, config.layers, bidirectional=True)
        self.output = nn.Linear(2 * config.width, actions)

    def forward(self, widths: Widths) -> Tensor:
        """Log-probabilities `(L, actions)` for the L layers."""
        before = (widths[0], *widths[:-1])
        rows = [
            [np.log2(width) / 8, np.log2(previous) / 8, place / len(widths)]
            for place, (width, previous) in enumerate(zip(widths, before, strict=True))
        ]
        output, _ = self.lstm(torch.tensor(rows, dtype=torch.float32))
        return self.output(output).log_softmax(-1)


@dataclass
class _Stage:
    """A controller in training and its start architecture."""

    controller: ArchitectureController
    optimizer: torch.optim.Optimizer
    start: Widths
    baseline: float = 0.0  # running mean of rewards
    seen: int = 0  # number of rewards in the mean
    drawn: list[Tensor] = field(default_factory=list[Tensor])  # actions (L,) of the architectures of the last `ask`


class Controllers(ArchitectureSearch):
    """N2N: remove layers, then shrink them."""

    def __init__(self, config: ControllersConfig, teacher: Widths, seed: int = 0) -> None:
        """Start from the layers of the teacher.

        Raises:
            UserError: The teacher has no hidden layers.
        """
        if not teacher:
            raise UserError("The teacher has no hidden layers to remove or shrink; pass a larger one.")
        self.config, self.teacher = config, teacher
        self.round = 0
        self._generator = torch.Generator().manual_seed(seed)
        self._best: tuple[float, Widths] = (-np.inf, teacher)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self._removal, self._shrinking = self._stage(2), self._stage(len(SHARES))

    def _stage(self, actions: int) -> _Stage:
        controller = ArchitectureController(actions, self.config)
        return _Stage(controller, torch.optim.Adam(controller.parameters(), self.config.lr), self.teacher)

    @property
    def _now(self) -> _Stage:
        return self._removal if self.round < self.config.removal_rounds else self._shrinking

    @torch.no_grad()
    def ask(self) -> list[Widths]:
        """Architectures of the current stage."""
        stage = self._now
        probabilities = stage.controller(stage.start).exp()
        stage.drawn = [
            torch.multinomial(probabilities, 1, generator=self._generator)[:, 0] for _ in range(self.config.population)
        ]
        self._asked = [self._apply(stage.start, actions.tolist()) for actions in stage.drawn]
        return list(self._asked)

    def _apply(self, widths: Widths, actions: Sequence[int]) -> Widths:
        if self._now is self._removal:
            return tuple(width for width, removed in zip(widths, actions, strict=True) if not removed)
        return tuple(max(1, round(width * SHARES[place])) for width, place in zip(widths, actions, strict=True))

    def tell(self, rewards: Sequence[float]) -> None:
        """Take one step of REINFORCE; after the last removal round the best architecture starts the shrinking."""
        stage = self._now
        logp = stage.controller(stage.start)
        loss = logp.new_zeros(())
        for actions, reward in zip(stage.drawn, rewards, strict=True):
            loss = loss - (reward - stage.baseline) * logp.gather(1, actions[:, None]).sum()
        stage.optimizer.zero_grad()
        (loss / len(rewards)).backward()
        stage.optimizer.step()
        stage.seen += len(rewards)
        stage.baseline += float(np.sum(rewards) - len(rewards) * stage.baseline) / stage.seen
        for widths, reward in zip(self._asked, rewards, strict=True):
            if widths and reward > self._best[0]:
                self._best = (float(reward), widths)
        self.round += 1
        if self.round == self.config.removal_rounds:
            self._shrinking.start = self._best[1]

    def state_dict(self) -> dict[str, Any]:
        """Both controllers, their start architectures, and the generator."""
        stages = {"removal": self._removal, "shrinking": self._shrinking}
        saved = {
            name: {
                "controller": stage.controller.state_dict(),
                "optimizer": stage.optimizer.state_dict(),
                "start": list(stage.start),
                "baseline": stage.baseline,
                "seen": stage.seen,
            }
            for name, stage in stages.items()
        }
        best = {"reward": self._best[0], "widths": list(self._best[1])}
        return {**saved, "best": best, "round": self.round, "generator": self._generator.get_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`, taken between `tell` and `ask`."""
        for name, stage in (("removal", self._removal), ("shrinking", self._shrinking)):
            saved = state[name]
            stage.controller.load_state_dict(saved["controller"])
            stage.optimizer.load_state_dict(saved["optimizer"])
            stage.start, stage.baseline, stage.seen = tuple(saved["start"]), saved["baseline"], saved["seen"]
        self._best = (state["best"]["reward"], tuple(state["best"]["widths"]))
        self.round = state["round"]
        self._generator.set_state(state["generator"])


class RandomWidths(ArchitectureSearch):
    """Baseline: every layer is removed with probability 1/2, or keeps a random fraction of its width."""

    def __init__(self, teacher: Widths, population: int = 4, seed: int = 0) -> None:
        """Start from the layers of the teacher."""
        self.teacher, self.population = teacher, population
        self._rng = np.random.default_rng(seed)

    def ask(self) -> list[Widths]:
        """Draw architectures independently of rewards."""
        return [self._draw() for _ in range(self.population)]

    def _draw(self) -> Widths:
        kept = [width for width in self.teacher if self._rng.random() < 0.5]
        return tuple(max(1, round(width * SHARES[self._rng.integers(len(SHARES))])) for width in kept)

    def tell(self, rewards: Sequence[float]) -> None:
        """Do nothing."""

    def state_dict(self) -> dict[str, Any]:
        """State of the generator."""
        return {"random": self._rng.bit_generator.state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`."""
        self._rng.bit_generator.state = state["random"]
