"""Tests of fine-tuning runs on denoising chains: from a clone, from their own checkpoint, and after an interrupt."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from robopolicy.cli.main import main
from robopolicy.training.loop import Trainer
from robopolicy.training.runs import resume_run

COMMON = ["evaluation.episodes=4", "sim.num_envs=8", "algorithm.epochs=1", "logging.every=1", "checkpoint_every=2"]
DPPO = ["algorithm=dppo", "algorithm.num_steps=6", "algorithm.trained_steps=2"]
RUNS = {
    "dppo": DPPO,
    "flow_grpo": ["algorithm=flow_grpo", "algorithm.group_size=4"],
    "recipe": ["algorithm=recipe", "algorithm.recipe=grpo", "algorithm.group_size=4"],
    "flow_sde": ["algorithm=flow_sde", "algorithm.num_steps=6", "algorithm.recompute_chains=true"],
}


def train(capsys: pytest.CaptureFixture[str], *settings: str) -> str:
    assert main(["train", *settings]) == 0
    return capsys.readouterr().out


@pytest.fixture(scope="module")
def bases(clone: Path, demonstrations: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Returns the cloned base policy of each run."""
    out = tmp_path_factory.mktemp("runs")
    settings = ["task=point_mass", "policy=diffusion", "policy.steps=4", "policy.hidden=[32]", "budget.updates=3"]
    settings += ["evaluation.episodes=0", f"dataset={demonstrations}", f"out={out}", "name=diffusion"]
    assert main(["train", *settings]) == 0
    return {name: f"init_from={out / 'diffusion' if name == 'dppo' else clone}/checkpoints/last" for name in RUNS}


@pytest.mark.parametrize(
    "name", ["dppo", *(pytest.param(name, marks=pytest.mark.slow) for name in ("flow_grpo", "recipe", "flow_sde"))]
)
def test_interrupted_run_resumes_bit_identically(
    name: str,
    bases: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    settings = [bases[name], *COMMON, *RUNS[name], "budget.updates=4", f"out={tmp_path}"]
    train(capsys, *settings, "name=whole")
    iterate = Trainer._iterate

    def stop_at_two(self: Trainer) -> None:
        iterate(self)
        if self.update == 2:
            self._signal = 15

    monkeypatch.setattr(Trainer, "_iterate", stop_at_two)
    assert main(["train", *settings, "name=stopped"]) == 128 + 15
    monkeypatch.setattr(Trainer, "_iterate", iterate)
    resume_run(tmp_path / "stopped").train()

    def weights(run: str) -> dict[str, torch.Tensor]:
        last = tmp_path / run / "checkpoints" / "last"
        return load_file(last / "model.safetensors") | load_file(last / "training_state" / "tensors.safetensors")

    whole, stopped = weights("whole"), weights("stopped")
    assert whole.keys() == stopped.keys()
    assert [key for key in whole if not torch.equal(whole[key], stopped[key])] == []
    report = json.loads((tmp_path / "stopped" / "report.json").read_text())
    assert report["base"]["n"] == 4 and report["env_steps"] > 0
    assert main(["verify", str(tmp_path / "stopped" / "checkpoints" / "best")]) == 0


def test_a_fine_tuned_diffusion_policy_is_evaluated_and_tuned_again(
    bases: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = [*COMMON, *DPPO, "budget.updates=1", f"out={tmp_path}"]
    train(capsys, bases["dppo"], *settings, "name=once")
    once = tmp_path / "once" / "checkpoints" / "last"
    assert json.loads((once / "manifest.json").read_text())["policy"] == "staged_diffusion"
    assert main(["eval", str(once), "--episodes", "4", "--out", str(tmp_path / "eval")]) == 0
    train(capsys, f"init_from={once}", *settings, "name=twice")
    assert main(["train", f"init_from={once}", *settings, "algorithm.trained_steps=3", "name=thrice"]) == 2
    assert "must be at most the newest network's 2 steps" in capsys.readouterr().err


def test_invalid_runs_are_refused_in_one_line(
    bases: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for settings, message in (
        ([bases["flow_grpo"], "algorithm=dppo", "budget.updates=1"], "got 'flow'; use reinflow"),
        ([bases["dppo"], "algorithm=flow_grpo", "budget.updates=1"], "got 'diffusion'; use dppo"),
        ([bases["flow_grpo"], "algorithm=flow_grpo", "budget.env_steps=99"], "set budget.updates instead"),
        ([bases["flow_grpo"], "algorithm=flow_grpo", "budget.updates=1", "sim.num_envs=6"], "not a multiple of"),
        (["task=point_mass", "policy=staged_diffusion", "algorithm=dppo", "budget.updates=1"], "is created by dppo"),
    ):
        assert main(["train", *settings, "evaluation.episodes=0", f"out={tmp_path}"]) == 2
        assert re.search(message, capsys.readouterr().err), settings
