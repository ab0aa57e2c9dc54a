"""Tests of `task=none`: learning from a dataset without a simulator, and the commands that use such a checkpoint."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from own_arm import JOINTS, record

from robopolicy.cli.main import main
from robopolicy.data.formats.lerobot import read_lerobot, write_lerobot
from robopolicy.training.loggers import read_jsonl
from robopolicy.training.manifest import read_manifest

SMALL = ["task=none", "algorithm=bc", "policy=gaussian", "policy.hidden=[32]"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on demonstrations of an arm that no task describes."""
    folder = tmp_path_factory.mktemp("recorded")
    data = record(folder / "my_arm", camera=True, reward=True)
    settings = [*SMALL, f"dataset={data}", "task.obs_keys=[state]", "budget.updates=300"]
    settings += ["algorithm.lr=3e-3", "evaluation.every=100"]
    assert main(["train", *settings, f"out={folder}"]) == 0
    return folder / "my_arm_gaussian_bc_seed0"


def test_a_run_reports_the_error_on_episodes_it_did_not_train_on(run: Path) -> None:
    report = json.loads((run / "report.json").read_text())
    best = report["best"]
    assert report["task"] == "none" and best["n"] == 2
    assert best["action_error_low"] < best["action_error"] < best["action_error_high"]
    assert list(best["entries"]) == [f"{joint} [rad]" for joint in JOINTS]
    errors = [row["eval/action_error"] for row in read_jsonl(run / "metrics.jsonl") if "eval/action_error" in row]
    assert len(errors) == 3 and errors[-1] < errors[0]
    assert best["action_error"] == min(errors)


def test_the_checkpoint_stores_shapes_names_rate_and_instruction(run: Path) -> None:
    manifest = read_manifest(run / "checkpoints" / "best")
    assert manifest.policy_spec.observation == {"state": (6,)} and manifest.policy_spec.action_dim == 6
    metadata = manifest.task_metadata
    assert metadata is not None and metadata.control_dt == pytest.approx(1 / 30)
    assert metadata.action_names[0] == "shoulder_pan [rad]" and metadata.instructions == ("pick the block",)


def test_a_camera_of_the_dataset_is_an_observation(tmp_path: Path) -> None:
    data = record(tmp_path / "data", camera=True)
    settings = [f"dataset={data}", "budget.updates=1", "evaluation.episodes=0", f"out={tmp_path}", "name=run"]
    assert main(["train", *SMALL, *settings]) == 0
    spec = read_manifest(tmp_path / "run" / "checkpoints" / "last").policy_spec
    assert spec.observation["image.front"] == (3, 16, 16)


def test_verify_eval_and_ope_accept_the_checkpoint(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    best, data = str(run / "checkpoints" / "best"), str(run.parent / "my_arm")
    assert main(["verify", best]) == 0
    assert "cannot be evaluated" not in capsys.readouterr().out
    assert main(["eval", best, "--dataset", data]) == 0
    assert "shoulder_pan [rad]" in capsys.readouterr().out
    assert main(["eval", best, "--dataset", data, "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["policies"].values()
    assert found["n"] == 8 and found["action_error"] < 1
    assert main(["ope", best, "--logs", data, "--steps", "20"]) == 0
    assert "8 logged episodes" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "message"),
    [("names", "'action' of dataset .* where the policy has 'shoulder_pan"), ("rate", "recorded every")],
)
def test_a_dataset_of_another_order_or_rate_is_refused(change, message, run, tmp_path, refused) -> None:
    data = read_lerobot(run.parent / "my_arm")
    names = {**data.names, "action": data.names["action"][::-1]}
    changed = replace(data, names=names) if change == "names" else replace(data, control_dt=0.1)
    write_lerobot(changed, tmp_path / "changed")
    best = run / "checkpoints" / "best"
    assert re.search(message, refused("eval", best, "--dataset", tmp_path / "changed"))
    words = ["algorithm=bc", f"dataset={tmp_path / 'changed'}", "budget.updates=1", f"out={tmp_path}", "name=further"]
    assert re.search(message, refused("train", "task=none", f"init_from={best}", *words))
    assert not (tmp_path / "further").exists()


def test_an_outlier_is_named_by_training_and_card(run: Path, tmp_path: Path, capsys) -> None:
    data = read_lerobot(run.parent / "my_arm", images=False)
    action = data.arrays["action"].copy()
    action[data.starts[3], 2] = 1e30
    write_lerobot(replace(data, arrays={**data.arrays, "action": action}), tmp_path / "data")
    text = "reaches 1e+30 in episode 3"
    settings = [f"dataset={tmp_path / 'data'}", "budget.updates=1", "evaluation.episodes=0", f"out={tmp_path}"]
    with pytest.warns(UserWarning, match=re.escape(text)):
        main(["train", *SMALL, *settings])
    capsys.readouterr()
    assert main(["data", "card", str(tmp_path / "data")]) == 0
    assert text in capsys.readouterr().out


def test_the_exported_bundle_has_the_rate_and_names_of_the_dataset(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("onnxscript", reason="needs robopolicy[onnx]")
    pytest.importorskip("onnxruntime", reason="needs robopolicy[onnx]")
    from robopolicy.deploy.bundle import open_bundle

    assert main(["export", str(run / "checkpoints" / "best"), "--out", str(tmp_path / "bundle")]) == 0
    assert "omitted" not in capsys.readouterr().out
    manifest = open_bundle(tmp_path / "bundle").manifest
    assert manifest.control_dt == pytest.approx(1 / 30) and manifest.action_names[5] == "gripper [rad]"
    assert manifest.action_low == () and manifest.task == "none"


def test_the_checkpoint_starts_further_training_on_the_dataset(run: Path, tmp_path: Path) -> None:
    settings = [f"init_from={run}/checkpoints/best", f"dataset={run.parent}/my_arm", "budget.updates=1"]
    assert main(["train", *settings, f"out={tmp_path}", "name=more"]) == 0
    assert read_manifest(tmp_path / "more" / "checkpoints" / "last").task == "none"


def test_offline_rl_learns_from_a_dataset_with_rewards(run: Path, tmp_path: Path) -> None:
    settings = ["task=none", "algorithm=iql", "policy=gaussian", "policy.hidden=[16]", "budget.updates=3"]
    settings += ["replay.offline_updates=3", f"dataset={run.parent}/my_arm", "task.obs_keys=[state]"]
    assert main(["train", *settings, f"out={tmp_path}", "name=iql"]) == 0
    assert json.loads((tmp_path / "iql" / "report.json").read_text())["best"]["n"] == 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["dataset="], "pass dataset=FOLDER"),
        (["algorithm=ppo"], "Algorithm 'ppo' needs a simulator"),
        (["algorithm=iql"], "replay.offline_updates=N"),
        (["task.cameras=[front]"], "choose among them by task.obs_keys"),
        (["task.obs_keys=[stat]"], "Did you mean 'state'?"),
    ],
)
def test_settings_that_need_a_simulator_are_refused(settings, message, run, tmp_path, refused) -> None:
    choices = [f"dataset={run.parent}/my_arm", "budget.updates=1", f"out={tmp_path}"]
    changed = {text.partition("=")[0] for text in settings}
    base = [text for text in [*SMALL, *choices] if text.partition("=")[0] not in changed]
    assert message in refused("train", *base, *settings)
    assert not list(tmp_path.iterdir())


def test_one_episode_cannot_be_held_out(tmp_path, refused) -> None:
    data = record(tmp_path / "data", episodes=1)
    settings = [*SMALL, f"dataset={data}", "budget.updates=1", f"out={tmp_path}/runs"]
    assert "evaluation.episodes=0" in refused("train", *settings)


def test_a_dataset_of_an_unknown_task_suggests_none(tmp_path, refused) -> None:
    data = record(tmp_path / "data")
    assert "task=none" in refused("train", "budget.updates=1", f"dataset={data}")


def test_commands_that_need_a_simulator_say_what_to_do(run: Path, tmp_path: Path, refused) -> None:
    best = str(run / "checkpoints" / "best")
    assert "'robopolicy eval CKPT --dataset FOLDER'" in refused("eval", best, "--out", tmp_path / "e")
    assert "--dataset compares checkpoints" in refused("eval", "random", "--dataset", run.parent / "my_arm")
    assert "--episodes has no effect" in refused("eval", best, "--dataset", run.parent / "my_arm", "--episodes", "3")
