"""Tests of the browser viewer: its metrics, access control, and that it never blocks the control loop."""

import contextlib
import http.client
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
from rig import robot_spec
from scripted import ScriptedLift

from robopolicy.cli import main as cli
from robopolicy.deploy.dashboard import parse_address
from robopolicy.deploy.dashboard_server import MAX_PENDING
from robopolicy.deploy.safety.interventions import SafetyIntervention
from robopolicy.errors import UserError
from robopolicy.interop.sources import CheckpointChunkPolicy
from robopolicy.tokens import SERVER_TOKEN
from robopolicy_robots.browser_dashboard import PLOT_PERIOD, BrowserDashboard
from robopolicy_robots.messages import CompressedImage, Header, Image
from robopolicy_robots.metrics import WINDOW, RunMetrics
from robopolicy_robots.states import State, Tick
from robopolicy_robots.transports.base import IMAGE
from robopolicy_robots.transports.loopback import LoopbackTransport

client = pytest.importorskip("websockets.sync.client", reason="needs robopolicy[ros]")
exceptions = pytest.importorskip("websockets.exceptions")
MEASURED = np.array([0.1, 0.2, 0.3])


def status(ticks: int) -> dict[str, Any]:
    return {"state": "RUN", "reason": "", "ticks": ticks, "overruns": 2, "ages": {"joints": 0.01}, "latency": 0.03}


def tick(now: float, wanted: float = 0.4, *done: SafetyIntervention) -> Tick:
    return Tick(now, State.RUN, "", MEASURED, np.array([wanted, 0.0, 0.0]), MEASURED + 0.5, done)


@pytest.fixture(scope="module")
def shared() -> Iterator[BrowserDashboard]:
    with pytest.MonkeyPatch.context() as environment:
        environment.delenv(SERVER_TOKEN, raising=False)
        view = BrowserDashboard("127.0.0.1:0", RunMetrics(robot_spec(), "a task"))
    yield view
    view.close()


@pytest.fixture
def view(shared: BrowserDashboard) -> BrowserDashboard:
    """The shared viewer, reset to the robot's default camera and a released button."""
    shared.estop_pressed, shared._robot = False, robot_spec()
    shared.watch(LoopbackTransport(989))
    return shared


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> Iterator[BrowserDashboard]:
    """A separate viewer for a test that stops it."""
    monkeypatch.delenv(SERVER_TOKEN, raising=False)
    view = BrowserDashboard("127.0.0.1:0", RunMetrics(robot_spec(), "a task"))
    yield view
    view.close()


def send_ticks(view: BrowserDashboard, seconds: float = 0.3, **changes: Any) -> None:
    """Send ticks for `seconds` in real time."""
    start = time.monotonic()
    while (now := time.monotonic()) < start + seconds:
        send_tick(view, now, **changes)
        time.sleep(0.01)


def send_tick(view: BrowserDashboard, now: float, wanted: float = 0.4) -> None:
    view._metrics.update(status(7), tick(now, wanted))
    view.update(tick(now, wanted))


def live(view: BrowserDashboard, **options: Any) -> Any:
    return client.connect(view.url.replace("http", "ws") + "live", proxy=None, **options)


def get(view: BrowserDashboard, path: str, **headers: str) -> tuple[int, dict[str, str], str]:
    connection = http.client.HTTPConnection(urlsplit(view.url).netloc, timeout=5)
    connection.request("GET", path, headers=headers)
    answer = connection.getresponse()
    return answer.status, dict(answer.getheaders()), answer.read().decode()


def newest(page: Any, view: BrowserDashboard, **changes: Any) -> dict[str, Any]:
    """Return the next metrics message that a browser receives."""
    send_ticks(view, **changes)
    while not isinstance(data := page.recv(timeout=5), str):
        pass
    return json.loads(data)


def test_metrics_match_the_ticks() -> None:
    metrics = RunMetrics(robot_spec(), "a task")
    moments = np.cumsum([0.0, *np.tile([0.02, 0.02, 0.02, 0.04], 10)])
    for i, moment in enumerate(moments):
        metrics.update(status(i), tick(moment))
    found = metrics.snapshot()
    assert found["rate"] == pytest.approx(40.0) and found["target_rate"] == 50.0
    assert found["period_p50"] == pytest.approx(0.02) and found["period_p99"] == pytest.approx(0.04)
    assert found["jitter"] == pytest.approx(0.02) and found["missed"] == 2
    assert found["ages"] == {"joints": [0.01, 0.1]}
    metrics.update(status(1), tick(1000.0, 0.4, SafetyIntervention("velocity", "a", 3.0, 2.0, 1000.0)))
    again = metrics.snapshot()  # a new loop restarts the counts, and the gap before it is not a period
    assert again["rate"] is None and again["recent"] == ["velocity of a: 3, allowed 2"]
    for i in range(3 * WINDOW):
        metrics.update(status(i + 1), tick(2000.0 + 0.01 * i))
    assert metrics.snapshot()["rate"] == pytest.approx(100.0)


def test_metrics_are_empty_before_the_first_tick() -> None:
    found = RunMetrics(robot_spec(), "a task").snapshot()
    assert found["rate"] is None and found["state"] == "" and found["interventions"] == {}
    json.dumps(found, allow_nan=False)


@pytest.mark.parametrize("text", ["nowhere", "127.0.0.1:", "127.0.0.1:70000", "127.0.0.1:-1"])
def test_an_invalid_address_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="PORT or HOST:PORT"):
        parse_address(text)


def test_a_public_address_requires_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SERVER_TOKEN, raising=False)
    assert parse_address("8780") == ("127.0.0.1", 8780) and parse_address("[::1]:1") == ("::1", 1)
    with pytest.raises(UserError, match=f"set {SERVER_TOKEN}"):
        parse_address("0.0.0.0:8780")
    monkeypatch.setenv(SERVER_TOKEN, "secret")
    assert parse_address("0.0.0.0:8780") == ("0.0.0.0", 8780)


def test_the_page_is_complete_and_has_a_strict_content_security_policy(view: BrowserDashboard) -> None:
    code, headers, body = get(view, "/")
    assert code == 200 and body.startswith("<!doctype html>") and "NONCE" not in body and 'data-token="none"' in body
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy and "frame-ancestors 'none'" in policy
    assert policy.split("script-src 'nonce-")[1].split("'")[0] in body
    assert "http://" not in body and "https://" not in body.replace("https:", "", 1)  # no external resources
    assert get(view, "/")[1]["Content-Security-Policy"] != policy
    assert get(view, "/etc")[0] == 404


def test_clients_without_the_token_do_not_exclude_the_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SERVER_TOKEN, "secret")
    view = BrowserDashboard("127.0.0.1:0", RunMetrics(robot_spec(), "a task"))
    with contextlib.ExitStack() as stack:
        stack.callback(view.close)
        silent = [stack.enter_context(live(view)) for _ in range(MAX_PENDING + 2)]
        page = stack.enter_context(live(view))
        page.send(json.dumps({"token": "secret"}))
        assert newest(page, view)["robot"] == "rig"
        with pytest.raises(exceptions.ConnectionClosed):
            silent[0].recv(timeout=5)


def test_other_host_names_and_origins_are_refused(view: BrowserDashboard) -> None:
    assert get(view, "/", Host="robot.example:80")[0] == 403  # another host name of this address is refused
    assert get(view, "/", Host="localhost:80")[0] == 200
    with pytest.raises(exceptions.InvalidStatus) as refusal:
        live(view, origin="http://127.0.0.1:1")
    assert refusal.value.response.status_code == 403
    with live(view, origin=view.url.rstrip("/")) as page:
        assert newest(page, view)["robot"] == "rig"


def test_malformed_requests_are_answered_in_one_line(view: BrowserDashboard) -> None:
    for path, headers in (("/", {"Host": "[::1"}), ("//[x", {}), ("/live", {"Origin": "http://["})):
        status, _, text = get(view, path, **headers)
        assert status == 400 and text == "The path or a header of the request is malformed.\n"


def test_metrics_and_rows_arrive_while_a_browser_is_connected(view: BrowserDashboard) -> None:
    send_ticks(view, 0.1)
    assert not view._rows
    with live(view) as page:
        newest(page, view)
        found = newest(page, view, wanted=np.nan)
        assert found["robot"] == "rig" and found["task"] == "a task" and found["missed"] == 2
        assert found["joints"][0] == ["a", "rad", -1.5, 1.5] and found["target_rate"] == 50.0
        assert 1 <= len(found["rows"]) <= 1 + 0.11 / (0.9 * PLOT_PERIOD)
        while (row := found["rows"][-1])[2][0] is not None:
            found = newest(page, view, wanted=np.nan)
        assert row[1:] == [[0.1, 0.2, 0.3], [None, 0.0, 0.0], [0.6, 0.7, 0.8]]
    send_ticks(view)
    assert not view._watched


def test_images_are_downscaled(view: BrowserDashboard) -> None:
    from io import BytesIO

    from PIL import Image as pillow

    robot = LoopbackTransport(990)
    camera = robot.advertise("/front", Image, IMAGE)
    view.watch(LoopbackTransport(990))
    with live(view) as page:
        send_ticks(view, 0.2)
        camera.publish(Image.from_pixels(np.full((480, 640, 3), (10, 200, 30), np.uint8), Header()))
        send_ticks(view, 0.4)
        while isinstance(data := page.recv(timeout=5), str):
            pass
    name, _, file = data.partition(b"\0")
    picture = pillow.open(BytesIO(file))
    assert name == b"front" and picture.size == (160, 120)
    np.testing.assert_allclose(picture.getpixel((80, 60)), (10, 200, 30), atol=6)


def test_compressed_images_are_passed_through(view: BrowserDashboard) -> None:
    from dataclasses import replace

    (front,) = view._robot.cameras
    view._robot = replace(view._robot, cameras=(replace(front, type=CompressedImage.ros_name),))
    camera = LoopbackTransport(991).advertise("/front", CompressedImage, IMAGE)
    view.watch(LoopbackTransport(991))
    with live(view) as page:
        send_ticks(view, 0.2)
        camera.publish(CompressedImage(format="jpeg", data=np.frombuffer(b"\xff\xd8file", np.uint8)))
        send_ticks(view, 0.4)
        while isinstance(data := page.recv(timeout=5), str):
            pass
    assert data == b"front\0\xff\xd8file"


def test_only_the_estop_message_is_accepted(view: BrowserDashboard) -> None:
    with live(view) as page:
        newest(page, view)
        page.send('{"reset": true}')
        with pytest.raises(exceptions.ConnectionClosed) as refusal:
            while True:
                page.recv(timeout=5)
        assert refusal.value.rcvd.code == 1003
    send_ticks(view)
    assert not view.estop_pressed
    with live(view) as page:
        newest(page, view)
        page.send('{"estop": true}')
        send_ticks(view)
        assert view.estop_pressed


def test_without_the_token_a_browser_gets_no_data_and_cannot_press(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SERVER_TOKEN, "secret")
    view = BrowserDashboard("0", RunMetrics(robot_spec(), "a task"))
    try:
        code, _, body = get(view, "/", Host="robot.example")
        assert code == 200 and 'data-token="needed"' in body and "a task" not in body  # no data about the robot
        for first in ('{"token": "guess"}', '{"estop": true}'):
            with live(view) as page:
                page.send(first)
                send_ticks(view)
                with pytest.raises(exceptions.ConnectionClosed) as refusal:
                    page.recv(timeout=5)
                assert refusal.value.rcvd.code == 4401
        assert not view.estop_pressed and not view._watched
        with live(view) as page:
            page.send('{"token": "secret"}')
            assert newest(page, view)["robot"] == "rig"
    finally:
        view.close()


def test_a_hanging_or_killed_viewer_does_not_block_the_loop(own: BrowserDashboard) -> None:
    with live(own) as page:
        newest(page, own)
        own._page.process.send_signal(signal.SIGSTOP)
        longest = 0.0
        for i in range(3000):
            own._last_metrics = own._last_row = -np.inf  # every tick sends data
            start = time.thread_time()
            send_tick(own, float(i))
            longest = max(longest, time.thread_time() - start)
        assert own.dropped > 100  # messages that did not fit
        assert longest < 0.02
        own._page.process.send_signal(signal.SIGKILL)
        own._page.process.wait()
    for i in range(3):
        send_tick(own, 4000.0 + i)
    assert own._gone and not own._watched and not own.estop_pressed


def test_an_error_in_the_metrics_does_not_disable_the_button(
    view: BrowserDashboard, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    with live(view) as page:
        newest(page, view)
        monkeypatch.setattr(view._metrics, "snapshot", lambda: {"rate": float("nan")})
        send_ticks(view)
        assert caplog.text.count("was stopped by an error") == 1
        page.send('{"estop": true}')
        send_ticks(view)
        assert view.estop_pressed


def test_the_viewer_ends_with_its_parent_process(own: BrowserDashboard) -> None:
    with live(own) as page:
        newest(page, own)
        own._page.link.close()  # as when the process is killed
        assert own._page.process.wait(5.0) == 0
        with pytest.raises(exceptions.ConnectionClosed) as end:
            while True:
                page.recv(timeout=5)
        assert end.value.rcvd.code == 1001


def test_a_port_in_use_is_refused_in_one_line(view: BrowserDashboard) -> None:
    with pytest.raises(UserError, match=r"Cannot listen on 127.0.0.1:\d+ .*; pass another port") as refusal:
        BrowserDashboard(urlsplit(view.url).netloc, RunMetrics(robot_spec(), "a task"))
    assert "\n" not in str(refusal.value)


def test_the_button_stops_a_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any) -> None:
    monkeypatch.delenv(SERVER_TOKEN, raising=False)
    source, pages = CheckpointChunkPolicy(ScriptedLift(8, 4)), []
    monkeypatch.setattr("robopolicy_robots.deployment.open_source", lambda name, device: source)

    class Pressing(BrowserDashboard):
        """A dashboard whose browser presses the button once the robot runs."""

        def update(self, tick: Tick) -> None:
            super().update(tick)
            if not pages:
                pages.append(live(self))
            if tick.state is State.RUN and len(pages) == 1:
                pages.append(tick.now)
                pages[0].send('{"estop": true}')

    monkeypatch.setattr("robopolicy_robots.tui.BrowserDashboard", Pressing)
    words = ["--robot", "sim_panda", "--task", "lift", "--policy", "scripted", "--transport", "loopback", "--no-tui"]
    words += ["--domain", str(100 + os.getpid() % 100), "--out", str(tmp_path / "r.json"), "--browser", "0"]
    assert cli.main(["deploy", *words]) == 1
    pages[0].close()
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["episodes"][0]["state"] == "ESTOP" and report["episodes"][0]["reason"] == "pressed in the browser"
    assert report["interventions"]["estop"] == 1
    out = capsys.readouterr().out
    assert "viewer: http://127.0.0.1:" in out and "ESTOP (pressed in the browser)" in out
