"""Tests of resume: a killed and resumed run ends bit-identical to an uninterrupted run."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import termios
from dataclasses import replace

import numpy as np
import pytest
import torch
from resumed_runs import assert_identical, kill_and_resume
from safetensors.torch import load_file

from robopolicy.cli.main import main
from robopolicy.errors import SimulatorFailed, UserError
from robopolicy.evaluation.intervals import paired_difference
from robopolicy.shutdown import Interrupted
from robopolicy.sim.contract import VectorSim
from robopolicy.training import guards
from robopolicy.training.compose import compose_config, config_text
from robopolicy.training.loggers import JsonlLogger, read_jsonl
from robopolicy.training.loop import Trainer
from robopolicy.training.manifest import read_manifest
from robopolicy.training.resume import check_resume_point
from robopolicy.training.runs import resume_run, start_run
from robopolicy_tasks.toy.point_mass import PointMassSim

COMMON = ["task=point_mass", "evaluation.episodes=10", "evaluation.every=4", "checkpoint_every=3", "logging.every=1"]
CHUNKS = ["chunk.horizon=4", "chunk.action_horizon=2"]
BC = [*COMMON, "policy.hidden=[32]", "algorithm.batch_size=64"]
REINFLOW = [*COMMON, "algorithm=reinflow", "sim.num_envs=8", "algorithm.num_steps=10", "algorithm.epochs=1"]
PPO = [*COMMON, "algorithm=ppo", "policy=gaussian", "task.reward=shaped", "sim.num_envs=4", "algorithm.num_steps=16"]
PPO += CHUNKS

MUJOCO = ["algorithm=ppo", "policy=gaussian", "sim.num_envs=4", "algorithm.num_steps=16", "evaluation.episodes=0"]
CHEETAH = [*MUJOCO, "task=half_cheetah", "checkpoint_every=3", "logging.every=1"]
LIFT = [*MUJOCO, *CHUNKS, "task=lift", "sim.backend=mujoco-exact", "checkpoint_every=3", "logging.every=1"]
WARP = pytest.param([*CHEETAH, "sim.backend=warp"], marks=pytest.mark.slow)


@pytest.mark.slow
@pytest.mark.parametrize("state", [{}, {"update": 1}, {"update": "x", "best": None}, {"update": -1, "best": None}])
def test_an_incomplete_resume_point_is_refused(state, tmp_path):
    with pytest.raises(UserError, match="its training state is incomplete"):
        check_resume_point(state, tmp_path, "best")


def test_killed_imitation_resumes_bit_identically(demonstrations, tmp_path):
    settings = [*BC, f"dataset={demonstrations}", "budget.updates=60"]
    assert main(["train", *settings, f"out={tmp_path}", "name=whole"]) == 0
    assert_identical(tmp_path / "whole", kill_and_resume(settings, tmp_path))


@pytest.mark.slow
def test_killed_fine_tuning_resumes_bit_identically(clone, tmp_path):
    settings = [*REINFLOW, f"init_from={clone}/checkpoints/last", "budget.updates=14"]
    assert main(["train", *settings, f"out={tmp_path}", "name=whole"]) == 0
    run = kill_and_resume(settings, tmp_path)
    assert_identical(tmp_path / "whole", run)
    report = json.loads((run / "report.json").read_text())
    assert report["base"]["n"] == 10
    assert report["env_steps"] == json.loads((tmp_path / "whole" / "report.json").read_text())["env_steps"]


@pytest.mark.parametrize("task", [PPO, CHEETAH, LIFT, WARP], ids=["point_mass", "half_cheetah", "lift", "warp"])
def test_interrupt_saves_a_resume_point_and_ends_with_130(task, tmp_path, monkeypatch, capsys):
    settings = [*task, "budget.updates=4", f"out={tmp_path}"]
    handler = signal.getsignal(signal.SIGINT)  # background jobs of a shell ignore it
    assert main(["train", *settings, "name=whole"]) == 0
    log = JsonlLogger.log

    def interrupt(self, update, row):
        if update == 2:
            os.kill(os.getpid(), signal.SIGINT)
        log(self, update, row)

    with monkeypatch.context() as patch:
        patch.setattr(JsonlLogger, "log", interrupt)
        assert main(["train", *settings, "name=stopped"]) == 130
    assert f"--resume {tmp_path}/stopped" in capsys.readouterr().out
    assert signal.getsignal(signal.SIGINT) is handler
    assert main(["train", "--resume", str(tmp_path / "stopped")]) == 0
    assert_identical(tmp_path / "whole", tmp_path / "stopped")
    rows = [read_jsonl(tmp_path / name / "metrics.jsonl") for name in ("whole", "stopped")]
    assert [row["update"] for row in rows[0]] == [row["update"] for row in rows[1]]
    losses = [[row["actor/approx_kl"] for row in run if "actor/approx_kl" in row] for run in rows]
    assert losses[0] == losses[1]


def test_resumed_run_restores_the_best_of_its_resume_point(tmp_path, monkeypatch):
    scores = {2: 0.5, 4: 0.6, 6: 0.1, 8: 0.9, 10: 0.85, 12: 0.88}  # update 8 is after the resume point

    monkeypatch.setattr(Trainer, "_evaluate_policy", lambda trainer, _: evaluation(scores[trainer.update]))
    shape = ["task=point_mass", "task.reward=shaped", "policy=gaussian", "policy.hidden=[8]", "algorithm=ppo"]
    sizes = ["algorithm.critic.hidden=[8]", "sim.num_envs=2", "algorithm.num_steps=7", f"out={tmp_path}"]
    pace = ["budget.updates=12", "evaluation.every=2", "checkpoint_every=5"]
    straight = start_run(compose_config([*shape, *sizes, *pace, "name=straight"]))
    straight.train()
    killed = start_run(compose_config([*shape, *sizes, *pace, "name=killed"]))
    while killed.update < 9:
        killed._iterate()
    killed.close()
    aside = killed.folder / "checkpoints" / "best.before"
    assert read_manifest(aside).training["update"] == 4
    resume_run(killed.folder).train()
    assert_identical(straight.folder, killed.folder)
    assert not aside.exists() and not (straight.folder / "checkpoints" / "best.before").exists()


@pytest.mark.slow
def test_a_run_whose_terminal_is_closed_saves_a_resume_point(tmp_path):
    settings = [*PPO, "evaluation.episodes=0", "budget.updates=2000", "checkpoint_every=2000"]
    master, terminal = os.openpty()
    command = [sys.executable, "-m", "robopolicy", "train", *settings, f"out={tmp_path}", "name=left"]
    process = subprocess.Popen(
        command, stdin=terminal, stdout=terminal, stderr=terminal, preexec_fn=lambda: own_terminal(terminal)
    )
    os.close(terminal)
    seen = b""
    while b"steps" not in seen:  # after an update
        seen += os.read(master, 1024)
    os.close(master)  # the kernel sends SIGHUP
    assert process.wait(60) == 128 + signal.SIGHUP
    assert (tmp_path / "left" / "checkpoints" / "last" / "manifest.json").exists()


def own_terminal(terminal: int) -> None:
    """Makes `terminal` the controlling terminal of this process, as a login does."""
    os.setsid()
    fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)


GROUPS = ["task=point_mass", "algorithm=flow_grpo", "sim.num_envs=8", "algorithm.group_size=4", "algorithm.epochs=1"]


@pytest.mark.parametrize("kind", ["rollout", "group"])
def test_unreported_episodes_are_counted_after_a_resume(kind, clone, tmp_path, monkeypatch):
    settings = PPO if kind == "rollout" else [*GROUPS, f"init_from={clone}/checkpoints/last"]
    settings = [*settings, "evaluation.episodes=0", "logging.every=2", "checkpoint_every=3", "budget.updates=4"]
    whole = start_run(compose_config([*settings, f"out={tmp_path}", "name=whole"]))
    whole.train()
    stopped = start_run(compose_config([*settings, f"out={tmp_path}", "name=stopped"]))
    update = stopped.algorithm.update

    def interrupted_in_the_third(batch):
        stopped._signal = signal.SIGINT if stopped.update == 2 else None
        return update(batch)

    monkeypatch.setattr(stopped.algorithm, "update", interrupted_in_the_third)
    with pytest.raises(Interrupted):
        stopped.train()
    resume_run(tmp_path / "stopped").train()
    rows = [read_jsonl(tmp_path / name / "metrics.jsonl")[-1] for name in ("whole", "stopped")]
    counted = [{key: value for key, value in row.items() if key.startswith("rollout/")} for row in rows]
    assert counted[0] == counted[1] and counted[0]["rollout/episodes"] > 0


def test_run_with_a_changed_configuration_is_not_resumed(tmp_path, monkeypatch):
    trainer = start_run(compose_config([*PPO, "budget.updates=4", f"out={tmp_path}", "name=run"]))
    trainer.total = 3
    monkeypatch.setattr(trainer, "_finish", dict)
    trainer.train()
    config = tmp_path / "run" / "config.yaml"
    critic = compose_config([*PPO, "algorithm.critic.hidden=[8]"])
    text = config_text(replace(critic, out=str(tmp_path), name="run"))
    config.write_text(text)
    with pytest.raises(UserError, match=r"does not fit .*config.yaml; revert the changes of .*: .*hidden was .*\[8"):
        resume_run(tmp_path / "run")


def test_resume_refuses_a_changed_num_envs_and_invalid_settings(tmp_path, monkeypatch):
    trainer = start_run(compose_config([*PPO, "budget.updates=4", f"out={tmp_path}", "name=run"]))
    trainer.total = 3
    monkeypatch.setattr(trainer, "_finish", dict)
    trainer.train()
    config = tmp_path / "run" / "config.yaml"
    text = config.read_text()
    for count, message in (
        (8, r"does not fit .*: sim\.num_envs was 4, is 8\."),
        (0, r"num_envs must be at least 1, got 0"),
    ):
        config.write_text(text.replace("num_envs: 4", f"num_envs: {count}"))
        with pytest.raises(UserError, match=message):
            resume_run(tmp_path / "run")


def test_run_killed_before_its_first_resume_point_restarts_with_a_message(tmp_path, capsys):
    settings = [*PPO, "budget.updates=2", f"out={tmp_path}"]
    start_run(compose_config([*settings, "name=dead"])).close()
    assert main(["train", "--resume", str(tmp_path / "dead")]) == 0
    assert "checkpoints/last does not exist, so the run restarts" in capsys.readouterr().out
    assert main(["train", *settings, "name=whole"]) == 0
    assert_identical(tmp_path / "whole", tmp_path / "dead")


def test_backends_without_saved_state_resume_with_fresh_episodes(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(PointMassSim, "state_dict", VectorSim.state_dict)
    trainer = start_run(compose_config([*PPO, "budget.updates=4", f"out={tmp_path}", "name=run"]))
    trainer.total = 3
    monkeypatch.setattr(trainer, "_finish", dict)
    trainer.train()
    last_seed, steps = _episode_seeds(trainer).max(), trainer.source.env_steps
    resumed = resume_run(tmp_path / "run")
    assert "starts new episodes" in capsys.readouterr().out
    assert resumed.source.env_steps == steps > 0
    assert _episode_seeds(resumed).min() > last_seed
    assert resumed.train()["env_steps"] > steps


def test_seeds_determine_the_result(tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        assert main(["train", *PPO, "budget.updates=2", f"out={tmp_path}", f"name={name}", f"seed={seed}"]) == 0
    assert_identical(tmp_path / "a", tmp_path / "b")
    weights = [load_file(tmp_path / name / "checkpoints/last/model.safetensors") for name in "ac"]
    assert any(not torch.equal(value, weights[1][key]) for key, value in weights[0].items())


def test_finished_runs_and_other_folders_are_not_resumed(clone, tmp_path):
    with pytest.raises(UserError, match="has ended; start a new one with init_from="):
        resume_run(clone)
    with pytest.raises(UserError, match="is not a run"):
        resume_run(tmp_path)


def test_a_run_is_trained_by_one_process_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr(Trainer, "_evaluate_policy", lambda trainer, _: evaluation(trainer.update / 10))
    pace = ["evaluation.every=2", "checkpoint_every=3", "budget.updates=8"]
    trainer = start_run(compose_config([*PPO, *pace, f"out={tmp_path}", "name=run"]))
    while trainer.update < 4:  # the best checkpoint is newer than the resume point
        trainer._iterate()
    with pytest.raises(UserError, match="Another process is training run"):
        resume_run(trainer.folder)
    assert read_manifest(trainer.folder / "checkpoints" / "best").training["update"] == 4
    trainer.close()
    resume_run(trainer.folder).close()


def test_an_evaluation_that_fails_is_repeated_after_a_resume(tmp_path, monkeypatch):
    def fail(*_):
        raise SimulatorFailed("An environment failed.")

    settings = [*PPO, "evaluation.every=2", "budget.updates=2", f"out={tmp_path}", "name=run"]
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_evaluate_policy", fail)
        with pytest.raises(SimulatorFailed, match="--resume"):
            start_run(compose_config(settings)).train()
    report = resume_run(tmp_path / "run").train()
    assert report["final"]["n"] == 10 and report["best"]["update"] == 2
    assert (tmp_path / "run" / "checkpoints" / "best").exists()


def test_a_run_killed_after_its_base_replaced_the_best_compares_them_again(clone, tmp_path, monkeypatch):
    worse = paired_difference(np.ones(20), np.zeros(20))
    monkeypatch.setattr(guards, "compare_with_base", lambda *_, **__: worse)
    monkeypatch.setattr(Trainer, "_evaluate_policy", lambda trainer, _: evaluation(0.1 + trainer.update / 10))
    settings = [*REINFLOW, f"init_from={clone}/checkpoints/last", "budget.updates=2", "evaluation.every=1"]
    trainer = start_run(compose_config([*settings, "checkpoint_every=1", f"out={tmp_path}", "name=run"]))
    while trainer.update < 2:
        trainer._iterate()
    trainer.base = evaluation(0.1)
    trainer._save_last()
    best = tmp_path / "run" / "checkpoints" / "best"
    tuned = load_file(best / "model.safetensors")
    assert trainer._compare_with_base() and read_manifest(best).training["update"] == 0
    trainer.close()  # killed before it writes its report
    again = resume_run(tmp_path / "run")
    restored = load_file(best / "model.safetensors")
    assert all(torch.equal(tuned[key], restored[key]) for key in tuned)
    again.base = evaluation(0.1)
    assert again.train()["reverted_to_base"]


def evaluation(score):
    """Summary of an evaluation of 100 episodes."""
    bounds = {"low": score - 0.05, "high": score + 0.05, "return_low": score - 0.05, "return_high": score + 0.05}
    return {"success": score, "return_mean": score, "n": 100, **bounds}


def _episode_seeds(trainer):
    return trainer.source.sim.sim.episode_seed
