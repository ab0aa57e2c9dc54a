"""Tests of simulation during learning: order of data and weights, resume, failures, devices and refusals."""

import copy
import threading
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from replay_runs import assert_interruption_changes_nothing, assert_refused, spy, trainer
from resumed_runs import assert_identical, kill_and_resume
from torch import Tensor

from docs.compatibility import opened, workplace
from robopolicy.algorithms.ppo import PPO
from robopolicy.algorithms.sac import SAC
from robopolicy.cli.main import main
from robopolicy.data.batches import Rollout
from robopolicy.data.replay import Replay
from robopolicy.rollout.off_policy import StepLog
from robopolicy.training.loggers import read_jsonl
from robopolicy.training.overlap import OverlapSource
from robopolicy.training.resume import load_tree, save_tree
from robopolicy_tasks.toy.point_mass import PointMassSim

QUICK = ["task=point_mass", "task.reward=shaped", "sim.num_envs=4", "evaluation.episodes=0", "logging.every=1"]
QUICK += ["chunk.horizon=4", "chunk.action_horizon=2"]
PPO_RUN = [*QUICK, "algorithm=ppo", "policy=gaussian", "policy.hidden=[8]", "algorithm.num_steps=8"]
SAC_RUN = [
    *(*QUICK, "algorithm=sac", "policy=squashed_gaussian", "policy.hidden=[16]", "algorithm.critic.hidden=[16]"),
    *("algorithm.batch_size=16", "replay.learning_starts=100"),
]
RUNS = {"ppo": PPO_RUN, "sac": SAC_RUN}
OVERLAP = "sim.overlap=1"


def rollout_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("rollout")]


# Order of data and weights.


def test_a_rollout_has_the_weights_before_the_previous_update(tmp_path: Path) -> None:
    run = trainer(tmp_path, *PPO_RUN, OVERLAP, "budget.updates=4")
    algorithm, source = run.algorithm, run.source
    assert isinstance(source, OverlapSource)
    policies = [copy.deepcopy(algorithm.policy)]  # before each update
    for update in range(4):
        acted = None if source._pending is None else source._pending.result().data.logp
        batch = source.next(algorithm)
        rows = [{key: value.flatten(0, 1) for key, value in part.items()} for part in (batch.obs, batch.record)]
        age = min(update, 1)
        earlier, present = (policy.decisions(*rows).logp.view(8, 4, 1) for policy in (policies[-1 - age], policies[-1]))
        if acted is not None:
            assert torch.allclose(acted, earlier, atol=1e-4)  # other sizes of products round differently
            assert not torch.allclose(earlier, present, atol=1e-4)
        assert torch.allclose(batch.logp, present, atol=1e-4)  # ratios begin at 1
        expected = (present - earlier).squeeze(-1).exp().clamp(max=2.0)
        assert batch.weight is None if age == 0 else torch.allclose(batch.weight, expected, atol=1e-3)
        assert source.metrics()["rollout/staleness"] == age
        assert source.env_steps == (update + 1) * 8 * 4 * 2  # decisions, environments, actions of a decision
        algorithm.update(batch)
        policies.append(copy.deepcopy(algorithm.policy))
    run.close()


def test_importance_weights_multiply_advantages_only(tmp_path: Path) -> None:
    run = trainer(tmp_path, *PPO_RUN, "budget.updates=2")
    batch = run.source.next(run.algorithm)
    weight = torch.linspace(0.5, 2.0, 32).view(8, 4)
    assert isinstance(run.algorithm, PPO)
    plain, weighted = (run.algorithm.process_rollout(each) for each in (batch, replace(batch, weight=weight)))
    assert torch.equal(weighted.advantage, plain.advantage * weight.flatten())
    assert torch.equal(weighted.value_target, plain.value_target)
    run.close()


def counted(self: Any, batch: Any) -> dict[str, float]:
    """An update that learns nothing."""
    self.updates += 1
    return {}


@pytest.mark.parametrize("name", RUNS)
def test_without_learning_the_data_are_equal_to_those_without_overlap(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SAC, "update", counted)
    monkeypatch.setattr(PPO, "update", counted)
    batches: list[list[Any]] = []
    for overlap in (0, 1):
        run = trainer(tmp_path / str(overlap), *RUNS[name], f"sim.overlap={overlap}", "budget.updates=6")
        batches.append([])
        for _ in range(6):
            batches[-1].append(run.source.next(run.algorithm))
            run.algorithm.update(batches[-1][-1])
        run.close()
    for one, other in zip(*batches, strict=True):
        assert torch.equal(one.reward, other.reward) and torch.equal(one.obs["state"], other.obs["state"])
        assert name == "ppo" or (torch.equal(one.index, other.index) and torch.equal(one.chunk, other.chunk))


@pytest.mark.parametrize("name", RUNS)
def test_the_result_does_not_depend_on_timing(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = [*RUNS[name], OVERLAP, "budget.updates=5", f"out={tmp_path}"]
    learner: Any = {"ppo": PPO, "sac": SAC}[name]
    update, step = learner.update, PointMassSim.step

    def slow_update(self: Any, batch: Any) -> Any:
        time.sleep(0.05)
        return update(self, batch)

    def slow_step(self: PointMassSim, action: Tensor, active: Tensor | None = None) -> Any:
        time.sleep(0.002)
        return step(self, action, active)

    with monkeypatch.context() as patch:
        patch.setattr(learner, "update", slow_update)
        assert main(["train", *settings, "name=learner"]) == 0
    with monkeypatch.context() as patch:
        patch.setattr(PointMassSim, "step", slow_step)
        assert main(["train", *settings, "name=simulator"]) == 0
    assert_identical(tmp_path / "learner", tmp_path / "simulator")


def test_replay_receives_the_steps_of_an_update_before_the_next_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = spy(monkeypatch)
    run = trainer(tmp_path, *SAC_RUN, OVERLAP, "budget.updates=5")
    sizes: list[int] = []
    update = run.algorithm.update
    source: Any = run.source
    monkeypatch.setattr(run.algorithm, "update", lambda b: sizes.append(len(source.source.sampler.replay)) or update(b))
    run.train()
    ended = len(source.source.sampler.replay) - source.env_steps  # slots of last observations
    assert all(later - size >= 8 for size, later in pairwise(sizes))  # 4 environments, 2 actions
    assert sizes[-1] == len(source.source.sampler.replay) and 0 <= ended <= 16
    for batch in batches:  # windows are contiguous: the next observation continues the trajectory
        moved = batch.next_obs["state"][:, 0, :2] - batch.obs["state"][:, 0, :2]
        assert moved.abs().max() < 1.0


def test_the_thread_has_the_settings_of_torch_and_leaves_global_generators(tmp_path: Path) -> None:
    run = trainer(tmp_path, *PPO_RUN, OVERLAP, "budget.updates=3")
    found: list[tuple[int, bool, str]] = []
    policy_sample = run.algorithm.policy.__class__.sample

    def sample(self: Any, obs: Any, **options: Any) -> Any:
        found.append((torch.get_num_threads(), torch.is_grad_enabled(), threading.current_thread().name))
        return policy_sample(self, obs, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run.algorithm.policy.__class__, "sample", sample)
        before = torch.get_rng_state()
        run.source.next(run.algorithm)
        assert run.source.state_dict()["collected"]["updates"] == 0  # waits for the second rollout
        assert torch.equal(torch.get_rng_state(), before)
    assert len(found) == 16 and all(name.startswith("rollout") for _, _, name in found)
    assert {(threads, grad) for threads, grad, _ in found} == {(torch.get_num_threads(), False)}
    run.close()


def test_a_logged_row_has_all_episodes_since_the_last_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PPO, "update", counted)
    found: list[dict[str, float]] = []
    for overlap in (0, 1):
        run = trainer(tmp_path / str(overlap), *PPO_RUN, f"sim.overlap={overlap}", "budget.updates=9")
        for _ in range(7):
            run.algorithm.update(run.source.next(run.algorithm))
        found.append(run.source.metrics())
        run.close()
    assert found[1].pop("rollout/staleness") == 1 and found[0]["rollout/episodes"] > 4
    assert found[1] == pytest.approx(found[0])


def test_a_rollout_of_abandoned_weights_is_not_learned(tmp_path: Path) -> None:
    run = trainer(tmp_path, *PPO_RUN, OVERLAP, "budget.updates=9")
    algorithm, source = run.algorithm, run.source
    algorithm.update(source.next(algorithm))
    best = copy.deepcopy(algorithm.state_dict())
    for _ in range(3):
        algorithm.update(source.next(algorithm))
    algorithm.load_state_dict(best)  # as after a collapse; the next rollout has the weights after three updates
    batch: Rollout = source.next(algorithm)
    rows = [{key: value.flatten(0, 1) for key, value in part.items()} for part in (batch.obs, batch.record)]
    assert torch.allclose(algorithm.policy.decisions(*rows).logp, batch.logp.flatten(0, 1), atol=1e-4)
    assert source.metrics()["rollout/staleness"] == 0
    run.close()


# Resume.


@pytest.mark.parametrize(
    "kind", ["ppo", "prioritized", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("sac", "offline"))]
)
def test_an_interrupted_run_resumes_bit_identically(
    kind: str, tmp_path: Path, demonstrations: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = [f"dataset={demonstrations}", "replay.prioritized=0.6"]
    settings = {
        "ppo": PPO_RUN,
        "sac": [*SAC_RUN, "chunk.obs_horizon=2"],
        "prioritized": [*SAC_RUN, *data],
        "offline": [*SAC_RUN, *data, "replay.offline_updates=6"],
    }[kind]
    assert_interruption_changes_nothing([*settings, OVERLAP], tmp_path, monkeypatch)


@pytest.mark.slow
def test_a_killed_run_resumes_bit_identically(tmp_path: Path) -> None:
    settings = [*PPO_RUN, OVERLAP, "budget.updates=80", "checkpoint_every=10"]
    assert main(["train", *settings, f"out={tmp_path}", "name=whole"]) == 0
    assert_identical(tmp_path / "whole", kill_and_resume(settings, tmp_path))


@pytest.mark.parametrize("name", RUNS)
def test_a_backend_that_cannot_save_its_state_discards_the_data_in_flight(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PointMassSim, "state_dict", lambda self: (_ for _ in ()).throw(RuntimeError))
    run = trainer(tmp_path, *RUNS[name], OVERLAP, "budget.updates=5")
    for _ in range(2):
        run.algorithm.update(run.source.next(run.algorithm))
    state, steps = run.source.state_dict(), run.source.env_steps
    assert not run.source.load_state_dict(state)
    assert run.source._take() is None  # type: ignore[attr-defined]
    run.algorithm.update(run.source.next(run.algorithm))
    assert run.source.env_steps > steps and run.source.metrics()["rollout/staleness"] == 0
    run.close()


# Failures.


def failing(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """Raise an exception in the given step of the simulator."""
    step, calls = PointMassSim.step, [0]

    def broken(self: PointMassSim, action: Tensor, active: Tensor | None = None) -> Any:
        calls[0] += 1
        if calls[0] == after:
            raise ZeroDivisionError("the robot is gone")
        return step(self, action, active)

    monkeypatch.setattr(PointMassSim, "step", broken)


@pytest.mark.parametrize("name", RUNS)
def test_an_error_of_the_simulator_ends_the_run_with_its_resume_point(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(monkeypatch, after={"ppo": 16 * 3 + 5, "sac": 26 + 2 * 3 + 2}[name])
    run = trainer(tmp_path, *RUNS[name], OVERLAP, "budget.updates=9", "checkpoint_every=1")
    with pytest.raises(ZeroDivisionError, match="the robot is gone"):
        run.train()
    assert run.update == 3 and rollout_threads() == []
    assert main(["train", "--resume", str(tmp_path / "run")]) == 0


def test_closing_does_not_wait_for_the_end_of_a_rollout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = trainer(tmp_path, *PPO_RUN, OVERLAP, "budget.updates=9", "algorithm.num_steps=400")
    started, step = threading.Event(), PointMassSim.step

    def slow(self: PointMassSim, action: Tensor, active: Tensor | None = None) -> Any:
        started.set()
        time.sleep(0.1)
        return step(self, action, active)

    run.source.next(run.algorithm)  # and starts the next rollout
    monkeypatch.setattr(PointMassSim, "step", slow)
    assert started.wait(10)
    start = time.monotonic()
    run.close()
    assert time.monotonic() - start < 10 and rollout_threads() == []  # the rollout would take 40 seconds


def test_the_log_has_the_age_of_the_weights(tmp_path: Path) -> None:
    assert main(["train", *PPO_RUN, OVERLAP, "budget.updates=4", f"out={tmp_path}", "name=run"]) == 0
    rows = [row for row in read_jsonl(tmp_path / "run" / "metrics.jsonl") if "rollout/staleness" in row]
    assert [row["rollout/staleness"] for row in rows] == [0, 1, 1, 1]
    assert [row["train/env_steps"] for row in rows] == [64, 128, 192, 256]
    assert rollout_threads() == []


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["algorithm=gorl", "policy=flow"], "Algorithm 'gorl' learns only from data of its present weights"),
        (["algorithm=reinflow", "policy=flow", "algorithm.recompute_chains=true"], "algorithm.recompute_chains"),
        (["algorithm=ppo", "policy=gaussian", "sim.overlap=2"], "sim.overlap"),
    ],
)
def test_runs_without_support_are_refused(
    settings: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shared = [setting for setting in QUICK if setting != "logging.every=1"]
    assert_refused([*shared, OVERLAP, *settings, "budget.updates=2"], message, tmp_path, capsys)


# Device.


@pytest.mark.parametrize(("name", "head"), [("ppo", "gaussian"), ("sac", "squashed_gaussian"), ("reinflow", "flow")])
def test_overlap_learns_on_a_device_and_continues_from_its_resume_point(name: str, head: str, tmp_path: Path) -> None:
    simulated = pytest.importorskip("simulated", exc_type=ImportError)
    with workplace([name]) as place, opened(place, name, head, device=simulated.NAME) as parts:
        algorithm = parts.algorithm
        source = OverlapSource(parts.source, torch.device(simulated.NAME))  # type: ignore[arg-type]
        for _ in range(2):
            algorithm.update(source.next(algorithm))
        save_tree(tmp_path, source.state_dict())
        assert source.load_state_dict(load_tree(tmp_path))  # from the CPU
        batch = source.next(algorithm)
        assert batch.reward.device == simulated.DEVICE and source.metrics()["rollout/staleness"] == 1
        algorithm.update(batch)
        source.close()


@pytest.mark.slow
def test_images_are_rendered_during_evaluations_on_another_thread(tmp_path: Path) -> None:
    settings = ["task=lift", "task.cameras=[front]", "task.image_size=16", "policy=gaussian", "algorithm=ppo"]
    quick = ["sim.num_envs=2", "algorithm.num_steps=4", "algorithm.epochs=1", "evaluation.every=1"]
    run = [*settings, *quick, OVERLAP, "evaluation.episodes=2", "budget.updates=3", f"out={tmp_path}", "name=run"]
    assert main(["train", *run]) == 0


def test_the_fraction_of_the_dataset_does_not_depend_on_the_speed_of_the_learner(
    demonstrations: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, delay = StepLog.write, 0.0

    def slow(log: StepLog, replay: Replay) -> None:
        write(log, replay)
        time.sleep(delay)  # the next rollout goes on

    monkeypatch.setattr(StepLog, "write", slow)
    settings = [f"dataset={demonstrations}", "replay.offline_fraction=null", "algorithm.num_steps=4"]
    settings += ["task.reward=sparse", "algorithm.batch_size=100", "budget.updates=6"]
    found: list[list[int]] = []
    for delay in (0.0, 0.05):
        run, rows = trainer(tmp_path / str(delay), *SAC_RUN, OVERLAP, *settings), list[int]()
        for _ in range(5):
            batch = run.source.next(run.algorithm)
            rows.append(int((~batch.online).sum()))
            run.algorithm.update(batch)
        run.close()
        found.append(rows)
    assert found[0] == found[1] and found[0][0] > found[0][-1] > 0
