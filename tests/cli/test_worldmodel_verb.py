"""Tests of `robopolicy worldmodel`: train, eval, rank and play with a tiny world model."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from scripted_device import ScriptedTeleop

from robopolicy.cli.main import main
from robopolicy.data.formats.lerobot import read_lerobot
from robopolicy.policies.base import PolicySpec
from robopolicy.policies.heads.gaussian import GaussianConfig, GaussianPolicy
from robopolicy.sim.registry import SimOptions, make_sim
from robopolicy.teleop.contract import SUCCESS, TeleopCommand
from robopolicy.training.checkpoint import save_checkpoint
from robopolicy.training.world_sims import load_world, save_world

TINY = ["learner.autoencoder_updates=3", "learner.updates=3", "learner.batch_size=8", "model.width=16"]
TINY += ["model.blocks=1"]
TESTS = ["evaluation.windows=4", "evaluation.horizon=3", "logging.every=1"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Videos, a world model briefly trained on them, and a copy of it that is marked as having passed its tests."""
    out = tmp_path_factory.mktemp("world")
    films = ["--cameras", "top", "--image-size", "16", "--images", "png", "--episodes", "8", "--num-envs", "4"]
    policies = ["--policies", "expert", "random"]
    assert main(["collect", "push", "--render", *films, *policies, "--out", str(out / "films")]) == 0
    run = ["--preset", "smoke", "--out", str(out), "--name", "run", "--override", *TINY, *TESTS]
    assert main(["worldmodel", "train", str(out / "films"), *run]) == 0
    model, manifest = load_world(out / "run" / "checkpoints" / "last")
    save_world(out / "passed", model, replace(manifest, gate={**manifest.gate, "passed": True, "reasons": []}))
    return out


def test_a_model_that_failed_its_tests_evaluates_no_policy(folder, refused):
    world = str(folder / "run" / "checkpoints" / "last")
    backend = ["--task", "push", "--backend", f"worldmodel:{world}"]
    message = refused("eval", "random", *backend, "--out", folder / "no")
    assert "must not evaluate policies: It ignores actions" in message


def test_a_model_that_failed_its_tests_can_be_looked_at_and_compared(folder, capsys):
    world, film = str(folder / "run" / "checkpoints" / "last"), folder / "failed.mp4"
    assert main(["worldmodel", "play", world, "random", "--episodes", "1", "--out", str(film)]) == 0
    assert film.is_file() and "note: World model" in capsys.readouterr().out
    few = ["--episodes", "8", "--num-envs", "4", "--video", "0", "--out", str(folder / "failed")]
    assert main(["worldmodel", "rank", world, "expert", "random", *few]) == 0
    out = capsys.readouterr().out
    assert "must not evaluate policies: It ignores actions" in out
    assert "verdict: the prediction must not rank policies: it does not distinguish expert 1 in reality" in out


def test_videos_in_another_format_train_a_model(folder, tmp_path):
    """A mapping file keeps the closing frames that the file stores."""
    pytest.importorskip("h5py", reason="needs robopolicy[hdf5]")
    assert main(["data", "convert", str(folder / "films"), str(tmp_path / "films.hdf5")]) == 0
    (tmp_path / "films.yaml").write_text("source: films.hdf5\nclosing: true\n")
    run = ["--preset", "smoke", "--out", str(tmp_path), "--name", "run", "--override", *TINY, *TESTS]
    assert main(["worldmodel", "train", str(tmp_path / "films.yaml"), *run]) == 0
    found, expected = (load_world(each / "run" / "checkpoints" / "last")[0] for each in (tmp_path, folder))
    assert {*found.spec.proprio} == {*expected.spec.proprio}  # HDF5 orders its arrays by name
    assert replace(found.spec, proprio=(), proprio_names=()) == replace(expected.spec, proprio=(), proprio_names=())


def test_eval_prints_its_results_and_writes_a_contact_sheet(folder, capsys):
    world, sheet = str(folder / "passed"), folder / "sheet.png"
    options = ["--windows", "4", "--horizon", "12", "--out", str(sheet)]
    assert main(["worldmodel", "eval", world, str(folder / "films"), *options]) == 0
    out = capsys.readouterr().out
    assert "shuffled" in out and "It failed the test and must not evaluate policies: It ignores actions" in out
    assert Image.open(sheet).width == 8 + 7 * (128 + 8)  # last observed frame; real and predicted at three horizons
    assert main(["worldmodel", "eval", world, str(folder / "films"), "--windows", "4", "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)["psnr"]) == {"true", "shuffled", "zero"}


def test_rank_compares_real_and_predicted_results_per_start(folder, capsys):
    players = ["expert", "expert+0.5", "expert+1", "random", "random+0.5"]
    options = ["--episodes", "4", "--num-envs", "4", "--video", "2", "--out", str(folder / "rank"), "--json"]
    assert main(["worldmodel", "rank", str(folder / "passed"), *players, *options]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found["policies"]) == players and "mmrv" in found["metrics"]
    assert found["policies"]["expert"]["real"]["estimate"] == 1.0
    assert {file.name for file in (folder / "rank").iterdir()} >= {"ranking.json", "scatter.png", "films.mp4"}


@pytest.mark.parametrize("action", ["rank", "play"])
def test_default_episodes_are_not_the_ones_that_select_checkpoints(action, capsys):
    with pytest.raises(SystemExit):
        main(["worldmodel", action, "--help"])
    assert "seed of the first episode (default: 50000)" in " ".join(capsys.readouterr().out.split())


def test_eval_runs_inside_the_world_model(folder, capsys, refused):
    backend = ["--task", "push", "--backend", f"worldmodel:{folder / 'passed'}", "--episodes", "3", "--video", "0"]
    assert main(["eval", "random", *backend, "--out", str(folder / "eval"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["results"]["random"]["n"] == 3
    assert "trained on toy/push; it cannot simulate toy/point_mass" in refused(
        "eval", "random", *backend, "--task", "point_mass", "--out", folder / "other"
    )


@pytest.mark.slow
def test_eval_plan_with_predicts_candidate_chunks_in_the_world_model(folder, capsys, refused):
    world = str(folder / "passed")
    spec = load_world(world)[0].spec
    sim = make_sim("push", SimOptions(num_envs=1))
    shapes = {key: tuple(sim.spec.observation[key].shape) for key in spec.proprio}
    policy = GaussianPolicy(
        GaussianConfig(normalization="identity"), PolicySpec(shapes, 2, horizon=2, action_horizon=2)
    )
    seen = {key: torch.zeros(2, 1, *shape) for key, shape in shapes.items()}
    save_checkpoint(folder / "policy", policy, task="toy/push", obs_sample=seen)
    imagine = ["--plan-with", world, "--candidates", "2", "--episodes", "1", "--video", "0", "--json"]
    assert main(["eval", str(folder / "policy"), *imagine, "--out", str(folder / "imagined")]) == 0
    assert [result["n"] for result in json.loads(capsys.readouterr().out)["results"].values()] == [1]
    assert f"2 chunks, predicted in {world}" in (folder / "imagined" / "report.html").read_text()
    other = ["eval", str(folder / "policy"), "--task", "point_mass", "--plan-with", world, "--out"]
    other += [str(folder / "other")]
    assert "trained on toy/push, not on toy/point_mass" in refused(*other)


def test_play_records_a_video(folder):
    world, film = str(folder / "passed"), folder / "film.mp4"
    assert main(["worldmodel", "play", world, "random", "--episodes", "2", "--out", str(film)]) == 0
    assert film.is_file()


def test_a_person_moves_the_robot_in_a_world_model(folder, monkeypatch, capsys, refused):
    """A model that failed its tests can be looked at, but not recorded."""
    right = np.array([1.0, 0, 0, 0, 0, 0])
    command = lambda k: TeleopCommand(k % 10 > 1, right * (k % 10 > 2), events=(SUCCESS,) * (k % 10 == 9))  # noqa: E731
    monkeypatch.setattr("robopolicy.teleop.devices.open_device", lambda name: ScriptedTeleop(command))
    words = ["teleop", "push", "--speed", "100", "--episodes", "1"]
    passed, failed = (["--backend", f"worldmodel:{folder / name}"] for name in ("passed", "run/checkpoints/last"))
    assert main([*words, *passed, "--out", str(folder / "by_hand")]) == 0
    data = read_lerobot(folder / "by_hand")
    assert data.num_episodes == 1 and data.arrays["intervention"].all()
    assert main([*words, *failed]) == 0 and "kept 1 episode" in capsys.readouterr().out
    assert "It ignores actions" in refused(*words, *failed, "--out", folder / "no")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train"], "No videos are given"),
        (["train", "nowhere", "--preset", "tini"], "Unknown preset 'tini'"),
        (
            ["train", "nowhere", "--override", "learner.rate=1"],
            "Unknown setting 'learner.rate'. Did you mean 'learner.lr'?",
        ),
        (["train", "nowhere", "--override", "learner.updates=soon"], "learner.updates must be"),
        (["train", "nowhere"], "No LeRobot dataset at nowhere"),
        (["train", "nowhere", "--resume", "run"], "pass only --resume RUN"),
        (["train", "--resume", "run", "--preset", "base"], "--preset has no effect with --resume"),
        (["eval", "nowhere", "films"], "nowhere does not exist"),
        (["eval", "nowhere", "films", "--overwrite"], "--overwrite has no effect without --out"),
        (["eval", "nowhere", "films", "--out", "sheet.gif"], "--out must end in .png, got sheet.gif"),
    ],
)
def test_invalid_arguments_are_refused(arguments, message, refused):
    assert message in refused("worldmodel", *arguments)


def test_fixture_videos_contain_failures(folder):
    films = read_lerobot(folder / "films")
    assert films.success.sum() == 4 and films.num_episodes == 8
