"""What sources of training batches from films share: the sampler's state, cached latents, statistics, judged frames."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from robopolicy.worldmodel.base import LatentFilms
from robopolicy.worldmodel.films import Films, FrameSampler


class FilmSource(ABC):
    """Batches for a learner of a `LatentFilms`; the latents of all frames are computed once, when first needed."""

    env_steps = 0

    def __init__(self, films: Films, device: torch.device, seed: int = 0) -> None:
        self.films, self.device = films, device
        self.sampler = FrameSampler(films, seed)
        self._latents: Tensor | None = None

    @abstractmethod
    def encode(self, model: Any) -> Tensor:
        """Latents `(F, Z, h, w)` of all frames, on the CPU."""

    def latents(self, model: LatentFilms) -> Tensor:
        """Those of all frames; with them the model takes the statistics of the films' vectors."""
        if self._latents is None:
            films, played = self.films, self.films.targets - 1
            self._latents = self.encode(model)
            change = films.proprio[films.targets] - films.proprio[played]
            model.fit_vectors(proprio=films.proprio, proprio_change=change, action=films.actions[played])
        return self._latents

    def judged(self, model: LatentFilms, size: int) -> tuple[Tensor, Tensor, Tensor]:
        """Latents, state vectors and outcomes `(B, 2)`, success and progress, of `size` frames drawn evenly."""
        films, chosen = self.films, self.sampler.frames(size)
        outcome = torch.stack([films.success[chosen], films.progress[chosen]], 1)
        return self.latents(model)[chosen], films.proprio[chosen], outcome

    def metrics(self) -> dict[str, float]:
        """Nothing of its own."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Position in the stream."""
        return self.sampler.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Restore `state_dict`."""
        self.sampler.load_state_dict(state)
        return True

    def close(self) -> None:  # noqa: B027 - there is nothing to free
        """Nothing to free."""
