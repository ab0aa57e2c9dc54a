"""Tests of default run names: tasks of different families have different ones."""

import pytest

from robopolicy.sim.registry import task_label
from robopolicy.training.build import resolve_config
from robopolicy.training.compose import compose_config


@pytest.mark.parametrize(
    ("task", "label"),
    [
        ("manipulation/lift", "lift"),
        ("none", "none"),
        ("gymnasium/Ant-v5", "gymnasium_Ant-v5"),
        ("envpool/Ant-v5", "envpool_Ant-v5"),
        ("prompts/data/sums.jsonl", "prompts_sums.jsonl"),
    ],
)
def test_a_label_names_the_family_where_another_task_may_have_the_same_last_part(task: str, label: str) -> None:
    assert task_label(task) == label


def test_equal_environments_of_two_backends_have_different_run_names() -> None:
    settings = ["policy=gaussian", "algorithm=ppo", "sim.num_envs=1", "budget.env_steps=1000"]
    configs = [compose_config([f"task.name={family}/Ant-v5", *settings]) for family in ("gymnasium", "envpool")]
    names = [resolve_config(config).name for config in configs]
    assert names == ["gymnasium_Ant-v5_gaussian_ppo_seed0", "envpool_Ant-v5_gaussian_ppo_seed0"]
