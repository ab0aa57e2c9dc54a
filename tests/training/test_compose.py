"""Tests of configurations: presets and overrides compose, and every mistake is a one-line error."""

from pathlib import Path

import pytest
import torch
from run_rules import check_can_be_chosen, check_preset_composes

from robopolicy.algorithms.registry import ALGORITHMS
from robopolicy.errors import UserError
from robopolicy.policies.base import PolicySpec
from robopolicy.policies.heads.flow import FlowConfig, FlowPolicy
from robopolicy.policies.registry import POLICIES
from robopolicy.resources import folder
from robopolicy.sim.registry import task_names
from robopolicy.training import build as build_module
from robopolicy.training.build import build, resolve_config
from robopolicy.training.checkpoint import save_checkpoint
from robopolicy.training.compose import compose_config, config_text, read_config
from robopolicy.training.config import BudgetConfig, TrainConfig, section


def test_defaults_match_the_dataclasses():
    config = compose_config()
    assert (config.policy["name"], config.algorithm["name"]) == ("flow", "bc")
    assert section("policy", config.policy) == ("flow", POLICIES["flow"].config_class())
    assert section("algorithm", config.algorithm) == ("bc", ALGORITHMS["bc"].config_class())
    assert config.sim == TrainConfig().sim


@pytest.mark.parametrize(
    "group, name",
    [*(("policy", name) for name in POLICIES.product()), *(("algorithm", name) for name in ALGORITHMS.product())],
)
def test_every_policy_and_algorithm_can_be_chosen(group, name):
    check_can_be_chosen(group, name)


def test_overrides_reach_nested_settings():
    config = compose_config(["algorithm=ppo", "algorithm.lr=3e-4", "algorithm.critic.hidden=[8,8]", "seed=7"])
    assert section("algorithm", config.algorithm)[1].critic.hidden == (8, 8)
    assert (config.algorithm["lr"], config.seed) == (3e-4, 7)


def test_budget_in_one_unit_replaces_the_preset_budget_in_the_other():
    preset = compose_config(["experiment=offline_to_online"]).budget
    assert (preset.updates > 0, preset.env_steps) == (True, 0)
    assert compose_config(["experiment=offline_to_online", "budget.env_steps=2000"]).budget == BudgetConfig(0, 2000)
    both = compose_config(["experiment=offline_to_online", "budget.env_steps=2000", "budget.updates=3"])
    assert both.budget == BudgetConfig(3, 2000)  # refused when it is completed


def test_counts_may_be_powers_of_ten():
    config = compose_config(
        ["budget.updates=0", "budget.env_steps=2.5e6", "algorithm=ppo", "algorithm.lr=1e-4", "out=1e3"]
    )
    assert (config.budget.env_steps, config.algorithm["lr"], config.out) == (2_500_000, 1e-4, "1e3")
    with pytest.raises(UserError, match="could not be converted to Integer"):
        compose_config(["budget.env_steps=2.5"])


def test_optional_numbers_can_be_switched_off():
    assert compose_config(["algorithm=reinflow", "algorithm.target_kl=null"]).algorithm["target_kl"] is None


@pytest.mark.parametrize("path", ["a b/c", "x=1,y=2", "${a", "it's", "[0]", "{a}", "c:\\d", "null", "1", "ü", "$x", ""])
def test_paths_may_contain_any_character(path):
    assert compose_config([f"dataset={path}"]).dataset == path


def test_tasks_can_be_presets_full_names_or_last_parts():
    assert compose_config(["task=toy/point_mass"]).task.name == "toy/point_mass"
    assert compose_config(["task=point_mass"]).task.name == "toy/point_mass"


@pytest.mark.parametrize("task", [name for name in task_names() if name.startswith("locomotion/")])
def test_gymnasium_robots_act_at_every_control_step(task: str):
    config = compose_config([f"task={task.split('/')[1]}"])
    assert config.task.name == task
    assert chunk_of(f"task={task}", "algorithm=ppo") == (1, 1)


def chunk_of(*settings: str) -> tuple[int, int]:
    chunk = resolve_config(compose_config([*settings, "budget.updates=1"])).chunk
    return chunk.horizon, chunk.action_horizon


@pytest.mark.parametrize("task", ["gymnasium/Pendulum-v1", "lift", "drawer"])
@pytest.mark.parametrize("policy, algorithm", [("gaussian", "ppo"), ("squashed_gaussian", "sac"), ("mixture", "ppo")])
def test_explicit_policies_from_scratch_decide_every_step(task, policy, algorithm):
    assert chunk_of(f"task={task}", f"policy={policy}", f"algorithm={algorithm}") == (1, 1)


def test_other_policies_use_the_chunks_of_the_task():
    assert chunk_of("task=gymnasium/Pendulum-v1", "policy=flow", "algorithm=fpo") == (8, 4)
    assert chunk_of("task=lift", "policy=flow", "algorithm=fpo") == (4, 4)
    assert chunk_of("task=lift", "policy=gaussian", "algorithm=bc", "dataset=data") == (4, 4)  # demonstrations
    assert chunk_of("task=arithmetic", "policy=text", "algorithm=text_recipe") == (1, 1)


@pytest.mark.parametrize(
    "settings, expected",
    [
        (("chunk.horizon=8",), (8, 1)),
        (("chunk.action_horizon=4",), (4, 4)),
        (("chunk.horizon=8", "chunk.action_horizon=4"), (8, 4)),
        (("policy=flow", "algorithm=fpo", "chunk.horizon=2"), (2, 2)),
        (("policy=flow", "algorithm=fpo", "chunk.action_horizon=16"), (16, 16)),
    ],
)
def test_chosen_chunk_sizes_are_kept(settings, expected):
    assert chunk_of("task=gymnasium/Pendulum-v1", "policy=gaussian", "algorithm=ppo", *settings) == expected


def test_more_executed_actions_than_the_chunk_has_are_refused():
    with pytest.raises(UserError, match=r"chunk.action_horizon must not exceed chunk.horizon, got 9 > 8"):
        compose_config(["chunk.horizon=8", "chunk.action_horizon=9"])


@pytest.mark.parametrize(
    "group, name",
    [
        (path.parent.name, path.stem)
        for path in sorted(folder("configs").glob("*/*.yaml"))
        if path.parent.name != "text"  # recipes
    ],
)
def test_every_preset_composes(group, name):
    check_preset_composes(group, name)


SETTINGS = sorted((folder("configs") / "settings").glob("*/*.yaml"))


@pytest.mark.parametrize("kind, algorithm", [(path.parent.name, path.stem) for path in SETTINGS])
def test_a_kind_of_experiment_has_settings_for_its_algorithms(kind, algorithm):
    words = [f"experiment={kind}", f"algorithm={algorithm}", "task=drawer"]
    words += {"rlpd": ["policy=squashed_gaussian"], "sac": ["policy=squashed_gaussian"]}.get(algorithm, [])
    config = compose_config(words)
    assert (config.task.name, config.algorithm["name"]) == ("manipulation/drawer", algorithm)
    assert config.algorithm != compose_config(words[1:]).algorithm or algorithm == "sac"
    assert (config.budget.updates > 0) != (config.budget.env_steps > 0)


def test_settings_of_a_kind_give_way_to_the_command_line():
    assert compose_config(["experiment=fine_tune", "algorithm=dppo"]).algorithm["std_min"] == 0.08
    chosen = [
        "experiment=fine_tune",
        "algorithm=dppo",
        "algorithm.std_min=0.05",
        "budget.updates=7",
        "sim.num_envs=3",
    ]
    config = compose_config(chosen)
    assert (config.algorithm["std_min"], config.budget.updates, config.sim.num_envs) == (0.05, 7, 3)


def test_a_kind_of_experiment_accepts_algorithms_without_settings():
    config = compose_config(["experiment=from_scratch", "task=hopper", "algorithm=ppo"])
    assert (config.task.name, config.budget.env_steps) == ("locomotion/hopper", 1_000_000)


def test_config_round_trips_through_the_run_folder(tmp_path: Path):
    config = compose_config(["task=point_mass", "algorithm=reinflow", "dataset=it's ${x}", "algorithm.lr=3e-5"])
    file = tmp_path / "config.yaml"
    file.write_text(config_text(config))
    assert read_config(file) == config


def test_a_damaged_config_file_is_refused(tmp_path: Path):
    file = tmp_path / "config.yaml"
    file.write_text("seed: [1\n")
    with pytest.raises(UserError, match="cannot be read"):
        read_config(file)
    file.write_text(config_text(compose_config()) + "extra: 1\n")
    with pytest.raises(UserError, match="'extra'"):
        read_config(file)


MISTAKES = {
    "polcy=flow": "Unknown setting 'polcy'. Did you mean 'policy'",
    "policy=flwo": "Unknown policy preset 'flwo'. Did you mean 'flow'",
    "algorithm=pppo": "Unknown algorithm preset 'pppo'. Did you mean 'ppo'",
    "experiment=none_such": "Unknown experiment preset 'none_such'",
    "task=poimt_mass": "Unknown task 'poimt_mass'. Did you mean 'point_mass'",
    "algorithm.lrr=1": "Unknown setting 'algorithm.lrr'. Did you mean 'algorithm.lr'",
    "algorithm.bogus=1": "Unknown setting 'algorithm.bogus'. Did you mean 'algorithm.",
    "bugdet.updates=1": "Did you mean 'budget.updates'",
    "seed.x=1": "Unknown setting 'seed.x'",
    "budget=5": "'budget' is a section; set one of budget.updates, budget.env_steps",
    "seed=many": "seed: Value 'many' of type 'str' could not be converted to Integer",
    "algorithm.ema=perhaps": "algorithm.ema: Value 'perhaps' is not a valid bool",
    "policy.hidden=[3,a]": "hidden",
    "policy.hidden=[3": "The value in 'policy.hidden=[3' cannot be read",
    "policy.name=gaussian": "set policy=gaussian",
    "seed": "Expected group=preset or key=value",
    "+new=1": "Expected group=preset or key=value",
    "~seed=1": "Expected group=preset or key=value",
    "algorithm.lr=-1": "algorithm.lr must be positive, got -1.0",
    "algorithm.lr=nan": "algorithm.lr must be a finite number",
    "algorithm.batch_size=0": "algorithm.batch_size must be at least 1",
    "algorithm.batch_size=10000000000": "algorithm.batch_size must be at most 1000000",
    "algorithm.weight_decay=-1": "algorithm.weight_decay must not be negative",
    "seed=99999999999999999999": "seed must be at most 4294967295",
    "threads=100000": "threads must be at most 1024",
    "chunk.horizon=100000000": "chunk.horizon must be at most 4096",
    "task.cameras=front": "task.cameras: expected a list, e.g. task.cameras=[a,b]",
    "name=../elsewhere": "name must be a plain folder name",
    "name=null": "name=null is not a name; omit name",
    "seed=0,1": "'seed=0,1' has several values; run 'robopolicy train --multirun' to train each",
    "algorithm=ppo,bpo": "'algorithm=ppo,bpo' has several values",
    "name=..": "name must be a plain folder name",
    "algorithm.beta1=2": "algorithm.beta1 must lie in [0, 1), got 2.0",
    "sim.num_envs=0": "sim.num_envs must be at least 1",
    "sim.threads=-1": "sim.threads must be at least 0",
    "budget.updates=-5": "budget.updates must be at least 0",
    "evaluation.episodes=-1": "evaluation.episodes must be at least 0",
    "policy.transformer_layers=-1": "policy.transformer_layers must be at least 1, got -1",
    "policy.transformer_layers=100000": "policy.transformer_layers must be at most 1000",
    "policy.transformer_dropout=-1": "policy.transformer_dropout must lie in [0, 1), got -1.0",
    "policy.hidden=[0]": "policy.hidden[0] must be at least 1, got 0",
    "evaluation.success_step=first": "Unknown value 'first' of evaluation.success_step",
    "policy.steps=0": "policy.steps must be at least 1",
    "policy.backbone=mpl": "Did you mean 'mlp'",
}


def test_preset_with_a_setting_that_the_choice_lacks_is_named():
    with pytest.raises(UserError, match=r"Preset experiment/go1_ppo sets policy\.log_std_init, which the chos"):
        compose_config(["experiment=go1_ppo", "policy=flow"])


@pytest.mark.parametrize("override", MISTAKES)
def test_mistakes_are_named_in_one_line(override):
    with pytest.raises(UserError) as refusal:
        compose_config([override])
    message = str(refusal.value)
    assert any(part in message for part in MISTAKES[override].split("|")), message
    assert "\n" not in message


def test_initial_policy_sets_the_cameras(tmp_path: Path):
    spec = PolicySpec({"state": (3,), "image.front": (3, 24, 24)}, action_dim=8, horizon=2)
    settings = FlowConfig(hidden=(8,), normalization="identity", action_normalization="identity")
    obs = {"state": torch.zeros(1, 1, 3), "image.front": torch.zeros(1, 1, 3, 24, 24, dtype=torch.uint8)}
    save_checkpoint(tmp_path / "ckpt", FlowPolicy(settings, spec), task="manipulation/lift", obs_sample=obs)
    start = ["algorithm=reinflow", f"init_from={tmp_path / 'ckpt'}", "budget.updates=1"]
    task = resolve_config(compose_config(start)).task
    assert (task.cameras, task.image_size) == (("front",), 24)
    assert resolve_config(compose_config([*start, "task.cameras=[wrist]"])).task.cameras == ("wrist",)


def test_entries_of_an_empty_section_can_be_added():
    settings = ["policy=gaussian", "algorithm=ppo", "algorithm.critic.privileged_obs.state=4"]
    assert compose_config(settings).algorithm["critic"]["privileged_obs"] == {"state": 4}
    with pytest.raises(UserError, match=r"algorithm.critic.privileged_obs.state: .*Integer"):
        compose_config([*settings[:2], "algorithm.critic.privileged_obs.state=many"])


def small_ppo(*settings: str):
    start = ["task=point_mass", "policy=gaussian", "algorithm=ppo", "budget.updates=1", "evaluation.episodes=0"]
    return build(resolve_config(compose_config([*start, *settings])))


def test_obs_keys_select_the_observations_of_a_new_policy():
    assert set(small_ppo("task.obs_keys=[state]").policy.spec.observation) == {"state"}
    with pytest.raises(UserError, match=r"'stat'.*Did you mean 'state'"):
        small_ppo("task.obs_keys=[stat]")


def test_privileged_critic_observations_must_match_the_simulator():
    with pytest.raises(UserError, match=r"requires 'state' of shape \(99,\); toy/point_mass has \("):
        small_ppo("algorithm.critic.privileged_obs.state=99")
    with pytest.raises(UserError, match=r"requires 'goal' of shape .*has no such key"):
        small_ppo("algorithm.critic.privileged_obs.goal=2")


def test_initial_weights_do_not_depend_on_random_numbers_of_simulators(monkeypatch: pytest.MonkeyPatch):
    make = build_module.eval_simulator

    def drawing(config):
        torch.rand(3)
        return make(config)

    monkeypatch.setattr(build_module, "eval_simulator", drawing)
    first, second = (small_ppo(f"evaluation.episodes={n}").policy.state_dict() for n in (0, 2))
    assert all(torch.equal(value, second[key]) for key, value in first.items())
