"""Device test of `robopolicy program`: no part of a policy stays on the CPU."""

import json
from pathlib import Path

import pytest
from device_commands import SEARCH, check_acts_on_a_device, policies

FLOW = "runs/flow/checkpoints/last"
BRAKE = {"kind": "action", "control": ["clip(-2 * state[2:4], -1, 1)"]}
STAGES = {"kind": "selector", "children": [{"kind": "action", "skill": "go", "until": "state[0] < 0.3"}, BRAKE]}
MADE = {
    "a tree of formulas": (BRAKE, ["--task", "toy/point_mass"]),
    "a tree that is changed": (STAGES, ["--skills", f"go={FLOW}", "--rounds", "1", *SEARCH]),
}


@pytest.mark.parametrize("what", MADE)
def test_a_tree_runs_on_a_device(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree, words = MADE[what]
    with policies(tmp_path, ("flow",)) as folder:
        Path("tree.json").write_text(json.dumps(tree))
        check_acts_on_a_device(["program", "tree.json", *words], folder, tmp_path / "found", monkeypatch)
