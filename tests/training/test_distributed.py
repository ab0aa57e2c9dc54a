"""Tests of distributed training: several processes match one on the same data; unsupported settings are refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import check_learns_as_one, play_both
from run_rules import SETTINGS, check_is_shared_out_or_refused

from robopolicy.algorithms.registry import ALGORITHMS
from robopolicy.cli.main import main
from robopolicy.core import distributed
from robopolicy.errors import UserError
from robopolicy.training.build import resolve_config
from robopolicy.training.compose import compose_config, config_text
from robopolicy.training.runs import resume_run

ADAPTIVE: dict[str, Any] = {"lr_schedule": "adaptive", "target_kl": 0.01, "entropy_coef": 0.01}
STOPPED: dict[str, Any] = {"target_kl": 1e-4}
ALL_ROWS: dict[str, Any] = {"batch_size": 1024}  # one minibatch, whose order has no effect
CASES = [
    ("ppo", "gaussian", {}),
    ("ppo", "gaussian", ADAPTIVE),
    ("ppo", "gaussian", STOPPED),
    ("reinflow", "flow", {}),
    ("reinflow", "flow", {"bc_coef": 0.1, "recompute_chains": True}),
    ("dppo", "diffusion", {"advantage_quantile": 0.1}),
    ("fpo", "flow", {}),
    ("fpo_pp", "flow", {}),
    ("policyflow", "flow", {}),
    ("flow_sde", "flow", {}),
    ("awm", "flow", {}),
    ("ac_flow", "flow", {"critic_warmup": 0}),
    ("flow_grpo", "flow", ALL_ROWS),
    ("bc", "gaussian", {}),
    ("bc", "flow", {}),
    ("bc", "diffusion", {}),
    ("distill", "flow", {}),
    ("reflow", "flow", {}),
]


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    play_both(folder, CASES)
    return folder


@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda n: f"{CASES[n][0]}-{n}")
def test_two_processes_match_one_process_with_all_environments(two_processes: Path, number: int):
    check_learns_as_one(two_processes, number, CASES[number])


def test_gathered_rows_keep_the_order_of_the_processes(two_processes: Path):
    for index in (0, 1):
        rows, flags, largest, total, data = torch.load(two_processes / f"g{index}.pt", weights_only=True)
        assert rows.flatten().tolist() == [0, 1, 2, 10, 11, 12, 13]
        assert flags.flatten().tolist() == [False] * 4 + [True] * 3
        assert (largest, total, data) == (1, 11, [b"ab", b"b"])


def test_collectives_are_the_identity_in_one_process():
    value = torch.arange(3.0)
    assert distributed.all_reduce_mean(value) is value and distributed.all_gather(value) is value
    assert (distributed.rank(), distributed.world_size(), distributed.all_reduce_max(7)) == (0, 1, 7)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["algorithm=sac", "policy=squashed_gaussian"], "choose one of "),
        (["algorithm=ppo", "sim.num_envs=3"], "sim.num_envs=3 is not divisible by the 2 processes"),
        (["algorithm=ppo", "algorithm.batch_size=15"], "algorithm.batch_size=15"),
    ],
)
def test_unsupported_distributed_settings_are_refused(monkeypatch, settings: list[str], message: str):
    monkeypatch.setattr("robopolicy.training.distributed.world_size", lambda: 2)
    with pytest.raises(UserError, match=message):
        resolve_config(compose_config([*SETTINGS, *settings]))


def test_a_run_of_one_process_is_not_resumed_by_several(monkeypatch, tmp_path: Path):
    config = resolve_config(compose_config([*SETTINGS, "algorithm=sac", "policy=squashed_gaussian"]))
    (tmp_path / "config.yaml").write_text(config_text(config))
    monkeypatch.setattr("robopolicy.training.distributed.world_size", lambda: 2)
    with pytest.raises(UserError, match="'sac' runs in one process"):
        resume_run(tmp_path)


@pytest.mark.parametrize("name", ALGORITHMS.product())
def test_every_algorithm_is_distributed_or_refused(monkeypatch, name: str):
    check_is_shared_out_or_refused(name, monkeypatch)


@pytest.mark.parametrize("variables", [{"WORLD_SIZE": "abc"}, {"WORLD_SIZE": "0"}])
def test_a_number_of_processes_that_is_no_number_is_refused(monkeypatch, capsys, variables: dict[str, str]):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert main(["list", "tasks"]) == 2
    assert "WORLD_SIZE must be a number of at least 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("rank", "message"), [("x", "RANK must be a number"), ("2", "RANK must be below WORLD_SIZE=2")]
)
def test_a_rank_outside_the_run_is_refused(monkeypatch, capsys, rank: str, message: str):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", rank)
    assert main(["train", "task=point_mass", "algorithm=ppo", "budget.updates=1"]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(("verb", "rest"), [("bench", []), ("train --multirun", ["seed=0,1"]), ("list", ["tasks"])])
def test_torchrun_is_refused_for_other_commands(monkeypatch, capsys, verb: str, rest: list[str]):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main([*verb.split(), *rest]) == 2
    error = capsys.readouterr().err
    assert f"call 'robopolicy {verb}' without it" in error and error.count("\n") == 1
