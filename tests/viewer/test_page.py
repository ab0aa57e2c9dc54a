"""Tests of the 3D page in a real browser: what it shows, how fast it plays, and that it asks no other host."""

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from headless_browser import visit

from robopolicy.errors import UserError
from robopolicy.evaluation.actors import ExpertActor
from robopolicy.sim.registry import SimOptions, get_task, make_sim
from robopolicy.viewer.frames import EpisodeFrame
from robopolicy.viewer.sim_episodes import SimEpisodes

pytest.importorskip("mjviser", reason="needs robopolicy[viewer]")
from robopolicy.viewer.page import Page, PageServer

PATIENCE = 60.0  # [s] on a shared processor


def lift_source() -> SimEpisodes:
    expert = get_task("lift").require_expert()
    return SimEpisodes("expert in lift", make_sim("lift", SimOptions(num_envs=1)), lambda: ExpertActor(expert()))


@pytest.fixture
def page() -> Iterator[Page]:
    """A page of the expert in lift, which nobody plays."""
    source, server = lift_source(), PageServer("lift")
    page = Page(server, source)
    yield page
    page.close()
    server.close()
    source.close()


def until(condition: Callable[[], Any], pump: Callable[[], Any]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        pump()


def canvas_spread(driver: Any) -> float:
    """Standard deviation of the pixels of the 3D scene."""
    import io

    from PIL import Image

    return float(np.asarray(Image.open(io.BytesIO(driver.screenshot(timeout=1e3 * PATIENCE))).convert("L")).std())


@pytest.mark.slow
@pytest.mark.parametrize("width, height", [(900, 600), (390, 700)])  # a desktop and a phone
def test_the_page_shows_and_controls_episodes_without_other_hosts(page: Page, width: int, height: int) -> None:
    page.playback.repeats = True
    stop = threading.Event()
    loop = threading.Thread(target=page.run, args=(stop.is_set,))
    loop.start()
    try:
        with visit(f"http://127.0.0.1:{page._viser.get_port()}", width, height) as found:
            wait = lambda: found.page.wait_for_timeout(100)  # noqa: E731  lets the browser work
            until(lambda: page.playback.index > 3, wait)
            until(lambda: canvas_spread(found.page) > 8, wait)
            press = "Array.from(document.querySelectorAll('button')).find(e => e.innerText == '{}').click()"
            found.page.evaluate(press.format("Pause"))
            until(lambda: not page.playback.playing, wait)
            found.page.evaluate(press.format("Next"))
            until(lambda: page.playback.episode == 1, wait)
            until(lambda: "seed 1" in found.page.inner_text("body"), wait)
            assert found.hosts == {"127.0.0.1"} and found.errors == []
    finally:
        stop.set()
        loop.join()


def test_a_frame_costs_less_than_a_twentieth_of_a_second(page: Page) -> None:
    page.update(0.0)
    start, shown = time.process_time(), 0
    while shown < 20:  # with all plots, pictures and texts
        page._panel_time = -np.inf
        page.update(page.playback.source.control_dt)
        shown += 1
    assert (time.process_time() - start) / shown < 1 / 20
    assert page.playback.index + page.playback.episode > 10


def test_the_page_listens_on_this_machine_alone_and_refuses_a_port_in_use() -> None:
    server = PageServer("lift")
    assert server.url.startswith("http://127.0.0.1:")
    port = int(server.url.rsplit(":", 1)[1])
    with pytest.raises(UserError, match=f"Port {port} of 127.0.0.1 cannot be opened .*; choose another port"):
        PageServer("push", port)
    server.close()


def test_requests_of_the_user_are_carried_out_by_the_loop(page: Page) -> None:
    panel = page._panel
    panel._press("Pause")
    page.update(10.0)
    assert page.playback.index == 0 and panel._buttons.options == ("Previous", "Play", "Next")
    panel._press("Play")
    page.update(0.1)
    assert page.playback.index == 2 and panel._time.value == pytest.approx(0.1)
    panel._requests.append(lambda: page.playback.open(3))
    page.update(0.0)
    assert page.playback.episode == 3 and "seed 3" in panel._status.content


def test_episodes_without_bodies_show_their_images() -> None:
    class Pictures:
        title, control_dt, max_steps, num_episodes, names = "film", 0.1, 2, 1, {}

        def label(self, episode: int) -> str:
            return "<film>"

        def note(self) -> str:
            return "a & b"

        def frames(self, episode: int) -> Iterator[EpisodeFrame]:
            for level in (0, 100, 200):
                yield EpisodeFrame(None, {"front": np.full((8, 12, 3), level, np.uint8)})

        def close(self) -> None:
            pass

    server = PageServer("film")
    page = Page(server, Pictures())
    page.playback.playing = False
    page.playback.seek(0.1)
    page.update(0.0)
    page._panel_time = -np.inf
    page.update(0.0)
    assert page._panel._pictures["front"].image.max() == 100
    assert "&lt;film&gt;" in page._panel._status.content and "a &amp; b" in page._panel._status.content
    page.close()
    server.close()
