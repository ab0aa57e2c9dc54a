"""Tests of files for Foxglove and Rerun, read back by the packages of their formats."""

import base64
import io
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import mujoco
import numpy as np
import pytest
from PIL import Image

from robopolicy.cli.main import main
from robopolicy.sim.physics_state import MujocoState
from robopolicy.viewer.frames import EpisodeFrame
from robopolicy.viewer.sinks import FrameWriter, open_sink, write_episodes

pytest.importorskip("mjviser", reason="needs robopolicy[viewer]")
CART = """<mujoco><worldbody><geom type="plane" size="1 1 1"/>
<body name="cart" pos="0 0 1"><joint name="x" type="slide" axis="1 0 0"/><geom type="box" size=".1 .2 .3"/></body>
</worldbody><actuator><motor joint="x"/></actuator></mujoco>"""
STEPS = 3


class Carts:
    """One episode of a cart that moves by 0.5 m per step, with a camera and a predicted next state."""

    title, control_dt, max_steps, num_episodes, names = "carts", 0.1, STEPS, 1, {}

    def __init__(self) -> None:
        self._model = mujoco.MjModel.from_xml_string(CART)

    def state(self, step: int) -> MujocoState:
        return MujocoState(self._model, np.array([0.5 * step]), np.zeros((0, 3)), np.zeros((0, 4)))

    def label(self, episode: int) -> str:
        return "seed 0"

    def note(self) -> str:
        return ""

    def frames(self, episode: int) -> Iterator[EpisodeFrame]:
        for step in range(STEPS + 1):
            images = {"front": np.full((8, 12, 3), 60 * step, np.uint8)}
            vectors = {"action": np.array([0.5, step], np.float32)}
            plan = (self.state(step), self.state(step + 1))
            yield EpisodeFrame(self.state(step), images, vectors, float(step), step == STEPS, plan)

    def close(self) -> None:
        pass


def messages(file: Path) -> dict[str, list[tuple[float, dict]]]:
    """Messages by topic, with their times [s]."""
    reader = pytest.importorskip("mcap.reader", reason="needs robopolicy[record]")
    found: dict[str, list[tuple[float, dict]]] = {}
    with file.open("rb") as stream:
        for schema, channel, message in reader.make_reader(stream).iter_messages():
            assert schema.encoding == "jsonschema" and json.loads(schema.data)["title"] == schema.name
            found.setdefault(channel.topic, []).append((message.log_time / 1e9, json.loads(message.data)))
    return found


def test_mcap_holds_poses_images_paths_and_outcomes(tmp_path: Path) -> None:
    with open_sink(tmp_path / "carts.mcap") as sink:
        assert write_episodes(Carts(), sink, 1) == STEPS + 1
    found = messages(tmp_path / "carts.mcap")
    times = [time for time, _ in found["/tf"]]
    np.testing.assert_allclose(times, [0.0, 0.1, 0.2, 0.3])
    (cart,) = found["/tf"][2][1]["transforms"]
    assert cart["translation"] == {"x": 1.0, "y": 0.0, "z": 1.0} and cart["rotation"]["w"] == 1.0
    (line,) = found["/path"][1][1]["entities"][0]["lines"]
    assert [point["x"] for point in line["points"]] == [0.5, 1.0]
    picture = Image.open(io.BytesIO(base64.b64decode(found["/camera/front"][2][1]["data"])))
    np.testing.assert_allclose(np.asarray(picture), 120, atol=2)
    assert found["/numbers"][1][1] == {"action": [0.5, 1.0]}
    assert [message for _, message in found["/outcome"]] == [
        {"episode": "seed 0"},
        *({"reward": float(step), "success": step == STEPS} for step in range(STEPS + 1)),
    ]
    ((_, scene),) = found["/scene"]
    (entity,) = scene["entities"]  # of the cart; planes have no mesh
    mesh = base64.b64decode(entity["models"][0]["data"])
    trimesh = pytest.importorskip("trimesh")
    loaded = trimesh.load(io.BytesIO(mesh), file_type="glb")
    np.testing.assert_allclose(loaded.extents, [0.2, 0.4, 0.6], atol=1e-6)
    assert entity["frame_id"] == "cart"


def test_mcap_holds_json_where_numbers_are_not_finite(tmp_path: Path) -> None:
    vectors = {"measured": np.array([np.nan, 1.0, -np.inf], np.float32)}
    frame = EpisodeFrame(None, {}, vectors, float("nan"), chunk=np.array([[np.inf, 2.0]], np.float32))
    with open_sink(tmp_path / "broken.mcap") as sink:
        FrameWriter(sink).write("seed 0", 0.0, frame)
    found = messages(tmp_path / "broken.mcap")
    assert found["/numbers"][0][1] == {"measured": [None, 1.0, None]}
    assert found["/chunk"][0][1] == {"actions": [[None, 2.0]]}
    assert found["/outcome"][1][1] == {"reward": None}


def test_rerun_verifies_its_file(tmp_path: Path) -> None:
    pytest.importorskip("rerun", reason="needs robopolicy[rerun]")
    file = tmp_path / "carts.rrd"
    with open_sink(file) as sink:
        write_episodes(Carts(), sink, 1)
    tool = shutil.which("rerun", path=str(Path(sys.executable).parent)) or sys.executable
    command = [tool, *(["-m", "rerun"] if tool == sys.executable else []), "rrd"]
    assert subprocess.run([*command, "verify", str(file)], capture_output=True, timeout=60).returncode == 0
    printed = subprocess.run([*command, "print", str(file)], capture_output=True, text=True, timeout=60).stdout
    for entity in ("/world/cart", "/world/predicted_path", "/camera/front", "/numbers/action", "/outcome/success"):
        assert entity in printed


def test_the_command_writes_a_file_and_keeps_an_existing_one(tmp_path: Path, refused) -> None:
    pytest.importorskip("mcap", reason="needs robopolicy[record]")
    file = tmp_path / "lift.mcap"
    arguments = ["view", "lift", "--seed", "3", "--out", str(file)]
    assert main([*arguments, "--episodes", "2"]) == 0
    found = messages(file)
    assert [message["episode"] for _, message in found["/outcome"] if "episode" in message] == ["seed 3", "seed 4"]
    assert len(found["/scene"]) == 1 and len(found["/tf"][0][1]["transforms"]) > 10
    assert "exists" in refused(*arguments)
    assert ".mcap" in refused("view", "lift", "--out", tmp_path / "lift.bag")
    assert "--port has no effect with --out" in refused(*arguments, "--port", 1)


def test_missing_episodes_of_a_dataset_are_refused(tmp_path: Path) -> None:
    from robopolicy.errors import UserError

    pytest.importorskip("mcap", reason="needs robopolicy[record]")
    with pytest.raises(UserError, match="carts has 1 episode, not 2"), open_sink(tmp_path / "a.mcap") as sink:
        write_episodes(Carts(), sink, 2)
    assert not list(tmp_path.iterdir())
