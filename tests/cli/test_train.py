"""Tests of `robopolicy train`: files of a run, and error messages."""

import json
import re
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import yaml
from pyarrow import parquet

from robopolicy.cli.main import main
from robopolicy.data.episodes import Episode, Episodes
from robopolicy.data.formats.lerobot import write_lerobot
from robopolicy.evaluation.harness import evaluate
from robopolicy.sim.registry import SimOptions, make_sim
from robopolicy.training.checkpoint import load_policy
from robopolicy.training.compose import compose_config, config_text
from robopolicy.training.loggers import read_jsonl

PPO = ["task=point_mass", "task.reward=shaped", "algorithm=ppo", "policy=gaussian", "sim.num_envs=4"]
QUICK = ["algorithm.num_steps=8", "evaluation.episodes=10"]
TEXT = ["task=text/arithmetic", "budget.updates=1"]
BC = ["task=point_mass", "budget.updates=2", "evaluation.episodes=0"]


def dataset(
    path: Path, *, state: int = 6, action: int = 2, dt: float = 0.1, key: str = "state", task: str = ""
) -> Path:
    """Random demonstrations with given shapes."""
    rng = np.random.default_rng(0)
    arrays = {key: rng.normal(size=(12, state)), "action": rng.uniform(-1, 1, (12, action))}
    arrays = {name: array.astype(np.float32) for name, array in arrays.items()}
    write_lerobot(Episodes.from_list([Episode(arrays, task=task or "toy/point_mass")], dt), path)
    return path


def test_a_run_writes_report_config_metrics_and_checkpoints(tmp_path, capsys):
    settings = [*PPO, *QUICK, "budget.env_steps=512", f"out={tmp_path}", "name=run", "seed=3"]
    assert main(["train", *settings]) == 0
    run = tmp_path / "run"
    assert "report.json" in capsys.readouterr().out
    report = json.loads((run / "report.json").read_text())
    assert report["final"].keys() >= {"n", "success", "low", "high"}
    assert report["total_updates"] == 16  # 512 / (8 decisions x 4 environments)
    assert report["env_steps"] == 512
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert (config["seed"], config["task"]["name"], config["policy"]["name"]) == (3, "toy/point_mass", "gaussian")
    rows = read_jsonl(run / "metrics.jsonl")
    assert {"actor/approx_kl", "train/env_steps", "eval/success"} <= {key for row in rows for key in row}
    assert (run / "metrics.csv").exists()
    assert main(["verify", str(run / "checkpoints" / "best")]) == 0


def test_evaluating_the_best_checkpoint_again_gives_the_same_numbers(tmp_path):
    assert main(["train", *PPO, *QUICK, "budget.updates=3", f"out={tmp_path}", "name=run"]) == 0
    best = json.loads((tmp_path / "run" / "report.json").read_text())["best"]
    policy, manifest = load_policy(tmp_path / "run" / "checkpoints" / "best")
    sim = make_sim(manifest.task, SimOptions(num_envs=7, reward="shaped"))
    again = evaluate(policy, sim, episodes=10, seed=10_000).summary()
    assert {key: again[key] for key in ("n", "success", "return_mean", "length_mean")}.items() <= best.items()
    assert manifest.training["update"] == best["update"]


def test_imitation_learns_from_a_dataset_without_a_simulator(tmp_path, capsys):
    data = dataset(tmp_path / "data")
    settings = [setting for setting in BC if not setting.startswith("task")]
    assert main(["train", *settings, f"dataset={data}", f"out={tmp_path}"]) == 0
    assert "report.json and checkpoints/last." in capsys.readouterr().out  # no best without evaluation
    report = json.loads((tmp_path / "point_mass_flow_bc_seed0" / "report.json").read_text())
    assert (report["task"], report["final"]) == ("toy/point_mass", None)


def test_fine_tuning_takes_policy_task_and_chunk_from_the_checkpoint(tmp_path):
    data = dataset(tmp_path / "data")
    base = [*BC, f"dataset={data}", f"out={tmp_path}", "name=base", "chunk.horizon=6", "chunk.action_horizon=3"]
    assert main(["train", *base, "policy.steps=2"]) == 0
    start = f"init_from={tmp_path}/base/checkpoints/last"
    settings = ["algorithm=reinflow", "budget.updates=1", "sim.num_envs=2", *QUICK, f"out={tmp_path}", "name=tuned"]
    assert main(["train", start, *settings]) == 0
    config = yaml.safe_load((tmp_path / "tuned" / "config.yaml").read_text())
    assert config["task"]["name"] == "toy/point_mass"
    assert config["chunk"] == {"horizon": 6, "action_horizon": 3, "obs_horizon": 1}
    assert config["policy"]["steps"] == 2
    assert json.loads((tmp_path / "tuned" / "report.json").read_text())["base"]["n"] == 10


def test_print_config_prints_a_readable_configuration(capsys):
    assert main(["train", "--print-config", *PPO, "seed=5"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["seed"] == 5


def test_print_config_prints_the_configuration_of_a_run(tmp_path, capsys):
    config = compose_config([*PPO, "seed=7", "budget.updates=1"])
    (tmp_path / "config.yaml").write_text(config_text(config))
    assert main(["train", "--print-config", "--resume", str(tmp_path)]) == 0
    assert capsys.readouterr().out == config_text(config)


def test_runs_do_not_overwrite_each_other(tmp_path, refused):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("mine")
    expected = {"notes.txt": "contains files that are not a run", "config.yaml": "exists; resume it with --resume"}
    for file, words in (expected | {"report.json": "has ended; continue from its weights with init_from="}).items():
        (tmp_path / "run" / file).touch()
        line = refused("train", *PPO, "budget.updates=1", f"out={tmp_path}", "name=run")
        assert words in line and "name=NAME" in line


def test_an_invalid_output_path_is_refused_before_building(tmp_path, refused, monkeypatch):
    monkeypatch.setattr("robopolicy.training.runs.build", None)
    (tmp_path / "file").write_text("")
    line = refused("train", *PPO, "budget.updates=1", f"out={tmp_path}/file")
    assert "a file exists where a folder is required" in line


def test_help_names_the_presets_but_no_recipe(capsys):
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    printed = capsys.readouterr().out
    presets = printed[printed.index("presets:") :]
    assert "offline_to_online" in presets and "see 'robopolicy list recipes'" in presets and "dr_grpo" not in presets
    assert max(map(len, presets.splitlines())) <= 110


@pytest.mark.parametrize(
    "settings, message",
    [
        (["budget.updates=1"], "pass dataset=FOLDER"),
        (["algorithm=distill", "budget.updates=1", "dataset=x"], "requires a trained policy; pass init_from="),
        (["budget.updates=1", "dataset=no/such/folder"], "no/such/folder"),
        ([*PPO], "Set exactly one of budget.updates and budget.env_steps"),
        ([*PPO, "budget.updates=1", "budget.env_steps=1"], "Set exactly one"),
        (["dataset=x", "budget.env_steps=10"], "set budget.updates instead"),
        (["algorithm=ppo", "policy=gaussian", "budget.updates=1"], "pass e.g. task=lift"),
        ([*PPO, "budget.updates=1", "sim.num_envs=-3"], "sim.num_envs must be at least 1, got -3"),
        ([*PPO, "budget.updates=1", "sim.backend=mujco"], "Unknown backend"),
        ([*PPO, "budget.updates=1", "device=cuda:77"], "Device 'cuda:77' cannot be used"),
        ([*PPO, "budget.updates=1", "device=tpu9"], "Device 'tpu9' cannot be used"),
        ([*PPO, "budget.updates=1", "device=meta"], "Device 'meta' cannot be used"),
        ([*PPO, "budget.updates=1", "task=mjlab/No-Such"], "mjlab has no environment 'No-Such'"),
        (["algorithm=ppo", "budget.updates=1", "init_from=no/such"], "no/such does not exist"),
        (["init_from=x", "policy.steps=8"], "come from the checkpoint in init_from; drop policy.steps"),
        ([*PPO, "budget.updates=1", "task.reward=dense"], "Unknown reward 'dense' of task toy/point_mass"),
        ([], "No settings are given"),
        ([*TEXT, "policy=gaussian", "algorithm=ppo"], "Task text/arithmetic is a text task; use policy=text with"),
        ([*TEXT, "policy=flow", "dataset=x"], "not policy 'flow' with algorithm 'bc'"),
        ([*TEXT, "policy=text", "algorithm=ppo"], "not policy 'text' with algorithm 'ppo'"),
        (
            [*TEXT, "policy=text", "algorithm=text_sft", "algorithm.num_prompts=-1"],
            "num_prompts must be at least 0, got -1",
        ),
        ([*PPO, "policy=text", "budget.updates=1"], "Task toy/point_mass is not a text task; use a task such as"),
        (["--resume", "no/such/run"], "is not a run"),
        (["--print-config", "--resume", "no/such/run"], "is not a run"),
        (["--resume", "x", "seed=1"], "keeps its settings"),
    ],
)
def test_bad_settings_are_refused(settings, message, tmp_path, refused, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert message in refused("train", *settings)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "change, message",
    [
        ({"state": 5}, "'state' of dataset .* has shape"),
        ({"action": 3}, "'action' of dataset .* has shape"),
        ({"key": "other"}, "lacks 'state'"),
        ({"dt": 0.5}, "was recorded every 0.5 s"),
    ],
)
def test_datasets_that_do_not_fit_the_task_are_refused(change, message, tmp_path, refused):
    data = dataset(tmp_path / "data", **change)
    settings = ["task=point_mass", "budget.updates=1", f"dataset={data}", f"out={tmp_path}/runs"]
    assert re.search(message, refused("train", *settings))
    assert not (tmp_path / "runs").exists()


def test_a_dataset_that_does_not_fit_the_starting_checkpoint_is_refused(tmp_path, refused):
    start = tmp_path / "run" / "checkpoints" / "last"
    assert main(["train", *PPO, "budget.updates=1", "evaluation.episodes=0", f"out={tmp_path}", "name=run"]) == 0
    data = dataset(tmp_path / "data", state=5)
    settings = [f"init_from={start}", f"dataset={data}", "budget.updates=1", "evaluation.episodes=0", f"out={tmp_path}"]
    assert "has shape (5,), but toy/point_mass has (6,)" in refused("train", *settings)
    line = refused("train", *settings, "task=none", "algorithm=bc")
    assert "The policy expects observation 'state' of shape (6,), but none provides (5,)" in line


def test_datasets_with_non_finite_numbers_are_refused(tmp_path, refused):
    file = next((dataset(tmp_path / "data") / "data").rglob("*.parquet"))
    table = parquet.read_table(file)
    index = table.schema.get_field_index("action")
    actions = [[float("nan"), 0.0], *table["action"].to_pylist()[1:]]
    parquet.write_table(table.set_column(index, "action", pa.array(actions, table["action"].type)), file)
    line = refused("train", "task=point_mass", "budget.updates=1", f"dataset={tmp_path}/data", f"out={tmp_path}/runs")
    assert "'action' is not finite in episode 0" in line


def test_datasets_of_unknown_tasks_are_refused(tmp_path, refused):
    data = dataset(tmp_path / "data", task="fold the towel")
    assert "recorded on 'fold the towel', which is no registered task" in refused(
        "train", "budget.updates=1", f"dataset={data}"
    )


def test_an_unwritable_folder_is_refused(tmp_path, refused):
    (tmp_path / "file").write_text("x")
    line = refused("train", *PPO, "budget.updates=1", f"out={tmp_path}/file/runs")
    assert "file/runs" in line


def test_a_run_that_cannot_start_leaves_no_folder(tmp_path, refused, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)  # as if it were not installed
    settings = ["budget.updates=1", "evaluation.episodes=0", "logging.wandb=true", f"out={tmp_path}"]
    assert "pip install 'robopolicy[wandb]'" in refused("train", *PPO, *settings)
    assert not list(tmp_path.iterdir())


def test_incompatible_policies_and_algorithms_are_refused(tmp_path, refused):
    ppo = ["algorithm=ppo", "budget.updates=1", f"out={tmp_path}"]
    assert "imitate first (algorithm=bc)" in refused("train", "task=point_mass", "policy=flow", *ppo)
    data = dataset(tmp_path / "data")
    assert main(["train", *BC, f"dataset={data}", f"out={tmp_path}", "name=base"]) == 0
    start = f"init_from={tmp_path}/base/checkpoints/last"
    assert "requires a policy with decisions, which 'flow' lacks" in refused("train", start, *ppo)
