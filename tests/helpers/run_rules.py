"""Checks for runs with every registered algorithm, policy and preset."""

from pathlib import Path

import pytest

from docs.compatibility import opened
from robopolicy.algorithms.registry import ALGORITHMS
from robopolicy.errors import UserError
from robopolicy.policies.registry import POLICIES
from robopolicy.training.compose import compose_config
from robopolicy.training.config import section
from robopolicy.training.distributed import check_distributed
from robopolicy.training.resume import load_tree, save_tree

SETTINGS = ["task=point_mass", "policy=gaussian", "sim.num_envs=4", "budget.updates=2", "guards.restore_best=false"]
SETTINGS += ["chunk.horizon=4", "chunk.action_horizon=2"]


def check_learns_on_a_device(name: str, head: str, place: Path, tmp_path: Path) -> None:
    """An algorithm learns on a device, continues from its resume point and acts, all on the device."""
    simulated = pytest.importorskip("simulated", exc_type=ImportError)
    with opened(place, name, head, device=simulated.NAME) as parts:
        algorithm, source = parts.algorithm, parts.source
        algorithm.update(source.next(algorithm))
        save_tree(tmp_path, {"algorithm": algorithm.state_dict(), "source": source.state_dict()})
        state = load_tree(tmp_path)  # on the CPU
        algorithm.load_state_dict(state["algorithm"])
        source.load_state_dict(state["source"])
        algorithm.update(source.next(algorithm))
        policy = algorithm.inference_policy()
        assert policy.act(source.observations()).device == policy.device == simulated.DEVICE


def check_is_shared_out_or_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An algorithm runs in two processes if its class declares `distributed`, and is refused otherwise."""
    monkeypatch.setattr("robopolicy.training.distributed.world_size", lambda: 2)
    learner = ALGORITHMS[name]
    config = compose_config([*SETTINGS, f"algorithm={name}"])
    if learner.distributed:
        check_distributed(config)
    else:
        with pytest.raises(UserError, match=f"'{name}' runs in one process; drop torchrun"):
            check_distributed(config)


def check_can_be_chosen(group: str, name: str) -> None:
    """A name selects a policy or an algorithm with the defaults of its config."""
    config = compose_config([f"{group}={name}"])
    defaults = {"policy": POLICIES, "algorithm": ALGORITHMS}[group][name].config_class()
    assert section(group, getattr(config, group)) == (name, defaults)


def check_preset_composes(group: str, name: str) -> None:
    """A preset composes; an experiment preset with a task sets the run's name, and a kind of experiment does not."""
    config = compose_config([f"{group}={name}"])
    assert group != "experiment" or config.name == (name if config.task.name else "")
