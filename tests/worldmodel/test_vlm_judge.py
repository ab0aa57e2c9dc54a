"""Tests of a vision-language model as judge: prompts and frames, vote counts, and backends."""

import base64
import importlib.util
import io
import json
import socket
import threading
import types
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from robopolicy.errors import UserError
from robopolicy.worldmodel.success_detectors import vlm
from robopolicy.worldmodel.success_detectors.vlm import (
    LocalVLM,
    ServedVLM,
    VLMJudge,
    frame_indices,
    parse_answer,
    pictures,
)

YES, NO = "SUCCESS: yes\nPROGRESS: 90", "SUCCESS: no\nPROGRESS: 30"


def clips(rows: int = 1, length: int = 45) -> dict[str, torch.Tensor]:
    values = torch.arange(rows * length, dtype=torch.uint8).reshape(rows, length, 1, 1, 1)
    return {"front": values.expand(rows, length, 3, 8, 8), "wrist": 255 - values.expand(rows, length, 3, 8, 8)}


class Scripted:
    """Returns prepared answers in a cycle, and records the prompts and frame counts."""

    def __init__(self, answers: Sequence[str]) -> None:
        self.answers = answers
        self.shown: list[tuple[str, int]] = []  # prompt, number of frames

    def __call__(self, prompt: str, frames: Sequence[Any], seed: int) -> str:
        self.shown.append((prompt, len(frames)))
        return self.answers[(len(self.shown) - 1) % len(self.answers)]


def judge_clips(answers: list[str], **options) -> tuple[float, float, bool]:
    found = VLMJudge(Scripted(answers), "push the block", **options)(clips(), torch.zeros(1, 45, 0))
    return round(float(found.success[0]), 4), round(float(found.progress[0]), 4), bool(found.uncertain[0])


def test_first_and_last_frame_are_always_included():
    assert frame_indices(45, 20) == [0, 20, 40, 44] and frame_indices(41, 20) == [0, 20, 40]
    assert frame_indices(1, 20) == [0] and frame_indices(2, 20) == [0, 1]


def test_cameras_are_placed_side_by_side():
    (clip,) = pictures(clips(length=3))
    assert clip[2].shape == (8, 16, 3) and clip[2][0, 0, 0] == 2 and clip[2][0, 15, 0] == 253


def test_votes_are_counted_and_the_prompt_names_the_task():
    script = Scripted([YES, YES, NO])
    judge = VLMJudge(script, "push the block", votes=3, agreement=0.6)
    found = judge(clips(2), torch.zeros(2, 45, 0))
    assert found.success.tolist() == pytest.approx([2 / 3, 2 / 3])
    assert found.progress.tolist() == pytest.approx([0.7, 0.7]) and not found.uncertain.any()
    assert len(script.shown) == 6
    prompt, count = script.shown[0]
    assert count == 4 and "push the block" in prompt and "4 frames" in prompt


def test_a_split_vote_or_too_few_answers_abstain():
    assert judge_clips([YES]) == (1.0, 0.9, False)
    assert judge_clips([YES, YES, NO, NO, YES]) == (0.6, 0.66, True)
    assert judge_clips([YES, "hm", "hm", "hm", "hm"])[2]
    assert judge_clips(["I cannot see the video."]) == (0.5, 0.0, True)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (YES, (True, 0.9)),
        ("**Success**: No\n**Progress**: 12.5 %", (False, 0.125)),
        ("It might be Success: yes. But no.\nSUCCESS: no", (False, 0.0)),
        ("success = yes, progress = 250", (True, 1.0)),
        ("Success: unclear", None),
        ("", None),
    ],
)
def test_answers_are_parsed_or_rejected(answer, expected):
    assert parse_answer(answer) == expected


def test_invalid_settings_are_refused():
    for options in ({"votes": 0}, {"stride": 0}, {"agreement": 0.3}):
        with pytest.raises(UserError, match="agreement"):
            VLMJudge(Scripted([YES]), "", **options)
    with pytest.raises(UserError, match="template"):
        VLMJudge(Scripted([YES]), "", template="{oops}")


class Handler(BaseHTTPRequestHandler):
    """Answers like a server of chat completions and records the requests."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append((self.path, dict(self.headers), body))  # type: ignore[attr-defined]
        status, answer = self.server.answer  # type: ignore[attr-defined]
        self.send_response(status)
        if 300 <= status < 400:
            self.send_header("Location", answer.decode())
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_) -> None:
        pass


@pytest.fixture
def server():
    server = HTTPServer(("127.0.0.1", 0), Handler)
    server.asked = []  # type: ignore[attr-defined]
    server.answer = (200, json.dumps({"choices": [{"message": {"content": YES}}]}).encode())  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def test_served_model_receives_chat_completion_requests(server, monkeypatch):
    monkeypatch.setenv("ROBOPOLICY_TOKEN_LOCALHOST", "secret")
    url = f"http://127.0.0.1:{server.server_port}/v1/"
    judge = VLMJudge(ServedVLM(url, "tiny-vlm"), "push the block", votes=2)
    assert judge(clips(), torch.zeros(1, 45, 0)).success.tolist() == [1.0]
    (path, headers, body), (_, _, second) = server.asked
    assert path == "/v1/chat/completions" and headers["Authorization"] == "Bearer secret"
    assert body["model"] == "tiny-vlm" and (body["seed"], second["seed"]) == (0, 1)
    *images, text = body["messages"][0]["content"]
    assert len(images) == 4 and "push the block" in text["text"]
    picture = base64.b64decode(images[-1]["image_url"]["url"].removeprefix("data:image/png;base64,"))
    assert np.asarray(Image.open(io.BytesIO(picture)))[0, 0].tolist() == [44, 44, 44]


@pytest.mark.parametrize(
    ("answer", "message"), [((500, b""), "status 500"), ((200, b"{}"), "no answer"), ((200, b"<html>"), "no answer")]
)
def test_invalid_server_answers_are_reported(server, answer, message):
    server.answer = answer
    backend = ServedVLM(f"http://127.0.0.1:{server.server_port}/v1", "m")
    with pytest.raises(UserError, match=message):
        backend("?", [np.zeros((4, 4, 3), np.uint8)], 0)


def test_redirects_are_not_followed(server, monkeypatch):
    """They would send the token to a host of the server's choice."""
    monkeypatch.setenv("ROBOPOLICY_TOKEN_LOCALHOST", "secret")
    url = f"http://127.0.0.1:{server.server_port}"
    server.answer = (302, f"{url}/elsewhere".encode())
    with pytest.raises(UserError, match="status 302"):
        ServedVLM(url, "m")("?", [], 0)
    assert [path for path, *_ in server.asked] == ["/chat/completions"]


def test_a_proxy_never_receives_the_token(server, monkeypatch):
    monkeypatch.setenv("ROBOPOLICY_TOKEN_LOCALHOST", "secret")
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{server.server_port}")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    spec = importlib.util.find_spec(vlm.__name__)
    assert spec is not None and spec.loader is not None
    fresh = importlib.util.module_from_spec(spec)  # urllib reads the variables when an opener is built
    spec.loader.exec_module(fresh)
    with pytest.raises(UserError, match="no answer"):
        fresh.ServedVLM("http://127.0.0.1:9/v1", "m", timeout=2.0)("?", [], 0)
    assert server.asked == []


def test_a_server_that_does_not_speak_http_is_reported():
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(b"garbage\r\n\r\n")

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        with pytest.raises(UserError, match=r"gave an invalid HTTP response\.$"):
            ServedVLM(f"http://127.0.0.1:{listener.getsockname()[1]}/v1", "m", timeout=5.0)("?", [], 0)
        thread.join()


@pytest.mark.parametrize(
    "url",
    [
        "localhost:8000",
        "http://",
        "http://[::1/v1",
        "http://127.0.0.1:8/v 1",
        "http://127.0.0.1:8/v1\n",
        "http://127.0.0.1:abc/v1",
        "http://127.0.0.1:99999/v1",
    ],
)
def test_invalid_addresses_are_refused(url):
    with pytest.raises(UserError, match="must be like http://HOST:PORT/v1"):
        ServedVLM(url, "m")


def test_tokens_are_sent_encrypted_or_to_this_machine(monkeypatch):
    ServedVLM("http://example.org/v1", "m")
    monkeypatch.setenv("ROBOPOLICY_TOKEN_EXAMPLE_ORG", "secret")
    with pytest.raises(UserError, match="unencrypted"):
        ServedVLM("http://example.org/v1", "m")
    ServedVLM("https://example.org/v1", "m")
    with pytest.raises(UserError, match="no answer"):
        ServedVLM("http://127.0.0.1:9/v1", "m", timeout=2.0)("?", [], 0)


class Batch(dict):
    def to(self, device):
        return self


def test_local_model_loads_offline_and_uses_its_own_chat_template(monkeypatch):
    calls = {}

    class Processor:
        def apply_chat_template(self, messages, **options):
            calls["messages"], calls["options"] = messages, options
            return Batch(input_ids=torch.zeros(1, 7, dtype=torch.int64))

        def batch_decode(self, tokens, **_):
            return [f"{YES} after {tokens.shape[1]} tokens"]

    class Model(torch.nn.Module):
        def generate(self, input_ids, **options):
            calls["draw"] = float(torch.rand(()))
            return torch.cat([input_ids, torch.zeros(1, 3, dtype=torch.int64)], 1)

    def loader(result):
        def from_pretrained(path, **options):
            calls["load"] = options
            if path == "nowhere":
                raise OSError("nowhere is not a folder\nhelp")
            return result

        return types.SimpleNamespace(from_pretrained=from_pretrained)

    fake = types.SimpleNamespace(AutoProcessor=loader(Processor()), AutoModelForImageTextToText=loader(Model()))
    monkeypatch.setattr(vlm, "require", lambda package, extra: fake)
    backend = LocalVLM("models/tiny")
    first, again, other = (
        (backend("?", [np.zeros((4, 4, 3), np.uint8)] * 2, seed), calls["draw"]) for seed in (1, 1, 2)
    )
    assert first == again and first[1] != other[1] and first[0].endswith("after 3 tokens")
    assert calls["load"] == {"local_files_only": True}
    kinds = [part["type"] for part in calls["messages"][0]["content"]]
    assert kinds == ["image", "image", "text"]
    with pytest.raises(UserError, match=r"nowhere is not a folder$"):
        LocalVLM("nowhere")
