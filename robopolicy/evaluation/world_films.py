"""Pictures of what a world model predicts beside what happened."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor

from robopolicy.evaluation.video import BACKGROUND, CAPTION, GAP, TEXT, font
from robopolicy.worldmodel.contract import VideoWorldModel
from robopolicy.worldmodel.films import Films


@torch.no_grad()
def contact_sheet(
    model: VideoWorldModel,
    films: Films,
    path: Path,
    *,
    horizons: Sequence[int] = (1, 10, 20),
    rows: int = 4,
    side: int = 128,
    seed: int = 0,
) -> Path:
    """Write a picture: per row one film, its last frame seen, then what happened and what was predicted, by horizon.

    Args:
        model: The world model.
        films: Films to continue, with the actions that were played.
        path: PNG file.
        horizons: Frames ahead; those beyond the longest film are left out.
        rows: Films, of every camera one row.
        side: Pixels of each picture.
        seed: Of the choice of films.
    """
    horizons = [h for h in horizons if h < films.longest]
    starts = films.starts(max(horizons), rows, seed)
    clip, context = films.clip(starts, max(horizons)), model.spec.context
    past = {camera: view[:, :context] for camera, view in clip.images.items()}
    state = model.reset(
        past, clip.proprio[:, :context], seeds=torch.arange(len(starts)), actions=clip.actions[:, : context - 1]
    )
    predicted = model.step(state, clip.actions[:, context - 1 :])[1].images
    titles = ["last seen"] + [f"{kind} +{h}" for h in horizons for kind in ("real", "predicted")]
    lines = [(row, camera) for row in range(len(starts)) for camera in model.spec.cameras]
    canvas = Image.new("RGB", (GAP + len(titles) * (side + GAP), CAPTION + len(lines) * (side + GAP)), BACKGROUND)
    draw = ImageDraw.Draw(canvas)
    for column, title in enumerate(titles):
        draw.text((GAP + column * (side + GAP), CAPTION / 2), title, TEXT, font(), anchor="lm")
    for line, (row, camera) in enumerate(lines):
        real, told = clip.images[camera][row], predicted[camera][row].cpu()
        pictures = [real[context - 1]]
        for h in horizons:
            pictures += [real[context - 1 + h], told[h - 1]]
        for column, picture in enumerate(pictures):
            canvas.paste(_image(picture, side), (GAP + column * (side + GAP), CAPTION + line * (side + GAP)))
    path.parent.mkdir(parents=True, exist_ok=True)
    canvas.save(path)
    return path


def _image(picture: Tensor, side: int) -> Image.Image:
    array = np.ascontiguousarray(picture.permute(1, 2, 0).numpy())
    return Image.fromarray(array).resize((side, side), Image.Resampling.NEAREST)
