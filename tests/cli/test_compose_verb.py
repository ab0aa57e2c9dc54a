"""Tests of `robopolicy compose`: checkpoints, searches, reports, interruptions and error messages."""

import errno
import io
import json
import shutil
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from composition_parents import TASK, parents, save_judge, trained_parents
from safetensors.torch import load_file

from robopolicy.cli.main import main
from robopolicy.evaluation.search.weights import SearchLog, SimEvaluator
from robopolicy.policies.base import PolicySpec
from robopolicy.policies.heads.flow import FlowConfig, FlowPolicy
from robopolicy.policies.heads.gaussian import GaussianConfig, GaussianPolicy
from robopolicy.policies.wrappers.composed import ComposedPolicy
from robopolicy.spec import TaskMetadata
from robopolicy.training.checkpoint import golden_observations, load_policy, save_checkpoint
from robopolicy.training.manifest import read_manifest

__all__ = ["parents", "trained_parents"]  # fixtures
SEARCH = ["--search", "grid", "--divisions", "4", "--episodes", "6", "--report-episodes", "12"]


@pytest.fixture
def edit_manifest() -> Callable[..., None]:
    def edit(folder, **fields):
        file = Path(folder) / "manifest.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))

    return edit


@pytest.fixture
def judge(parents):
    """Checkpoint of a critic for compositions of the parents."""
    save_judge()


def test_given_weights_write_a_regular_checkpoint(parents, tmp_path, capsys):
    out = Path("both")
    argv = ["--operator", "or", "--weights", "0.3", "0.7"]
    assert main(["compose", *parents, *argv, "--out", str(out)]) == 0
    assert "or composition: left 0.3, right 0.7" in capsys.readouterr().out
    assert sorted(path.name for path in out.iterdir()) == ["golden.safetensors", "manifest.json", "model.safetensors"]
    policy, manifest = load_policy(out)
    assert policy.name == "composed" and manifest.task == TASK
    assert isinstance(policy, ComposedPolicy) and policy.operator.nominal(2) == (0.3, 0.7)
    assert main(["verify", "both"]) == 0
    assert main(["eval", "both", "--episodes", "2", "--video", "0", "--out", "report"]) == 0


def test_verify_lists_the_parents_and_fails_if_they_moved_or_changed(parents, tmp_path, capsys, refused):
    assert main(["compose", *parents, "--out", "both"]) == 0
    capsys.readouterr()
    assert main(["verify", "both", "--json"]) == 0
    recorded = json.loads(capsys.readouterr().out)["parents"]
    assert [parent["path"] for parent in recorded] == ["../left", "../right"]
    assert [parent["policy"] for parent in recorded] == ["flow", "diffusion"]
    manifest = json.loads(Path("left/manifest.json").read_text())
    assert recorded[0]["files"]["model.safetensors"] == manifest["files"]["model.safetensors"]

    (tmp_path / "elsewhere").mkdir()
    for name in ("left", "right", "both"):  # moving all checkpoints together keeps the paths valid
        shutil.copytree(name, tmp_path / "elsewhere" / name)
    assert main(["verify", str(tmp_path / "elsewhere" / "both")]) == 0

    shutil.move("left", "moved")
    message = refused("verify", "both")
    assert message.startswith("robopolicy: error: left, of which both was composed, no longer exists")
    shutil.copytree("right", "left")  # a different policy at the same path
    assert "left has changed since both was composed of it: manifest.json was" in refused("verify", "both")
    shutil.rmtree("left")
    assert load_policy("both")[0].name == "composed"  # the composition has its own weights


@pytest.mark.parametrize(
    ("argv", "policy"),
    [
        (["--operator", "and", "--override", "operator.sampler=sde", "operator.reach=3"], "composed"),
        (["--operator", "or", "--weights", "0.2", "0.8", "--override", "steps=3", "action_horizon=1"], "composed"),
        (["--operator", "scheduled", "--override", "operator.knots=[[1,0],[0,1]]"], "composed"),
        (["--operator", "affine", "--weights", "1.5", "-0.5", "--override", "corrector.steps=2"], "composed"),
        (["--critic", "judge", "--override", "guidance.strength=0.5"], "composed"),
        (["--critic", "judge", "--override", "candidates=3"], "selected"),
    ],
)
def test_compose_options_write_verified_checkpoints_of_every_composition_kind(parents, judge, argv, policy):
    assert main(["compose", *parents, *argv, "--out", "both"]) == 0
    assert load_policy("both")[0].name == policy and main(["verify", "both"]) == 0


def test_compose_trains_a_selector_from_demonstrations(parents, capsys, refused):
    assert main(["collect", TASK, "--episodes", "4", "--num-envs", "4", "--out", "shown"]) == 0
    settings = ["--override", "selection.updates=5", "selection.hidden=[8]"]
    assert main(["compose", *parents, "--gate-data", "shown", *settings, "--out", "chosen"]) == 0
    printed = capsys.readouterr()
    assert "ranks the better policy first for" in printed.err
    gate = "gate: at every decision the observation selects one of left, right; trained in 5 steps on shown, where it"
    assert gate in printed.out and "of the chunks (at random: 50 %)" in printed.out
    assert load_policy("chosen")[0].name == "gated" and main(["verify", "chosen"]) == 0
    assert main(["eval", "chosen", "--episodes", "2", "--video", "0", "--out", "report"]) == 0
    assert (
        main(["collect", "toy/push", "--policy", "random", "--keep-failures", "--episodes", "2", "--out", "push"]) == 0
    )
    line = refused("compose", *parents, "--gate-data", "push", "--out", "no")
    assert "requires 'state' of shape (6,), but dataset push has" in line
    argv = ["--override", "selection.top=1", "--out", "no"]
    assert "requires demonstrations; pass --gate-data" in refused("compose", *parents, *argv)
    argv = ["--operator", "or", "--gate-data", "shown", "--out", "no"]
    assert "operator 'or' has other weights" in refused("compose", *parents, *argv)


@pytest.fixture(scope="module")
def searched(trained_parents):
    """Folder of a finished search, and its stdout and stderr."""
    out, (stdout, stderr) = trained_parents / "whole", (io.StringIO(), io.StringIO())
    argv = [str(trained_parents / "left"), str(trained_parents / "right"), *SEARCH, "--out", str(out), "--json"]
    with redirect_stdout(stdout), redirect_stderr(stderr):
        assert main(["compose", *argv]) == 0
    return out, stdout.getvalue(), stderr.getvalue()


def test_a_search_writes_its_checkpoint_report_and_curve(searched):
    out, stdout, stderr = searched
    assert "grid search: 5 candidates, 30 episodes on 6 common seeds" in stderr
    assert "report: 3 policies, 12 held-out episodes each" in stderr
    printed = json.loads(stdout)
    assert printed["search"]["played_episodes"] == printed["search"]["planned_episodes"] == 30
    assert printed["weights"] == printed["search"]["weights"]
    policy = load_policy(out)[0]
    assert isinstance(policy, ComposedPolicy) and list(policy.operator.nominal(2)) == printed["weights"]

    report = json.loads((out / "report" / "report.json").read_text())
    assert [Path(name).name for name in report["results"]] == ["left", "right", "whole"]
    assert len(report["against"]) == 2
    search_seeds = set(range(printed["search"]["first_seed"], printed["search"]["first_seed"] + 6))
    for result in report["results"].values():
        assert len(result["episodes"]["seed"]) == 12 and not search_seeds & set(result["episodes"]["seed"])
    files = {path.name for path in (out / "report").iterdir()}
    assert {"report.html", "report.md", "curve.png", "search.csv", "paired_1.png", "paired_2.png"} <= files
    text = (out / "report" / "report.md").read_text()
    assert "whole" in text and "common seeds" in text and "left |" in text
    best = max(row["score"] for row in printed["search"]["candidates"])
    assert next(row for row in printed["search"]["candidates"] if row["chosen"])["score"] == best
    assert main(["verify", str(out)]) == 0


def test_a_search_can_maximise_returns(parents, tmp_path, capsys):
    few = ["--search", "grid", "--divisions", "2", "--episodes", "4", "--report-episodes", "2", "--reward", "shaped"]
    argv = [*parents, *few, "--objective", "return", "--out", str(tmp_path / "out"), "--json"]
    assert main(["compose", *argv]) == 0
    printed = json.loads(capsys.readouterr().out)
    candidates = printed["search"]["candidates"]
    assert len(candidates) == 3 and all(row["score"] == row["return"] for row in candidates)
    assert "success" in printed["results"]["left"]  # from the report


def _rows(out):
    """The rows of the search table without the header, which has the names."""
    return (out / "report" / "search.csv").read_text().splitlines()[1:]


def test_an_interrupted_search_resumes_to_the_same_checkpoint(parents, searched, capsys, refused, monkeypatch):
    whole, parts = searched[0], Path("parts")
    play, calls = SimEvaluator.__call__, []

    def interrupted(self, policy, seeds):
        if len(calls) in (3, 7):  # once in the search, once in the report
            calls.append("interrupted")
            raise KeyboardInterrupt
        calls.append("played")
        return play(self, policy, seeds)

    monkeypatch.setattr(SimEvaluator, "__call__", interrupted)
    assert main(["compose", *parents, *SEARCH, "--out", str(parts)]) == 130
    assert f"robopolicy compose --resume {parts}" in capsys.readouterr().err
    assert [path.name for path in parts.iterdir()] == ["search.jsonl"]
    assert "--resume" in refused("compose", *parents, *SEARCH, "--out", parts)
    assert main(["compose", "--resume", str(parts)]) == 130
    assert main(["compose", "--resume", str(parts)]) == 0
    assert calls.count("played") == 5 + 3

    for name in ("model.safetensors", "golden.safetensors"):
        first, second = load_file(whole / name), load_file(parts / name)
        assert first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)
    one, other = (json.loads((out / "manifest.json").read_text()) for out in (whole, parts))
    assert one["config"] == other["config"] and one["training"]["search"] == other["training"]["search"]
    assert _rows(whole) == _rows(parts)
    assert "is complete" in refused("compose", "--resume", parts)


def test_a_search_does_not_resume_with_changed_parents(parents, tmp_path, refused, monkeypatch):
    out = Path("both")

    def stop(self, policy, seeds):
        raise KeyboardInterrupt

    monkeypatch.setattr(SimEvaluator, "__call__", stop)
    assert main(["compose", *parents, *SEARCH, "--out", str(out)]) == 130
    shutil.rmtree(parents[0])
    shutil.copytree(parents[1], parents[0])
    assert "left has changed since" in refused("compose", "--resume", out)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--operator", "convexe"], "Unknown operator 'convexe'. Did you mean 'convex'?"),
        (["--search", "gird"], "Unknown search 'gird'. Did you mean 'grid'?"),
        (["--weights", "0.5", "0.2", "0.3"], "2 policies require 2 weights, got 3"),
        (["--weights", "1.2", "-0.2"], "none of them negative, got [1.2, -0.2]"),
        (["--weights", "0.5", "0.6"], "must sum to 1, none of them negative, got [0.5, 0.6]"),
        (["--weights", "0.5", "nan"], "must sum to 1"),
        (["--weights", "0.5", "0.5", "--search", "grid"], "either --weights, or --search"),
        (["--episodes", "5"], "--episodes belongs to a search"),
        (["--objective", "return"], "--objective belongs to a search"),
        (["--search", "grid", "--episodes", "0"], "--episodes must be at least 1, got 0"),
        (["--search", "grid", "--candidates", "5"], "Unknown setting 'candidates' in search 'grid'"),
        (["--search", "grid", "--report-episodes", "1"], "--report-episodes must be at least 2, got 1"),
        (["--search", "grid", "--report-seed", "20049"], "must not overlap"),
        (["--override", "sampler=sde"], "Unknown setting 'sampler' in --override"),
        (["--override", "operator.sampler=sde"], "Unknown setting 'sampler' in operator 'convex'"),
        (["--override", "steps"], "--override takes KEY=VALUE, got 'steps'"),
        (["--override", "corrector=1"], "write --override corrector.KEY=VALUE"),
        (["--override", "operator.weights=[1,0]"], "Pass --operator NAME and --weights"),
        (["--override", "action_horizon=[", "steps=1"], "cannot be read"),
        (["--override", "unconditioned=[2]"], "unconditioned names parents from 0 to 1, got 2"),
        (["--override", "unconditioned=[0]"], "left has no 'embedding.*' observation"),
        (["--override", "candidates=4"], "pass --critic CKPT"),
        (["--critic", "left"], "--critic has no effect here"),
        (["--num-envs", "4"], "--num-envs has no effect without --search or --report-episodes; leave it out"),
        (["--seed", "7", "--report-episodes", "2"], "--seed has no effect without --search"),
        (["--report-seed", "7"], "--report-seed has no effect without --report-episodes"),
        (["--critic", "left", "--override", "candidates=4"], "policy 'flow', which has no critic"),
        (["--then", "left"], "--then takes NAME=CKPT, got 'left'"),
        (["--operator", "scheduled"], "A schedule needs knots"),
        (
            ["--operator", "scheduled", "--override", "operator.knots=[[1,0],[0,1]]", "--search", "grid"],
            "at every knot",
        ),
        (["--search", "grid", "--task", "toy/point_mas"], "Did you mean 'toy/point_mass'?"),
        (["--search", "grid", "--task", "locomotion/hopper"], "choose the task"),
    ],
)
def test_bad_input_gives_one_line_and_writes_nothing(parents, argv, message, tmp_path, refused):
    before = sorted(tmp_path.iterdir())
    assert message in refused("compose", *parents, "--out", "both", *argv)
    assert sorted(tmp_path.iterdir()) == before


def test_incompatible_parents_are_refused(parents, tmp_path, refused, edit_manifest):
    out = ["--out", "both"]
    assert "at least two checkpoints, got 1" in refused("compose", parents[0], *out)
    assert "--critic has no effect here" in refused("compose", parents[0], "--critic", parents[1], *out)
    assert "Pass --out" in refused("compose", *parents)
    assert "no/such does not exist" in refused("compose", parents[0], "no/such", *out)
    for name, policy in (("arm", FlowPolicy(FlowConfig(), PolicySpec({"state": (6,)}, 7))), ("gaussian", None)):
        policy = policy or GaussianPolicy(GaussianConfig(normalization="identity"), PolicySpec({"state": (6,)}, 2))
        if name == "arm":
            bounds = [("state", 6), ("action", 7)]
            policy.fit_normalizer({key: {"min": -torch.ones(n), "max": torch.ones(n)} for key, n in bounds})
        save_checkpoint(tmp_path / name, policy, task=TASK, obs_sample={"state": torch.zeros(2, 1, 6)})
    assert "arm has 7 action dimensions, left has 2" in refused("compose", parents[0], tmp_path / "arm", *out)
    assert "gaussian is a policy 'gaussian' without velocities" in refused(
        "compose", parents[0], tmp_path / "gaussian", *out
    )
    edit_manifest(parents[1], task="toy/other")
    assert "trained on toy/point_mass and toy/other" in refused("compose", *parents, *out)


ARM = TaskMetadata("none", 0.05, ("a", "b"), observation_names={"state": list("abcdef")}, instructions=("push",))


@pytest.mark.parametrize(
    "other, message",
    [
        (replace(ARM, control_dt=0.02), "acts every 0.05 s and"),
        (replace(ARM, action_names=("b", "a")), "have different names of actions"),
        (replace(ARM, observation_names={"state": list("abcdfe")}), "have other names of 'state'"),
        (replace(ARM, control_dt=None, action_names=(), observation_names={}, instructions=("lift",)), ""),
    ],
)
def test_parents_without_a_task_have_one_rate_and_names(parents, other, message, tmp_path, refused):
    for parent, name, metadata in zip(parents, ("left", "right"), (ARM, other), strict=True):
        policy, _ = load_policy(parent)
        obs = golden_observations(Path(parent))
        save_checkpoint(tmp_path / name, policy, task="none", obs_sample=obs, task_metadata=metadata)
    folders = [str(tmp_path / name) for name in ("left", "right")]
    words = ["compose", *folders, "--out", str(tmp_path / "both")]
    if message:
        assert message in refused(*words) and not (tmp_path / "both").exists()
    else:
        assert main(words) == 0
        assert read_manifest(tmp_path / "both").task_metadata == replace(ARM, instructions=("push", "lift"))


def test_a_full_disk_is_one_line_that_names_the_target(parents, tmp_path, monkeypatch, refused):
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr("robopolicy.training.checkpoint.save_file", Mock(side_effect=full))
    line = refused("compose", *parents, "--out", "both")
    assert "Cannot write both: No space left on device; free some space" in line and not Path("both").exists()


def test_existing_folders_are_not_replaced(parents, tmp_path, refused):
    assert "right exists already" in refused("compose", *parents, "--out", parents[1])
    precious = tmp_path / "data"
    precious.mkdir()
    (precious / "file").write_text("keep me")
    assert "data exists and is not a checkpoint" in refused("compose", *parents, "--out", precious, "--overwrite")
    over = ["--out", parents[1], "--overwrite"]
    assert "right is the input " in refused("compose", *parents, *over)
    assert (precious / "file").read_text() == "keep me"


def test_overwrite_replaces_a_composition(parents, tmp_path):
    words = ["compose", *map(str, parents), "--out", str(tmp_path / "both")]
    assert main(words) == 0 and main(words) == 2
    assert main([*words, "--overwrite", *SEARCH]) == 0
    assert (tmp_path / "both" / "search.jsonl").is_file()
    assert main([*words, "--overwrite"]) == 0
    assert not (tmp_path / "both" / "search.jsonl").exists()


def test_only_an_interrupted_search_can_be_resumed(parents, tmp_path, refused):
    assert "has no search.jsonl" in refused("compose", "--resume", tmp_path)
    assert "pass only --resume OUT" in refused("compose", *parents, "--resume", tmp_path)
    assert "pass only --resume OUT" in refused("compose", "--resume", tmp_path, "--device", "cpu")
    (tmp_path / "odd").mkdir()
    SearchLog(tmp_path / "odd" / "search.jsonl", {"parents": []})
    assert "lacks 'names'" in refused("compose", "--resume", tmp_path / "odd")
