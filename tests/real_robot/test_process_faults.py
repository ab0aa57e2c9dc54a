"""Tests of stopped, killed and restarted processes: the robot reaches the documented state in time and logs why.

The robot runs in a separate process behind DDS, the bridge in a thread of this process (or in a process to kill).
`SLACK` is the allowance for a busy machine on top of the times in docs/deployment/safety.md.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from children import Sway, bridge
from networks import free_domain, free_port, until

from robopolicy.deploy.client import ClientConfig, ServerChunkPolicy
from robopolicy_robots.messages import Header, JointState, Time
from robopolicy_robots.robot import RobotSpec, load_robot
from robopolicy_robots.simulated.client import Simulation, simulated
from robopolicy_robots.states import State, Tick
from robopolicy_robots.transports.base import SENSOR, open_transport
from robopolicy_robots.transports.dds import cyclone_settings
from robopolicy_robots.transports.faults import Faults, FaultTransport

pytest.importorskip("cyclonedds", reason="needs robopolicy[ros]")
pytestmark = pytest.mark.slow
ROBOT = load_robot("sim_panda")
STALE, TICKS, SLACK = ROBOT.safety.max_age, 2 * ROBOT.dt, 0.25  # [s]
HASTY = replace(ROBOT, safety=replace(ROBOT.safety, max_overruns=50))  # a busy machine causes no hold
PATIENT = replace(HASTY, safety=replace(HASTY.safety, estop_after=10.0))  # for tests of the hold only
HERE = Path(__file__).parent


class Bridge:
    """A control loop in a thread, armed and running, and its ticks."""

    def __init__(self, transport: FaultTransport, source: Any, robot: RobotSpec) -> None:
        self.transport = transport
        Simulation(transport).reset(0)
        self.ticks: list[Tick] = []
        self.loop = bridge(transport, source or Sway(), robot, on_tick=self.ticks.append)
        self.loop.arm()
        self._thread = threading.Thread(target=self.loop.run, daemon=True)
        self._thread.start()
        self.reach(State.RUN)
        time.sleep(0.3)  # during a motion

    def reach(self, state: State, seconds: float = 20.0) -> None:
        until(lambda: self.ticks and self.ticks[-1].state is state, seconds)

    def after(self, start: float, state: State) -> float:
        """Return the seconds from `start` to the first tick in `state`."""
        return next(tick.now for tick in self.ticks if tick.now > start and tick.state is state) - start

    def close(self) -> None:
        """Stop the loop and assert that every command was within limits."""
        self.loop.stop()
        self._thread.join(5.0)
        path = np.array([tick.command for tick in self.ticks if tick.command is not None])
        assert np.isfinite(path).all() and ROBOT.limits.inside(path, 1e-9).all()


@contextmanager
def driving(domain: int, source: Any = None, robot: RobotSpec = PATIENT) -> Iterator[Bridge]:
    """Run a bridge on the domain over a transport with fault injection."""
    with FaultTransport(open_transport("dds", domain=domain), Faults()) as transport:
        made = Bridge(transport, source, robot)
        try:
            yield made
        finally:
            made.close()


@pytest.fixture(scope="module")
def robot() -> Iterator[tuple[int, subprocess.Popen[str]]]:
    """Run a simulated robot for the whole module; yield its domain and process."""
    domain = free_domain()
    with simulated(["--domain", str(domain)]) as process:
        yield domain, process


@contextmanager
def child(*words: str) -> Iterator[subprocess.Popen[str]]:
    """Run `children.py`, wait until it is ready, and kill it on exit."""
    path = os.pathsep.join([str(HERE.parents[1]), str(HERE), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, str(HERE / "children.py"), *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": path})
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_a_robot_stopped_for_one_second_is_held_and_resumes(robot: Any, caplog: Any) -> None:
    domain, process = robot
    with driving(domain) as bridge:
        start = time.monotonic()
        os.kill(process.pid, signal.SIGSTOP)
        try:
            bridge.reach(State.HOLD)
            time.sleep(max(0.0, start + 1.0 - time.monotonic()))
        finally:
            os.kill(process.pid, signal.SIGCONT)
        back = time.monotonic()
        bridge.reach(State.RUN)
        assert bridge.after(start, State.HOLD) <= STALE + TICKS + SLACK
        assert bridge.after(back, State.RUN) <= 0.5 + SLACK
    assert "RUN -> HOLD (stale observation: 'joints'" in caplog.text or "'object.cube'" in caplog.text
    assert "HOLD -> RUN" in caplog.text


def test_a_dropped_transport_ends_in_an_emergency_stop_on_both_sides(robot: Any, caplog: Any) -> None:
    domain, _ = robot
    with driving(domain, robot=HASTY) as bridge, open_transport("dds", domain=domain) as second_transport:
        watching = Simulation(second_transport)
        until(lambda: watching.status.steps > 0)
        start = time.monotonic()
        bridge.transport.faults = Faults(drop=1.0)
        until(lambda: watching.status.holding)
        held = time.monotonic() - start
        time.sleep(max(0.0, start + 2.0 - time.monotonic()))
        bridge.transport.faults = Faults()
        assert ROBOT.command_timeout is not None and held <= ROBOT.command_timeout + TICKS + SLACK
        assert bridge.after(start, State.HOLD) <= STALE + TICKS + SLACK
        assert bridge.after(start, State.ESTOP) <= ROBOT.safety.estop_after + TICKS + SLACK
        time.sleep(0.3)
        assert bridge.loop.state is State.ESTOP  # messages return, and the stop stays latched
        bridge.loop.reset_estop()
        bridge.loop.arm()
        bridge.reach(State.RUN)
    assert "-> ESTOP (no message of '" in caplog.text and "' for 1." in caplog.text


def test_a_second_publisher_holds_until_it_is_gone_and_an_operator_arms(robot: Any, caplog: Any) -> None:
    domain, _ = robot
    with driving(domain) as bridge, open_transport("dds", domain=domain) as second_transport:
        publisher = second_transport.advertise("/joint_states", JointState, SENSOR)
        until(lambda: publisher.matched)
        start = time.monotonic()
        state = JointState(Header(Time(1, 0)), ROBOT.names, ROBOT.home)
        until(lambda: (publisher.publish(state), bridge.loop.state is State.HOLD)[1])
        assert time.monotonic() - start <= TICKS + SLACK
        second_transport.close()
        time.sleep(0.5)
        assert bridge.loop.state is State.HOLD
        bridge.loop.arm()
        bridge.reach(State.RUN)
    assert "RUN -> HOLD (publisher changed: 2 publishers of /joint_states)" in caplog.text


def test_a_killed_policy_server_holds_and_its_restart_resumes(robot: Any, caplog: Any) -> None:
    pytest.importorskip("websockets", reason="needs robopolicy[remote]")
    domain, _ = robot
    port = free_port()
    with child("server", str(port)) as server:
        source = ServerChunkPolicy(f"ws://127.0.0.1:{port}", ClientConfig(timeout=1.0, reconnect_timeout=30.0))
        with driving(domain, source=source) as bridge:
            start = time.monotonic()
            server.kill()
            bridge.reach(State.HOLD)
            rest = (Sway.spec.horizon + 1) * 0.05  # [s] of the last chunk, and one action of waiting
            assert bridge.after(start, State.HOLD) <= rest + TICKS + SLACK
            time.sleep(0.3)
            at_rest = [tick.command for tick in bridge.ticks[-3:]]
            assert (at_rest[0] == at_rest[-1]).all()
            with child("server", str(port)):
                bridge.reach(State.RUN)
    assert "RUN -> HOLD (chunk exhausted" in caplog.text and "HOLD -> RUN" in caplog.text


def test_a_robot_holds_by_itself_after_its_bridge_is_killed(robot: Any) -> None:
    domain, _ = robot
    with open_transport("dds", domain=domain) as second_transport:
        simulation = Simulation(second_transport)
        simulation.reset(1)
        joints = second_transport.subscribe("/joint_states", JointState, SENSOR)
        with child("bridge", str(domain)) as process:
            until(lambda: simulation.status.steps > 5)
            assert not simulation.status.holding
            process.kill()
            start = time.monotonic()
            until(lambda: simulation.status.holding)
            assert ROBOT.command_timeout is not None
            assert time.monotonic() - start <= ROBOT.command_timeout + TICKS + SLACK
        time.sleep(0.4)
        first = joints.latest()
        time.sleep(0.2)
        last = joints.latest()
        assert first is not None and last is not None and last.sequence > first.sequence
        np.testing.assert_allclose(last.message.position, first.message.position, atol=2e-3)


def test_the_simulated_robot_dies_with_its_bridge() -> None:
    source = (
        "import os, time\nfrom robopolicy_robots.simulated.client import simulated\n"
        f"with simulated(['--transport', 'dds', '--domain', '{free_domain()}']) as process:\n"
        "    print(process.pid, flush=True)\n    os.kill(os.getpid(), 9)"
    )
    ran = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True)
    node = int(ran.stdout)
    until(lambda: not Path(f"/proc/{node}/stat").exists() or " Z " in Path(f"/proc/{node}/stat").read_text(), 5.0)


def test_a_robot_that_is_killed_and_restarted_needs_arming(caplog: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    hasty = cyclone_settings("lo").replace("</Discovery>", "<LeaseDuration>1s</LeaseDuration></Discovery>")
    monkeypatch.setenv("CYCLONEDDS_URI", hasty)
    domain = free_domain()
    words = ["--domain", str(domain)]
    with simulated(words) as process, driving(domain, robot=HASTY) as bridge:
        start = time.monotonic()
        process.kill()
        bridge.reach(State.ESTOP)
        assert bridge.after(start, State.HOLD) <= STALE + TICKS + SLACK
        assert bridge.after(start, State.ESTOP) <= ROBOT.safety.estop_after + TICKS + SLACK
        with simulated(words):
            until(lambda: bridge.loop.inputs.state, 20.0)
            time.sleep(0.3)
            assert bridge.loop.state is State.ESTOP  # a new publisher alone does not restart the motion
            bridge.loop.reset_estop()
            time.sleep(0.3)
            assert bridge.loop.state in (State.WAIT_OBS, State.DISCONNECTED)
            bridge.loop.arm()
            bridge.reach(State.RUN)  # the DDS lease of the old publisher is 1 s here and 10 s by default
    assert "-> ESTOP (no message of " in caplog.text and "WAIT_OBS -> ARMED" in caplog.text
