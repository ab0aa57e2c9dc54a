import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from robopolicy.cli.main import main
from robopolicy.data.formats.lerobot import read_lerobot
from robopolicy.evaluation.harness import evaluate
from robopolicy.policies.base import PolicySpec
from robopolicy.policies.heads.gaussian import GaussianConfig, GaussianPolicy
from robopolicy.sim.registry import SimOptions, make_sim
from robopolicy.training.checkpoint import save_checkpoint

TASK = "manipulation/lift"


def test_collect_writes_a_dataset_that_depends_only_on_the_seed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for num_envs in (1, 3):
        out = tmp_path / f"lift{num_envs}"
        arguments = ["collect", TASK, "--episodes", "3", "--num-envs", str(num_envs), "--out", str(out), "--json"]
        assert main(arguments) == 0
        report = json.loads(capsys.readouterr().out)
        assert report["kept"] == 3 and report["attempts"] >= 3
    one, three = (read_lerobot(tmp_path / f"lift{num_envs}") for num_envs in (1, 3))
    assert one.success.all() and one.seeds.tolist() == three.seeds.tolist()
    assert all((one.arrays[key] == three.arrays[key]).all() for key in one.arrays)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--episodes", "-3"], "--episodes must be at least 1, got -3"),
        (["--num-envs", "0"], "--num-envs must be at least 1"),
        (["--seed", "-1"], "--seed must be at least 0"),
        (["--noise", "-0.1"], "--noise must be 0 or larger"),
        (["--noise", "nan"], "--noise must be 0 or larger"),
        (["--seed", "99999999999999999999"], "--seed must be at most 4294967295"),
        (["--num-envs", "1000000000"], "--num-envs must be at most 100000"),
        (["--image-size", "96"], "--image-size has no effect without --cameras; leave it out"),
        (["--points", "96"], "--points has no effect without --point-clouds"),
        (["--images", "png"], "--images has no effect without images (add --cameras)"),
        (["--stochastic"], "--stochastic has no effect on experts and random actions"),
        (["--image-size", "100000", "--cameras", "front"], "--image-size must be at most 4096"),
        (["--episodes", "many"], "many"),
        (["--episods", "3"], "--episodes"),
        (["--cameras", "nowhere"], "nowhere"),
        (["--reward", "dens"], "sparse"),
        (["--backend", "mujoko"], "mujoco"),
    ],
)
def test_bad_options_are_refused_in_one_line(
    options: list[str], message: str, tmp_path: Path, refused: Callable[..., str]
) -> None:
    assert message in refused("collect", TASK, "--out", tmp_path / "set", *options)
    assert list(tmp_path.iterdir()) == []


def test_unknown_task_suggests_the_nearest(tmp_path: Path, refused: Callable[..., str]) -> None:
    assert "manipulation/lift" in refused("collect", "manipulation/lif", "--out", tmp_path / "set")


def test_task_without_expert_is_refused(tmp_path: Path, refused: Callable[..., str]) -> None:
    assert "no scripted expert" in refused("collect", "gymnasium/Pendulum-v1", "--out", tmp_path / "set")


def test_existing_folder_needs_overwrite(tmp_path: Path, refused: Callable[..., str]) -> None:
    out = tmp_path / "set"
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    assert "not a dataset" in refused("collect", TASK, "--out", out)
    assert "not a dataset" in refused("collect", TASK, "--out", out, "--overwrite")
    assert (out / "notes.txt").read_text() == "mine"
    words = ["collect", "toy/point_mass", "--episodes", "1", "--out", str(tmp_path / "other")]
    for seed, overwrite in (("0", []), ("7", ["--overwrite"])):
        assert main([*words, "--seed", seed, *overwrite]) == 0
        assert read_lerobot(tmp_path / "other").seeds.tolist() == [int(seed)]
    assert "exists already; choose another folder, or pass --overwrite" in refused(*words)


def test_unwritable_folder_is_refused(tmp_path: Path, refused: Callable[..., str]) -> None:
    (tmp_path / "file").write_text("")
    assert "Cannot write" in refused("collect", TASK, "--episodes", "1", "--out", tmp_path / "file" / "set")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_collection_leaves_no_files(number: signal.Signals, tmp_path: Path) -> None:
    arguments = ["collect", "toy/point_mass", "--episodes", "1000000", "--out", str(tmp_path / "set")]
    process = subprocess.Popen(
        [sys.executable, "-m", "robopolicy", *arguments],
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # background shell jobs ignore SIGINT
    )
    deadline = time.monotonic() + 50
    while not list(tmp_path.iterdir()) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(number)
    _, printed = process.communicate(timeout=60)
    assert process.returncode == 128 + number, printed
    assert b"Traceback" not in printed and list(tmp_path.iterdir()) == []


def test_recorded_episodes_match_evaluated_episodes(tmp_path: Path) -> None:
    torch.manual_seed(0)
    spec = PolicySpec({"state": (11,)}, 3, horizon=4, action_horizon=3, obs_horizon=2)
    policy = GaussianPolicy(GaussianConfig(hidden=(16,), normalization="identity"), spec)
    sim = make_sim("locomotion/hopper", SimOptions(num_envs=4))
    obs = {key: value.unsqueeze(1).repeat(1, 2, 1) for key, value in sim.reset(5).items()}
    save_checkpoint(tmp_path / "ckpt", policy, task="locomotion/hopper", obs_sample=obs)
    out = tmp_path / "data"
    command = ["collect", "hopper", "--policy", str(tmp_path / "ckpt"), "--episodes", "4", "--seed", "5"]
    assert main([*command, "--out", str(tmp_path / "no")]) == 2  # the task defines no success
    assert main([*command, "--keep-failures", "--num-envs", "3", "--out", str(out)]) == 0
    recorded = read_lerobot(out)
    evaluated = evaluate(policy, sim, episodes=4, seed=5)
    sim.close()
    returns = [float(recorded.episode(i).arrays["reward"].sum()) for i in range(4)]
    assert returns == pytest.approx(evaluated.returns.tolist(), rel=1e-5)
    assert recorded.lengths.tolist() == evaluated.lengths.tolist()


def test_videos_mix_behaviours_and_end_with_the_final_observation(tmp_path: Path) -> None:
    arguments = ["--cameras", "top", "--image-size", "16", "--images", "png", "--episodes", "5", "--num-envs", "2"]
    policies = ["--policies", "expert", "random+0.5", "--after-success", "0"]
    assert main(["collect", "toy/push", "--render", *policies, *arguments, "--out", str(tmp_path / "films")]) == 0
    films = read_lerobot(tmp_path / "films")
    assert films.behaviours == ("expert",) * 3 + ("random+0.5",) * 2
    assert films.seeds.tolist() == [0, 1, 2, 3, 4] and films.success[:3].all()
    last = films.ends[0] - 1
    block = films.arrays["block"]
    assert ((block[last] - [0.75, 0.0]) ** 2).sum() < 0.08**2 < ((block[last - 1] - [0.75, 0.0]) ** 2).sum()
    assert not films.arrays["success"][last] and films.arrays["success"][last - 1]
    steps = films.without_closing_frames()
    assert steps.lengths.tolist() == (films.lengths - 1).tolist() and "closing" not in steps.arrays
    assert steps.arrays["terminated"][steps.ends[:3] - 1].all()
    sim = make_sim("toy/push", SimOptions(num_envs=1))
    obs = sim.reset(3)  # replaying the recorded random actions gives the recorded states
    for frame in range(int(steps.starts[3]), int(steps.ends[3])):
        assert (obs["block"][0].numpy() == steps.arrays["block"][frame]).all()
        obs = sim.step(torch.from_numpy(steps.arrays["action"][frame : frame + 1])).final_obs


def test_a_replay_repeats_the_actions_of_the_first_policy_at_other_starts(tmp_path: Path) -> None:
    arguments = ["--cameras", "top", "--image-size", "16", "--images", "png", "--episodes", "6", "--num-envs", "2"]
    policies = ["--policies", "expert", "random", "replay"]
    assert main(["collect", "toy/push", "--render", *policies, *arguments, "--out", str(tmp_path / "films")]) == 0
    steps = read_lerobot(tmp_path / "films").without_closing_frames()
    assert steps.behaviours == ("expert",) * 2 + ("random",) * 2 + ("replay",) * 2
    stream = np.concatenate([steps.episode(index).arrays["action"] for index in (0, 1)])
    begin = {4: 0, 5: len(steps.episode(0))}  # seeds 4 and 5 select the first and the second episode
    for index, first in begin.items():
        replayed = steps.episode(index)
        assert not (replayed.arrays["block"][0] == steps.episode(index - 4).arrays["block"][0]).all()
        expected = stream[(first + np.arange(len(replayed))) % len(stream)]
        assert (replayed.arrays["action"] == expected).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--render"], "pass --cameras"),
        (["--render", "--cameras", "top", "--policies", "replay+0.1", "expert"], "name another policy first"),
        (["--render", "--cameras", "top", "--policies", "expert+x"], "POLICY[+]NOISE .*, got 'expert[+]x'"),
        (["--render", "--cameras", "top", "--policies", "expert", "expert"], "cannot be divided"),
        (["--render", "--cameras", "top", "--noise", "0.1"], "from --policies"),
        (["--policies", "random"], "requires --render"),
        (["--after-success", "5"], "no effect without --render"),
        (["--render", "--cameras", "top", "--after-success", "-1"], "--after-success must be"),
    ],
)
def test_invalid_video_options_are_refused(options, message, tmp_path, refused) -> None:
    import re

    error = refused("collect", "toy/push", *options, "--out", tmp_path / "films")
    assert re.search(message, error), error
