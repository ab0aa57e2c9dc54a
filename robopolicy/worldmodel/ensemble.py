"""Several world models of one world: each film is continued by one of them, and is uncertain where they differ.

Members that were trained with other seeds agree where the data were dense and differ where they guess. Every member
plays every film with the same actions, so that their disagreement grows with the horizon as their films part.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from robopolicy.errors import UserError
from robopolicy.worldmodel.base import LatentFilms
from robopolicy.worldmodel.contract import Frames, Images, Judgement, WorldState


class EnsembleWorldModel:
    """A `VideoWorldModel` of several; a film with seed s shows what member s modulo M predicts."""

    def __init__(self, members: Sequence[LatentFilms]) -> None:
        """Join `members`.

        Raises:
            UserError: They show different worlds.
        """
        self.members, self.spec = list(members), members[0].spec
        if any(member.spec != self.spec for member in members):
            raise UserError(f"World models of one ensemble must show the same, got {[m.spec for m in members]}.")

    @property
    def device(self) -> torch.device:
        """That of the first member."""
        return self.members[0].device

    def reset(
        self, images: Images, proprio: Tensor, *, seeds: Tensor, actions: Tensor | None = None, text: str = ""
    ) -> WorldState:
        """Show the context to every member."""
        states = [member.reset(images, proprio, seeds=seeds, actions=actions, text=text) for member in self.members]
        return self._joined(states)

    def step(self, state: WorldState, actions: Tensor) -> tuple[WorldState, Frames]:
        """Let every member play; the disagreement is the root of the mean variance of their pixels, in [0, 1]."""
        pairs = [member.step(part, actions) for member, part in zip(self.members, self._parts(state), strict=True)]
        told = [frames for _, frames in pairs]
        own, rows = state.seeds % len(self.members), torch.arange(len(state.seeds))

        def shown(values: list[Tensor]) -> Tensor:
            return torch.stack(values)[own, rows]

        views = {camera: [frames.images[camera] for frames in told] for camera in self.spec.cameras}
        variance = [torch.stack(view).float().div(255).var(0).flatten(2).mean(2) for view in views.values()]
        return self._joined([after for after, _ in pairs]), Frames(
            {camera: shown(view) for camera, view in views.items()},
            shown([frames.proprio for frames in told]),
            torch.stack(variance).mean(0).sqrt(),
        )

    @torch.no_grad()
    def judge(self, images: Images, proprio: Tensor) -> Judgement:
        """The members' mean; it abstains where they are divided over success."""
        told = [member.judge(images, proprio) for member in self.members]
        success = torch.stack([judgement.success for judgement in told])
        votes = (success >= 0.5).float().mean(0)
        progress = torch.stack([judgement.progress for judgement in told]).mean(0)
        return Judgement(success.mean(0), progress, (votes > 0) & (votes < 1))

    def _joined(self, states: list[WorldState]) -> WorldState:
        memory = {f"{i}.{key}": value for i, state in enumerate(states) for key, value in state.memory.items()}
        return WorldState(states[0].seeds, states[0].steps, memory)

    def _parts(self, state: WorldState) -> list[WorldState]:
        parts: list[dict[str, Tensor]] = [{} for _ in self.members]
        for name, value in state.memory.items():
            index, _, key = name.partition(".")
            parts[int(index)][key] = value
        return [WorldState(state.seeds, state.steps, memory) for memory in parts]
