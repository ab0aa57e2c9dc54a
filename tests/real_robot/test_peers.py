"""Tests of the transports with programs that share no code: Fast DDS, Cyclone DDS in C, rospy, roslibpy.

Each test is skipped if its packages are missing; `make test-ros` lists them.
"""

# ruff: noqa: T201  (programs print when they are ready, and their latency)

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from networks import free_domain, free_port, until

from robopolicy_robots.codecs.definitions import describe
from robopolicy_robots.message import Message
from robopolicy_robots.messages import Duration, Header, JointState, JointTrajectory, String, Time
from robopolicy_robots.transports.base import COMMAND, LATCHED, SENSOR, Transport, open_transport

pytest.importorskip("rosbags", reason="needs robopolicy[ros]")
pytestmark = pytest.mark.slow
PEERS = Path(__file__).parent / "peers"
APT = {
    "fastdds": "apt-get install --no-install-recommends g++ libfastrtps-dev libfastcdr-dev fastddsgen",
    "cyclone": "apt-get install --no-install-recommends gcc cyclonedds-tools cyclonedds-dev",
    "ros1": "apt-get install --no-install-recommends python3-rospy python3-roslaunch python3-rostopic python3-std-msgs "
    "python3-sensor-msgs python3-trajectory-msgs",
}
NAMES = tuple(f"joint_{number}" for number in range(7))


def require(peer: str, *programs: str) -> None:
    """Skip the test if programs of a peer are missing."""
    if missing := [program for program in programs if shutil.which(program) is None]:
        pytest.skip(f"{', '.join(missing)} not found; run: {APT[peer]}")


def build(folder: Path, *command: str) -> None:
    run = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240, check=False)
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Yield a function that starts a program and waits for its ready line; kill the programs at the end."""
    running: list[subprocess.Popen[str]] = []

    def run(*command: str, **variables: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(command, env={**os.environ, **variables}, stdout=subprocess.PIPE, text=True)
        running.append(process)
        assert process.stdout is not None and process.stdout.readline(), f"{command} ended"
        return process

    yield run
    for process in running:
        process.kill()
        process.communicate()


def idl(*kinds: type[Message]) -> str:
    """Return the IDL of message types and their dependencies for the DDS compilers."""
    modules: dict[str, str] = {}

    def name(kind: type[Message]) -> str:
        package, _, short = kind.ros_name.split("/")
        if kind.ros_name not in modules:
            members = "".join(member(each) for each in describe(kind))
            struct = f"struct {short}_ {{ {members}}};"
            modules[kind.ros_name] = f"module {package} {{ module msg {{ module dds_ {{ {struct} }}; }}; }};\n"
        return f"{package}::msg::dds_::{short}_"

    def member(each: Any) -> str:
        plain = {"float64": "double", "int32": "long", "uint32": "unsigned long", "string": "string"}
        base = name(each.base) if isinstance(each.base, type) else plain[each.base]
        return f"{f'sequence<{base}>' if each.many else base} {each.name}; "

    for kind in kinds:
        name(kind)
    return "".join(modules.values())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with the IDL of the exchanged messages."""
    (tmp_path / "messages.idl").write_text(idl(JointState, JointTrajectory))
    return tmp_path


def exchange(transport: Transport, seconds: float = 5.0, rate: float = 500.0) -> None:
    """Publish states at a rate; 99.5 % must be answered, 99 % of them within 10 ms.

    An answer to a later state counts too: both sides store only the newest message, so on a busy machine an answer
    may be replaced before it is read. The number of states with an answer of their own is printed. The limit of 10 ms
    is not checked if the load average exceeds the number of cores.
    """
    publisher = transport.advertise("/joint_states", JointState, SENSOR)
    subscription = transport.subscribe("/arm/joint_trajectory", JointTrajectory, COMMAND)
    until(lambda: publisher.matched == subscription.publishers == 1, 20)
    time.sleep(0.3)
    count, position = round(seconds * rate), np.arange(7.0)
    sent, seen = np.zeros(count + 1), np.full(count + 1, np.inf)  # time [s] by number; 0 is unused

    def look() -> None:
        received = subscription.latest()
        if received is not None and seen[number := received.message.header.stamp.nanosec] == np.inf:
            seen[number] = time.monotonic()

    due = time.monotonic()
    for number in range(1, count + 1):
        due = max(due + 1 / rate, time.monotonic())  # late messages are not sent in a burst
        while time.monotonic() < due:
            look()
            time.sleep(0.0001)
        sent[number] = time.monotonic()
        publisher.publish(JointState(Header(Time(1, number), "bäse"), NAMES, position + number, -position))
    end = time.monotonic() + 0.5
    while time.monotonic() < end:
        look()
    received = subscription.latest()
    assert received is not None and subscription.malformed == 0
    message = received.message
    assert (message.joint_names, message.header.frame_id) == (NAMES, "bäse")
    (point,) = message.points
    np.testing.assert_array_equal(point.positions, position + message.header.stamp.nanosec)
    np.testing.assert_array_equal(point.velocities, -position)
    assert point.time_from_start == Duration(0, 20_000_000) and not len(point.effort)
    themselves = np.isfinite(seen).sum()
    taken = 1e3 * (np.minimum.accumulate(seen[::-1])[::-1] - sent)[1:]  # [ms]
    answered = np.isfinite(taken)
    p50, p99 = np.percentile(taken[answered], [50, 99])
    most = taken[answered].max()
    print(f"answered {answered.sum()} of {count} ({themselves} seen themselves), p50 {p50:.2f} ms, p99 {p99:.2f} ms,")
    print(f"at most {most:.1f} ms")
    assert answered.mean() >= 0.995
    assert p99 < 10 or os.getloadavg()[0] > (os.cpu_count() or 1)


def test_fast_dds(folder: Path, start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cyclonedds", reason="needs robopolicy[ros]")
    require("fastdds", "fastddsgen", "g++")
    if not Path("/usr/include/fastdds").is_dir():
        pytest.skip(f"no headers of Fast DDS; run: {APT['fastdds']}")
    build(folder, "fastddsgen", "-replace", "messages.idl")
    sources = (str(PEERS / "fastdds_echo.cpp"), *sorted(path.name for path in folder.glob("messages*.cxx")))
    build(folder, "g++", "-O1", "-std=c++17", "-I.", *sources, "-lfastrtps", "-lfastcdr", "-o", "echo")
    monkeypatch.delenv("CYCLONEDDS_URI", raising=False)
    domain = free_domain()
    start(str(folder / "echo"), str(domain), FASTRTPS_DEFAULT_PROFILES_FILE=str(PEERS / "fastdds_loopback.xml"))
    with open_transport("dds", domain=domain) as transport:
        exchange(transport)


def test_cyclone_in_c(folder: Path, start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cyclonedds", reason="needs robopolicy[ros]")
    from robopolicy_robots.transports.dds import cyclone_settings

    require("cyclone", "idlc", "gcc")
    build(folder, "idlc", "messages.idl")
    build(folder, "gcc", "-O1", "-I.", str(PEERS / "cyclone_echo.c"), "messages.c", "-lddsc", "-o", "echo")
    monkeypatch.delenv("CYCLONEDDS_URI", raising=False)
    domain = free_domain()
    start(str(folder / "echo"), str(domain), CYCLONEDDS_URI=cyclone_settings("lo"))
    with open_transport("dds", domain=domain) as transport:
        exchange(transport)


ROS1 = f"import sys; sys.path.insert(0, {str(PEERS.parent)!r}); import test_peers; test_peers."


@pytest.fixture
def master(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Run a ROS master and yield the environment variables for its nodes."""
    require("ros1", "roscore", "rostopic")
    port = free_port()
    variables = {"ROS_MASTER_URI": f"http://127.0.0.1:{port}", "ROS_IP": "127.0.0.1", "ROS_HOME": str(tmp_path)}
    variables |= {"ROS_LOG_DIR": str(tmp_path / "log"), "ROS_PACKAGE_PATH": "/usr/share", "ROS_PYTHON_VERSION": "3"}
    command = ("roscore", "-p", str(port))
    environment = {**os.environ, **variables}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        listed = ("rostopic", "list")
        until(lambda: subprocess.run(listed, env=environment, capture_output=True, check=False).returncode == 0, 30)
        yield variables
    finally:
        process.terminate()
        process.communicate()


def run_python(code: str, variables: dict[str, str]) -> str:
    """Run code in a new Python process and return its output; a ROS 1 node lives as long as its process."""
    environment = {**os.environ, **variables}
    command = [sys.executable, "-c", code]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def exchange_over_ros1() -> None:
    """Run the part of `test_rospy` that needs a separate process."""
    with open_transport("ros1") as transport:
        exchange(transport)


def talk_to_rostopic() -> None:
    """Run the part of `test_rostopic` that needs a separate process."""
    with open_transport("ros1") as transport:
        transport.advertise("/ours", String, LATCHED).publish(String("grüße"))
        subscription = transport.subscribe("/theirs", String, SENSOR)
        print("ready", flush=True)
        names = {until(subscription.latest, 30).publisher}
        first = subscription.latest()
        until(lambda: subscription.publishers == 0, 30)
        until(lambda: subscription.latest() is not first, 30)
        names.add(subscription.latest().publisher)  # type: ignore[union-attr]
        assert len(names) == 2
        print(subscription.latest().message.data, subscription.malformed)  # type: ignore[union-attr]


def test_rospy(master: dict[str, str], start: Callable[..., Any]) -> None:
    start("/usr/bin/python3", str(PEERS / "rospy_echo.py"), **master)
    print(run_python(ROS1 + "exchange_over_ros1()", master))


def test_rostopic(master: dict[str, str], start: Callable[..., Any]) -> None:
    process = start(sys.executable, "-c", ROS1 + "talk_to_rostopic()", **master)
    environment = {**os.environ, **master}

    def rostopic(*words: str) -> str:
        command = ("timeout", "20", "rostopic", *words)
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False).stdout

    assert re.search(r"data: \"gr\\xFC\\xDFe\"|data: \"grüße\"", rostopic("echo", "-n", "1", "/ours"))
    assert "Type: std_msgs/String" in rostopic("info", "/ours")
    for text in ("one", "two"):
        rostopic("pub", "-1", "/theirs", "std_msgs/String", text)
    assert process.communicate(timeout=30)[0].split() == ["two", "0"]


def test_roslibpy() -> None:
    roslibpy = pytest.importorskip("roslibpy", reason="needs robopolicy[dev]")
    pytest.importorskip("websockets", reason="needs robopolicy[ros]")
    from rosbridge_hub import Hub

    hub, received_messages = Hub(), []
    other_client = roslibpy.Ros("127.0.0.1", hub.port)
    other_client.run(timeout=10)
    with open_transport("rosbridge", url=hub.url, ros1=True) as transport:
        roslibpy.Topic(other_client, "/status", "std_msgs/String").subscribe(received_messages.append)
        publisher = transport.advertise("/status", String, SENSOR)
        subscription = transport.subscribe("/joint_states", JointState, SENSOR)
        until(lambda: hub.subscribers("/status") == hub.subscribers("/joint_states") == 1)
        publisher.publish(String("up"))
        until(lambda: received_messages == [{"data": "up"}])
        topic = roslibpy.Topic(other_client, "/joint_states", "sensor_msgs/JointState")
        header = {"seq": 1, "stamp": {"secs": 1, "nsecs": 2}, "frame_id": "base"}
        topic.publish(
            roslibpy.Message({"header": header, "name": ["a"], "position": [1.5], "velocity": [], "effort": []})
        )
        assert until(subscription.latest).message == JointState(Header(Time(1, 2), "base"), ("a",), np.array([1.5]))
    other_client.close()
    hub.stop()
