"""Camera frames on disk: PNG bytes inside parquet, or MP4 files through PyAV."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from robopolicy.data.formats.lerobot.layout import VIDEO, next_file, plain_rate, to_frames
from robopolicy.errors import UserError

_ENCODERS = {  # encoder: (codec, options); a key frame every second frame keeps random access fast
    "libx264": ("h264", {"crf": "18", "g": "2", "bf": "0", "preset": "fast"}),
    "libsvtav1": ("av1", {"crf": "24", "g": "2", "preset": "10"}),
}


MAX_PIXELS = 2**28  # of an image; a damaged header must not exhaust the memory


def encode_png(images: NDArray[np.uint8]) -> list[bytes]:
    """Encode each image `(T, 3, height, width)` as lossless PNG."""
    encoded: list[bytes] = []
    for frame in to_frames(images):
        buffer = io.BytesIO()
        Image.fromarray(frame).save(buffer, "PNG", compress_level=3)
        encoded.append(buffer.getvalue())
    return encoded


def image_column(encoded: Sequence[bytes]) -> list[dict[str, Any]]:
    """Rows of a LeRobot image column that embeds PNG or JPEG images."""
    suffix = "jpg" if encoded[0].startswith(b"\xff\xd8") else "png"
    return [{"bytes": data, "path": f"frame-{index:06d}.{suffix}"} for index, data in enumerate(encoded)]


def decode_image(data: bytes, what: str = "An image") -> NDArray[np.uint8]:
    """Decode one image `(3, height, width)` from PNG or JPEG bytes; raises a `UserError` for depth, naming `what`."""
    image = Image.open(io.BytesIO(data), formats=("PNG", "JPEG"))
    if image.width * image.height > MAX_PIXELS:
        raise ValueError(f"an image declares {image.width} x {image.height} pixels")
    if is_deep(image):
        raise UserError(f"{what} has 16 bits of grey, such as depth, where colours of 8 bits are expected.")
    return np.asarray(image.convert("RGB")).transpose(2, 0, 1)


def is_deep(image: Image.Image) -> bool:
    """Whether an image has one channel of more than 8 bits."""
    return image.mode.split(";")[0] in ("I", "F")


def video_encoder() -> str | None:
    """Name of the first encoder that the installed PyAV supports, or None."""
    return next((name for name in _ENCODERS if name in av.codecs_available), None)


def video_info(encoder: str, height: int, width: int, rate: Fraction) -> dict[str, Any]:
    """Description of a video feature for `meta/info.json`."""
    return {
        "video.height": height,
        "video.width": width,
        "video.codec": _ENCODERS[encoder][0],
        "video.pix_fmt": "yuv420p",
        "video.is_depth_map": False,
        "video.fps": plain_rate(rate),
        "video.channels": 3,
        "has_audio": False,
    }


class VideoFiles:
    """Video files of one camera: concatenated episodes, with a new file above a size limit."""

    def __init__(self, root: Path, feature: str, encoder: str, rate: Fraction, max_bytes: int) -> None:
        self._root, self._feature, self._encoder, self._rate, self._max_bytes = root, feature, encoder, rate, max_bytes
        self._location = (0, 0)  # chunk and file index
        self._frames = 0  # in the current file
        self._output: tuple[Any, Any] | None = None  # container and stream of the current file

    def write(self, images: NDArray[np.uint8]) -> dict[str, Any]:
        """Append the images `(T, 3, height, width)` of one episode; return its row of episode metadata."""
        if self._output and self._bytes() >= self._max_bytes:
            self.close()
            self._location = next_file(*self._location)
        container, stream = self._output or self._open(height=images.shape[2], width=images.shape[3])
        start = self._frames
        for array in to_frames(images):
            frame = av.VideoFrame.from_ndarray(array, format="rgb24")
            frame.pts, frame.time_base = self._frames, 1 / self._rate
            container.mux(stream.encode(frame))
            self._frames += 1
        row = {
            "chunk_index": self._location[0],
            "file_index": self._location[1],
            "from_timestamp": float(start / self._rate),
            "to_timestamp": float(self._frames / self._rate),
        }
        return {f"videos/{self._feature}/{name}": value for name, value in row.items()}

    def close(self) -> None:
        """Finish the current file; safe to call twice."""
        if self._output:
            container, stream = self._output
            self._output = None
            container.mux(stream.encode(None))
            container.close()

    def _bytes(self) -> int:
        """Size of the current file, which appears with the first packet of the encoder, after its delay."""
        return self._path.stat().st_size if self._path.exists() else 0

    @property
    def _path(self) -> Path:
        chunk, file = self._location
        return self._root / VIDEO.format(video_key=self._feature, chunk_index=chunk, file_index=file)

    def _open(self, height: int, width: int) -> tuple[Any, Any]:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        container = av.open(str(self._path), "w")
        stream: Any = container.add_stream(self._encoder, rate=self._rate, options=dict(_ENCODERS[self._encoder][1]))
        stream.width, stream.height, stream.pix_fmt, stream.time_base = width, height, "yuv420p", 1 / self._rate
        self._output, self._frames = (container, stream), 0
        return self._output


def decode_video(path: Path, rate: Fraction) -> Iterator[tuple[int, NDArray[np.uint8]]]:
    """Yield the index and the image `(3, height, width)` of every frame of a video."""
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        stream.thread_type = "AUTO"
        for frame in container.decode(stream):
            assert frame.pts is not None and frame.time_base is not None
            image = np.asarray(frame.to_ndarray(format="rgb24"), np.uint8)
            yield round(frame.pts * frame.time_base * rate), image.transpose(2, 0, 1)
