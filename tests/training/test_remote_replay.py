"""Tests of replay runs with environments in worker processes: equal data, exact resume, stale weights, failures."""

import importlib.util
from pathlib import Path

import pytest
import torch
from in_process import InProcessHandle
from replay_runs import COMMON, assert_interruption_changes_nothing, assert_refused, trainer
from safetensors.torch import load_file

from robopolicy.errors import UserError
from robopolicy.training.loggers import read_jsonl
from robopolicy.training.parallel import WORKER_HANDLES
from robopolicy.training.remote_replay import SimWorker

SAC_RUN = [*COMMON, "algorithm=sac", "sim.num_workers=2", "logging.every=1"]


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "checkpoints/last/model.safetensors")


def assert_same_weights(one: Path, two: Path) -> None:
    found, expected = weights(one), weights(two)
    assert found.keys() == expected.keys() and all(torch.equal(found[key], expected[key]) for key in found)


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(WORKER_HANDLES, "process", InProcessHandle)


def test_workers_fill_the_lanes_of_their_environments(in_process: None, tmp_path: Path):
    run = trainer(tmp_path, *SAC_RUN, "budget.updates=3", "algorithm.utd=2")
    run.train()
    sampler = run.source.sampler
    assert len(sampler.replay) >= sampler.env_steps == run.source.env_steps > 100
    # Two environments of each worker: episodes start at the seeds 1,000,000 and 11,000,000.
    states = sampler.replay.state_dict()
    assert int(states["filled"].min()) >= 100 // 4 and len(states["filled"]) == 4
    first = [states["arrays"]["obs.state"][lane, 0] for lane in range(4)]
    assert not any(torch.equal(first[0], other) for other in first[1:])


@pytest.mark.parametrize(("every", "ages"), [(1, [0, 1, 1, 1, 1]), (3, [0, 1, 2, 3, 1])])
def test_the_age_of_the_weights_is_logged(in_process: None, tmp_path: Path, every: int, ages: list[int]):
    trainer(tmp_path, *SAC_RUN, "budget.updates=5", f"sim.weights_every={every}").train()
    rows = read_jsonl(tmp_path / "run/metrics.jsonl")
    assert [row["rollout/staleness"] for row in rows if "rollout/staleness" in row] == ages


@pytest.mark.parametrize("every", [1, 3])
def test_an_interrupted_run_with_workers_resumes_exactly(
    in_process: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: int
):
    assert_interruption_changes_nothing([*SAC_RUN, f"sim.weights_every={every}"], tmp_path, monkeypatch)


def test_a_run_interrupted_before_its_workers_have_weights_resumes_exactly(
    in_process: None, demonstrations: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    settings = [f"dataset={demonstrations}", "replay.offline_updates=6", "task.reward=sparse"]
    assert_interruption_changes_nothing([*SAC_RUN, *settings], tmp_path, monkeypatch)


def test_processes_return_the_same_data_as_workers_in_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    trainer(tmp_path / "processes", *SAC_RUN, "budget.updates=4").train()
    monkeypatch.setitem(WORKER_HANDLES, "process", InProcessHandle)
    trainer(tmp_path / "here", *SAC_RUN, "budget.updates=4").train()
    assert_same_weights(tmp_path / "processes/run", tmp_path / "here/run")


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed")
def test_ray_actors_return_the_same_data_as_workers_in_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    trainer(tmp_path / "ray", *SAC_RUN, "budget.updates=4", "sim.worker_backend=ray").train()
    monkeypatch.setitem(WORKER_HANDLES, "process", InProcessHandle)
    trainer(tmp_path / "here", *SAC_RUN, "budget.updates=4").train()
    assert_same_weights(tmp_path / "ray/run", tmp_path / "here/run")


def test_a_failing_worker_ends_the_run_with_one_line(in_process: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def fail(self: SimWorker, *arguments: object):
        raise RuntimeError("Traceback ...\nValueError: The robot is upside down.")

    run = trainer(tmp_path, *SAC_RUN, "budget.updates=4")
    monkeypatch.setattr(SimWorker, "collect", fail)
    with pytest.raises(UserError, match=r"^A simulation worker failed: ValueError: The robot is upside down\.$"):
        run.train()


def test_a_worker_that_ends_is_reported(tmp_path: Path):
    run = trainer(tmp_path, *SAC_RUN, "budget.updates=4")
    run.source.sampler.workers[1]._process.kill()
    with pytest.raises(UserError, match="A simulation worker failed: The process of a worker has ended"):
        run.train()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["algorithm=sac", "sim.num_workers=3"], "sim.num_envs=4 is not divisible by sim.num_workers=3"),
        (["algorithm=sac", "sim.worker_backend=rai"], "Unknown backend 'rai' in sim.worker_backend"),
        (["algorithm=ppo", "policy=gaussian", "sim.num_workers=2"], "for algorithms that learn from replay"),
    ],
)
def test_unsupported_settings_of_workers_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], settings: list[str], message: str
):
    assert_refused([*COMMON, "budget.updates=2", *settings], message, tmp_path, capsys)
