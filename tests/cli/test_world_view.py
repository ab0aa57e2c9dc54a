"""Tests of the world model in a browser: keys control both simulators, a policy runs, other input is refused."""

import json
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from robopolicy.cli import world_view
from robopolicy.cli.policy_args import PolicyEntry
from robopolicy.deploy.dashboard import Dashboard
from robopolicy.evaluation.actors import ExpertActor
from robopolicy.sim.contract import VectorSim
from robopolicy.sim.registry import SimOptions, make_sim
from robopolicy.tokens import SERVER_TOKEN
from robopolicy_tasks.toy.push import PushExpert

client = pytest.importorskip("websockets.sync.client", reason="needs robopolicy[remote]")
exceptions = pytest.importorskip("websockets.exceptions")
Runner = Callable[..., Any]


def table() -> VectorSim:
    """The toy push task in place of a world model."""
    return make_sim("push", SimOptions(num_envs=1, cameras=("top",), image_size=16))


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Runner]:
    """Function that runs a view in a thread and returns the address for a browser."""
    monkeypatch.delenv(SERVER_TOKEN, raising=False)
    pages: queue.Queue[Dashboard] = queue.Queue()
    threads: list[threading.Thread] = []

    class Known(Dashboard):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            pages.put(self)

    monkeypatch.setattr(world_view, "Dashboard", Known)

    def start(runner: Runner, *arguments: Any) -> Any:
        threads.append(threading.Thread(target=runner, args=("127.0.0.1:0", *arguments)))
        threads[-1].start()
        return pages.get(timeout=20).url.replace("http", "ws") + "live"

    yield start
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()


def figures(page: Any) -> tuple[dict[str, str], list[bytes], dict[str, Any]]:
    """The next figures, the images before them, and the whole message."""
    pictures: list[bytes] = []
    while isinstance(data := page.recv(timeout=20), bytes):
        pictures.append(data)
    now = json.loads(data)
    return dict(now["figures"]), pictures, now


def test_keys_control_both_simulators(watch: Runner) -> None:
    predicted, real = table(), table()
    with client.connect(watch(world_view.teleoperate, predicted, real, 7), proxy=None) as page:
        found, pictures, now = figures(page)
        assert found == {"seed": "7"} and now["title"] == "toy/push"
        assert [picture.split(b"\0")[0] for picture in pictures] == [b"predicted top", b"real top"]
        assert ["d", "d: gripper_vx [m/s] +"] in now["words"] and ["a", "a: gripper_vx [m/s] -"] in now["words"]
        before = real.state_dict()["gripper"]
        page.send('{"d": true}')
        assert figures(page)[0] == {"predicted: success": "no", "real: success": "no"}
        for side in (predicted, real):
            assert (side.state_dict()["gripper"] - before).tolist() == [[pytest.approx(0.07), 0.0]]
        page.send('{"again": true}')
        assert figures(page)[0] == {"seed": "8"}
        page.send('{"end": true}')
        with pytest.raises(exceptions.ConnectionClosed) as end:
            page.recv(timeout=20)
        assert end.value.rcvd.code == 1001


def test_a_policy_runs_while_a_client_is_connected(watch: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world_view.time, "sleep", lambda seconds: None)
    player = PolicyEntry("expert", lambda: ExpertActor(PushExpert()))
    address = watch(world_view.run_policy, table(), player, range(3, 4))
    with client.connect(address, proxy=None) as page:
        found = [figures(page)]
        while found[-1][0]["success"] == "no":
            found.append(figures(page))
        assert len(found) > 3 and all(len(pictures) == 1 for _, pictures, _ in found)
        assert found[0][2]["title"] == "expert in toy/push"
        page.send('{"d": true}')  # keys are refused while a policy runs
        with pytest.raises(exceptions.ConnectionClosed) as refusal:
            while True:
                page.recv(timeout=20)
        assert refusal.value.rcvd.code == 1003
    with client.connect(address, proxy=None) as again:
        again.send('{"end": true}')
