"""Fixtures of the point mass: demonstrations, a behaviour-cloning run, and a small policy."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from robopolicy.cli.main import main
from robopolicy.data.collect import collect
from robopolicy.data.formats.lerobot import LeRobotWriter
from robopolicy.policies.base import Policy, PolicySpec
from robopolicy.policies.heads.flow import FlowConfig, FlowPolicy
from robopolicy.sim.registry import SimOptions, get_task, make_sim

TASK = "toy/point_mass"


@pytest.fixture(scope="session")
def demonstrations(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of twenty demonstrations."""
    path = tmp_path_factory.mktemp("data") / "point_mass"
    sim, make_expert = make_sim(TASK, SimOptions(num_envs=20)), get_task(TASK).make_expert
    assert make_expert is not None
    with LeRobotWriter(path, control_dt=sim.spec.control_dt) as writer:
        collect(sim, make_expert(), writer, episodes=20)
    return path


@pytest.fixture(scope="session")
def clone(demonstrations: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A barely trained behaviour-cloning run of a flow with three steps."""
    out = tmp_path_factory.mktemp("clone")
    settings = ["task=point_mass", "algorithm=bc", "policy.hidden=[16]", "policy.steps=3", "budget.updates=5"]
    settings += [f"dataset={demonstrations}", "evaluation.episodes=0", f"out={out}", "name=clone"]
    assert main(["train", *settings]) == 0
    return out / "clone"


@pytest.fixture
def make_policy() -> Callable[[], Policy]:
    """Builds a small flow policy with fitted normalisers."""

    def make() -> Policy:
        torch.manual_seed(0)
        policy = FlowPolicy(
            FlowConfig(steps=3), PolicySpec({"state": (6,)}, 2, horizon=4, action_horizon=2, obs_horizon=2)
        )
        names = {"state": 6, "action": 2}
        policy.fit_normalizer({key: {"min": [-1.0] * n, "max": [2.0] * n} for key, n in names.items()})
        return policy

    return make
