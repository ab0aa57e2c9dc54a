"""Several processes learn what one learns from the same experience; what they cannot do is refused."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import start_processes

from robopolicy.algorithms.registry import ALGORITHMS, make_algorithm
from robopolicy.cli.main import main
from robopolicy.core import distributed
from robopolicy.data.batches import Rollout
from robopolicy.errors import UserError
from robopolicy.policies.base import PolicySpec
from robopolicy.policies.heads.gaussian import GaussianConfig
from robopolicy.policies.registry import make_policy
from robopolicy.rollout.on_policy import RolloutSampler
from robopolicy.sim.chunk import ChunkedSim
from robopolicy.sim.registry import SimOptions, make_sim
from robopolicy.training.build import complete
from robopolicy.training.compose import compose_config, config_text
from robopolicy.training.distributed import check_distributed, together
from robopolicy.training.loop import resume_run

ADAPTIVE: dict[str, Any] = {"lr_schedule": "adaptive", "target_kl": 0.01, "entropy_coef": 0.01}
STOPPED: dict[str, Any] = {"target_kl": 1e-4}
CASES = [
    ("ppo", {}),
    ("ppo", ADAPTIVE),
    ("ppo", STOPPED),
    ("bpo", {"target_kl": 0.5}),
    ("mdpo", {}),
    ("subpo", {}),
    ("ta_lpo", {"entropy_coef": 0.01}),
]


def learner(name: str, settings: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    policy = make_policy("gaussian", GaussianConfig(hidden=(8,)), PolicySpec({"state": (6,)}, action_dim=2))
    config = ALGORITHMS[name].config_class(epochs=3, batch_size=16, lr=3e-3, **settings)
    return make_algorithm(name, config, policy, total_updates=4)


def rollouts(name: str, settings: dict[str, Any]) -> list[Rollout]:
    """Two rollouts of 4 environments with truncations, which a learner in one process plays in turn."""
    sim = make_sim("toy/point_mass", SimOptions(num_envs=4, reward="shaped"))
    sampler = RolloutSampler(ChunkedSim(sim, gamma=0.99), decisions=60, seed=1)
    algorithm = learner(name, settings)
    played = []
    for _ in range(2):
        played.append(sampler.collect(algorithm.act))
        algorithm.update(played[-1])
    return played


def half(rollout: Rollout, side: int) -> Rollout:
    """The first or the last two environments."""
    part = slice(2 * side, 2 * side + 2)
    cut: dict[str, Any] = {}
    for entry in fields(rollout):
        value = getattr(rollout, entry.name)
        dim = 0 if entry.name == "last_obs" else 1
        pick = lambda x, dim=dim: x[part] if dim == 0 else x[:, part]  # noqa: E731
        cut[entry.name] = pick(value) if isinstance(value, Tensor) else {key: pick(x) for key, x in value.items()}
    mask = rollout.truncated & ~rollout.terminated
    mine = torch.zeros_like(mask)
    mine[:, part] = True
    cut["final_obs"] = {key: value[mine[mask]] for key, value in rollout.final_obs.items()}
    return replace(rollout, **cut)


def one_of_two(index: int, folder: str) -> None:
    """What each of two processes does with its environments."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=index, world_size=2)
    for number, (name, settings) in enumerate(CASES):
        algorithm = learner(name, settings)
        whole = torch.load(f"{folder}/{number}.pt", weights_only=True)
        metrics = [algorithm.update(together(half(Rollout(**entry), index))) for entry in whole]
        torch.save([algorithm.state_dict(), metrics], f"{folder}/{number}-{index}.pt")
    rows = torch.arange(3 + index).view(-1, 1) + 10 * index  # of unequal sizes
    torch.save(
        [distributed.gathered(rows), distributed.gathered(rows > 10), distributed.largest_over_ranks(index)],
        f"{folder}/g{index}.pt",
    )
    dist.barrier()  # as in `processes`: one that leaves early may take the other with it
    dist.destroy_process_group()


def leaves(tree: Any, where: str = "") -> dict[str, Any]:
    if isinstance(tree, dict):
        return {k: v for key, part in tree.items() for k, v in leaves(part, f"{where}.{key}").items()}
    if isinstance(tree, list | tuple):
        return {k: v for key, part in enumerate(tree) for k, v in leaves(part, f"{where}.{key}").items()}
    return {where: tree}


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory) -> Path:
    """What both left behind; processes that meet take a while to start, so one pair does all cases."""
    folder = tmp_path_factory.mktemp("ranks")
    for number, case in enumerate(CASES):
        torch.save([vars(rollout) for rollout in rollouts(*case)], folder / f"{number}.pt")
    start_processes(one_of_two, (str(folder),), nprocs=2, start_method="spawn")
    return folder


@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda n: f"{CASES[n][0]}-{n}")
def test_two_processes_learn_what_one_learns_from_all_environments(two_processes: Path, number: int):
    alone = learner(*CASES[number])
    start = copy.deepcopy(leaves(alone.state_dict()["policy"]))
    whole = torch.load(two_processes / f"{number}.pt", weights_only=True)
    metrics = [alone.update(Rollout(**entry)) for entry in whole]
    expected = leaves(alone.state_dict())
    states = [torch.load(two_processes / f"{number}-{index}.pt", weights_only=True) for index in (0, 1)]
    for key, value in expected.items():
        found, other = (leaves(state)[key] for state, _ in states)
        if isinstance(value, Tensor):
            torch.testing.assert_close(found, value, rtol=1e-4, atol=1e-5, msg=lambda text, key=key: f"{key}: {text}")
            assert torch.equal(found, other), key  # both processes stay the same to the last bit
        else:
            assert found == pytest.approx(value), key
    assert not any(torch.equal(value, expected[f".policy{key}"]) for key, value in start.items() if "weight" in key)
    for mine, theirs in zip(metrics, states[0][1], strict=True):
        assert theirs["actor/epochs"] == mine["actor/epochs"] and theirs["actor/lr"] == pytest.approx(mine["actor/lr"])


def test_gathered_rows_keep_the_order_of_the_processes(two_processes: Path):
    for index in (0, 1):
        rows, flags, largest = torch.load(two_processes / f"g{index}.pt", weights_only=True)
        assert rows.flatten().tolist() == [0, 1, 2, 10, 11, 12, 13]
        assert flags.flatten().tolist() == [False] * 4 + [True] * 3 and largest == 1


def test_one_process_is_left_alone():
    value = torch.arange(3.0)
    assert distributed.mean_over_ranks(value) is value and distributed.gathered(value) is value
    assert (distributed.rank(), distributed.world_size(), distributed.largest_over_ranks(7)) == (0, 1, 7)


SETTINGS = ["task=point_mass", "policy=gaussian", "sim.num_envs=4", "budget.updates=2", "guards.restore_best=false"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["algorithm=props"], "'props' runs in one process"),
        (["algorithm=sac", "policy=squashed_gaussian"], "choose one of bpo, mdpo, ppo, subpo, ta_lpo"),
        (["algorithm=ppo", "guards.restore_best=true"], "set guards.restore_best=false"),
        (["algorithm=ppo", "sim.num_envs=3"], "sim.num_envs=3 cannot be shared out evenly to 2"),
        (["algorithm=ppo", "algorithm.batch_size=15"], "algorithm.batch_size=15"),
    ],
)
def test_what_several_processes_cannot_do_is_refused(monkeypatch, settings: list[str], message: str):
    monkeypatch.setattr("robopolicy.training.distributed.world_size", lambda: 2)
    with pytest.raises(UserError, match=message):
        complete(compose_config([*SETTINGS, *settings]))


def test_a_run_of_one_process_is_not_resumed_by_several(monkeypatch, tmp_path: Path):
    config = complete(compose_config([*SETTINGS, "algorithm=sac", "policy=squashed_gaussian"]))
    (tmp_path / "config.yaml").write_text(config_text(config))
    monkeypatch.setattr("robopolicy.training.distributed.world_size", lambda: 2)
    with pytest.raises(UserError, match="'sac' runs in one process"):
        resume_run(tmp_path)


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_every_algorithm_is_shared_out_or_refused(monkeypatch, name: str):
    monkeypatch.setattr("robopolicy.training.distributed.world_size", lambda: 2)
    learner = ALGORITHMS[name]
    config = compose_config([*SETTINGS, f"algorithm={name}"])
    if learner.distributed:
        assert learner.data_source == "rollout"  # what `SharedRollouts` puts together
        check_distributed(config)
    else:
        with pytest.raises(UserError, match=f"'{name}' runs in one process; drop torchrun"):
            check_distributed(config)


@pytest.mark.parametrize(("verb", "rest"), [("bench", []), ("train --multirun", ["seed=0,1"]), ("list", ["tasks"])])
def test_torchrun_is_for_one_training_run(monkeypatch, capsys, verb: str, rest: list[str]):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main([*verb.split(), *rest]) == 2
    error = capsys.readouterr().err
    assert f"call 'robopolicy {verb}' without it" in error and error.count("\n") == 1


@pytest.mark.slow
def test_torchrun_trains_one_run_that_the_first_process_writes(tmp_path: Path):
    words = [
        *SETTINGS,
        "algorithm=ppo",
        "algorithm.decisions=8",
        "evaluation.episodes=2",
        f"out={tmp_path}",
        "name=run",
    ]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    subprocess.run([*torchrun, "-m", "robopolicy", "train", *words], env=environment, check=True, timeout=120)
    report = json.loads((tmp_path / "run/report.json").read_text())
    config = compose_config(words)
    assert report["env_steps"] == 2 * 8 * config.sim.num_envs * config.chunk.execute
    assert report["final"]["n"] == 2 and (tmp_path / "run/checkpoints/last/manifest.json").exists()
