"""Tests of DSRL and GoRL runs from the command line: they train, resume bit-identically in any stage, and verify."""

from pathlib import Path

import pytest
import torch
from resumed_runs import assert_identical, interrupted_at

from robopolicy.cli.main import main
from robopolicy.policies.wrappers.latent import LatentPolicy
from robopolicy.training.checkpoint import load_policy
from robopolicy.training.loggers import read_jsonl

COMMON = ["checkpoint_every=20", "logging.every=1", "evaluation.episodes=2", "evaluation.every=20", "sim.num_envs=4"]
DSRL = [*COMMON, "replay.learning_starts=40", "algorithm.batch_size=16", "algorithm.utd=0.5"]
DSRL += ["algorithm.actor.hidden=[16]", "algorithm.critic.hidden=[16]", "budget.updates=6"]
GORL = [*COMMON, "task=point_mass", "policy=flow_decoder", "policy.hidden=[16]", "algorithm=gorl"]
GORL += ["algorithm.num_steps=8", "algorithm.epochs=1", "algorithm.stages=[2,2,1]", "algorithm.decoder_updates=2"]
GORL += ["algorithm.decoder_steps=3", "budget.updates=9"]


@pytest.fixture
def base(clone: Path) -> Path:
    """Returns the checkpoint of the policy to steer."""
    return clone / "checkpoints" / "last"


@pytest.mark.parametrize(
    "algorithm",
    [
        ["algorithm=dsrl_na"],
        pytest.param(["algorithm=dsrl_sac"], marks=pytest.mark.slow),
        pytest.param(["algorithm=dsrl_sac", "algorithm.noise_space.kind=repeat"], marks=pytest.mark.slow),
    ],
)
def test_dsrl_run_resumes_bit_identically(
    algorithm: list[str], base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = [*algorithm, *DSRL, f"init_from={base}"]
    assert main(["train", *settings, f"out={tmp_path}", "name=whole"]) == 0
    assert_identical(tmp_path / "whole", interrupted_at(3, settings, tmp_path, monkeypatch))
    best = tmp_path / "whole" / "checkpoints" / "best"
    assert main(["verify", str(best)]) == 0
    policy, manifest = load_policy(best)
    assert isinstance(policy, LatentPolicy) and manifest.network_calls == 1 + load_policy(base)[1].network_calls
    before = load_policy(base)[0].state_dict()
    assert all(torch.equal(value, policy.base.state_dict()[key]) for key, value in before.items())


def test_dsrl_na_accepts_demonstrations_and_dsrl_sac_refuses_them(
    base: Path, demonstrations: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = [*DSRL, f"init_from={base}", f"dataset={demonstrations}", f"out={tmp_path}"]
    assert main(["train", "algorithm=dsrl_na", *settings, "replay.offline_updates=3", "name=na"]) == 0
    rows = [row for row in read_jsonl(tmp_path / "na" / "metrics.jsonl") if "train/env_steps" in row]
    assert rows[0]["train/env_steps"] == 0 < rows[-1]["train/env_steps"]
    assert main(["train", "algorithm=dsrl_sac", *settings, "name=sac"]) == 2
    error = capsys.readouterr().err
    assert "which datasets lack" in error and error.count("\n") == 1


@pytest.mark.parametrize(
    "update",  # in stage 0, while a decoder is trained, in stage 1
    [pytest.param(1, marks=pytest.mark.slow), 3, pytest.param(5, marks=pytest.mark.slow)],
)
def test_gorl_resumes_bit_identically_in_the_middle_of_a_stage(
    update: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["train", *GORL, f"out={tmp_path}", "name=whole"]) == 0
    assert_identical(tmp_path / "whole", interrupted_at(update, GORL, tmp_path, monkeypatch))
    assert main(["verify", str(tmp_path / "whole" / "checkpoints" / "last")]) == 0
    rows = read_jsonl(tmp_path / "whole" / "metrics.jsonl")
    assert [row["train/stage"] for row in rows if "train/stage" in row] == [0, 0, 0, 1, 1, 1, 1, 2, 2]


@pytest.mark.parametrize("update", [pytest.param(1, marks=pytest.mark.slow), 5])
def test_gorl_from_an_imitated_policy_resumes_bit_identically(
    update: int, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = [setting for setting in GORL if not setting.startswith(("task=", "policy"))]
    settings = [*own, f"init_from={base}", "algorithm.skip_first_decoder=false", "budget.updates=6"]
    assert main(["train", *settings, f"out={tmp_path}", "name=whole"]) == 0
    assert_identical(tmp_path / "whole", interrupted_at(update, settings, tmp_path, monkeypatch))
