"""Videos of episodes in a grid of clips whose borders show the outcome.

Recordings repeat episodes of an evaluation by their seeds and do not enter its statistics.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import matplotlib
import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from robopolicy.atomic import atomic_file
from robopolicy.evaluation.actors import Actor
from robopolicy.evaluation.harness import run_episodes
from robopolicy.policies.base import Policy
from robopolicy.sim.contract import Step, VectorSim

Frames = NDArray[np.uint8]
FPS = 25
MAX_FRAMES = 400  # longer episodes are shown as a time lapse
HOLD_SECONDS = 1.0  # duration of the last frame
BACKGROUND, RUNNING, SUCCESS, FAILURE = (22, 26, 32), (96, 106, 120), (46, 184, 114), (226, 84, 76)
TEXT, BORDER, CAPTION, GAP = (226, 230, 236), 4, 26, 8


@dataclass(frozen=True, eq=False)
class EpisodeVideo:
    """One recorded episode."""

    frames: Frames  # (T, h, w, 3)
    decided: int  # first frame with a known outcome; T where it is only known at the end
    seed: int
    success: bool | None
    total_reward: float
    title: str = ""  # name of the policy


@dataclass(frozen=True, eq=False)
class Recording:
    """Clips of one policy, all at one frame rate."""

    clips: list[EpisodeVideo]
    fps: float  # frames per second
    speed: float = 1.0  # relative to real time


def rendering_problem(sim: VectorSim) -> str | None:
    """Render `sim`, which must have been reset, once; return an error message of one line, or None."""
    try:
        sim.render(width=64, height=48)
    except NotImplementedError:
        return f"No video: task {sim.spec.task} does not support rendering."
    except Exception as error:  # GL stacks fail in every way there is: import, attribute, library and context errors
        first = str(error).strip().splitlines()
        return f"No video: {first[0] if first else type(error).__name__}"
    return None


def record(
    policy: Policy | Actor,
    sim: VectorSim,
    seeds: Sequence[int],
    *,
    title: str = "",
    camera: str | None = None,
    width: int = 320,
    height: int = 240,
    deterministic: bool = True,
) -> Recording:
    """Roll out and record the episodes `seeds`, one per environment of `sim` (see `rendering_problem`).

    `title` is the name of the policy under each clip; `camera` None is the camera of the task; sizes are in pixels.
    """
    spec = sim.spec
    natural = max(1, round(1 / (FPS * spec.control_dt)))
    stride = max(natural, math.ceil(spec.max_episode_steps / MAX_FRAMES))
    rate = 1 / (natural * spec.control_dt)
    frames: list[list[Frames]] = [[] for _ in seeds]
    decided: list[int | None] = [None] * len(seeds)
    finished = [False] * len(seeds)
    count = 0

    def capture() -> None:
        nonlocal count
        if count % stride == 0:
            pictures = sim.render(camera, width=width, height=height, envs=len(seeds)).permute(0, 2, 3, 1).cpu().numpy()
            for row, picture in enumerate(pictures):
                if not finished[row]:
                    frames[row].append(picture.copy())
        count += 1

    def track(moving: Tensor, step: Step) -> None:
        success = step.info["success"].tolist() if "success" in step.info else [False] * len(seeds)
        for row, (moved, done) in enumerate(zip(moving.tolist(), step.done.tolist(), strict=True)):
            if moved and success[row] and decided[row] is None:
                decided[row] = len(frames[row])
            finished[row] |= moved and done

    result = run_episodes(policy, sim, seeds, deterministic=deterministic, before_step=capture, on_step=track)
    clips: list[EpisodeVideo] = []
    for row, seed in enumerate(seeds):
        known = decided[row]
        clips.append(
            EpisodeVideo(
                frames=np.stack(frames[row]),
                decided=len(frames[row]) if known is None else known,
                seed=int(seed),
                success=None if result.success is None else bool(result.success[row]),
                total_reward=float(result.returns[row]),
                title=title,
            )
        )
    return Recording(clips, rate, speed=stride / natural)


def write_video(recordings: Sequence[Recording], path: Path) -> Path:
    """Write the clips as one grid and return the path: mp4, or gif if requested or without an H.264 encoder.

    One recording becomes a near-square grid; several become one row each, with one seed per column. The file is written
    atomically.
    """
    grid, fps = _arrange(recordings), recordings[0].fps
    if path.suffix != ".gif":
        video = path.with_suffix(".mp4")
        with suppress(ImportError, ValueError), atomic_file(video) as temporary:  # PyAV or its H.264 encoder is missing
            _write_mp4(_grid_frames(grid, fps), temporary, fps)
            return video
    video = path.with_suffix(".gif")
    pictures = [Image.fromarray(frame) for frame in _grid_frames(grid, fps)]
    with atomic_file(video) as temporary:
        pictures[0].save(temporary, save_all=True, append_images=pictures[1:], duration=round(1000 / fps), loop=0)
    return video


def write_strip(recordings: Sequence[Recording], path: Path, *, moments: int = 5) -> Path:
    """Write an image with `moments` frames of the first clip of each recording, one row each."""
    rows: list[list[Frames]] = []
    for recording in recordings:
        clip = recording.clips[0]
        instants = np.linspace(0, len(clip.frames) - 1, moments).round().astype(int)
        rows.append([_tile(clip, len(clip.frames) if i == instants[-1] else int(i)) for i in instants])
    Image.fromarray(_assemble(rows)).save(path)
    return path


def _arrange(recordings: Sequence[Recording]) -> list[list[EpisodeVideo]]:
    if len(recordings) > 1:
        return [recording.clips for recording in recordings]
    clips = recordings[0].clips
    columns = math.ceil(math.sqrt(len(clips)))
    return [clips[start : start + columns] for start in range(0, len(clips), columns)]


def _grid_frames(grid: list[list[EpisodeVideo]], fps: float) -> Iterator[Frames]:
    longest = max(len(clip.frames) for row in grid for clip in row)
    for t in range(longest + round(HOLD_SECONDS * fps)):
        yield _assemble([[_tile(clip, t) for clip in row] for row in grid])


def _tile(clip: EpisodeVideo, t: int) -> Frames:
    """Picture of a clip at frame `t` with border and caption; from `t = T` on, the end with its outcome."""
    height, width = clip.frames.shape[1:3]
    known = t >= min(clip.decided, len(clip.frames))
    colour = RUNNING if not known or clip.success is None else SUCCESS if clip.success else FAILURE
    tile = np.empty((height + 2 * BORDER + CAPTION, width + 2 * BORDER, 3), np.uint8)
    tile[:] = colour
    tile[BORDER : BORDER + height, BORDER : BORDER + width] = clip.frames[min(t, len(clip.frames) - 1)]
    tile[2 * BORDER + height :] = BACKGROUND
    canvas = Image.fromarray(tile)
    draw = ImageDraw.Draw(canvas)
    letters, middle = font(), tile.shape[0] - CAPTION / 2 + 1
    name = f"{clip.title}  seed {clip.seed}" if clip.title else f"seed {clip.seed}"
    draw.text((2, middle), name, TEXT, letters, anchor="lm")
    if known:
        outcome = f"return {clip.total_reward:.3g}" if clip.success is None else "success" if clip.success else "fail"
        draw.text(
            (tile.shape[1] - 2, middle), outcome, colour if clip.success is not None else TEXT, letters, anchor="rm"
        )
    return np.asarray(canvas)


def _assemble(rows: list[list[Frames]]) -> Frames:
    height, width = rows[0][0].shape[:2]
    columns = max(len(row) for row in rows)
    total = (GAP + len(rows) * (height + GAP), GAP + columns * (width + GAP))
    canvas = np.empty((total[0] + total[0] % 2, total[1] + total[1] % 2, 3), np.uint8)  # H.264 needs even sizes
    canvas[:] = BACKGROUND
    for i, row in enumerate(rows):
        for j, tile in enumerate(row):
            top, left = GAP + i * (height + GAP), GAP + j * (width + GAP)
            canvas[top : top + height, left : left + width] = tile
    return canvas


def font() -> ImageFont.FreeTypeFont:
    """Return the font of captions."""
    return ImageFont.truetype(str(Path(matplotlib.get_data_path()) / "fonts/ttf/DejaVuSans.ttf"), 13)


def _write_mp4(frames: Iterator[Frames], path: Path, fps: float) -> None:
    import av

    with av.open(str(path), "w", options={"movflags": "+faststart"}) as container:
        stream = container.add_stream(
            "libx264", rate=Fraction(fps).limit_denominator(1000), options={"crf": "23", "preset": "veryfast"}
        )
        stream.pix_fmt = "yuv420p"  # the only layout that every browser supports
        for i, picture in enumerate(frames):
            if i == 0:
                stream.height, stream.width = picture.shape[:2]
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())
