"""Tests of displays of running programs: files, pages, dropped frames, and processes that fail."""

import logging
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from test_sinks import STEPS, Carts, messages

from robopolicy.cli.main import main
from robopolicy.errors import UserError
from robopolicy.sim.registry import SimOptions, make_sim
from robopolicy.viewer.display import MAX_QUEUED, Display
from robopolicy.viewer.display_process import FrameStream
from robopolicy.viewer.displayed_sim import DisplayedSim
from robopolicy.viewer.frames import EpisodeFrame, SafetyEvent
from robopolicy.viewer.live import MAX_EPISODES, LiveEpisodes, LivePlayback

pytest.importorskip("mjviser", reason="needs robopolicy[viewer]")
pytest.importorskip("mcap", reason="needs robopolicy[record]")
CARTS = FrameStream("carts", 0.1)
PATIENCE = 60.0  # [s] on a shared processor


def small(step: int, **fields) -> EpisodeFrame:
    return EpisodeFrame(None, {}, {"state": np.full(2, step, np.float32)}, **fields)


def test_the_file_holds_what_the_program_shows(tmp_path: Path, capfd) -> None:
    file = tmp_path / "carts.mcap"
    with Display(file) as display:
        display.begin(CARTS)
        for index, frame in enumerate(Carts().frames(0)):
            display.add("seed 0", 0.1 * index, frame)
        chunk = np.arange(6, dtype=np.float32).reshape(3, 2)
        display.add("seed 1", 0.0, small(0, chunk=chunk, events=(SafetyEvent("HOLD: stale camera"),)))
    found = messages(file)
    np.testing.assert_allclose([moment for moment, _ in found["/tf"]], [0.0, 0.1, 0.2, 0.3])
    assert [row["translation"]["x"] for _, row in found["/tf"] for row in row["transforms"]] == [0.0, 0.5, 1.0, 1.5]
    ((moment, shown),) = found["/chunk"]
    assert moment == pytest.approx(0.8) and shown == {"actions": [[0, 1], [2, 3], [4, 5]]}
    ((_, event),) = found["/events"]
    assert event["message"] == "HOLD: stale camera" and event["level"] == 3
    assert f"display: {file}, {STEPS + 2} frames" in capfd.readouterr().err


def test_a_display_that_hangs_never_delays_the_program(tmp_path: Path, caplog, monkeypatch) -> None:
    display = Display(tmp_path / "a.mcap")
    display.begin(CARTS)
    assert display._process.pid is not None
    os.kill(display._process.pid, signal.SIGSTOP)
    frame = small(0, chunk=np.zeros((50, 50), np.float32))
    start = time.perf_counter()
    for step in range(10 * MAX_QUEUED):
        display.add("seed 0", 0.1 * step, frame)
    assert time.perf_counter() - start < 0.5
    dropped = display.dropped
    assert 8 * MAX_QUEUED < dropped < 10 * MAX_QUEUED
    os.kill(display._process.pid, signal.SIGCONT)
    with caplog.at_level(logging.WARNING):
        display.close()
    assert [record.getMessage() for record in caplog.records] == [
        f"The display lacks {dropped} frames, which came faster than it takes them."
    ]
    assert len(messages(tmp_path / "a.mcap")["/numbers"]) == 10 * MAX_QUEUED - dropped


def test_a_display_that_fails_gives_one_warning(tmp_path: Path, caplog) -> None:
    with caplog.at_level(logging.WARNING), Display(tmp_path / "a.mcap") as display:
        display.begin(CARTS)
        display._process.kill()
        display._process.join()
        deadline = time.monotonic() + PATIENCE
        while not caplog.records:
            assert time.monotonic() < deadline
            display.add("seed 0", 0.0, small(0))
            time.sleep(1e-3)
        for step in range(10 * MAX_QUEUED):
            display.add("seed 0", 0.1 * step, small(step))
    (warning,) = caplog.records
    assert "the program continues without it: its process has ended" in warning.getMessage()


def test_a_frame_that_cannot_be_written_gives_one_warning(tmp_path: Path, caplog) -> None:
    with caplog.at_level(logging.WARNING), Display(tmp_path / "a.mcap") as display:
        display.begin(CARTS)
        for step in range(3):
            display.add("seed 0", 0.1 * step, EpisodeFrame(None, {"front": np.zeros((0, 0, 3), np.uint8)}))
    (warning,) = caplog.records
    assert "the program continues without it" in warning.getMessage()
    assert not list(tmp_path.iterdir())


def test_frames_of_a_simulator_have_the_rest_of_their_chunk() -> None:
    class Keep:
        def __init__(self) -> None:
            self.rows: list[tuple[str, float, EpisodeFrame]] = []

        def add(self, *row) -> None:
            self.rows.append(row)

    import torch

    from robopolicy.sim.chunk import ChunkedSim

    sim, keep = make_sim("lift", SimOptions(num_envs=2)), Keep()
    shown = DisplayedSim(sim, keep, "zero")  # type: ignore[arg-type]
    chunked = ChunkedSim(shown, action_horizon=2)
    chunked.reset(5)
    chunks = torch.linspace(-0.1, 0.1, 2 * 3 * sim.spec.action_dim).reshape(2, 3, -1)
    for _ in range(2):
        shown.predict(chunks[:1], torch.tensor([0]))
        shown.predict(chunks[1:], torch.tensor([1]))
        chunked.step(chunks)
    shown.flush()
    sim.close()
    assert {label for label, _, _ in keep.rows} == {"zero, seed 5"}
    np.testing.assert_allclose([moment for _, moment, _ in keep.rows], sim.spec.control_dt * np.arange(5))
    lengths = [0 if frame.chunk is None else len(frame.chunk) for _, _, frame in keep.rows]
    assert lengths == [3, 2, 3, 2, 1]
    np.testing.assert_array_equal(keep.rows[1][2].chunk, chunks[0, 1:])  # type: ignore[arg-type]
    np.testing.assert_array_equal(keep.rows[1][2].vectors["action"], chunks[0, 0])


def test_collect_and_eval_write_their_first_environment(tmp_path: Path, refused) -> None:
    file = tmp_path / "collect.mcap"
    words = ["collect", "lift", "--episodes", "2", "--num-envs", "2", "--out", str(tmp_path / "data")]
    assert main([*words, "--display", str(file)]) == 0
    found = messages(file)
    labels = [row["episode"] for _, row in found["/outcome"] if "episode" in row]
    assert labels[0] == "seed 0" and len(labels) >= 1
    assert any(row.get("success") for _, row in found["/outcome"]) and len(found["/tf"]) > 5
    words = ["eval", "random", "--task", "lift", "--episodes", "1", "--video", "0", "--out", str(tmp_path / "eval")]
    assert main([*words, "--display", str(tmp_path / "eval.mcap")]) == 0
    rows = messages(tmp_path / "eval.mcap")["/outcome"]
    assert rows[0][1] == {"episode": "random, seed 50000"}
    assert "exists already" in refused(*words, "--display", str(file))
    assert "--display must end in .mcap or .rrd" in refused(*words, "--display", "page")
    assert "--display live:PORT needs a port" in refused(*words, "--display", "live:x")
    assert "--display has no effect with --jobs" in refused(*words, "--display", "live", "--jobs", 2)


def test_a_live_playback_follows_the_newest_frame_until_the_user_goes_back() -> None:
    source = LiveEpisodes("robot", 0.1)
    source.add("seed 0", small(0))
    playback = LivePlayback(source)
    for step in range(1, 5):
        source.add("seed 0", small(step))
    playback.advance(0.0)
    assert (playback.index, playback.length, playback.complete) == (4, 6, False)
    playback.seek(0.1)
    playback.advance(0.1)
    assert playback.index == 2 and not playback.follows
    source.add("seed 1", small(0))
    playback.follows = True
    playback.advance(0.0)
    assert (playback.episode, playback.index) == (1, 0) and source.label(1) == "seed 1"
    playback.open(0)
    playback.advance(0.1)
    assert (playback.episode, playback.index, playback.length) == (0, 1, 5)


def test_a_live_source_keeps_the_newest_episodes() -> None:
    source = LiveEpisodes("robot", 0.1)
    for episode in range(MAX_EPISODES + 3):
        source.add(f"seed {episode}", small(0))
    playback = LivePlayback(source)
    assert (source.oldest, source.newest, playback.episode) == (3, MAX_EPISODES + 2, 3)
    source.end()
    assert source.known(source.newest)[1]


def test_a_process_that_does_not_start_is_refused(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr("robopolicy.viewer.display.serve", os._exit)
    with pytest.raises(UserError, match="did not start"):
        Display(tmp_path / "a.mcap")


def test_a_port_in_use_is_refused_before_the_program_starts() -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(UserError, match=r"cannot be opened .*; choose another port"):
            Display(None, taken.getsockname()[1])


def test_the_page_of_an_ended_program_waits_for_a_browser() -> None:
    import threading
    from types import SimpleNamespace

    from robopolicy.viewer import display_process

    page, ended = SimpleNamespace(is_open=True), threading.Event()
    has_left = display_process._has_left(page, ended)  # type: ignore[arg-type]
    assert not has_left()
    page.is_open = False
    assert not has_left()  # the program still runs
    ended.set()
    assert has_left()
    assert not display_process._has_left(page, ended)()  # type: ignore[arg-type]  nobody has come yet


@pytest.mark.slow
def test_a_running_program_is_shown_in_a_browser(capfd) -> None:
    from headless_browser import visit

    display = Display(None)
    display.begin(CARTS)
    deadline = time.monotonic() + PATIENCE
    printed = ""
    while "display: " not in printed:
        assert time.monotonic() < deadline
        time.sleep(0.05)
        printed += capfd.readouterr().err
    with visit(printed.split()[-1], 900, 600) as found:
        step = 0
        while "seed 7" not in found.page.inner_text("body") or "HOLD" not in found.page.inner_text("body"):
            assert time.monotonic() < deadline
            for frame in Carts().frames(0):
                frame = EpisodeFrame(frame.state, events=(SafetyEvent("HOLD: stale camera"),))
                display.add("seed 7", 0.1 * step, frame)
                step += 1
            found.page.wait_for_timeout(100)
        assert found.hosts == {"127.0.0.1"} and found.errors == []
    start = time.monotonic()
    display.close()  # the browser has left
    assert time.monotonic() - start < 20
