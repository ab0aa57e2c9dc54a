"""Tests that image and walking policies produce the same episodes over the bridge as in an evaluation."""

import json
import os
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from robopolicy.cli import main as cli
from robopolicy.cli.commands import COMMANDS
from robopolicy.errors import UserError
from robopolicy.evaluation.harness import evaluate
from robopolicy.interop.sources import CheckpointChunkPolicy
from robopolicy.nets.normalizer import Normalizer
from robopolicy.nets.vision import VisionConfig
from robopolicy.policies.base import Policy, PolicySpec
from robopolicy.policies.registry import POLICIES
from robopolicy.sim.registry import SimOptions, make_sim
from robopolicy_robots import cli as deploy_cli
from robopolicy_robots.embodiment import decode_image
from robopolicy_robots.messages import CompressedImage, Header, Image, Imu, JointState, Time, TwistStamped
from robopolicy_robots.mujoco_topics import to_twist
from robopolicy_robots.robot import SHIPPED
from robopolicy_robots.simulated.node import png
from robopolicy_robots.task_embodiment import TaskEmbodiment
from robopolicy_robots.transports.base import Received
from robopolicy_tasks.manipulation.lift import Lift
from robopolicy_tasks.velocity.go1 import Go1

DOMAIN = 100 + os.getpid() % 100
STATE = Lift().observation["state"].shape[0]


class Logged(CheckpointChunkPolicy):
    """A policy source that stores the chunks of the latest episode."""

    def __init__(self, policy: Policy) -> None:
        self.chunks: list[np.ndarray] = []
        super().__init__(policy)

    def reset(self, seed: int) -> None:
        super().reset(seed)
        self.chunks.clear()

    def chunk(self, obs: Any, prefix: Any = None) -> Any:
        self.chunks.append(super().chunk(obs, prefix))
        return self.chunks[-1]


def untrained(spec: PolicySpec, **settings: Any) -> Policy:
    """Return an untrained flow policy in raw units."""
    torch.manual_seed(0)
    policy = POLICIES["flow"]
    kind = policy.config_class
    raw = {"normalization": "identity", "action_normalization": "identity", "hidden": (16,), "steps": 2}
    made: Any = policy(kind(**(raw | settings)), spec)  # type: ignore[call-arg]
    for part in made.modules():
        if isinstance(part, Normalizer):
            part.fitted.fill_(True)
    return made.eval()


def over_the_bridge(monkeypatch: Any, out: Path, policy: Policy, *words: str) -> tuple[dict[str, Any], np.ndarray]:
    """Return the report of one deployed episode and its chunks."""
    source = Logged(policy)
    monkeypatch.setitem(COMMANDS._rows, "deploy", deploy_cli.COMMAND)
    monkeypatch.setattr("robopolicy_robots.deployment.open_source", lambda name, device: source)
    line = ["deploy", "--policy", "given", "--transport", "loopback", "--domain", str(DOMAIN), "--no-tui", "--lockstep"]
    assert cli.main([*line, "--seed", "50", "--out", str(out), *words]) == 0
    report = json.loads(out.read_text())
    assert report["holds"] == 0
    return report["episodes"][0], np.array(source.chunks)


def in_process(monkeypatch: Any, policy: Policy, task: str, **options: Any) -> tuple[Any, np.ndarray]:
    """Return the result and the chunks of the same episode in an evaluation."""
    chunks: list[torch.Tensor] = []
    act = policy.act

    def logged(*args: Any, **kwargs: Any) -> Any:
        chunks.append(act(*args, **kwargs))
        return chunks[-1]

    sim = make_sim(task, SimOptions(num_envs=1, **options))
    with monkeypatch.context() as patch:
        patch.setattr(policy, "act", logged, raising=False)
        found = evaluate(policy, sim, episodes=1, seed=50, policy_batch=1)
    sim.close()
    return found, np.stack([chunk[0].numpy() for chunk in chunks[: found.cost.policy_calls]])  # later calls are timed


def same(episode: dict[str, Any], chunks: np.ndarray, found: Any, wanted: np.ndarray) -> None:
    assert episode["done"] and episode["steps"] == found.lengths[0] and episode["success"] == found.success[0]
    assert len(wanted) - 1 <= len(chunks) <= len(wanted) + 1  # one extra request may occur at the very end
    count = min(len(chunks), len(wanted))
    np.testing.assert_array_equal(chunks[:count], wanted[:count])


@pytest.mark.parametrize("kind", ["sensor_msgs/msg/Image", "sensor_msgs/msg/CompressedImage"])
def test_an_image_policy_matches_an_evaluation(kind: str, monkeypatch: Any, tmp_path: Path) -> None:
    spec = PolicySpec({"state": (STATE,), "image.front": (3, 64, 64)}, action_dim=5, horizon=8, action_horizon=4)
    policy = untrained(spec, vision=VisionConfig(widths=(16,), keypoints=4, crop=1.0))
    found, wanted = in_process(monkeypatch, policy, "manipulation/lift", cameras=("front",), image_size=64)
    robot = yaml.safe_load((SHIPPED / "sim_panda.yaml").read_text())
    for camera in robot["cameras"]:
        camera["type"] = kind
    path = tmp_path / "robot.yaml"
    path.write_text(yaml.safe_dump(robot))
    words = ("--robot", str(path), "--task", "lift", "--rate", "20")
    episode, chunks = over_the_bridge(monkeypatch, tmp_path / "r.json", policy, *words)
    same(episode, chunks, found, wanted)


def test_a_walking_policy_matches_an_evaluation(monkeypatch: Any, tmp_path: Path) -> None:
    policy = untrained(PolicySpec({"state": (45,)}, action_dim=12))
    found, wanted = in_process(monkeypatch, policy, "velocity/go1")
    words = ("--robot", "sim_go1", "--task", "velocity/go1")
    episode, chunks = over_the_bridge(monkeypatch, tmp_path / "r.json", policy, *words)
    assert len(wanted) > 20
    same(episode, chunks, found, wanted)


def test_the_operator_sets_the_velocity_command() -> None:
    embodiment = TaskEmbodiment(Go1("velocity/go1"))
    assert set(embodiment.sources.values()) == {JointState, Imu, TwistStamped}
    model = embodiment.task.model
    messages: dict[str, Any] = embodiment.topics.messages(
        model.key_qpos[0] if model.nkey else model.qpos0, np.zeros(model.nv), Time()
    )
    state = {key: Received(message, 0.0, None, "robot", 1) for key, message in messages.items()}
    embodiment.start(state)
    with pytest.raises(UserError, match="No velocity command was received"):
        embodiment.observe(state)
    for wanted in ([0.5, -0.2, 1.0], [0.0, 0.0, 0.0]):
        state["operator"] = Received(to_twist(np.array(wanted), Time()), 0.0, None, "operator", 1)
        np.testing.assert_allclose(embodiment.observe(state)["state"][-3:], wanted)


def test_images_are_required_and_scaled_to_the_policy_size() -> None:
    embodiment = TaskEmbodiment(Lift(), "panda_", {"front": (32, 32)})
    model = embodiment.task.model
    messages: dict[str, Any] = embodiment.topics.messages(model.qpos0, np.zeros(model.nv), Time())
    state = {key: Received(message, 0.0, None, "robot", 1) for key, message in messages.items()}
    embodiment.start(state)
    with pytest.raises(UserError, match=r"does not report image\.front"):
        embodiment.observe(state)
    pixels = np.arange(64 * 64 * 3, dtype=np.uint8).reshape(64, 64, 3)
    header = messages["joints"].header
    seen = [
        embodiment.observe({**state, "image.front": Received(message, 0.0, None, "camera", 1)})["image.front"]
        for message in (Image.from_pixels(pixels, header), png(pixels, header))
    ]
    assert seen[0].shape == (3, 32, 32) and seen[0].dtype == np.uint8
    np.testing.assert_array_equal(seen[0], seen[1])


def png_that_claims(width: int, height: int) -> bytes:
    parts = ((b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)), (b"IDAT", zlib.compress(bytes(99))))
    body = (
        struct.pack(">I", len(data)) + key + data + struct.pack(">I", zlib.crc32(key + data)) for key, data in parts
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(body)


@pytest.mark.filterwarnings("ignore:Image size")
def test_a_damaged_image_is_refused_in_one_line() -> None:
    rng, whole = np.random.default_rng(0), png(np.zeros((16, 16, 3), np.uint8), Header()).data
    for _ in range(100):
        data = whole[: int(rng.integers(1, len(whole)))].copy()
        data[rng.integers(0, len(data), 3)] = rng.integers(0, 256, 3)
        try:
            decode_image(CompressedImage(Header(), "png", data), (4, 4))
        except UserError as error:
            assert "\n" not in str(error)
    sizes = ((10_000, 10_000), (20_000, 20_000), (2**31 - 1, 2**31 - 1), (1, 10**8), (0, 0))
    for size in sizes:
        data = np.frombuffer(png_that_claims(*size), np.uint8)
        with pytest.raises(UserError, match="an image that cannot be read") as refusal:
            decode_image(CompressedImage(Header(), "png", data), (4, 4))
        assert "\n" not in str(refusal.value)
    with pytest.raises(UserError):
        decode_image(Image(Header(), 2**32 - 1, 2**32 - 1, "rgb8", 0, 2**32 - 1, np.zeros(10, np.uint8)), (4, 4))
