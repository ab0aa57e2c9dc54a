"""Search over networks, by `ask` and `tell`: which layers of one to remove and how far to shrink the others.

Source: Ashok et al. 2017, N2N. An architecture is a tuple of layer widths. `Controllers` draws it by two recurrent
policies, one after the other: a bidirectional LSTM reads the teacher's layers and keeps or removes each; then a second
one reads the best of the first stage and gives each layer a share of its width. Both learn by REINFORCE from

    R = accuracy / accuracy_teacher * C (2 - C),    C = 1 - parameters / parameters_teacher

with the running mean of rewards as baseline. Under a limit on the parameters, an architecture that exceeds it gets
`(e - 1) + e R` in its place, where `e = (1 - round / 15)^4` falls to 0: first a hint, later a refusal.

Use `RandomWidths` as the baseline that it has to beat: for small networks and a few dozen students it often does as
well, and needs no stages.

Deviations: every architecture is rewarded for itself (the authors' code rewards a batch by its mean, and keeps the
gradient of the last action alone); the second controller is bidirectional as well, and starts from the best of the
first stage instead of a chosen model; layers of a controller's input are described by their widths and place.
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

SHARES = tuple(round(0.1 * step, 1) for step in range(1, 11))  # of a layer's width that may be kept
PATIENCE = 15  # rounds after which an architecture above the limit is worth nothing
UNBUILT = -1.0  # reward of what cannot be built


def compression_reward(accuracy: float, teacher_accuracy: float, compression: float) -> float:
    """R of a student that has lost the share `compression` of the teacher's parameters.

    Raises:
        UserError: The teacher achieves nothing, so nothing can be kept of it.
    """
    if teacher_accuracy <= 0:
        raise UserError(f"The teacher scores {teacher_accuracy:.3g}; compress one that is better than chance.")
    return accuracy / teacher_accuracy * compression * (2 - compression)


def constrained_reward(reward: float, violated: bool, round_: int) -> float:
    """The reward, or where a limit is violated what is left of it in a round (from 0)."""
    if not violated:
        return reward
    leniency = max(0.0, 1 - round_ / PATIENCE) ** 4
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
    """The architectures among which a search has its smallest: no layer or a single one, as narrow as it gets.

    Args:
        teacher: Where the search begins.
        removes: Whether it removes layers.
        shrinks: Whether it shrinks them.
    """
    narrow = tuple(max(1, round(width * SHARES[0])) for width in teacher) if shrinks else teacher
    return [(), *((width,) for width in narrow)] if removes else [narrow]


class ArchitectureSearch(Part):
    """Proposes architectures and hears what they were worth."""

    @abstractmethod
    def ask(self) -> list[Widths]:
        """The next architectures."""

    @abstractmethod
    def tell(self, rewards: Sequence[float]) -> None:
        """Rewards of the architectures asked for last."""


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
        read, _ = self.lstm(torch.tensor(rows, dtype=torch.float32))
        return self.output(read).log_softmax(-1)


@dataclass
class _Stage:
    """A controller under training, and what it changes."""

    controller: ArchitectureController
    optimizer: torch.optim.Optimizer
    start: Widths
    baseline: float = 0.0  # running mean of rewards
    seen: int = 0  # rewards in it
    drawn: list[Tensor] = field(default_factory=list[Tensor])  # actions (L,) of the architectures asked for last


class Controllers(ArchitectureSearch):
    """N2N: remove layers, then shrink them."""

    def __init__(self, config: ControllersConfig, teacher: Widths, seed: int = 0) -> None:
        """Begin at the layers of the teacher.

        Raises:
            UserError: It has none.
        """
        if not teacher:
            raise UserError("The teacher has no hidden layers that could be removed or shrunk.")
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
        """Architectures of the present stage."""
        stage = self._now
        chance = stage.controller(stage.start).exp()
        stage.drawn = [
            torch.multinomial(chance, 1, generator=self._generator)[:, 0] for _ in range(self.config.population)
        ]
        self._asked = [self._applied(stage.start, actions.tolist()) for actions in stage.drawn]
        return list(self._asked)

    def _applied(self, widths: Widths, actions: Sequence[int]) -> Widths:
        if self._now is self._removal:
            return tuple(width for width, removed in zip(widths, actions, strict=True) if not removed)
        return tuple(max(1, round(width * SHARES[place])) for width, place in zip(widths, actions, strict=True))

    def tell(self, rewards: Sequence[float]) -> None:
        """One step of REINFORCE; after the last round of removal the best architecture is what shrinks."""
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
        """Both controllers, what they start from, and the generator."""
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
    """The baseline: every layer is removed by a coin, or keeps a random share of its width."""

    def __init__(self, teacher: Widths, population: int = 4, seed: int = 0) -> None:
        """Begin at the layers of the teacher."""
        self.teacher, self.population = teacher, population
        self._rng = np.random.default_rng(seed)

    def ask(self) -> list[Widths]:
        """Architectures that no reward has shaped."""
        return [self._draw() for _ in range(self.population)]

    def _draw(self) -> Widths:
        kept = [width for width in self.teacher if self._rng.random() < 0.5]
        return tuple(max(1, round(width * SHARES[self._rng.integers(len(SHARES))])) for width in kept)

    def tell(self, rewards: Sequence[float]) -> None:
        """Nothing to learn."""

    def state_dict(self) -> dict[str, Any]:
        """The generator."""
        return {"random": self._rng.bit_generator.state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`."""
        self._rng.bit_generator.state = state["random"]
