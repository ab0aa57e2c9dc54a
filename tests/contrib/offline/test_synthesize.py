"""Tests of `robopolicy synthesize`: train and resume a trajectory model, and write datasets for offline learners."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from robopolicy.cli.main import main
from robopolicy.contrib.offline.trajectory_training import TrajectoryTrainConfig, load_trajectories, start_trajectories
from robopolicy.data.formats.lerobot import read_lerobot
from robopolicy.training.model_runs import with_settings

TASK = "toy/point_mass"
TINY = [
    "updates=6",
    "learner.batch_size=16",
    "model.length=8",
    "model.head.backbone=mlp",
    "model.head.hidden=[16]",
    "model.head.steps=3",
    "evaluation.segments=8",
    "checkpoint_every=3",
    "logging.every=1",
]
LEARN = ["evaluation.episodes=0", "budget.updates=2", "replay.offline_updates=2", "algorithm.batch_size=8"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset, a briefly trained trajectory model, and a policy trained offline."""
    out = tmp_path_factory.mktemp("synthesize")
    collect = ["--episodes", "6", "--num-envs", "6", "--noise", "0.3", "--keep-failures", "--out", str(out / "data")]
    assert main(["collect", TASK, *collect]) == 0
    train = ["synthesize", "train", str(out / "data"), "--out", str(out), "--name", "run", "--override", *TINY]
    assert main(train) == 0
    td3 = ["algorithm=iql", "policy=gaussian", "policy.hidden=[8]", "algorithm.critic.hidden=[8]", *LEARN]
    assert main(["train", *td3, f"dataset={out / 'data'}", f"out={out}", "name=iql"]) == 0
    return out


def test_synthetic_episodes_form_a_dataset_for_offline_training(folder, capsys):
    model, policy = str(folder / "run/checkpoints/best"), str(folder / "iql/checkpoints/last")
    guided = [
        "--policy",
        policy,
        "--episodes",
        "5",
        "--append-dataset",
        str(folder / "data"),
        "--out",
        str(folder / "guided"),
    ]
    assert main(["synthesize", "write", model, *guided, "--json"]) == 0
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert summary["episodes"] == 5 and summary["kept"] == 6 and summary["distance"] > 0
    real, written = read_lerobot(folder / "data"), read_lerobot(folder / "guided")
    assert written.num_episodes == 11 and written.control_dt == real.control_dt
    assert written.tasks == (TASK,) * 11 and list(written.names) == [key for key in real.names if key in written.arrays]
    low, high = real.arrays["action"].min(0), real.arrays["action"].max(0)
    synthetic = written.subset(range(5)).arrays["action"]
    assert (synthetic >= low - 1e-6).all() and (synthetic <= high + 1e-6).all()
    again = ["algorithm=iql", "policy=gaussian", "policy.hidden=[8]", "algorithm.critic.hidden=[8]", *LEARN]
    assert main(["train", *again, f"dataset={folder / 'guided'}", f"out={folder}", "name=again"]) == 0


def test_output_is_reproducible_by_seed_and_strength_0_ignores_the_policy(folder, capsys):
    model, policy = str(folder / "run/checkpoints/last"), str(folder / "iql/checkpoints/last")
    for name, options in (("a", []), ("b", []), ("c", ["--policy", policy, "--guidance-scale", "0"])):
        assert main(["synthesize", "write", model, "--episodes", "2", *options, "--out", str(folder / name)]) == 0
    found = [read_lerobot(folder / name).arrays["action"] for name in "abc"]
    assert (found[0] == found[1]).all() and (found[0] == found[2]).all()
    assert "standard deviations" in capsys.readouterr().out


def test_an_interrupted_run_resumes_bit_identically(folder):
    config = TrajectoryTrainConfig(dataset=str(folder / "data"), out=str(folder), name="broken")
    broken = start_trajectories(with_settings(config, TINY))
    while broken.update <= 3:
        broken._iterate()
    broken.close()
    assert main(["synthesize", "train", "--resume", str(folder / "broken")]) == 0
    whole, again = (load_trajectories(folder / name / "checkpoints/last")[0] for name in ("run", "broken"))
    weights = again.state_dict()
    assert all(torch.equal(value, weights[key]) for key, value in whole.state_dict().items())


def test_bad_input_is_refused_in_one_line(folder, tmp_path, refused):
    model, policy = str(folder / "run/checkpoints/best"), str(folder / "iql/checkpoints/last")
    out = ["--out", str(tmp_path / "no")]
    assert "contains a policy, not a trajectory model" in refused("synthesize", "write", policy, *out)
    assert "strength must not be negative" in refused("synthesize", "write", model, "--guidance-scale", "-1", *out)
    assert "--episodes must be at least 1" in refused("synthesize", "write", model, "--episodes", "0", *out)
    assert "--std has no effect without --policy" in refused("synthesize", "write", model, "--std", "1", *out)
    assert "--seed has no effect with --resume" in refused("synthesize", "train", "--resume", folder, "--seed", "1")
    assert "No dataset is given" in refused("synthesize", "train")
    assert "keeps its settings" in refused("synthesize", "train", "x", "--resume", folder)
    long = ["synthesize", "train", str(folder / "data"), *out, "--override", "model.length=100000"]
    assert "set model.length=" in refused(*long)
    train = ["synthesize", "train", str(folder / "data"), *out, "--override"]
    assert "Unknown setting 'model.lenght'. Did you mean 'model.length'" in refused(*train, "model.lenght=8")
    assert "Unknown setting 'modl.head'" in refused(*train, "modl.head=8")
    assert "Write a setting as KEY=VALUE, got 'updates'" in refused(*train, "updates")
    damaged = tmp_path / "damaged"
    shutil.copytree(model, damaged)
    file = damaged / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    assert "corrupted or truncated" in refused("synthesize", "write", damaged, *out)
    assert "trajectory model, not a policy" in refused("eval", model, *out)
