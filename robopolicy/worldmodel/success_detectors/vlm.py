"""Success detection by a vision-language model (VLM) with majority voting over several answers per clip.

The prompt contains the first, the last and every `stride`-th frame of a clip; leading copies of the first frame, which
pad short videos, count once (WorldGym uses every 20th frame, five votes, and a prompt that excuses the appearance of
objects). The fraction of "yes" votes is the probability; the detector abstains where the votes split or too few of them
can be parsed.

No single model is reliable: published ones reach an F1 of at most 0.7, with biases in either direction. Measure yours
on labelled clips (`robopolicy.evaluation.judge_metrics`) and correct the rates. Backends are functions from a prompt
and frames to text: a served model, or a local one.
"""

from __future__ import annotations

import base64
import http.client
import io
import json
import re
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import SplitResult, urlsplit

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from robopolicy.device import list_factories
from robopolicy.errors import UserError
from robopolicy.optional import require
from robopolicy.tokens import client_token
from robopolicy.worldmodel.contract import Images, Judgement

Picture = NDArray[np.uint8]
"""Image (height, width, 3), cameras side by side"""

TEMPLATE = """\
You see {count} frames of a video in order of time, from the first to the last. A robot was told to: {task}.
The video may come from a simulation or a generative model: excuse blur and odd textures, and judge what happens.
Judge the LAST frame. Answer in exactly two lines:
SUCCESS: yes or no
PROGRESS: a number from 0 (nothing done) to 100 (fully done)
"""
_SUCCESS = re.compile(r"success\W*\b(yes|no)\b", re.I)
_PROGRESS = re.compile(r"progress\W*(\d+(?:\.\d+)?)", re.I)
_MAX_ANSWER_BYTES = 1 << 20


class VLMBackend(Protocol):
    """Model that answers a prompt about frames, reproducibly by seed where the model allows it."""

    def __call__(self, prompt: str, frames: Sequence[Picture], seed: int) -> str:
        """Return the text of the answer."""
        ...


@dataclass(frozen=True)
class VLMJudge:
    """Success detector that queries a vision-language model."""

    backend: VLMBackend
    task: str  # instruction of the robot
    votes: int = 5  # n, answers per clip
    stride: int = 20  # frames from one image to the next
    agreement: float = 0.7  # fraction of the valid votes that must agree; the detector abstains otherwise
    template: str = TEMPLATE  # with {task} and {count}

    def __post_init__(self) -> None:
        if self.votes < 1 or self.stride < 1 or not 0.5 <= self.agreement <= 1:
            raise UserError("A VLM judge needs votes and stride of at least 1, and agreement in [0.5, 1].")
        try:
            self.template.format(task=self.task, count=1)
        except (KeyError, IndexError, ValueError) as error:
            raise UserError("The prompt template may only contain {task} and {count}.") from error

    def __call__(self, images: Images, proprio: Tensor) -> Judgement:
        """Evaluate clips one after the other, without the state vectors."""
        rows = [self._evaluate(row) for row in pictures(images)]
        success, progress, uncertain = zip(*rows, strict=True)
        return Judgement(torch.tensor(success), torch.tensor(progress), torch.tensor(uncertain))

    def _evaluate(self, clip: Sequence[Picture]) -> tuple[float, float, bool]:
        clip = clip[_num_padding(clip) :]
        frames = [clip[index] for index in frame_indices(len(clip), self.stride)]
        prompt = self.template.format(task=self.task, count=len(frames))
        answers = [parse_answer(self.backend(prompt, frames, seed)) for seed in range(self.votes)]
        valid = [answer for answer in answers if answer is not None]
        if not valid:
            return 0.5, 0.0, True
        success = sum(won for won, _ in valid) / len(valid)
        progress = sum(done for _, done in valid) / len(valid)
        split = max(success, 1 - success) < self.agreement
        return success, progress, split or 2 * len(valid) <= self.votes


def _num_padding(clip: Sequence[Picture]) -> int:
    """Return the number of frames at the start of a clip that equal the next one, which pad short videos."""
    return next((i for i in range(len(clip) - 1) if not np.array_equal(clip[i], clip[i + 1])), len(clip) - 1)


def frame_indices(count: int, stride: int) -> list[int]:
    """Return every `stride`-th of `count` indices, including the first and the last one."""
    return sorted({*range(0, count, stride), count - 1})


def pictures(images: Images) -> list[list[Picture]]:
    """Convert clips `{camera: (B, T, 3, S, S)}` to B lists of T images, cameras side by side in order of name."""
    wide = torch.cat([images[name] for name in sorted(images)], -1)  # (B, T, 3, S, S * cameras)
    return [list(clip) for clip in wide.permute(0, 1, 3, 4, 2).cpu().numpy()]


def parse_answer(answer: str) -> tuple[bool, float] | None:
    """Parse the last success and progress in [0, 1] of an answer; None where it has no success.

    Without progress, success counts as 1 and failure as 0.
    """
    success, progress = _SUCCESS.findall(answer), _PROGRESS.findall(answer)
    if not success:
        return None
    won = success[-1].lower() == "yes"
    return won, min(float(progress[-1]) / 100, 1.0) if progress else float(won)


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A redirect is an error: it would send the token to another host."""

    def redirect_request(self, *_: Any) -> None:
        return None


_OPENER = urllib.request.build_opener(_NoRedirects, urllib.request.ProxyHandler({}))  # a proxy would see the token


class ServedVLM:
    """Client of a server with OpenAI's chat completions API, such as vLLM or llama.cpp."""

    def __init__(
        self,
        url: str,
        model: str,
        *,
        temperature: float = 0.7,
        timeout: float = 120.0,
        max_tokens: int = 256,
    ) -> None:
        """Set the address: `url` includes the version, e.g. "http://127.0.0.1:8000/v1".

        The token of the host (`robopolicy.tokens`) is sent as a bearer token. A `temperature` above 0 lets votes
        differ; `timeout` is in seconds.
        """
        parts = _split_url(url)
        self.url, self.model, self.temperature, self.timeout = url.rstrip("/"), model, temperature, timeout
        self._token, self._max_tokens = client_token(parts), max_tokens

    def __call__(self, prompt: str, frames: Sequence[Picture], seed: int) -> str:
        """Request one answer; a UserError is raised for an unreachable server or an invalid reply."""
        content: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": _data_url(f)}} for f in frames]
        content.append({"type": "text", "text": prompt})
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": content}],
            "temperature": self.temperature,
            "seed": seed,
            "max_tokens": self._max_tokens,
        }
        headers = {"Content-Type": "application/json"}
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        request = urllib.request.Request(f"{self.url}/chat/completions", json.dumps(body).encode(), headers)
        try:
            with _OPENER.open(request, timeout=self.timeout) as response:
                answer = json.loads(response.read(_MAX_ANSWER_BYTES))
            return str(answer["choices"][0]["message"]["content"])
        except urllib.error.HTTPError as error:
            raise UserError(f"The model at {self.url} refused with status {error.code}.") from error
        except (OSError, ValueError, KeyError, IndexError, TypeError, RecursionError) as error:
            raise UserError(f"The model at {self.url} gave no answer: {error}.") from error
        except http.client.HTTPException as error:
            raise UserError(f"The server at {self.url} gave an invalid HTTP response.") from error


def _split_url(url: str) -> SplitResult:
    """Split the address of a server; other text raises a UserError."""
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # brackets or port
        parts, valid = SplitResult("", "", "", "", ""), False
    if not valid or not url.isascii() or not url.isprintable() or " " in url:
        raise UserError(f"The URL of a served model must be like http://HOST:PORT/v1, got {url!r}.")
    return parts


class LocalVLM:
    """Model of the package transformers in this process."""

    def __init__(
        self, path: str, *, device: str = "cpu", temperature: float = 0.7, max_tokens: int = 64, download: bool = False
    ) -> None:
        """Load model and processor from the folder `path`, or with `download` from the Hugging Face hub.

        A `temperature` above 0 lets votes differ; `max_tokens` limits an answer.
        """
        transformers = require("transformers", "vlm")
        list_factories()
        try:
            options = {"local_files_only": not download}
            self.processor: Any = transformers.AutoProcessor.from_pretrained(path, **options)
            self.model: Any = (
                transformers.AutoModelForImageTextToText.from_pretrained(path, **options).to(device).eval()
            )
        except (OSError, ValueError) as error:
            reason = str(error).strip().splitlines()[0]
            raise UserError(f"'{path}' holds no model of transformers with image input: {reason}") from error
        self.device, self.temperature, self.max_tokens = device, temperature, max_tokens

    @torch.no_grad()
    def __call__(self, prompt: str, frames: Sequence[Picture], seed: int) -> str:
        """Generate one answer."""
        content: list[dict[str, Any]] = [{"type": "image", "image": Image.fromarray(frame)} for frame in frames]
        messages = [{"role": "user", "content": [*content, {"type": "text", "text": prompt}]}]
        inputs = self.processor.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
        ).to(self.device)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            output = self.model.generate(
                **inputs, do_sample=True, temperature=self.temperature, max_new_tokens=self.max_tokens
            )
        return self.processor.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)[0]


def _data_url(frame: Picture) -> str:
    buffer = io.BytesIO()
    Image.fromarray(frame).save(buffer, format="PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
