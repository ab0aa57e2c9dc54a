"""Tests of guards: divergence names its tensor, and a collapse restores the best policy."""

import copy
import re
import signal
from typing import Any, cast

import numpy as np
import pytest
import torch
from played_scores import play_scores, summary

from robopolicy.algorithms.ppo import PPO
from robopolicy.cli.main import main
from robopolicy.errors import UserError
from robopolicy.evaluation.result import Cost, EvalResult
from robopolicy.shutdown import Interrupted
from robopolicy.training import guards as duels
from robopolicy.training import loop
from robopolicy.training.checkpoint import load_policy
from robopolicy.training.compose import compose_config
from robopolicy.training.guards import TrainingDiverged, check_parameters, has_collapsed, is_better, named_tensors
from robopolicy.training.loggers import read_jsonl
from robopolicy.training.runs import resume_run, start_run

PPO_RUN = ["task=point_mass", "task.reward=shaped", "algorithm=ppo", "policy=gaussian", "sim.num_envs=4"]
QUICK = ["algorithm.num_steps=8", "evaluation.episodes=10", "evaluation.every=1", "logging.every=1"]


def test_best_is_by_success_then_return_then_earlier_update():
    assert is_better(summary(0.5), None)
    assert is_better(summary(0.6, ret=-5), summary(0.5, ret=9))
    assert is_better(summary(0.5, ret=2), summary(0.5, ret=1))
    assert not is_better(summary(0.5), summary(0.5))


def test_best_is_by_return_without_a_success_definition():
    assert is_better(summary(None, ret=2), summary(None, ret=1))


def test_policy_that_diverges_to_avoid_costs_is_not_better():
    honest, escaping = summary(None, ret=-20.0, n=20), summary(None, ret=0.0, n=20) | {"diverged": 20}
    assert not is_better(escaping, honest) and is_better(honest, escaping)
    rare = summary(None, ret=-10.0, n=20) | {"diverged": 2}  # two diverged episodes may be chance
    assert is_better(rare, honest)
    assert is_better(summary(0.9, n=20) | {"diverged": 3}, summary(0.5, n=20))  # success accounts for divergence


def test_collapse_requires_disjoint_intervals():
    best = summary(0.8, low=0.7, high=0.9)
    assert has_collapsed(summary(0.5, low=0.4, high=0.6), best)
    assert not has_collapsed(summary(0.6, low=0.5, high=0.71), best)
    assert has_collapsed(summary(None, ret=-3), summary(None, ret=0))
    assert not has_collapsed(summary(None, ret=-1.5), summary(None, ret=0))


def test_returns_of_few_episodes_are_no_collapse():
    assert has_collapsed(summary(None, ret=-3, n=10), summary(None, ret=0, n=10))
    assert not has_collapsed(summary(None, ret=-3, n=9), summary(None, ret=0))
    assert has_collapsed(summary(0.5, low=0.4, high=0.6, n=9), summary(0.8, low=0.7, high=0.9))


def test_tensors_are_named_by_their_path():
    tree = {"a": {"b": [torch.zeros(1), 3]}, "c": {0: torch.zeros(1)}}
    assert [name for name, _ in named_tensors(tree)] == ["a.b.0", "c.0"]


def run(tmp_path, *settings):
    return start_run(compose_config([*PPO_RUN, *QUICK, f"out={tmp_path}", "name=run", *settings]))


def run_of_a_wrapper(tmp_path, monkeypatch):
    """Returns a run of two updates from a checkpoint; its algorithm deploys a copy of its policy."""
    run(tmp_path, "budget.updates=1", "name=base", "evaluation.episodes=0").train()
    settings = [setting for setting in PPO_RUN if not setting.startswith("policy=")]
    start = f"init_from={tmp_path}/base/checkpoints/last"
    trainer = start_run(compose_config([*settings, *QUICK, f"out={tmp_path}", "name=run", "budget.updates=2", start]))
    policy = trainer.algorithm.policy
    monkeypatch.setattr(trainer.algorithm, "inference_policy", lambda: copy.deepcopy(policy))
    return trainer


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_non_finite_weight_is_named(tmp_path, value):
    trainer = run(tmp_path, "budget.updates=1")
    next(iter(trainer.algorithm.policy.parameters())).data.view(-1)[0] = value
    name = "policy." + next(name for name, _ in trainer.algorithm.policy.named_parameters())
    with pytest.raises(TrainingDiverged, match=f"update 7: tensor '{name}' is {value}"):
        check_parameters(trainer.algorithm, 7)
    trainer.close()


def test_large_sums_of_finite_weights_are_not_divergence(tmp_path):
    trainer = run(tmp_path, "budget.updates=1")
    next(iter(trainer.algorithm.policy.parameters())).data.fill_(3e38)
    check_parameters(trainer.algorithm, 1)
    trainer.close()


def test_divergence_ends_with_one_line_and_intact_checkpoints(tmp_path, monkeypatch, capsys):
    update = PPO.update

    def explode(self, batch):
        metrics = update(self, batch)
        if self.updates == 3:
            self.policy.log_std.data.fill_(torch.nan)
            metrics["actor/loss"] = float("nan")
        return metrics

    monkeypatch.setattr(PPO, "update", explode)
    settings = ["budget.updates=5", "checkpoint_every=1", f"out={tmp_path}", "name=run"]
    assert main(["train", *PPO_RUN, *QUICK, *settings]) == 2
    error = capsys.readouterr().err
    assert "diverged at update 3: tensor 'policy.log_std' is nan" in error
    assert re.search(r"Continue from checkpoints/best or checkpoints/last of \S+; both are intact", error)
    assert error.count("\n") == 1
    assert main(["verify", str(tmp_path / "run/checkpoints/last")]) == 0


@pytest.mark.parametrize("diverges", [True, False])
def test_new_run_that_fails_before_its_first_update_leaves_no_folder(diverges, tmp_path, monkeypatch, refused):
    def fail(self, batch):
        if diverges:
            return {"actor/loss": float("nan")}
        raise UserError("This is not for me.")

    monkeypatch.setattr(PPO, "update", fail)
    settings = ["train", *PPO_RUN, *QUICK, "budget.updates=5", f"out={tmp_path}", "name=run"]
    message = "at update 1: metric 'actor/loss' is nan; .* No checkpoint was saved" if diverges else "not for me"
    assert re.search(message, refused(*settings))
    assert list(tmp_path.iterdir()) == []
    trainer = run(tmp_path, "budget.updates=5")
    (tmp_path / "run" / "notes.txt").write_text("mine")
    with pytest.raises(UserError):
        trainer.train()
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["notes.txt"]


def test_a_resumed_run_that_fails_keeps_its_folder(tmp_path, monkeypatch, capsys):
    run(tmp_path, "budget.updates=5").close()
    monkeypatch.setattr(PPO, "update", lambda self, batch: {"actor/loss": float("nan")})
    assert main(["train", "--resume", str(tmp_path / "run")]) == 2
    printed = capsys.readouterr()
    assert printed.out.count("\n") == 1 and "restarts at its first update" in printed.out
    assert printed.err.count("\n") == 1 and "No checkpoint was saved" in printed.err
    assert (tmp_path / "run" / "config.yaml").is_file()


def test_a_collapse_restores_the_best_state(tmp_path, monkeypatch):
    play_scores(monkeypatch, [0.5, 0.9, 0.75, 0.2])
    trainer = run(tmp_path, "budget.updates=4")
    states = []
    restore = trainer.algorithm.load_state_dict

    def spy(state):
        states.append(state["updates"])
        restore(state)

    monkeypatch.setattr(trainer.algorithm, "load_state_dict", spy)
    report = trainer.train()
    assert states == [2]  # not at 0.75: that drop may be chance
    assert vars(trainer.algorithm)["reward_normalizer"].running is None  # its running returns belong to other episodes
    assert (report["num_restores"], report["final"]["success"], report["best"]["update"]) == (1, 0.9, 2)
    assert [
        row["train/restores"] for row in read_jsonl(trainer.folder / "metrics.jsonl") if "train/restores" in row
    ] == [1]


def test_the_guard_can_be_switched_off(tmp_path, monkeypatch):
    play_scores(monkeypatch, [0.9, 0.2])
    report = run(tmp_path, "budget.updates=2", "guards.restore_best=false").train()
    assert (report["num_restores"], report["final"]["success"]) == (0, 0.2)


def fake_duel(monkeypatch, base, best):
    """Replaces the episodes of the final comparison with given outcomes; returns the first seed of each round."""
    starts = []

    def fake_run_episodes(policy, sim, seeds):
        starts.append(seeds[0])
        outcomes, n = best if len(starts) % 2 == 0 else base, len(seeds)
        wins = np.resize(np.asarray(outcomes, dtype=np.bool_), n)
        cost = Cost(1, 1, 1, 1, 1.0)
        return EvalResult("t", np.array(seeds), wins.astype(np.float64), np.ones(n, np.int64), wins, cost)

    monkeypatch.setattr(duels, "run_episodes", fake_run_episodes)
    return starts


def test_run_worse_than_its_base_reverts_to_the_base(tmp_path, monkeypatch, capsys):
    trainer = run_of_a_wrapper(tmp_path, monkeypatch)
    play_scores(monkeypatch, [0.5, 0.2, 0.6, 0.45])  # the best score exceeds the base by chance
    starts = fake_duel(monkeypatch, base=[True] * 6 + [False] * 4, best=[True] * 3 + [False] * 7)
    capsys.readouterr()
    report = trainer.train()
    assert (report["base"]["success"], report["best"]["success"], report["best"]["update"]) == (0.5, 0.5, 0)
    assert (report["final"]["success"], report["reverted_to_base"], report["num_restores"]) == (0.45, True, 0)
    kept, started = (load_policy(tmp_path / folder)[0] for folder in ("run/checkpoints/best", "base/checkpoints/last"))
    assert all(torch.equal(a, b) for a, b in zip(kept.parameters(), started.parameters(), strict=True))
    against = report["vs_base"]
    assert (against["wins"], against["losses"], against["difference"]["estimate"]) == (0, 6, -0.3)
    assert starts == [10_010, 10_010, 10_020, 10_020]  # fresh episodes, the same for both, until significant
    assert "below its base, which checkpoints/best now contains: success -30 points [" in capsys.readouterr().out


def test_run_equal_to_its_base_keeps_its_policy(tmp_path, monkeypatch, capsys):
    trainer = run_of_a_wrapper(tmp_path, monkeypatch)
    play_scores(monkeypatch, [0.6, 0.2, 0.5, 0.45])
    starts = fake_duel(monkeypatch, base=[True, False], best=[False, True])
    capsys.readouterr()
    report = trainer.train()
    assert (report["best"]["success"], report["reverted_to_base"]) == (0.5, False)
    assert report["vs_base"]["difference"]["n"] == 50 and len(starts) == 2 * duels.ROUNDS
    assert "best vs base: success +0 points [" in capsys.readouterr().out


def test_returns_of_few_episodes_do_not_end_the_duel(monkeypatch):
    def fake_run_episodes(policy, sim, seeds):
        returns = np.full(len(seeds), float(policy))
        return EvalResult("t", np.array(seeds), returns, np.ones(len(seeds), np.int64), None, Cost(1, 1, 1, 1, 1.0))

    monkeypatch.setattr(duels, "run_episodes", fake_run_episodes)
    rounds: list[int] = []
    base, best, sim = cast(list[Any], [1, 0, None])
    outcome = duels.compare_with_base(base, best, sim, episodes=4, seed=0, before_round=lambda: rounds.append(1))
    assert (outcome.difference.estimate, outcome.difference.n, len(rounds)) == (-1.0, 12, 3)


def test_base_is_not_compared_with_itself(tmp_path, monkeypatch):
    run(tmp_path, "budget.updates=1", "name=base", "evaluation.episodes=0").train()
    settings = [setting for setting in PPO_RUN if not setting.startswith("policy=")]
    start = f"init_from={tmp_path}/base/checkpoints/last"
    trainer = start_run(compose_config([*settings, *QUICK, f"out={tmp_path}", "name=run", "budget.updates=1", start]))
    play_scores(monkeypatch, [0.6, 0.6])
    starts = fake_duel(monkeypatch, base=[True], best=[False])
    report = trainer.train()
    assert (starts, report["vs_base"], report["best"]["update"]) == ([], None, 0)


def test_a_stop_during_the_duel_can_be_resumed(tmp_path, monkeypatch):
    trainer = run_of_a_wrapper(tmp_path, monkeypatch)
    play_scores(monkeypatch, [0.6, 0.2, 0.5, 0.45])

    def stop(*args, before_round, **kwargs):
        signal.raise_signal(signal.SIGTERM)
        before_round()

    monkeypatch.setattr(loop.guards, "compare_with_base", stop)
    with pytest.raises(Interrupted, match="resume with"):
        trainer.train()
    assert not (tmp_path / "run" / "report.json").exists()
    monkeypatch.undo()
    report = resume_run(tmp_path / "run").train()
    assert (report["update"], report["base"]["success"]) == (2, 0.6)
    assert report["vs_base"]["difference"]["n"] >= 10
