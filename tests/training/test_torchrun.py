"""Tests of runs under torchrun: one run is written, resumed exactly, and ended by the failure of a process."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from run_rules import SETTINGS
from safetensors.torch import load_file
from small_world import small_run

from robopolicy.errors import UserError
from robopolicy.training.compose import compose_config
from robopolicy.training.distributed import mean_metrics, state_of_process
from robopolicy.training.resume import pack_tree, unpack_tree

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
TRAIN = ["-m", "robopolicy", "train"]
PPO = [*SETTINGS, "algorithm=ppo", "algorithm.num_steps=8", "evaluation.episodes=2", "name=run"]
STOPPING = """
import os, signal, sys
from robopolicy.cli.main import main
from robopolicy.errors import UserError
from robopolicy.training.loop import Trainer

iterate = Trainer._iterate

def stop(trainer):
    if os.environ["RANK"] == "1" and trainer.update == 1:
        {action}
    iterate(trainer)

Trainer._iterate = stop
sys.exit(main(sys.argv[1:]))
"""


def environment() -> dict[str, str]:
    return {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}


def start(*words: str) -> subprocess.Popen[str]:
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([*TORCHRUN, *words], env=environment(), **pipes)


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "checkpoints/last/model.safetensors")


def test_metrics_are_weighted_by_the_episodes_of_the_processes():
    rows = [{"rollout/return": 1.0, "rollout/episodes": 3.0}, {}, {"rollout/return": 5.0, "rollout/episodes": 1.0}]
    assert mean_metrics(rows) == {"rollout/return": 2.0, "rollout/episodes": 4.0}
    assert mean_metrics([{"data/epoch": 1.0}, {"data/epoch": 1.0}]) == {"data/epoch": 1.0}


def test_trees_travel_as_bytes():
    tree = {"numbers": (1, 2.5, None), "tensor": torch.arange(3), 4: {"tree.json": torch.ones(2, dtype=torch.bool)}}
    found = unpack_tree(pack_tree(tree))
    assert found["numbers"] == (1, 2.5, None) and torch.equal(found["tensor"], tree["tensor"])
    assert torch.equal(found[4]["tree.json"], torch.ones(2, dtype=torch.bool))


def test_a_run_of_several_processes_is_not_resumed_by_one():
    with pytest.raises(UserError, match="saved by 2 processes; resume it with torchrun --nproc-per-node 2, not 1"):
        state_of_process({"processes": [{}, {}]})


@pytest.mark.slow
def test_torchrun_trains_one_run_that_the_first_process_writes(tmp_path: Path):
    run = start(*TRAIN, *PPO, f"out={tmp_path}")
    output, errors = run.communicate(timeout=120)
    assert run.returncode == 0, errors
    report = json.loads((tmp_path / "run/report.json").read_text())
    config = compose_config(PPO)
    assert report["env_steps"] == 2 * 8 * config.sim.num_envs * config.chunk.action_horizon
    assert report["final"]["n"] == 2 and (tmp_path / "run/checkpoints/last/manifest.json").exists()
    assert output.count("Done in") == 1


@pytest.mark.slow
def test_an_interrupted_run_of_two_processes_resumes_exactly(tmp_path: Path):
    words = [*PPO, "policy.normalization=running", "budget.updates=60", "logging.every=1", "evaluation.every=60"]
    for out in ("whole", "cut"):
        run = start(*TRAIN, *words, f"out={tmp_path / out}")
        metrics = tmp_path / out / "run/metrics.jsonl"
        while out == "cut" and not (metrics.exists() and metrics.read_text()):
            time.sleep(0.01)
        if out == "cut":
            run.send_signal(signal.SIGTERM)  # torchrun passes it on
        run.communicate(timeout=120)
    assert not (tmp_path / "cut/run/report.json").exists()
    run = start(*TRAIN, "--resume", str(tmp_path / "cut/run"))
    _, errors = run.communicate(timeout=120)
    assert run.returncode == 0, errors
    one, two = weights(tmp_path / "whole/run"), weights(tmp_path / "cut/run")
    assert all(torch.equal(value, two[key]) for key, value in one.items())
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [row["update"] for row in rows if "actor/loss" in row or "critic/loss" in row] == list(range(1, 61))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("action", "message"),
    [
        ("raise UserError('The simulator is broken.')", "robopolicy: error: The simulator is broken."),
        ("os.kill(os.getpid(), signal.SIGKILL)", "Another process of this run ended"),
    ],
    ids=["error", "killed"],
)
def test_a_failing_process_ends_the_run_with_one_line(tmp_path: Path, action: str, message: str):
    script = tmp_path / "stopping.py"
    script.write_text(STOPPING.format(action=action))
    run = start(str(script), "train", *PPO, f"out={tmp_path}")
    _, errors = run.communicate(timeout=120)
    ours = [line for line in errors.split("Root Cause")[0].splitlines() if line.startswith("robopolicy:")]
    assert run.returncode != 0 and len(ours) == 1 and message in ours[0]
    assert "Traceback" not in errors.split("torch/distributed/elastic")[0]  # torchrun prints its own afterwards


@pytest.mark.slow
def test_imitation_by_two_processes_equals_one_process(tmp_path: Path, demonstrations: Path):
    words = ["policy=gaussian", "algorithm=bc", f"dataset={demonstrations}", "budget.updates=30", "name=run"]
    words += ["algorithm.batch_size=64", "evaluation.episodes=0", "policy.hidden=[16]"]
    run = start(*TRAIN, *words, f"out={tmp_path / 'two'}")
    _, errors = run.communicate(timeout=120)
    assert run.returncode == 0, errors
    subprocess.run([sys.executable, *TRAIN, *words, f"out={tmp_path / 'one'}"], check=True, timeout=120)
    one, two = weights(tmp_path / "one/run"), weights(tmp_path / "two/run")
    torch.testing.assert_close(two, one, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_a_world_model_of_two_processes_equals_one_process(tmp_path: Path):
    """The autoencoder has no noise here; the dynamics have other noise in each process."""
    small_run(tmp_path)
    words = ["-m", "robopolicy", "worldmodel", "train", str(tmp_path / "films"), "--preset", "smoke", "--name", "run"]
    words += ["--override", "learner.autoencoder_updates=20", "learner.updates=5", "learner.latent_noise=0"]
    words += ["learner.batch_size=8", "learner.autoencoder_batch=8", "evaluation.windows=4", "evaluation.horizon=3"]
    run = start(*words, "--out", str(tmp_path / "two"))
    output, errors = run.communicate(timeout=200)
    assert run.returncode == 0 and output.count("Done in") == 1, errors
    subprocess.run([sys.executable, *words, "--out", str(tmp_path / "one")], check=True, timeout=200)
    one, two = weights(tmp_path / "one/run"), weights(tmp_path / "two/run")
    names = [key for key in one if key.startswith("autoencoder.")]
    assert names
    torch.testing.assert_close({key: two[key] for key in names}, {key: one[key] for key in names}, rtol=1e-3, atol=1e-5)
