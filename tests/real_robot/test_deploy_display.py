"""Tests of `robopolicy deploy --display`: what a run on a robot shows."""

import json
from pathlib import Path

import pytest
from test_deploy import FAST, command, run_deploy

from robopolicy.cli import main as cli

mcap = pytest.importorskip("mcap.reader", reason="needs robopolicy[record]")
pytest.importorskip("mjviser", reason="needs robopolicy[viewer]")
assert command  # the fixture that registers the command


def test_a_run_shows_bodies_joints_chunks_success_and_events(monkeypatch, tmp_path: Path):
    path = tmp_path / "run.mcap"
    report = run_deploy(monkeypatch, tmp_path / "r.json", "--transport", "loopback", "--display", str(path))
    assert report["n"] == 1
    found: dict[str, list[tuple[float, dict]]] = {}
    with path.open("rb") as stream:
        for _, channel, message in mcap.make_reader(stream).iter_messages():
            found.setdefault(channel.topic, []).append((message.log_time / 1e9, json.loads(message.data)))
    steps = report["episodes"][0]["steps"]
    times = [moment for moment, _ in found["/numbers"]]
    assert abs(len(times) - steps) <= 0.2 * steps + 3 and times == sorted(times)  # about one frame per action
    assert {"state", "measured", "target", "command"} <= set(found["/numbers"][-1][1])
    bodies = [row for _, poses in found["/tf"] for row in poses["transforms"]]
    heights = [body["translation"]["z"] for body in bodies if "cube" in body["child_frame_id"]]
    assert heights[-1] > heights[0] + 0.05  # the cube of the topic is lifted
    assert all(len(row["actions"]) <= 8 and len(row["actions"][0]) == 5 for _, row in found["/chunk"])
    events = {row["message"]: row["level"] for _, row in found["/events"]}
    assert events["RUN"] == events["STOPPED: shut down"] == 2
    assert found["/outcome"][0][1] == {"episode": "seed 10000"}
    assert found["/outcome"][-1][1]["success"] is True
    words = ["deploy", *FAST, "--transport", "loopback", "--out", str(tmp_path / "s.json")]
    assert cli.main([*words, "--display", str(path)]) == 2
    assert cli.main([*words, "--display", "live", "--check"]) == 2
