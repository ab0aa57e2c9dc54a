"""Test that a run with cost limits does not restore a checkpoint when success drops."""

import pytest
from played_scores import play_scores

from robopolicy.nets.normalizer import Normalizer
from robopolicy.training.compose import compose_config
from robopolicy.training.runs import start_run

PPO_RUN = ["task=point_mass", "task.reward=shaped", "algorithm=ppo", "policy=gaussian", "sim.num_envs=4"]
QUICK = ["algorithm.num_steps=8", "evaluation.episodes=10", "evaluation.every=1", "logging.every=1"]


def run(tmp_path, *settings):
    return start_run(compose_config([*PPO_RUN, *QUICK, f"out={tmp_path}", "name=run", *settings]))


@pytest.mark.parametrize("limits, restored", [([1.0], 0), ([], 1)])
def test_constrained_runs_do_not_restore_after_a_success_drop(limits, restored, tmp_path, monkeypatch):
    play_scores(monkeypatch, [0.9, 0.2])
    algorithm = ["algorithm=ppo_lagrangian", f"algorithm.costs={['fall'] * len(limits)}", f"algorithm.limits={limits}"]
    trainer = run(tmp_path, *algorithm, "budget.updates=2")
    monkeypatch.setattr(trainer.algorithm, "update", lambda batch: {})
    for part in trainer.algorithm.policy.modules():
        if isinstance(part, Normalizer):
            part.fitted.fill_(True)
    assert trainer.train()["num_restores"] == restored
