"""Tests of the page: its server with a plain client, and the page itself in a headless chromium."""

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from robopolicy.errors import UserError
from robopolicy.teleop.contract import DISCARD, MAX_AGE, STOP, SUCCESS, DeadManSwitch, SessionStatus, TeleopCommand
from robopolicy.teleop.devices import open_device
from robopolicy.tokens import SERVER_TOKEN

pytest.importorskip("websockets", reason="needs robopolicy[remote]")
from websockets import exceptions
from websockets.sync import client

from robopolicy.teleop.browser import BrowserTeleop

STATUS = SessionStatus("manipulation/lift", "paused", (("kept", "0 of 10"),))
PICTURE = {"front": np.zeros((24, 32, 3), np.uint8)}


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[BrowserTeleop]:
    monkeypatch.delenv(SERVER_TOKEN, raising=False)
    teleop = BrowserTeleop("127.0.0.1:0")
    yield teleop
    teleop.close()


def connect(device: BrowserTeleop, **options: Any) -> Any:
    return client.connect(device.url.replace("http", "ws") + "live", proxy=None, **options)


def message(number: Any = 1, axes: Any = (0, 0, 0, 0, 0, 0), enabled: Any = True, gripper: Any = 0) -> str:
    return json.dumps({"input": {"number": number, "axes": axes, "enabled": enabled, "gripper": gripper}})


def until(device: BrowserTeleop, condition: Callable[[TeleopCommand], bool], seconds: float = 10.0) -> TeleopCommand:
    """The first command that meets a condition."""
    end = time.monotonic() + seconds
    while not condition(command := device.read(time.monotonic())):
        assert time.monotonic() < end, command
        time.sleep(0.005)
    return command


def test_inputs_arrive_with_the_time_of_this_machine(device):
    assert not device.read(time.monotonic()).enabled
    with connect(device) as page:
        begin = time.monotonic()
        page.send(message(axes=[1, 0, 0, 0, 0, -0.5], gripper=1))
        command = until(device, lambda command: command.enabled)
        assert command.twist.tolist() == [1, 0, 0, 0, 0, -0.5] and command.gripper == 1
        assert begin <= command.stamp <= time.monotonic()
        page.send('{"success": true}')
        assert until(device, lambda command: bool(command.events)).events == (SUCCESS,)
    until(device, lambda command: not command.enabled and command.stamp == -np.inf)


def test_messages_in_the_wrong_order_or_form_are_counted_and_not_used(device):
    with connect(device) as page:
        page.send(message(5, [1, 0, 0, 0, 0, 0]))
        until(device, lambda command: command.enabled)
        for text in (
            message(4, [0.5] * 6),
            message(6, [0.5] * 5),
            message(7, [0.5] * 5 + [None]),
            message(8, enabled=1),
            message("9"),
            '{"input": 3}',
            '{"input":{',
            '{"input":' + "[" * 3000,
        ):
            page.send(text)
        page.send('{"discard": true}')
        command = until(device, lambda command: command.events == (DISCARD,))
        assert command.twist.tolist() == [1, 0, 0, 0, 0, 0] and device.malformed == 8


@pytest.mark.parametrize(
    ("texts", "code"),
    [(["no json"], 1003), (['{"jump": true}'], 1003), (["x" * 5000], 1009), ([message(k) for k in range(402)], 1003)],
)
def test_foreign_long_and_too_many_messages_disconnect(device, texts, code):
    with connect(device) as page, pytest.raises(exceptions.ConnectionClosed) as end:
        for text in texts:
            page.send(text)
        while True:
            page.recv(timeout=10)
    assert end.value.rcvd.code == code
    time.sleep(1.5 * MAX_AGE)
    now = time.monotonic()
    assert not DeadManSwitch().check(device.read(now), now).enabled


def test_a_second_client_and_other_origins_are_refused(device):
    with pytest.raises(exceptions.InvalidStatus) as refusal:
        connect(device, origin="http://elsewhere.example")
    assert refusal.value.response.status_code == 403
    with connect(device) as first:
        with pytest.raises(exceptions.InvalidStatus) as refusal:
            connect(device)
        assert refusal.value.response.status_code == 503
        first.send(message())
        until(device, lambda command: command.enabled)


def test_a_page_beyond_loopback_needs_a_token(monkeypatch):
    monkeypatch.delenv(SERVER_TOKEN, raising=False)
    with pytest.raises(UserError, match="the dashboard needs a token"):
        open_device("browser:0.0.0.0:0")


def test_the_session_ends_with_the_server(device):
    device._page.process.kill()
    until(device, lambda command: STOP in command.events)


FAKE_GAMEPAD = """(() => {
  const buttons = Array.from({ length: 17 }, () => ({ pressed: false, touched: false, value: 0 }));
  window.pad = { id: "Test pad", index: 0, connected: true, mapping: "standard", axes: [0, 0, 0, 0], buttons };
  navigator.getGamepads = () => [window.pad, null, null, null];
})()"""


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    path = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    if path is None:
        pytest.skip("needs chromium; set CHROMIUM to its path")
    with playwright.sync_playwright() as engine:
        browser = engine.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(chromium: Any, device: BrowserTeleop) -> Iterator[Any]:
    """The page with a gamepad, after its first status; a foreign request or an error of the page fails the test."""
    found = chromium.new_page()
    problems: list[str] = []
    found.on("pageerror", lambda error: problems.append(str(error)))
    found.on("request", lambda request: problems.append(request.url) if device.url not in request.url else None)
    found.add_init_script(FAKE_GAMEPAD)
    found.goto(device.url)
    device.read(time.monotonic())
    end = time.monotonic() + 20
    while not found.evaluate("bindings !== null"):
        assert time.monotonic() < end
        device.read(time.monotonic())
        device.show(STATUS, PICTURE)
        time.sleep(0.05)
    yield found
    found.close()
    assert not [problem for problem in problems if not problem.startswith("blob:")]


def test_keys_move_only_with_the_switch_and_let_go_without_focus(device, page):
    page.keyboard.down("w")
    assert not until(device, lambda command: command.twist[0] == 1).enabled
    page.keyboard.down("Space")
    until(device, lambda command: command.enabled and command.twist.tolist() == [1, 0, 0, 0, 0, 0])
    page.evaluate("dispatchEvent(new Event('blur'))")
    until(device, lambda command: not command.enabled and not command.twist.any())
    page.keyboard.up("Space")
    page.keyboard.press("Enter")
    assert until(device, lambda command: bool(command.events)).events == (SUCCESS,)


def test_a_gamepad_moves_and_lets_go_when_it_is_disconnected(device, page):
    page.evaluate("pad.axes = [0.25, -0.5, 0.75, 1]; pad.buttons[5].pressed = pad.buttons[6].pressed = true")
    command = until(device, lambda command: command.enabled)
    assert command.twist.tolist() == [0.5, -0.25, -1, 0, 0, -0.75] and command.gripper == 1
    page.evaluate("pad.buttons[3].pressed = true")
    assert until(device, lambda command: bool(command.events)).events == (SUCCESS,)
    page.evaluate("pad.connected = false")
    until(device, lambda command: not command.enabled)


def test_the_page_sends_often_enough_and_shows_status_and_images(device, page):
    device.show(STATUS, PICTURE)
    stamps = {device.read(time.monotonic()).stamp}
    end = time.monotonic() + 2.0
    while time.monotonic() < end:
        stamps.add(device.read(time.monotonic()).stamp)
        time.sleep(0.002)
    assert np.median(np.diff(sorted(stamps))) < MAX_AGE / 3, "three messages may be lost"
    assert page.inner_text("#title") == "manipulation/lift" and page.inner_text("#actor") == "paused"
    assert "0 of 10" in page.inner_text("#rows")
    assert page.evaluate("document.querySelector('img[alt=front]').naturalWidth") == 32


def test_touch_moves_relative_to_the_first_contact(device, chromium):
    context = chromium.new_context(viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True)
    phone = context.new_page()
    phone.goto(device.url)
    while not phone.evaluate("bindings !== null"):
        device.read(time.monotonic())
        device.show(STATUS, PICTURE)
    box = phone.locator("#left").bounding_box()
    x, y = box["x"] + 20, box["y"] + 100
    phone.mouse.move(x, y)
    phone.mouse.down()
    assert not until(device, lambda command: command.enabled).twist.any()
    phone.mouse.move(x + 30, y - 60)
    until(device, lambda command: command.enabled and command.twist.tolist() == [1, -0.5, 0, 0, 0, 0])
    phone.mouse.up()
    until(device, lambda command: not command.enabled)
    assert phone.evaluate("document.documentElement.scrollWidth <= innerWidth"), "no horizontal scrolling"
    context.close()
