"""Network that selects the next visit (BQ-NCO, Drakulic et al. 2023).

Its input is a reduced state: the current position, the remaining points, and the end of the path. It omits visited
points, because the best continuation does not depend on them (bisimulation quotienting). It omits the frame:
coordinates are relative to the current position and scaled by the farthest point. Tokens carry no position, so the
order of the points does not matter.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from robopolicy.atomic import atomic_folder
from robopolicy.constraints import Layers, PositiveInt, Validated
from robopolicy.errors import UserError
from robopolicy.files import check_owned, parse_json
from robopolicy.nets.transformer import AttentionBlock
from robopolicy.schema import from_dict, to_dict

MODEL, FACTS = "model.safetensors", "visits.json"
VERSION = 1


@dataclass(frozen=True)
class VisitConfig(Validated):
    """Size of a `VisitPolicy`; published: width 192, 9 layers, 12 heads."""

    dim: PositiveInt = 2  # d, coordinates of a point
    width: PositiveInt = 64
    layers: Layers = 3
    heads: PositiveInt = 4


class VisitPolicy(nn.Module):
    """Scores of the remaining points."""

    def __init__(self, config: VisitConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Linear(config.dim, config.width)
        self.roles = nn.Parameter(0.1 * torch.randn(2, config.width))  # of the current position, of the end
        self.blocks = nn.ModuleList(AttentionBlock(config.width, config.heads) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.score = nn.Linear(config.width, 1)

    def forward(self, points: Tensor, here: Tensor, end: Tensor | None = None) -> Tensor:
        """Scores `(B, n)` of the points `(B, n, d)` as the next visit.

        Args:
            points: Remaining points.
            here: `(B, d)` current position.
            end: `(B, d)` end of the path; None: anywhere.
        """
        stops = points if end is None else torch.cat([points, end[:, None]], 1)
        relative = stops - here[:, None]
        scale = relative.norm(dim=-1).amax(1).clamp(min=1e-9)[:, None, None]
        tokens = self.embed(relative / scale)
        if end is not None:
            tokens = torch.cat([tokens[:, :-1], tokens[:, -1:] + self.roles[1]], 1)
        origin = (self.embed.bias + self.roles[0]).expand(len(points), 1, -1)
        x = torch.cat([origin, tokens], 1)
        for block in self.blocks:
            x = block(x)
        return self.score(self.norm(x[:, 1 : 1 + points.shape[1]]))[..., 0]


def save_visits(policy: VisitPolicy, folder: str | Path) -> None:
    """Write weights and sizes as a folder.

    Raises:
        UserError: The folder contains something else.
    """
    place = Path(folder)
    check_owned(place, FACTS, "a network for visits")
    with atomic_folder(place) as temporary:
        save_file({key: value.cpu().contiguous() for key, value in policy.state_dict().items()}, temporary / MODEL)
        facts = {"version": VERSION, "config": to_dict(policy.config)}
        (temporary / FACTS).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")


def load_visits(folder: str | Path) -> VisitPolicy:
    """Read the folder of `save_visits`, in evaluation mode.

    Raises:
        UserError: The folder is damaged or has another version.
    """
    place = Path(folder)
    try:
        facts = parse_json((place / FACTS).read_text(encoding="utf-8"))
        if facts["version"] != VERSION:
            raise UserError(f"{place} has version {facts['version']!r}, expected {VERSION}; train it again.")
        policy = VisitPolicy(from_dict(VisitConfig, facts["config"], str(place / FACTS)))
        policy.load_state_dict(load_file(place / MODEL), strict=True)
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(
            f"{place} is not a network for visits ({reason}); train one with 'robopolicy visits'."
        ) from error
    return policy.eval()
