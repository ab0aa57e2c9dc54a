"""Test of a cost constraint on leaving the training data of a world model."""

import json

from push_worlds import folder

from robopolicy.cli.main import main

__all__ = ["folder"]  # a fixture


def test_ppo_lagrangian_constrains_the_cost_of_leaving_the_video_support(folder):
    algorithm = ["algorithm=ppo_lagrangian", "algorithm.costs=[outside]", "algorithm.limits=[0.5]"]
    settings = [
        "algorithm.num_steps=8",
        "sim.num_envs=4",
        "worldmodel.steps=6",
        "budget.updates=2",
        "evaluation.episodes=0",
    ]
    guard = [
        f"worldmodel.support={folder / 'films'}",
        "worldmodel.support_penalty=3",
        "task.obs_keys=[gripper,block]",
        "evaluation.episodes=0",
    ]
    place = [f"sim.backend=worldmodel:{folder / 'world0'}", f"out={folder}", "name=bounded", "task=push"]
    policy = ["policy=gaussian", "policy.normalization=running", "logging.every=1"]
    assert main(["train", *algorithm, *settings, *guard, *place, *policy]) == 0
    rows = [json.loads(row) for row in (folder / "bounded" / "metrics.jsonl").read_text().splitlines()]
    costs = [row["cost/outside"] for row in rows if "cost/outside" in row]
    assert costs and all(0 <= cost <= 3 for cost in costs)
    assert all(row["multiplier/outside"] >= 0 for row in rows if "multiplier/outside" in row)
