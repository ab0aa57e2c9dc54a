"""Tests that checkpoints, runs and states saved before a rename load under the current names."""

from pathlib import Path

import torch
import yaml
from old_manifests import as_of_old

from robopolicy.policies.base import PolicySpec
from robopolicy.policies.heads.flow import FlowConfig, FlowPolicy
from robopolicy.policies.migration import migrate, migrate_state
from robopolicy.training.compose import compose_config, config_text, read_config


def test_defaults_of_unused_parts_are_removed() -> None:
    config = FlowPolicy(FlowConfig(), PolicySpec({"state": (2,)}, 1)).config_dict()
    assert migrate({"base": {"name": "flow", "config": as_of_old(config, 0)}}) == {
        "base": {"name": "flow", "config": config}
    }
    assert migrate(config) == config


def test_an_old_run_config_is_read(tmp_path: Path) -> None:
    config = compose_config(["task=point_mass", "policy=flow", "algorithm=sac"])
    plain = yaml.safe_load(config_text(config))
    plain["policy"] = as_of_old(plain["policy"], 0)
    plain["algorithm"]["critic"]["vision"]["noise_mask"] = 0
    del plain["algorithm"]["critic"]["vision"]["augmentation"]
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(plain))
    assert read_config(tmp_path / "config.yaml") == config


def test_states_have_the_same_values_under_the_current_names() -> None:
    one, mask = torch.ones(()), torch.zeros(2)
    state = {"critic": {"encoder.start": one, "start": 3}, "ema": [{"m.noise_mask.w": mask}], 0: ("encoder.start", 5)}
    found = migrate_state(state)
    assert found == {
        "critic": {"encoder.stock.start": one, "start": 3},
        "ema": [{"m.augmentation.w": mask}],
        0: ("encoder.start", 5),
    }
    assert migrate_state(found) == found
