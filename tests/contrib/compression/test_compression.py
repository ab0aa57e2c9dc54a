"""Tests of policy compression: distillation data, student quality, and `robopolicy compress`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from robopolicy.cli.main import main
from robopolicy.contrib.compression.architectures import Controllers, ControllersConfig, RandomWidths, smallest
from robopolicy.contrib.compression.compression import (
    Scorer,
    check_reachable,
    distil,
    parameters_of,
    record,
    student_of,
    widths_of,
)
from robopolicy.errors import UserError
from robopolicy.policies.base import PolicySpec
from robopolicy.policies.heads.flow import FlowConfig, FlowPolicy
from robopolicy.policies.heads.gaussian import GaussianConfig, GaussianPolicy
from robopolicy.policies.wrappers.black_box import CallablePolicy
from robopolicy.sim.registry import SimOptions, make_sim
from robopolicy.training.checkpoint import load_policy, save_checkpoint

SPEC = PolicySpec({"state": (6,)}, 2)


def expert(obs):
    state = obs["state"][:, -1]
    return (6 * (state[:, 4:6] - state[:, 0:2]) - 3 * state[:, 2:4]).clamp(-1, 1)[:, None]


@pytest.fixture(scope="module")
def sim():
    made = make_sim("toy/point_mass", SimOptions(num_envs=16))
    yield made
    made.close()


@pytest.fixture(scope="module")
def teacher(sim):
    """A wide Gaussian policy distilled from a controller of the point mass."""
    torch.manual_seed(0)
    policy = GaussianPolicy(GaussianConfig(hidden=(128, 128), normalization="meanstd"), SPEC)
    bounds = {"min": -torch.ones(2), "max": torch.ones(2)}
    state = {"mean": torch.zeros(6), "std": torch.full((6,), 0.5)}
    policy.fit_normalizer({"state": state, "action": bounds})
    seen = record(CallablePolicy.wrap("brake", expert, SPEC, noise=False), sim, range(40_000, 40_064), noise=0.2)
    return distil(policy, seen, updates=600)


@pytest.fixture(scope="module")
def seen(teacher, sim):
    return record(teacher, sim, range(41_000, 41_048))


def test_a_record_holds_each_observation_once_with_the_noise_free_action(teacher, seen):
    assert len(seen) > 300 and len({tuple(row) for row in seen.obs["state"].flatten(1).tolist()}) == len(seen)
    found = teacher.act(seen.obs, deterministic=True)
    assert torch.allclose(found, seen.chunk, atol=1e-5)


def test_distilled_student_keeps_most_of_the_teacher_score(teacher, seen, sim):
    score = Scorer(sim, range(20_000, 20_032))
    fresh = student_of(teacher, (16, 16))
    student = distil(student_of(teacher, (16, 16)), seen, updates=600)
    assert parameters_of(student) < 0.05 * parameters_of(teacher)
    assert score(teacher) > 0.9 and score(fresh) < 0.3
    assert score(student) > 0.85 * score(teacher)


def test_students_copy_normalizers_and_training_is_reproducible(teacher, seen):
    first, second = (distil(student_of(teacher, (8,), seed=3), seen, updates=5, seed=1) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    own = student_of(teacher, (8,))
    assert torch.equal(own.encoder.normalizer.offset, teacher.encoder.normalizer.offset)  # type: ignore[union-attr]
    assert own.spec == teacher.spec and widths_of(own) == (8,)


def test_students_copy_the_bounds_of_point_clouds():
    spec = PolicySpec({"state": (2,), "point_cloud.front": (8, 3)}, 1)
    policy = GaussianPolicy(GaussianConfig(hidden=(16,), normalization="minmax"), spec)
    bounds = {"min": -10 * torch.ones(8, 3), "max": 30 * torch.ones(8, 3)}
    state, action = ({"min": -torch.ones(n), "max": torch.ones(n)} for n in (2, 1))
    policy.fit_normalizer({"state": state, "point_cloud.front": bounds, "action": action})
    theirs = dict(student_of(policy, (8,)).named_buffers())
    assert all(torch.equal(theirs[name], buffer) for name, buffer in policy.named_buffers())


def test_students_of_flow_policies_can_be_built_and_trained():
    torch.manual_seed(0)
    flow = FlowPolicy(FlowConfig(hidden=(32, 32), steps=2), PolicySpec({"state": (6,)}, 2, horizon=4, action_horizon=2))
    flow.fit_normalizer({k: {"min": -torch.ones(n), "max": torch.ones(n)} for k, n in [("state", 6), ("action", 2)]})
    sim = make_sim("toy/point_mass", SimOptions(num_envs=4))
    seen = record(flow.eval(), sim, range(4))
    student = distil(student_of(flow, (8,)), seen, updates=3)
    assert student.act({"state": torch.zeros(2, 1, 6)}).shape == (2, 4, 2)
    sim.close()


def test_policies_without_plain_layers_are_refused():
    unet = FlowPolicy(FlowConfig(backbone="unet", unet_channels=(8, 16)), PolicySpec({"state": (6,)}, 2, horizon=4))
    with pytest.raises(UserError, match="has no plain hidden layers"):
        widths_of(unet)
    with pytest.raises(UserError, match="has no plain hidden layers"):
        widths_of(CallablePolicy.wrap("brake", expert, SPEC, noise=False))


@pytest.fixture
def checkpoint(teacher, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_checkpoint("teacher", teacher, task="toy/point_mass", obs_sample={"state": torch.rand(4, 1, 6)})
    return "teacher"


QUICK = [
    "--updates",
    "30",
    "--final-updates",
    "200",
    "--population",
    "2",
    "--teacher-episodes",
    "16",
    "--episodes",
    "8",
]
QUICK += ["--report-episodes", "16", "--removal-rounds", "1", "--shrink-rounds", "1", "--json"]


@pytest.mark.parametrize(("removes", "shrinks"), [(True, True), (True, False), (False, True)])
def test_a_limit_is_refused_only_if_no_student_satisfies_it(teacher, removes, shrinks):
    architectures = smallest((12, 30), removes=removes, shrinks=shrinks)
    least = min(parameters_of(student_of(teacher, widths)) for widths in architectures)
    check_reachable(teacher, architectures, least)
    check_reachable(teacher, architectures, 0)
    with pytest.raises(UserError, match=rf"No student has at most {least - 1} parameters: .* has {least}"):
        check_reachable(teacher, architectures, least - 1)
    config = ControllersConfig(removal_rounds=2 if removes else 0)
    for search in (Controllers(config, (12, 30)), *([RandomWidths((12, 30))] if removes and shrinks else [])):
        for _ in range(4 if shrinks else 2):
            asked = search.ask()
            assert all(parameters_of(student_of(teacher, widths)) >= least for widths in asked if widths)
            search.tell([1.0] * len(asked))


def test_impossible_students_are_refused_before_recording(checkpoint, refused, monkeypatch):
    monkeypatch.setattr("robopolicy.contrib.compression.compression.record", None)
    compress = ["compress", checkpoint, "--out", "small"]
    assert "No student has at most 1 parameters" in refused(*compress, *QUICK, "--max-parameters", "1")
    assert "hidden must be at least 1, got 0" in refused(*compress, "--widths", "8", "0")


@pytest.mark.parametrize("search", ["n2n", "random"])
def test_compress_command_writes_a_verified_student_checkpoint(search, checkpoint, capsys):
    assert main(["compress", checkpoint, "--out", "small", "--search", search, *QUICK]) == 0
    found = json.loads(capsys.readouterr().out)
    student, manifest = load_policy("small")
    assert list(widths_of_config(student)) == found["widths"] and manifest.task == "toy/point_mass"
    assert parameters_of(student) == found["parameters"]["student"] <= found["parameters"]["teacher"]
    assert found["results"].keys() == {"teacher", "student"} and len(found["rewards"]) >= 1
    assert main(["verify", "small"]) == 0


def widths_of_config(policy: Any):
    return policy.config.hidden


def test_an_interrupted_search_resumes_without_retraining(checkpoint, capsys, monkeypatch):
    import robopolicy.contrib.compression.compression as compression

    real, trained = compression.distil, []

    def counted(student, *args, **settings):
        if len(trained) == 2:
            raise KeyboardInterrupt
        trained.append(widths_of_config(student))
        return real(student, *args, **settings)

    words = ["compress", checkpoint, "--out", "small", *QUICK, "--search", "random", "--shrink-rounds", "2"]
    monkeypatch.setattr(compression, "distil", counted)
    assert main(words) == 130 and len(trained) == 2
    assert main(words) == 2 and "continue with --resume" in capsys.readouterr().err
    assert main([*words, "--resume", "--updates", "31"]) == 2 and "another updates" in capsys.readouterr().err
    record = Path("small/students.json")
    whole = record.read_text()
    record.write_text(json.dumps({**json.loads(whole), "request": []}))
    assert main([*words, "--resume"]) == 2 and "has another teacher" in capsys.readouterr().err
    record.write_text(whole)
    again: list = []
    monkeypatch.setattr(compression, "distil", lambda s, *a, **k: again.append(widths_of_config(s)) or real(s, *a, **k))
    assert main([*words, "--resume"]) == 0
    assert not set(again[:-1]) & set(trained)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--max-parameters", "3"], "No student has at most 3 parameters"),
        (["--removal-rounds", "0", "--shrink-rounds", "0"], "A search needs rounds"),
        (["--noise", "-1"], "--noise must be 0 or larger"),
        (["--teacher-seed", "30000"], "must not overlap"),
        (["--resume"], "There is no search to resume"),
        (["--out", "teacher"], "exists already"),
        (["--out", "teacher", "--overwrite"], "is the input"),
        (["--resume", "--overwrite"], "pass only one of them"),
        (["--widths", "8", "--episodes", "4"], "has no effect with --widths"),
    ],
)
def test_invalid_commands_are_refused_in_one_line(words, complaint, checkpoint, capsys):
    assert main(["compress", checkpoint, "--out", "small", *QUICK, *words]) == 2
    assert complaint in capsys.readouterr().err.splitlines()[-1]
