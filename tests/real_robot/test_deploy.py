"""Tests of `robopolicy deploy`: a policy drives a simulated robot and gets the same score as in an evaluation."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scripted import NAMES, ScriptedLift

from robopolicy.cli import main as cli
from robopolicy.cli.commands import COMMANDS
from robopolicy.data.episodes import Episode, Episodes
from robopolicy.data.formats.lerobot import write_lerobot
from robopolicy.deploy.safety.filter import SafetyFilter
from robopolicy.evaluation.harness import evaluate
from robopolicy.interop.sources import CheckpointChunkPolicy
from robopolicy.policies.heads.gaussian import GaussianConfig, GaussianPolicy
from robopolicy.sim.registry import SimOptions, make_sim
from robopolicy.spec import PolicySpec, TaskMetadata
from robopolicy.training.checkpoint import save_checkpoint
from robopolicy_robots import cli as deploy_cli
from robopolicy_robots.filter_log import refilter
from robopolicy_robots.policy_source import PolicyRequirements, compatibility_errors, open_source
from robopolicy_robots.recorder import read
from robopolicy_robots.robot import load_robot
from robopolicy_robots.setup import task_setup
from robopolicy_robots.simulated.node import task_of

DOMAIN = 100 + os.getpid() % 100
FAST = ["--robot", "sim_panda", "--task", "manipulation/lift", "--policy", "scripted"]
FAST += ["--domain", str(DOMAIN), "--no-tui"]


@pytest.fixture(autouse=True)
def command(monkeypatch):
    """Register the deploy command, whose entry point is missing in older installations."""
    monkeypatch.setitem(COMMANDS._rows, "deploy", deploy_cli.COMMAND)


def run_deploy(monkeypatch, out: Path, *words: str, horizon: int = 8, action_horizon: int = 4) -> dict:
    source = CheckpointChunkPolicy(ScriptedLift(horizon, action_horizon))
    monkeypatch.setattr("robopolicy_robots.deployment.open_source", lambda name, device: source)
    assert cli.main(["deploy", *FAST, "--out", str(out), *words]) == 0
    return json.loads(out.read_text())


@pytest.mark.slow
def test_in_lockstep_every_episode_equals_an_evaluation(monkeypatch, tmp_path):
    pytest.importorskip("cyclonedds", reason="needs robopolicy[ros]")
    report = run_deploy(
        monkeypatch, tmp_path / "r.json", "--lockstep", "--rate", "20", "--episodes", "4", "--seed", "50"
    )
    sim = make_sim("manipulation/lift", SimOptions(num_envs=1))
    wanted = evaluate(ScriptedLift(8, 4), sim, episodes=4, seed=50, policy_batch=1)
    sim.close()
    assert [each["seed"] for each in report["episodes"]] == [50, 51, 52, 53]
    assert [each["success"] for each in report["episodes"]] == wanted.success.tolist()
    assert [each["steps"] for each in report["episodes"]] == wanted.lengths.tolist()
    assert report["interventions"] == {} and report["holds"] == 0
    assert report["success"] == wanted.success.mean() and report["low"] < report["success"]


def test_in_real_time_the_cube_is_lifted_and_refiltering_the_recording_changes_nothing(monkeypatch, tmp_path):
    """The loop runs at 50 Hz with 20 Hz actions in one process; a busy machine may delay an episode."""
    pytest.importorskip("mcap", reason="needs robopolicy[record]")
    path = tmp_path / "run.mcap"
    words = ("--transport", "loopback", "--episodes", "2", "--record", str(path))
    report = run_deploy(monkeypatch, tmp_path / "r.json", *words)
    assert report["n"] == 2 and report["success"] >= 0.5
    assert 19.0 < report["period_p50_ms"] < 25.0
    robot = load_robot("sim_panda")
    recording = list(read(path))
    ticks, other = refilter(recording, SafetyFilter(robot.limits, robot.filter_config))
    assert ticks >= report["ticks"] - 2 and other == []
    counts = {topic: sum(each.topic == topic for each in recording) for topic in {each.topic for each in recording}}
    assert min(counts[robot.state.topic], counts["/objects/cube/pose"], counts[robot.command.topic]) > 50
    sent = np.stack([each.message.points[0].positions for each in recording if each.topic == robot.command.topic])
    assert np.isfinite(sent).all() and robot.limits.inside(sent, 1e-9).all()


def test_a_dry_run_sends_nothing(monkeypatch, tmp_path):
    report = run_deploy(monkeypatch, tmp_path / "r.json", "--transport", "loopback", "--dry-run", "--seconds", "3")
    assert report["dry_run"] and report["n"] == 0 and report["ticks"] > 10
    (episode,) = report["episodes"]
    assert (
        episode["steps"] == 0 and report["success"] is None and not any(isinstance(v, list) for v in episode.values())
    )


def test_the_report_explains_every_kind_of_intervention(monkeypatch, tmp_path, capsys):
    words = ["--transport", "loopback", "--seconds", "2", "--ood-data", str(lift_data(tmp_path / "noise", len(NAMES)))]
    report = run_deploy(monkeypatch, tmp_path / "r.json", *words, "--ood-action", "refuse")
    lines = capsys.readouterr().out.splitlines()
    assert "support" in report["interventions"]
    assert report["intervention_meanings"].keys() == report["interventions"].keys()
    for kind, meaning in report["intervention_meanings"].items():
        assert meaning and f"  {kind}: {meaning}" in lines


def lift_data(folder: Path, columns: int) -> Path:
    """Write out-of-distribution noise as demonstrations whose states have `columns` numbers."""
    rng = np.random.default_rng(0)
    arrays = {
        "state": rng.normal(50.0, 1.0, size=(50, columns)).astype("f4"),
        "action": rng.normal(size=(50, 5)).astype("f4"),
    }
    write_lerobot(Episodes.from_list([Episode(arrays)], 0.05), folder)
    return folder


def test_actions_outside_the_support_of_a_dataset_hold_the_robot(monkeypatch, tmp_path, capsys):
    """A dataset of noise supports no action of a lift, so the robot is held."""
    data = lift_data(tmp_path / "noise", len(NAMES))
    words = ["--transport", "loopback", "--seconds", "2", "--ood-data", str(data), "--ood-action", "refuse"]
    report = run_deploy(monkeypatch, tmp_path / "r.json", *words)
    assert report["holds"] >= 1 and report["interventions"]["support"] >= 1
    source = CheckpointChunkPolicy(ScriptedLift(8, 4))
    monkeypatch.setattr("robopolicy_robots.deployment.open_source", lambda name, device: source)
    for folder, message in ((lift_data(tmp_path / "short", 3), "needs 8 numbers"), (tmp_path / "none", "No LeRobot")):
        assert cli.main(["deploy", *FAST, "--transport", "loopback", "--ood-data", str(folder)]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "words, message",
    [
        (["--robot", "sim_pand"], "Unknown robot 'sim_pand'. Did you mean 'sim_panda'?"),
        (["--task", "lft"], "Unknown task 'lft'"),
        (["--task", "drawr"], "Did you mean"),
        (["--task", "locomotion/hopper"], "joints"),
        (["--transport", "dsd"], "Unknown transport 'dsd'. Did you mean 'dds'?"),
        (["--task", "toy/point_mass"], "Task toy/point_mass cannot be deployed"),
        (["--episodes", "0"], "--episodes must be at least 1"),
        (["--seed", "-1"], "--seed must be at least 0, got -1"),
        (["--seed", "4294967296"], "--seed must be at most 4294967295"),
        (["--record", "run.mp4"], "--record must end in .mcap, got run.mp4"),
        (["--out", "report.html"], "--out must end in .json, got report.html"),
        (["--overwrite"], "--overwrite has no effect without --out or --record"),
        (["--ood-action", "slow"], "--ood-action has no effect without --ood-data"),
        (["--check", "--dry-run"], "--dry-run has no effect with --check, which does not move the robot"),
        (["--robot", "franka_panda", "--seed", "3"], "--seed has no effect on franka_panda, which is a real robot"),
        (["--rate", "-1"], "--rate must be a positive number"),
        (["--robot", "ur5e"], "The task moves the joints"),
        (["--robot", "franka_panda", "--lockstep"], "--lockstep is for simulated robots"),
        (["--robot", "franka_panda", "--transport", "loopback"], "connects only within this process"),
        (["--ood-action", "slw"], "Unknown response 'slw'. Did you mean 'slow'?"),
        (["--lockstep", "--dry-run"], "--dry-run cannot run in lockstep"),
        (["--lockstep", "--check"], "--check cannot run in lockstep"),
        (["--use-running-sim", "--transport", "loopback"], "where no robot runs yet"),
        (["--robot", "franka_panda", "--episodes", "3"], "--episodes is for simulated robots"),
        (["--robot", "franka_panda"], "under sources or cameras"),
        (["--domain", "233"], "domain must lie in [0, 232], got 233"),
        (["--chunk-blending", "rct"], "Unknown chunk blending 'rct'. Did you mean 'rtc'?"),
        (["--transport", "lerobot"], "LeRobot controls real robots"),
        (["--browser", "here"], "PORT or HOST:PORT"),
        (["--policy", "http://x"], "ws://HOST:PORT"),
        (["--policy", "ws://x:1", "--device", "cuda"], "--device has no effect with a policy server"),
        (["--policy", "nowhere"], "There is no policy nowhere: pass the folder of a bundle or a checkpoint"),
    ],
)
def test_wrong_arguments_are_one_line_and_exit_code_2(words, message, capsys):
    assert cli.main(["deploy", *FAST, *words]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("robopolicy: error: ") and captured.err.count("\n") == 1
    assert message in captured.err


def test_a_device_that_cannot_be_used_or_has_no_effect_is_refused_before_the_checks(tmp_path, capsys):
    policy = GaussianPolicy(GaussianConfig(normalization="identity"), PolicySpec({"state": (39,)}, 5))
    save_checkpoint(tmp_path / "c", policy, task="manipulation/lift", obs_sample={"state": torch.zeros(1, 1, 39)})
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "bundle.json").write_text("{}")
    for name, message in (("c", "Device 'cuda:99' cannot be used"), ("b", "no effect with a bundle, which runs on")):
        words = ["--policy", str(tmp_path / name), "--device", "cuda:99", "--check"]
        assert cli.main(["deploy", *FAST, *words]) == 2
        captured = capsys.readouterr()
        assert captured.out == "" and captured.err.count("\n") == 1 and message in captured.err


def test_a_policy_that_cannot_continue_chunks_is_refused_before_anything_starts(monkeypatch, capsys):
    monkeypatch.setattr(
        "robopolicy_robots.deployment.open_source", lambda name, device: CheckpointChunkPolicy(ScriptedLift())
    )
    for words in ([], ["--check"]):
        assert cli.main(["deploy", *FAST, "--chunk-blending", "rtc", *words]) == 2
        assert "--chunk-blending rtc needs a policy that continues a prefix" in capsys.readouterr().err


MISFITS = [
    ({"observation": {"state": (7,)}}, {}, "it expects 'state' of shape (7,), the task provides (39,)"),
    ({"observation": {"wrist": (7,)}}, {}, "it expects 'wrist' of shape (7,), the task provides nothing"),
    ({"action_dim": 7}, {}, "it has 7 actions and the task 5"),
    ({}, {"task": "manipulation/push"}, "it was trained on manipulation/push"),
    ({}, {"control_dt": 0.1}, "its actions last 100 ms, the task's 50 ms"),
    ({}, {"action_high": (2.0,) * 5}, "its actions have other bounds"),
    ({}, {"action_high": (1.0,)}, "its actions have other bounds"),
]


@pytest.mark.parametrize("spec, manifest, message", MISFITS)
def test_a_policy_for_another_task_is_refused_before_anything_starts(
    spec, manifest, message, monkeypatch, capsys, tmp_path
):
    source = CheckpointChunkPolicy(ScriptedLift())
    source.policy.spec = replace(source.policy.spec, **spec)
    known = {"task": "manipulation/lift", "control_dt": 0.05, "action_low": (-1.0,) * 5, "action_high": (1.0,) * 5}
    source.task_metadata = SimpleNamespace(**known | manifest)
    monkeypatch.setattr("robopolicy_robots.deployment.open_source", lambda name, device: source)
    out, recording = tmp_path / "deploy" / "report.json", tmp_path / "run.mcap"
    words = ["--transport", "loopback", "--out", str(out), "--record", str(recording)]
    assert cli.main(["deploy", *FAST, *words]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and f"does not fit manipulation/lift: {message}." in error
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("task", ["manipulation/push", "manipulation/lift"])
def test_a_checkpoint_knows_its_task(task, tmp_path):
    policy = GaussianPolicy(GaussianConfig(normalization="identity"), PolicySpec({"state": (39,)}, 5))
    save_checkpoint(tmp_path / "c", policy, task=task, obs_sample={"state": torch.zeros(1, 1, 39)})
    source = open_source(str(tmp_path / "c"))
    errors = compatibility_errors(source, task_setup("lift", task_of("lift"), load_robot("sim_panda")).requirements)
    assert errors == ([] if task == "manipulation/lift" else ["it was trained on manipulation/push"])


def test_a_randomized_task_of_training_is_the_task_without_randomization():
    source = CheckpointChunkPolicy(ScriptedLift(), task_metadata=TaskMetadata("velocity/go1_randomized"))
    needed = PolicyRequirements("velocity/go1", {"state": (39,)}, -np.ones(5), np.ones(5), 0.02)
    assert compatibility_errors(source, needed) == []
    assert compatibility_errors(source, replace(needed, task="manipulation/lift")) != []


@pytest.mark.parametrize("option", ["--out", "--record"])
def test_an_unwritable_output_path_is_reported_before_the_run(option, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(
        "robopolicy_robots.deployment.open_source", lambda name, device: CheckpointChunkPolicy(ScriptedLift())
    )
    (tmp_path / "file").write_text("")
    for place, reason in (
        (tmp_path, "Is a directory"),
        (tmp_path / "file" / "x", "a file exists where a folder is required"),
    ):
        assert cli.main(["deploy", *FAST, "--transport", "loopback", option, str(place)]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and f"Cannot write {place}: {reason}" in error


def test_help_shows_examples_without_heavy_imports(capsys):
    with pytest.raises(SystemExit):
        cli.main(["deploy", "--help"])
    assert "robopolicy deploy --robot sim_panda" in capsys.readouterr().out.split("examples:")[1]
    code = "import sys, robopolicy_robots.cli; assert not {'torch', 'mujoco', 'rich'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.slow
def test_wrong_node_arguments_are_reported_in_one_line():
    command = [sys.executable, "-m", "robopolicy_robots.simulated.node", "--robot", "nobody"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2 and done.stderr.startswith("simulated robot: error: Unknown robot 'nobody'")
    assert done.stderr.count("\n") == 1
