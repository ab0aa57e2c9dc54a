"""The journeys of `docs/architecture.md`: each enters the files that the page names, and no more than the limit."""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from source_tree import ROOT, read

from robopolicy.policies.base import PolicySpec
from robopolicy.policies.heads.flow import FlowConfig, FlowPolicy
from robopolicy.training.build import build, resolve_config
from robopolicy.training.checkpoint import save_checkpoint
from robopolicy.training.compose import compose_config

RUN = ["task=point_mass", "sim.num_envs=4", "budget.updates=2", "evaluation.episodes=0"]
QUICK = [*RUN, "algorithm.num_steps=4", "algorithm.epochs=1"]
JOURNEYS = {
    "A reward through `ppo`": (15, [*QUICK, "policy=gaussian", "algorithm=ppo"]),
    "An observation to a gradient in `reinflow`": (25, [*QUICK, "algorithm=reinflow"]),
    "A token through GRPO": (
        25,
        ["experiment=text_grpo", "policy.layers=1", "algorithm.sft_updates=0", "algorithm.prompts_per_update=2"],
    ),
}


def files_of(journey: str) -> list[str]:
    """Files that the page names for a journey, in order."""
    section = read(Path("docs/architecture.md")).split(f"## {journey}\n")[1].split("\n## ")[0]
    return re.findall(r"^\| `([\w/.]+\.py)` \|", section, re.M)


@contextmanager
def entered_files() -> Iterator[set[str]]:
    """Files of the project whose functions are called."""
    found: set[str] = set()

    def record(frame: FrameType, event: str, argument: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(ROOT):
            found.add(path.relative_to(ROOT).as_posix())

    sys.setprofile(record)
    try:
        yield found
    finally:
        sys.setprofile(None)


@pytest.mark.parametrize("journey", JOURNEYS)
def test_a_journey_enters_the_files_that_the_page_names(journey: str, tmp_path: Path) -> None:
    limit, settings = JOURNEYS[journey]
    if "reinflow" in journey:
        spec, obs = PolicySpec({"state": (6,)}, action_dim=2), {"state": torch.zeros(4, 1, 6)}
        policy = FlowPolicy(FlowConfig(hidden=(16,), normalization="identity"), spec)
        policy.fit_normalizer({"action": {"min": [-1.0] * 2, "max": [1.0] * 2}})
        save_checkpoint(tmp_path / "base", policy, task="toy/point_mass", obs_sample=obs)
        settings = [*settings, f"init_from={tmp_path / 'base'}"]
    run = build(resolve_config(compose_config([*settings, f"out={tmp_path}"])))
    with entered_files() as entered:
        run.algorithm.update(run.source.next(run.algorithm))
    run.close()
    named = files_of(journey)
    assert 0 < len(named) <= limit
    assert [name for name in named if name not in entered] == []
