"""Tests of `robopolicy eval`: report folder, comparison and error messages."""

import json

import pytest
import torch

from robopolicy.cli.main import main
from robopolicy.policies.base import PolicySpec
from robopolicy.policies.registry import POLICIES
from robopolicy.training.checkpoint import save_checkpoint

TASK = "toy/point_mass"


@pytest.fixture
def make_checkpoint(tmp_path):
    def make(name, task=TASK, state=6):
        policy_class = POLICIES["gaussian"]
        config_class = policy_class.config_class
        policy = policy_class(config_class(), PolicySpec({"state": (state,)}, 2))
        seen = {"state": torch.randn(4, 1, state)}
        policy.encoder.normalizer.update(seen["state"][:, 0])
        save_checkpoint(tmp_path / name, policy, task=task, obs_sample=seen)
        return str(tmp_path / name)

    return make


def test_a_checkpoint_is_evaluated_on_its_own_task(make_checkpoint, tmp_path, capsys):
    out = tmp_path / "report"
    checkpoint = make_checkpoint("runs/run/checkpoints/best")
    assert main(["eval", checkpoint, "--episodes", "6", "--num-envs", "3", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert f"{TASK}, 6 episodes, seeds 50000 to 50005" in printed and "run/best" in printed
    assert "No video: Task toy/point_mass cannot render images." in printed
    report = json.loads((out / "report.json").read_text())
    episodes = report["results"]["run/best"]["episodes"]
    assert episodes["seed"] == list(range(50000, 50006)) and len(episodes["return"]) == 6
    assert (out / "report.html").is_file() and (out / "report.md").is_file()


def test_the_number_of_environments_does_not_change_the_episodes(make_checkpoint, tmp_path):
    checkpoint, found = make_checkpoint("ckpt"), []
    for n in ("1", "5"):
        out = tmp_path / f"out{n}"
        main(
            ["eval", checkpoint, "--stochastic", "--episodes", "8", "--num-envs", n, "--out", str(out), "--video", "0"]
        )
        found.append(next(iter(json.loads((out / "report.json").read_text())["results"].values()))["episodes"])
    assert found[0] == found[1]


def test_two_policies_are_compared_and_printed_as_json(make_checkpoint, tmp_path, capsys):
    argv = ["eval", make_checkpoint("ckpt"), "expert", "--episodes", "20", "--out", str(tmp_path / "out"), "--json"]
    assert main(argv) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["comparison"]["success"]["wins"] > 15
    assert printed["results"]["expert"]["success"] == 1.0 and printed["results"]["expert"]["low"] > 0.8


def test_two_policies_are_not_compared_on_one_episode(make_checkpoint, tmp_path):
    out = tmp_path / "out"
    argv = ["eval", make_checkpoint("ckpt"), "expert", "--episodes", "1", "--video", "0", "--out", str(out)]
    assert main(argv) == 0
    report = json.loads((out / "report.json").read_text())
    assert report["comparison"] is None and len(report["results"]) == 2


def test_success_of_the_last_step_is_an_option(make_checkpoint, tmp_path):
    out = tmp_path / "out"
    argv = ["eval", make_checkpoint("ckpt"), "--episodes", "4", "--out", str(out), "--video", "0"]
    assert main([*argv, "--success-step", "last"]) == 0
    report = json.loads((out / "report.json").read_text())
    assert {result["success_step"] for result in report["results"].values()} == {"last"}
    assert "at the last step" in (out / "report.md").read_text()


def test_overwrite_replaces_reports_only(tmp_path, refused):
    out = tmp_path / "out"
    argv = ["random", "--task", TASK, "--episodes", "2", "--overwrite", "--out", str(out)]
    assert main(["eval", *argv]) == 0 and main(["eval", *argv]) == 0
    argv.remove("--overwrite")
    assert f"{out} exists already" in refused("eval", *argv)
    argv.append("--overwrite")
    precious = tmp_path / "data"
    precious.mkdir()
    (precious / "file").write_text("keep me")
    argv[argv.index(str(out))] = str(precious)
    assert "is not an evaluation report" in refused("eval", *argv)
    assert (precious / "file").read_text() == "keep me"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "out"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["expert"], "expert has no task; pass --task"),
        (["random", "--task", "toy/point_mas"], "Did you mean 'toy/point_mass'?"),
        (["random", "--task", TASK, "--episodes", "-3"], "--episodes must be at least 1, got -3"),
        (["random", "--task", TASK, "--seed", "-1"], "--seed must be at least 0, got -1"),
        (["random", "random", "--task", TASK], "Pass different policies"),
        (["runs/a", "runs/a/"], "Pass different policies"),
        (["no/such/checkpoint"], "no/such/checkpoint does not exist"),
        (["random", "--task", TASK, "--backend", "mujco"], "Unknown backend"),
        (["expert", "--task", "locomotion/hopper"], "has no scripted expert"),
        (
            ["random", "--task", TASK, "--chunk-blending", "hold"],
            "--chunk-blending has no effect without --latency; leave it out",
        ),
        (["random", "--task", TASK, "--plan-horizon", "1"], "--plan-horizon has no effect without --plan-with"),
        (
            ["random", "--task", "text/arithmetic", "--latency", "50"],
            "--latency has no effect on text/arithmetic, a text",
        ),
        (["random", "--task", TASK, "--samples", "8"], f"--samples has no effect on {TASK}, which is not a text task"),
        (["random", "--task", TASK, "--stochastic"], "--stochastic has no effect on experts and random actions"),
        (["random", "--task", TASK, "--video", "0", "--camera", "top"], "--camera has no effect without a video"),
        (["random", "--task", TASK, "--overwrite"], "--overwrite has no effect without --out"),
        (
            ["random", "--task", TASK, "--plan-with", "world"],
            "--plan-with requires a policy, and random samples no chunks",
        ),
        (["random", "--task", TASK, "--seed", "4294967296"], "--seed must be at most 4294967295"),
    ],
)
def test_bad_input_gives_one_line(argv, message, refused, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert message in refused("eval", *argv)
    assert not list(tmp_path.rglob("report*"))


def test_a_checkpoint_of_another_task_is_refused_and_writes_nothing(make_checkpoint, tmp_path, refused):
    checkpoint, out = make_checkpoint("ckpt", state=9), tmp_path / "out"
    assert "expects observation 'state' of shape (9,)" in refused("eval", checkpoint, "--out", out)
    assert not out.exists() and [path.name for path in tmp_path.iterdir()] == ["ckpt"]


def test_checkpoints_of_two_tasks_need_a_task(make_checkpoint, refused):
    line = refused("eval", make_checkpoint("a"), make_checkpoint("b", task="toy/other"))
    assert "trained on toy/other and toy/point_mass; pass --task" in line


def test_action_repeats_are_evaluated_printed_and_reported(make_checkpoint, tmp_path, capsys):
    out = tmp_path / "report"
    words = [make_checkpoint("ckpt"), "random", "--episodes", "4", "--video", "0", "--action-repeats", "1", "3"]
    assert main(["eval", *words, "--task", TASK, "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "every 1" in printed and "every 3" in printed and "score, 0 to 1" in printed
    report = json.loads((out / "report.json").read_text())
    assert set(report["frequency_scores"]) == set(report["results"]) == set(report["action_repeats"])
    assert {tuple(curve) for curve in report["action_repeats"].values()} == {("1", "3")}
    assert "every 3" in (out / "report.html").read_text()


def test_invalid_action_repeats_are_refused_before_evaluation(make_checkpoint, refused):
    assert "increasing" in refused("eval", make_checkpoint("ckpt"), "--action-repeats", "4", "2")
    assert "hold must be at most 10000, got 20000" in refused(
        "eval", "random", "--task", TASK, "--action-repeats", "1", "20000"
    )


def test_latencies_are_printed_and_reported(make_checkpoint, tmp_path, capsys):
    argv = ["eval", make_checkpoint("ckpt"), "--episodes", "3", "--video", "0", "--out", str(tmp_path / "out")]
    assert main([*argv, "--latency", "0", "120", "--chunk-blending", "ensemble"]) == 0
    printed = capsys.readouterr().out
    assert "Score by inference latency (chunk blending 'ensemble'):" in printed and "120 ms (" in printed
    latencies = json.loads((tmp_path / "out" / "report.json").read_text())["latencies"]
    (latencies,) = latencies.values()
    assert list(latencies) == ["0", "120"] and latencies["0"]["delay"] == 0 < latencies["120"]["delay"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--latency", "-5"], "Latencies must be between 0 and 3600000 ms, got -5"),
        (["--latency", "50", "--chunk-blending", "ensmble"], "Did you mean 'ensemble'?"),
        (
            ["--latency", "50", "--chunk-blending", "rtc"],
            "and 'random' cannot; use flow, shortcut, meanflow, edm or diffusion",
        ),
    ],
)
def test_invalid_latencies_are_refused(refused, words, message):
    assert message in refused("eval", "random", "--task", TASK, *words)


def test_help_shows_that_action_repeats_requires_two_values(capsys):
    with pytest.raises(SystemExit):
        main(["eval", "--help"])
    assert "--action-repeats M M [M ...]" in capsys.readouterr().out


@pytest.mark.parametrize("ray", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_parallel_evaluation_gives_the_same_episodes(make_checkpoint, tmp_path, ray: bool):
    if ray:
        pytest.importorskip("ray")
    names, found = [*(make_checkpoint(name) for name in ("one", "two")), "expert"], []
    for number, jobs in enumerate((["--jobs", "1"], ["--jobs", "2", *(["--ray"] if ray else [])])):
        out = tmp_path / f"out{number}"
        argv = ["eval", *names, "--task", TASK, "--episodes", "6", "--video", "0", "--out", str(out), *jobs]
        assert main(argv) == 0
        results = json.loads((out / "report.json").read_text())["results"]
        found.append({label: result["episodes"] for label, result in results.items()})
    assert [label.split("/")[-1] for label in found[0]] == ["one", "two", "expert"]
    assert list(found[0]) == list(found[1]) and found[0] == found[1]


@pytest.mark.parametrize("option", [["--ray"], ["--jobs", "2", "--latency", "50"]])
def test_options_without_effect_on_parallel_evaluation_are_refused(make_checkpoint, tmp_path, capsys, option):
    assert main(["eval", make_checkpoint("one"), "--out", str(tmp_path / "out"), *option]) == 2
    assert "has no effect" in capsys.readouterr().err
