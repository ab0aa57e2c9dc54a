"""Recordings of ROS: one recording in every container gives the same episodes, and a deployment needs no mapping."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import foreign_bags as bags
import numpy as np
import pyarrow.parquet as pq
import pytest
from foreign_datasets import assert_same

from robopolicy.cli.main import main
from robopolicy.data.episodes import Episodes
from robopolicy.data.formats import open_dataset, read_dataset
from robopolicy.data.formats.lerobot import read_lerobot
from robopolicy.data.formats.lerobot.images import decode_image
from robopolicy.data.formats.mapping import load_mapping
from robopolicy.errors import UserError

pytest.importorskip("rosbags", reason="needs robopolicy[record]")
pytest.importorskip("mcap", reason="needs robopolicy[record]")
CONTAINERS = ["sqlite", "mcap", "bare", "ros1"]


@pytest.fixture(name="containers", scope="module")
def _containers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("bags")
    return {kind: bags.write_bag(folder / kind, kind) for kind in CONTAINERS}


def read(path: Path, tmp_path: Path, text: str = bags.MAPPING) -> Episodes:
    """All episodes of a recording under a mapping."""
    (tmp_path / "mapping.yaml").write_text(text)
    with open_dataset(path, load_mapping(tmp_path / "mapping.yaml")) as dataset:
        return dataset.read()


def test_frames_hold_the_newest_message_of_each_topic(containers: dict[str, Path], tmp_path: Path) -> None:
    found = read(containers["sqlite"], tmp_path)
    assert found.num_episodes == 1 and found.control_dt == 0.05 and found.tasks == ("wave",)
    assert 38 <= len(found) <= 40 and found.names["state"] == ("a", "b")
    state, action = found.arrays["state"], found.arrays["action"]
    assert np.allclose(state[:, 0], np.sin(state[:, 1] / 100))  # ordered by name, not by place
    frames = np.arange(len(found))
    assert ((frames * 5 - state[:, 1] >= 0) & (frames * 5 - state[:, 1] <= 1)).all()  # jitter of 2 ms
    assert np.array_equal(action[:, 0], -action[:, 1]) and np.all(state[:, 1] - action[:, 0] < 10)
    shown = int(state[10, 1]) // 3 * 3
    pixels = found.arrays["image.cam"][10]
    assert any(np.array_equal(pixels, decode_image(bags.picture(index))) for index in (shown - 3, shown))


@pytest.mark.parametrize("kind", CONTAINERS[1:])
def test_all_containers_give_equal_episodes(kind: str, containers: dict[str, Path], tmp_path: Path) -> None:
    assert_same(read(containers[kind], tmp_path), read(containers["sqlite"], tmp_path))


@pytest.mark.parametrize("kind", CONTAINERS)
def test_conversion_there_and_back_keeps_every_bit_and_the_jpeg(
    kind: str, containers: dict[str, Path], tmp_path: Path
) -> None:
    before = read(containers[kind], tmp_path)
    mapping = str(tmp_path / "mapping.yaml")
    assert main(["data", "convert", str(containers[kind]), str(tmp_path / "set"), "--mapping", mapping]) == 0
    assert_same(read_lerobot(tmp_path / "set"), before)
    stored = pq.read_table(next((tmp_path / "set/data").rglob("*.parquet")))["observation.images.cam"]
    recorded = {bags.picture(index) for index in range(0, 200, 3)}
    assert {entry["bytes"] for entry in stored.to_pylist()} <= recorded
    assert main(["data", "convert", str(tmp_path / "set"), str(tmp_path / "back.npz")]) == 0
    assert_same(read_dataset(tmp_path / "back.npz"), before)


def test_a_policy_trains_on_a_recording(containers: dict[str, Path], tmp_path: Path) -> None:
    text = f"source: {containers['mcap']}\n" + bags.MAPPING.replace(
        "  action:", "  both: {from: [/joint_states, /commands, /commands]}\n  action:"
    )
    (tmp_path / "wave.yaml").write_text(text)
    settings = ["task=none", "algorithm=bc", "policy=flow", "policy.hidden=[8]", "budget.updates=2"]
    settings += [f"dataset={tmp_path / 'wave.yaml'}", "evaluation.episodes=0", f"out={tmp_path}", "name=run"]
    assert main(["train", *settings]) == 0


def test_a_topic_marks_episodes(containers: dict[str, Path], tmp_path: Path) -> None:
    found = read(containers["mcap"], tmp_path, bags.MAPPING + "episodes: {from: /active}\n")
    assert found.num_episodes == 2 and all(9 <= length <= 10 for length in found.lengths)
    first = found.arrays["state"][found.starts, 1]
    assert 0 <= first[0] <= 3 and 99 <= first[1] <= 103


def test_each_recording_of_a_folder_is_an_episode(containers: dict[str, Path], tmp_path: Path) -> None:
    for name in ("one.bag", "two.bag"):
        shutil.copy(containers["ros1"], tmp_path / name)
    one, both = read(containers["ros1"], tmp_path), read(tmp_path, tmp_path)
    assert both.num_episodes == 2 and len(both) == 2 * len(one)


def test_pauses_and_old_messages_end_episodes(containers: dict[str, Path], tmp_path: Path) -> None:
    found = read(containers["mcap"], tmp_path, bags.MAPPING + "max_age: 0.02\n")
    assert found.num_episodes > 3 and len(found) < 30  # commands at 20 Hz are older at most frames
    held = bags.MAPPING.replace("  action: /commands", "  action: {from: /commands, hold: true}") + "max_age: 0.04\n"
    assert read(containers["mcap"], tmp_path, held).num_episodes == 1


def test_the_next_position_can_be_the_action(containers: dict[str, Path], tmp_path: Path) -> None:
    text = bags.MAPPING.replace("  action: /commands", "  action: {from: /joint_states, names: [b], next: true}")
    found = read(containers["mcap"], tmp_path, text)
    assert np.array_equal(found.arrays["action"][:-1, 0], found.arrays["state"][1:, 1])


def test_two_clocks_are_refused_until_one_is_chosen(tmp_path: Path) -> None:
    path = bags.write_rosbag2(tmp_path / "bag", "MCAP", stamped=False)
    assert len(read(path, tmp_path)) > 30  # without stamps, the time of recording counts
    with pytest.raises(UserError, match="have no stamps; set clock: receive"):
        read(path, tmp_path, bags.MAPPING + "clock: stamp\n")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("rate: 20", ""), "has no rate of its own; state it with 'robopolicy data convert --rate HZ'"),
        (("/commands", "/orders"), "has no topic /orders; it has /joint_states"),
        (("[a, b]", "[a, c]"), "lacks joint c; it has"),
        (("position", "positions"), "has no field 'positions'"),
        (("  action: /commands\n", ""), "has no actions; map them"),
        (("  action: /commands", "  action: /cam/compressed"), "must have shape"),
    ],
)
def test_mappings_that_do_not_fit_are_refused(
    change: tuple[str, str], message: str, containers: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message):
        read(containers["mcap"], tmp_path, bags.MAPPING.replace(*change))


def test_an_incomplete_mcap_file_is_read_up_to_its_damage(
    containers: dict[str, Path], tmp_path: Path, refused: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    cut, mapping = tmp_path / "cut.mcap", tmp_path / "wave.yaml"
    cut.write_bytes(containers["bare"].read_bytes()[:-2_000])
    mapping.write_text(bags.MAPPING)
    words = ("data", "convert", cut, tmp_path / "set", "--mapping", mapping)
    assert "--repair reads it up to its damage" in refused(*words)
    assert main([*map(str, words), "--repair"]) == 0
    assert "messages were read before the damage" in capsys.readouterr().out
    assert len(read_lerobot(tmp_path / "set")) > 5


def test_a_recording_of_deploy_becomes_a_dataset_in_one_command(tmp_path: Path) -> None:
    from robopolicy_robots.filter_log import TOPIC
    from robopolicy_robots.messages import Float64MultiArray, Header, JointTrajectory, JointTrajectoryPoint, String
    from robopolicy_robots.messages import Image as ImageMessage
    from robopolicy_robots.recorder import Recorder

    path, pixels = tmp_path / "run.mcap", np.arange(8 * 8 * 3, dtype=np.uint8).reshape(8, 8, 3)
    with Recorder(path) as recorder:
        for episode in range(2):
            recorder.write("/front/image_raw", ImageMessage.from_pixels(pixels + episode, Header()))
            recorder.write("/robopolicy/status", String(json.dumps({"state": "RUN"})))
            for tick in range(5):
                target = [0.1 * tick, float(episode)]
                entry = {"dt": 0.02, "measured": [1.0, [0.1 * tick - 0.01, 0.5]], "asked": target, "sent": target}
                held = {name: entry[name] for name in ("dt", "sent")}  # a hold has no target
                recorder.write(TOPIC, String(json.dumps(held if tick == 2 else entry)))
            point = JointTrajectoryPoint(np.zeros(2))
            recorder.write("/arm/joint_trajectory", JointTrajectory(Header(), ("a", "b"), (point,)))
            recorder.write("/robopolicy/status", String(json.dumps({"state": "STOPPED"})))
            recorder.write("/other", Float64MultiArray())
    assert main(["data", "convert", str(path), str(tmp_path / "set"), "--task", "wave"]) == 0
    found = read_lerobot(tmp_path / "set")
    assert found.control_dt == 0.02 and found.lengths.tolist() == [4, 4] and found.tasks == ("wave", "wave")
    assert found.arrays["state"][:4, 0].tolist() == pytest.approx([-0.01, 0.09, 0.29, 0.39])
    assert found.arrays["action"][:4].tolist() == [[0.0, 0], [0.1, 0], [0.1 * 3, 0], [0.4, 0]]
    assert np.array_equal(found.arrays["executed"], found.arrays["action"])
    assert np.array_equal(found.arrays["image.front"][4], (pixels + 1).transpose(2, 0, 1))
    assert found.names["action"] == ("a", "b")
