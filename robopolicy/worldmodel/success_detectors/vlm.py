"""A vision-language model as judge: some frames of a clip and a question, asked several times.

The first and the last frame are always shown, and every `stride`-th between them; copies of the first, with which short
films are padded, count once (WorldGym asks about every 20th, five votes, and tells the model to excuse how objects
look). The share of the votes that say yes is the probability; where the votes split, or too few can be understood, the
judge abstains.

No single model is reliable: published ones reach an F1 of 0.7 at best, with biases that point either way. Measure yours
on labelled clips first (`robopolicy.evaluation.judge_metrics`) and correct the rates by what you find. Backends are
functions from a prompt and frames to text: a served model, or a local one.
"""

from __future__ import annotations

import base64
import io
import json
import re
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import urlparse

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from robopolicy.errors import UserError
from robopolicy.optional import require
from robopolicy.worldmodel.contract import Images, Judgement

Picture = NDArray[np.uint8]
"""(height, width, 3), cameras side by side"""

TEMPLATE = """\
You see {count} frames of a video in order of time, from the first to the last. A robot was told to: {task}.
The video may come from a simulation or a generative model: excuse blur and odd textures, and judge what happens.
Judge the LAST frame. Answer in exactly two lines:
SUCCESS: yes or no
PROGRESS: a number from 0 (nothing done) to 100 (fully done)
"""
_SUCCESS = re.compile(r"success\W*\b(yes|no)\b", re.I)
_PROGRESS = re.compile(r"progress\W*(\d+(?:\.\d+)?)", re.I)
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


class VLMBackend(Protocol):
    """Answers a prompt about frames. The same seed gives the same answer where the model allows it."""

    def __call__(self, prompt: str, frames: Sequence[Picture], seed: int) -> str:
        """Return the answer in words."""
        ...


@dataclass(frozen=True)
class VLMJudge:
    """A `Judge` that asks a vision-language model."""

    backend: VLMBackend
    task: str  # what the robot was told, in words
    votes: int = 5  # n, questions per clip
    stride: int = 20  # frames from one picture to the next
    agreement: float = 0.7  # share of the understood votes that must agree, or the judge abstains
    template: str = TEMPLATE  # with {task} and {count}

    def __post_init__(self) -> None:
        if self.votes < 1 or self.stride < 1 or not 0.5 <= self.agreement <= 1:
            raise UserError("A VLM judge needs votes and stride of at least 1, and agreement in [0.5, 1].")
        try:
            self.template.format(task=self.task, count=1)
        except (KeyError, IndexError, ValueError) as error:
            raise UserError("The prompt template may hold {task} and {count} alone.") from error

    def __call__(self, images: Images, proprio: Tensor) -> Judgement:
        """Judge clips one after the other; the state vectors are not shown."""
        rows = [self._judge(row) for row in pictures(images)]
        success, progress, uncertain = zip(*rows, strict=True)
        return Judgement(torch.tensor(success), torch.tensor(progress), torch.tensor(uncertain))

    def _judge(self, clip: Sequence[Picture]) -> tuple[float, float, bool]:
        clip = clip[_copies(clip) :]
        shown = [clip[index] for index in chosen_frames(len(clip), self.stride)]
        prompt = self.template.format(task=self.task, count=len(shown))
        answers = [parse_answer(self.backend(prompt, shown, seed)) for seed in range(self.votes)]
        understood = [answer for answer in answers if answer is not None]
        if not understood:
            return 0.5, 0.0, True
        success = sum(won for won, _ in understood) / len(understood)
        progress = sum(done for _, done in understood) / len(understood)
        split = max(success, 1 - success) < self.agreement
        return success, progress, split or 2 * len(understood) <= self.votes


def _copies(clip: Sequence[Picture]) -> int:
    """Frames at the start of a clip that only repeat the one after them: padding of a film that is still short."""
    return next((i for i in range(len(clip) - 1) if not np.array_equal(clip[i], clip[i + 1])), len(clip) - 1)


def chosen_frames(count: int, stride: int) -> list[int]:
    """Every `stride`-th of `count` frames, the first and the last one always."""
    return sorted({*range(0, count, stride), count - 1})


def pictures(images: Images) -> list[list[Picture]]:
    """Clips `{camera: (B, T, 3, S, S)}` as B lists of T pictures, cameras side by side in order of name."""
    wide = torch.cat([images[name] for name in sorted(images)], -1)  # (B, T, 3, S, S * cameras)
    return [list(clip) for clip in wide.permute(0, 1, 3, 4, 2).cpu().numpy()]


def parse_answer(answer: str) -> tuple[bool, float] | None:
    """Success and progress in [0, 1] of an answer, the last mention of each; None where it cannot be understood.

    An answer without progress counts with 1 for success and 0 for failure.
    """
    success, progress = _SUCCESS.findall(answer), _PROGRESS.findall(answer)
    if not success:
        return None
    won = success[-1].lower() == "yes"
    return won, min(float(progress[-1]) / 100, 1.0) if progress else float(won)


class ServedVLM:
    """A model behind an endpoint that speaks OpenAI's chat completions, as vLLM, llama.cpp and others do."""

    def __init__(
        self,
        url: str,
        model: str,
        *,
        token: str = "",
        temperature: float = 0.7,
        timeout: float = 120.0,
        longest: int = 256,
    ) -> None:
        """Point at a server.

        Args:
            url: Up to and including the version, e.g. "http://127.0.0.1:8000/v1".
            model: Name under which the server knows it.
            token: Bearer token; sent over https or to this machine alone.
            temperature: Of the answers; above 0, so that votes differ.
            timeout: Seconds to wait for an answer.
            longest: Tokens of an answer.

        Raises:
            UserError: The address is none, or the token would travel in the clear.
        """
        parts = urlparse(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UserError(f"The address of a served model begins with http:// or https://, got '{url}'.")
        if token and parts.scheme == "http" and parts.hostname not in _LOOPBACK:
            raise UserError(f"The token would travel to {parts.hostname} in the clear; use https.")
        self.url, self.model, self.temperature, self.timeout = url.rstrip("/"), model, temperature, timeout
        self._token, self._longest = token, longest

    def __call__(self, prompt: str, frames: Sequence[Picture], seed: int) -> str:
        """Ask once.

        Raises:
            UserError: The server cannot be reached or answers something else.
        """
        content: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": _data_url(f)}} for f in frames]
        content.append({"type": "text", "text": prompt})
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": content}],
            "temperature": self.temperature,
            "seed": seed,
            "max_tokens": self._longest,
        }
        headers = {"Content-Type": "application/json"}
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        request = urllib.request.Request(f"{self.url}/chat/completions", json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(request, timeout=self.timeout) as response:
                return str(json.load(response)["choices"][0]["message"]["content"])
        except urllib.error.HTTPError as error:
            raise UserError(f"The model at {self.url} refused with status {error.code}.") from error
        except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
            raise UserError(f"The model at {self.url} gave no answer: {error}.") from error


class Local:
    """A model of transformers in this process, from a local folder."""

    def __init__(
        self, path: str, *, device: str = "cpu", temperature: float = 0.7, tokens: int = 64, download: bool = False
    ) -> None:
        """Load it.

        Args:
            path: Folder with model and processor; with `download` also the name of one on the hub.
            device: Where to compute.
            temperature: Of the answers; above 0, so that votes differ.
            tokens: Longest answer.
            download: Whether it may be fetched.

        Raises:
            UserError: transformers is missing, or the folder holds no model that sees images.
        """
        transformers = require("transformers", "vlm")
        try:
            options = {"local_files_only": not download}
            self.processor: Any = transformers.AutoProcessor.from_pretrained(path, **options)
            self.model: Any = (
                transformers.AutoModelForImageTextToText.from_pretrained(path, **options).to(device).eval()
            )
        except (OSError, ValueError) as error:
            reason = str(error).strip().splitlines()[0]
            raise UserError(f"'{path}' holds no model of transformers that sees images: {reason}") from error
        self.device, self.temperature, self.tokens = device, temperature, tokens

    @torch.no_grad()
    def __call__(self, prompt: str, frames: Sequence[Picture], seed: int) -> str:
        """Ask once."""
        content: list[dict[str, Any]] = [{"type": "image", "image": Image.fromarray(frame)} for frame in frames]
        messages = [{"role": "user", "content": [*content, {"type": "text", "text": prompt}]}]
        inputs = self.processor.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
        ).to(self.device)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            output = self.model.generate(
                **inputs, do_sample=True, temperature=self.temperature, max_new_tokens=self.tokens
            )
        return self.processor.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)[0]


def _data_url(frame: Picture) -> str:
    buffer = io.BytesIO()
    Image.fromarray(frame).save(buffer, format="PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
