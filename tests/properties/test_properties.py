"""Properties of all that reads foreign bytes: wire messages, manifests, datasets, settings, and the safety filter.

A reader returns a value or raises its own error of one line; it never raises anything else. `make fuzz` searches for
counterexamples longer.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from robopolicy.archives import read_arrays
from robopolicy.core.recipe import Recipe
from robopolicy.data.episodes import Episode
from robopolicy.data.formats.lerobot import LeRobotWriter, read_lerobot
from robopolicy.deploy.safety.filter import FilterConfig, FilterState, JointMeasurement, SafetyFilter
from robopolicy.deploy.safety.motion import JointLimits
from robopolicy.deploy.wire import Greeting, Reply, Request, WireError, decode, encode
from robopolicy.errors import UserError
from robopolicy.files import parse_json, parse_yaml
from robopolicy.policies.base import PolicySpec
from robopolicy.policies.heads.gaussian import GaussianConfig, GaussianPolicy
from robopolicy.tokens import token_variable
from robopolicy.training.checkpoint import load_policy, save_checkpoint
from robopolicy.training.compose import compose_config
from robopolicy.training.names import read_settings

settings.register_profile("quick", max_examples=40, deadline=None, derandomize=True, database=None)
settings.register_profile(
    "fuzz", max_examples=100, deadline=None, database=None, suppress_health_check=list(HealthCheck)
)
PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "quick")  # `tests/fuzz.py` sets the other one
settings.load_profile(PROFILE)
SLOW = settings(max_examples=15) if PROFILE == "quick" else settings()

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.binary(max_size=20),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=10), inner, max_size=5),
    max_leaves=20,
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=10), inner, max_size=5),
    max_leaves=10,
)
damages = st.lists(st.tuples(st.floats(0, 1), st.binary(max_size=3)), max_size=5)


def damaged(data: bytes, changes: list[tuple[float, bytes]], cut: float = 1.0) -> bytes:
    """Replace bytes at relative places, then cut the end off."""
    found = bytearray(data)
    for place, new in changes:
        at = int(place * len(found))
        found[at : at + 1] = new
    return bytes(found[: int(cut * len(found))])


GREETING = Greeting(PolicySpec({"state": (3,)}, 2, horizon=4), "model")
MESSAGES = {
    Greeting: GREETING.pack(),
    Request: Request(
        1, {"state": np.zeros((2, 1, 3), np.float32)}, streams=np.array([[3, 0], [3, 1]]), deadline=1.0
    ).pack(),
    Reply: Reply(1, np.zeros((2, 4, 2), np.float32), 0.1).pack(),
}


@given(plain)
def test_a_message_returns_what_was_sent(value: Any) -> None:
    try:
        data = encode({"value": value})
    except (OverflowError, ValueError, TypeError):  # integers beyond 64 bits
        return
    found = decode(data)["value"]
    assert repr(found) == repr(value)


@given(st.sampled_from(list(MESSAGES)), damages, st.floats(0, 1), st.binary(max_size=60))
def test_damaged_messages_raise_their_own_error(kind: Any, changes: list, cut: float, other: bytes) -> None:
    for data in (damaged(MESSAGES[kind], changes, cut), other):
        try:
            kind.unpack(data)
        except WireError as error:
            assert "\n" not in str(error)


@given(st.dictionaries(st.sampled_from(["spec", "config", "policy", "files", "schema", "task"]), json_values))
@SLOW
def test_manifests(changes: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "policy"
        shutil.copytree(_checkpoint(), folder)
        manifest = json.loads((folder / "manifest.json").read_text()) | changes
        (folder / "manifest.json").write_text(json.dumps(manifest))
        try:
            load_policy(folder)
        except UserError as error:
            assert "\n" not in str(error)


@given(st.sampled_from(["manifest.json", "model.safetensors", "golden.safetensors"]), damages, st.floats(0, 1))
@SLOW
def test_damaged_checkpoints(file: str, changes: list, cut: float) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "policy"
        shutil.copytree(_checkpoint(), folder)
        (folder / file).write_bytes(damaged((folder / file).read_bytes(), changes, cut))
        try:
            load_policy(folder)
        except UserError as error:
            assert "\n" not in str(error)


@given(st.integers(0, 5), damages, st.floats(0.5, 1))
@SLOW
def test_damaged_datasets(number: int, changes: list, cut: float) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "data"
        shutil.copytree(_dataset(), folder)
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        file = files[number % len(files)]
        file.write_bytes(damaged(file.read_bytes(), changes, cut))
        try:
            read_lerobot(folder)
        except UserError as error:
            assert "\n" not in str(error)


@given(st.binary(max_size=300), damages)
def test_damaged_arrays(data: bytes, changes: list) -> None:
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "x.npz"
        np.savez(path, a=np.arange(4), b=np.ones((2, 2)))
        for content in (damaged(path.read_bytes(), changes), data):
            path.write_bytes(content)
            try:
                found = read_arrays(path)
            except (ValueError, OSError) as error:
                assert "\n" not in str(error)
            else:
                assert all(array.dtype.kind in "biuf" for array in found.values())


@given(st.text(max_size=60))
@example("a: &a [*a]")
def test_yaml_and_json(text: str) -> None:
    for parse in (parse_yaml, parse_json):
        try:
            parse(text)
        except ValueError as error:
            assert "\n" not in str(error) or parse is parse_json


@given(
    st.lists(st.sampled_from(["lr", "batch_size", "algorithm.lr", "policy", "task", "budget.updates", ""]), max_size=3),
    st.text(max_size=12),
)
@SLOW
def test_settings(keys: list[str], value: str) -> None:
    try:
        compose_config([f"{key}={value}" for key in keys])
        read_settings([value])
    except UserError:  # may quote the value; the command line prints one line
        return


@given(st.dictionaries(st.sampled_from(["advantage", "rollout", "objective", "title", "filter", "ratio"]), json_values))
def test_recipes(content: dict[str, Any]) -> None:
    try:
        Recipe.from_dict(content)
    except (UserError, ValueError):
        return


@given(st.text(max_size=30))
def test_a_variable_of_a_token_is_a_name(host: str) -> None:
    variable = token_variable(host)
    assert variable is None or variable.isidentifier()


numbers = st.floats() | st.sampled_from([0.0, 1e-300, 1e300, np.nan, np.inf, -np.inf])
positive = st.floats(1e-3, 1e4)


@given(
    st.lists(st.tuples(positive, positive | st.just(np.inf), positive | st.just(np.inf)), min_size=2, max_size=2),
    st.sampled_from([0.0005, 0.01, 0.1]),
    st.sampled_from(["absolute", "delta", "velocity"]),
    st.lists(st.tuples(numbers, numbers, numbers), min_size=1, max_size=40),
)
def test_the_safety_filter_keeps_its_limits(bounds: list, dt: float, mode: Any, inputs: list) -> None:
    velocity, acceleration, jerk = (np.array(values) for values in zip(*bounds, strict=True))
    limits = JointLimits(("a", "b"), -np.ones(2), np.ones(2), velocity, acceleration, jerk, np.full(2, 10.0))
    safety, state = SafetyFilter(limits, FilterConfig(mode=mode)), FilterState.at_rest(np.zeros(2))
    path = [np.zeros(2)] * 3
    for first, second, third in inputs:
        unknown = np.full(2, np.nan)
        measured = JointMeasurement(0.0, unknown, np.array([third, 0.0]), unknown)
        output, state, _ = safety.step([first, second], state, measured, dt)
        assert np.isfinite(output).all()
        path.append(state.motion.position)
    positions = np.stack(path)
    assert (np.abs(positions) <= 1.0).all()
    for order, limit in ((1, velocity), (2, acceleration), (3, jerk)):
        change = np.abs(np.diff(positions, order, axis=0)) / dt**order
        assert (change <= limit * (1 + 1e-6) + 2.0**order * 1e-15 / dt**order).all()


_MADE: dict[str, Path] = {}


def _checkpoint() -> Path:
    if "checkpoint" not in _MADE:
        _MADE["checkpoint"] = folder = Path(tempfile.mkdtemp()) / "policy"
        policy = GaussianPolicy(GaussianConfig(normalization="identity", hidden=(4,)), PolicySpec({"state": (6,)}, 2))
        save_checkpoint(folder, policy, task="toy/point_mass", obs_sample={"state": torch.zeros(2, 1, 6)})
    return _MADE["checkpoint"]


def _dataset() -> Path:
    if "dataset" not in _MADE:
        _MADE["dataset"] = folder = Path(tempfile.mkdtemp()) / "data"
        arrays = {"state": np.zeros((5, 2), np.float32), "action": np.zeros((5, 1), np.float32)}
        with LeRobotWriter(folder, control_dt=0.1) as writer:
            for seed in range(2):
                writer.add(Episode({**arrays, "terminated": np.zeros(5, bool)}, task="push", seed=seed))
    return _MADE["dataset"]


@pytest.fixture(scope="session", autouse=True)
def _clean() -> Any:
    yield
    for path in _MADE.values():
        shutil.rmtree(path.parent, ignore_errors=True)
    _MADE.clear()
