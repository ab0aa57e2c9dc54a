"""Pictures of what a world model predicts beside what happened."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor

from robopolicy.evaluation.video import BACKGROUND, CAPTION, GAP, TEXT, font
from robopolicy.files import atomic_file
from robopolicy.worldmodel.contract import VideoWorldModel
from robopolicy.worldmodel.diagnostics import frame_psnr
from robopolicy.worldmodel.films import Films


@torch.no_grad()
def contact_sheet(
    model: VideoWorldModel,
    films: Films,
    path: Path,
    *,
    horizons: Sequence[int] = (1, 10, 20),
    typical: int = 2,
    worst: int = 2,
    windows: int = 64,
    side: int = 128,
    seed: int = 0,
) -> Path:
    """Write a picture: per row one film, its last frame seen, then what happened and what was predicted, by horizon.

    The films are those of `windows` drawn ones that were predicted as well as half of them at the last horizon, and
    those that were predicted worst, with their PSNR [dB] there.

    Args:
        model: The world model.
        films: Films to continue, with the actions that were played.
        path: PNG file.
        horizons: Frames ahead; those beyond the longest film are left out.
        typical: Films of median quality, of every camera one row each.
        worst: Films where it went most wrong.
        windows: Films to choose them from.
        side: Pixels of each picture.
        seed: Of the choice of films.
    """
    horizons = [h for h in horizons if h < films.longest]
    starts = films.starts(max(horizons), windows, seed)
    clip, context = films.clip(starts, max(horizons)), model.spec.context
    past = {camera: view[:, :context] for camera, view in clip.images.items()}
    state = model.reset(
        past, clip.proprio[:, :context], seeds=torch.arange(len(starts)), actions=clip.actions[:, : context - 1]
    )
    predicted = model.step(state, clip.actions[:, context - 1 :])[1].images
    end = {camera: view[:, -1:] for camera, view in predicted.items()}
    quality = frame_psnr(end, {camera: view[:, -1:] for camera, view in clip.images.items()})[:, 0]
    order = quality.argsort().tolist()
    middle = max((len(order) - typical) // 2, min(worst, len(order)))
    chosen = [("typical", row) for row in order[middle : middle + typical]] + [("worst", row) for row in order[:worst]]
    titles = ["last seen"] + [f"{kind} +{h}" for h in horizons for kind in ("real", "predicted")]
    lines = [(name, row, camera) for name, row in chosen for camera in model.spec.cameras]
    height = CAPTION + side + GAP
    canvas = Image.new("RGB", (GAP + len(titles) * (side + GAP), CAPTION + len(lines) * height), BACKGROUND)
    draw = ImageDraw.Draw(canvas)
    for column, title in enumerate(titles):
        draw.text((GAP + column * (side + GAP), CAPTION / 2), title, TEXT, font(), anchor="lm")
    for line, (name, row, camera) in enumerate(lines):
        top = CAPTION + line * height
        title = f"{name}: {quality[row]:.1f} dB at +{max(horizons)}, camera {camera}"
        draw.text((GAP, top + CAPTION / 2), title, TEXT, font(), anchor="lm")
        real, told = clip.images[camera][row], predicted[camera][row].cpu()
        pictures = [real[context - 1]]
        for h in horizons:
            pictures += [real[context - 1 + h], told[h - 1]]
        for column, picture in enumerate(pictures):
            canvas.paste(_image(picture, side), (GAP + column * (side + GAP), top + CAPTION))
    with atomic_file(path) as temporary:
        canvas.save(temporary)
    return path


def _image(picture: Tensor, side: int) -> Image.Image:
    array = np.ascontiguousarray(picture.permute(1, 2, 0).numpy())
    return Image.fromarray(array).resize((side, side), Image.Resampling.NEAREST)
