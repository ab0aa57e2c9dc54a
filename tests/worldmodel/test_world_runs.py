"""Tests of world-model training runs: exact resume, strict checkpoints, and (slow) a model that follows its actions."""

import json
from dataclasses import replace

import pytest
import torch
from films import push_films
from small_world import small_run

from robopolicy.data.formats.lerobot import write_lerobot
from robopolicy.errors import UserError
from robopolicy.training.checkpoint import load_policy
from robopolicy.training.model_runs import WorldEvaluationConfig, WorldTrainConfig, preset, resume_world, start_world
from robopolicy.training.world_sims import load_world
from robopolicy.worldmodel.learner import LearnerConfig


def weights(folder):
    """Returns the weights and statistics of a checkpoint."""
    return load_world(folder)[0].state_dict()


@pytest.mark.parametrize("stop", [4, 8])  # a resume point in the autoencoder's stage, and one in the denoiser's
def test_interrupted_run_resumes_bit_identically(tmp_path, stop):
    config = small_run(tmp_path / "whole")
    start_world(config).train()
    broken = start_world(replace(config, out=str(tmp_path / "broken")))
    while broken.update <= stop:
        broken._iterate()
    broken.close()
    resumed = resume_world(tmp_path / "broken" / "run")
    assert resumed.update == stop
    resumed.train()
    whole, again = (weights(tmp_path / name / "run" / "checkpoints" / "last") for name in ("whole", "broken"))
    assert all(torch.equal(value, again[key]) for key, value in whole.items())
    rows = [(tmp_path / name / "run" / "metrics.jsonl").read_text().splitlines() for name in ("whole", "broken")]
    assert [json.loads(row) for row in rows[0]] == [json.loads(row) for row in rows[1]]


def test_checkpoint_records_the_gate_and_loads_strictly(tmp_path):
    start_world(small_run(tmp_path)).train()
    folder = tmp_path / "run" / "checkpoints" / "last"
    _, manifest = load_world(folder)
    assert manifest.task == "toy/push" and manifest.ends_on_success
    assert not manifest.gate["passed"]
    with pytest.raises(UserError, match="must not evaluate policies: It ignores actions"):
        manifest.require(folder)
    with pytest.raises(UserError, match="was not tested; train it to the end: worldmodel train --resume RUN"):
        replace(manifest, gate={}).require(folder)
    with pytest.raises(UserError, match="contains a world model, not a policy"):
        load_policy(folder)
    model = folder / "model.safetensors"
    model.write_bytes(model.read_bytes()[:-8])
    with pytest.raises(UserError, match="corrupted or truncated"):
        load_world(folder)


def test_invalid_runs_are_refused(tmp_path):
    config = small_run(tmp_path)
    with pytest.raises(UserError, match="No videos are given"):
        start_world(replace(config, dataset=""))
    with pytest.raises(UserError, match=r"plain folder name, got '\.\./elsewhere'"):
        start_world(replace(config, name="../elsewhere"))
    with pytest.raises(UserError, match="Unknown preset 'tini'"):
        preset("tini")
    with pytest.raises(UserError, match="Unknown behaviour 'nobody'"):
        start_world(replace(config, held_out=("nobody",)))
    with pytest.raises(UserError, match="is not a run"):
        resume_world(tmp_path / "nothing")


@pytest.mark.slow
def test_briefly_trained_world_model_passes_the_action_following_gate(tmp_path):
    write_lerobot(push_films(64, size=32), tmp_path / "films", video=False)
    learner = LearnerConfig(
        autoencoder_updates=800,
        updates=1200,
        batch_size=32,
        autoencoder_batch=8,
        autoencoder_lr=6e-3,
        lr=3e-3,
        history_noise=0.05,
    )
    config = WorldTrainConfig(
        dataset=str(tmp_path / "films"),
        model=preset("smoke"),
        learner=learner,
        evaluation=WorldEvaluationConfig(every=2000, windows=32, horizon=10),
        out=str(tmp_path),
        name="run",
    )
    report = start_world(config).train()
    gate = load_world(tmp_path / "run" / "checkpoints" / "best")[1].gate
    assert gate["passed"], gate
    assert report["final"]["psnr"]["true"]["1"] > 25
