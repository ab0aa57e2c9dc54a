"""Tests of video datasets: refused data, splits, and the content of a window."""

from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
import torch
from films import ACTIONS, push_films

from robopolicy.data.collect import EpisodeList, collect
from robopolicy.data.episodes import Episodes
from robopolicy.data.formats.lerobot import read_lerobot, write_lerobot
from robopolicy.data.formats.lerobot.layout import names_of
from robopolicy.errors import UserError
from robopolicy.sim.registry import SimOptions, get_task, make_sim
from robopolicy.worldmodel.backend import SimInitialStates
from robopolicy.worldmodel.videos import FrameSampler, VideoDataset, check_videos, infer_spec, split_episodes


@pytest.fixture(scope="module")
def episodes() -> Episodes:
    return push_films(8, size=16)


def test_spec_is_inferred_from_the_data(episodes):
    spec = infer_spec(episodes)
    assert spec.cameras == ("top",) and spec.size == 16 and spec.fps == pytest.approx(10.0)
    assert spec.proprio == ("gripper", "block") and spec.proprio_dim == 4 and spec.action_dim == 2
    assert infer_spec(episodes, proprio=("gripper",)).proprio_dim == 2
    with pytest.raises(UserError, match="Unknown camera 'wrist'"):
        infer_spec(episodes, cameras=("wrist",))
    with pytest.raises(UserError, match="has no images"):
        infer_spec(replace(episodes, arrays={k: v for k, v in episodes.arrays.items() if k != "image.top"}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cameras": ("front",)}, r"DATA has the cameras \['top'\], expected \['front'\]"),
        ({"size": 32}, "has 16x16 pixels, expected 32"),
        ({"fps": 20.0}, "has 10 frames per second, expected 20"),
        ({"action_dim": 7}, "has 2 action dimensions, expected 7"),
        ({"proprio": ("state",)}, "lacks the observation 'state'"),
        ({"proprio_dim": 3}, "have 4 entries, expected 3"),
    ],
)
def test_data_of_another_spec_is_refused_with_the_expected_value(episodes, change, message):
    with pytest.raises(UserError, match=message):
        check_videos(replace(infer_spec(episodes), **change), episodes, "DATA")


def test_names_and_rate_come_from_the_dataset_and_others_are_refused(episodes, tmp_path):
    names = {**episodes.names, "gripper": ("x [m]", "y [m]"), "block": ("block x [m]", "block y [m]")}
    write_lerobot(replace(episodes, names=names), tmp_path / "films", video=False)
    spec = infer_spec(again := read_lerobot(tmp_path / "films"))
    assert spec.action_names == ACTIONS and spec.fps == 10.0
    assert set(spec.proprio_names) == {"x [m]", "y [m]", "block x [m]", "block y [m]"}
    assert Episodes.concat([again, again]).subset([0]).names == again.names
    swapped = replace(again, names={**names, "action": ACTIONS[::-1]})
    with pytest.raises(UserError, match=r"Actions of DATA are gripper_vy .*; expected gripper_vx .*, gripper_vy"):
        check_videos(spec, swapped, "DATA")
    check_videos(spec, replace(again, names={}), "DATA")  # missing names contradict nothing
    with pytest.raises(UserError, match="cannot be joined"):
        Episodes.concat([again, swapped])
    with pytest.raises(UserError, match="State vectors of toy/push are"):
        SimInitialStates(make_sim("toy/push", SimOptions(num_envs=1, cameras=("top",), image_size=16)), spec)


@pytest.mark.parametrize(
    ("names", "found"),
    [({"motors": ["a", "b"]}, ("a", "b")), (["a", "b"], ("a", "b")), (["a"], ()), (None, ()), ({"a": 0, "b": 1}, ())],
)
def test_names_are_read_as_lerobot_writes_them(names, found):
    assert names_of({"dtype": "float32", "shape": [2], "names": names}) == found


def test_a_corrupt_video_is_refused_in_one_line(episodes, tmp_path):
    write_lerobot(episodes, tmp_path / "films")
    video = next((tmp_path / "films").rglob("*.mp4"))
    video.write_bytes(video.read_bytes()[:600])
    with pytest.raises(UserError, match=r"Cannot read .*mp4") as caught:
        read_lerobot(tmp_path / "films")
    assert "\n" not in str(caught.value)


def test_behaviours_round_trip_through_the_dataset_format(episodes, tmp_path):
    write_lerobot(episodes, tmp_path / "films", video=False)
    again = read_lerobot(tmp_path / "films")
    assert again.behaviours == episodes.behaviours
    assert all(np.array_equal(again.arrays[key], episodes.arrays[key]) for key in episodes.arrays)


def test_split_holds_out_whole_episodes_and_whole_behaviours(episodes):
    train, validation = split_episodes(episodes, share=0.5, held_out=["random"])
    assert "random" not in train.behaviours and validation.behaviours.count("random") == 2
    assert not set(train.seeds) & set(validation.seeds)
    assert train.num_episodes + validation.num_episodes == 8
    with pytest.raises(UserError, match="Unknown behaviour 'rand'"):
        split_episodes(episodes, held_out=["rand"])
    with pytest.raises(UserError, match="needs more than 1 episode;"):
        split_episodes(episodes.subset([0]))


def test_a_window_repeats_the_first_frame_with_zero_actions(episodes):
    videos = VideoDataset(infer_spec(episodes), episodes)
    start = int(episodes.starts[1])
    frames, actions, whole = videos.window(torch.tensor([start + 2]), horizon=2)
    assert frames[0].tolist() == [start, start, start, start + 1, start + 2, start + 3]
    assert bool((actions[0, :2] == 0).all())
    assert torch.equal(actions[0, 2:], videos.actions[start : start + 3]) and bool(whole.all())
    last = int(episodes.ends[1]) - 1
    assert videos.window(torch.tensor([last]), horizon=2)[2].tolist() == [[True, False]]


def test_success_labels_the_frame_after_the_step(episodes):
    videos = VideoDataset(infer_spec(episodes), episodes)
    end = int(episodes.ends[0])
    assert episodes.success[0] and videos.ends_on_success
    assert videos.success[end - 1] == 1 and videos.success[end - 2] == 0
    assert videos.progress[end - 1] == 1 and videos.progress[end - 2] == pytest.approx(0.95)
    assert videos.progress[int(episodes.starts[4]) : int(episodes.ends[4])].sum() == 0 or episodes.success[4]


@pytest.mark.parametrize("task", ["toy/push", "manipulation/lift"])
def test_videos_go_on_after_success_where_the_simulator_does(task):
    def collected(**after: int) -> Episodes:
        found = EpisodeList()
        with closing(make_sim(task, SimOptions(num_envs=3, ends_on_success=not after))) as sim:
            collect(sim, get_task(task).require_expert()(), found, episodes=4, behaviour="expert", **after)
        return Episodes.from_list(found, sim.spec.control_dt)

    whole, cut, longer = collected(), collected(after_success=0), collected(after_success=3)
    assert whole.success.all() and all(np.array_equal(whole.arrays[key], cut.arrays[key]) for key in whole.arrays)
    assert longer.lengths.tolist() == (whole.lengths + 3).tolist()
    for index in range(4):
        first, second = whole.episode(index).arrays, longer.episode(index).arrays
        steps = len(first["action"]) - 1
        state = "state" if "state" in first else "block"
        assert np.array_equal(first["action"][:steps], second["action"][:steps])
        assert np.array_equal(first[state], second[state][: steps + 1])
        assert second["success"].argmax() == steps - 1 and second["terminated"].nonzero()[0].tolist() == [steps + 3]


def test_restored_sampler_continues_the_same_sequence(episodes):
    videos = VideoDataset(infer_spec(episodes), episodes)
    sampler = FrameSampler(videos, seed=1)
    sampler.targets(8)
    state = sampler.state_dict()
    expected = sampler.frames(8), sampler.targets(8)
    other = FrameSampler(videos, seed=2)
    other.load_state_dict(state)
    assert torch.equal(other.frames(8), expected[0]) and torch.equal(other.targets(8), expected[1])
