"""Tests of the world-model contract: refused inputs, and branching and merging of world states."""

import json
from dataclasses import replace

import pytest
import torch

from robopolicy.errors import UserError
from robopolicy.schema import from_dict, to_dict
from robopolicy.worldmodel.contract import WorldSpec, WorldState, check_actions, check_inputs, first_frames

SPEC = WorldSpec(("front", "wrist"), size=8, fps=10.0, action_dim=2, proprio_dim=3, context=2, action_names=("x", "y"))


def make_states(rows: int) -> WorldState:
    """Returns world states that store their own row index."""
    index = torch.arange(rows)
    return WorldState(index + 100, index * 0, {"latent": index[:, None].float().expand(-1, 4)})


def frames(spec: WorldSpec, rows: int = 2) -> dict[str, torch.Tensor]:
    """Returns black frames of every camera."""
    shape = (rows, spec.context, 3, spec.size, spec.size)
    return {camera: torch.zeros(shape, dtype=torch.uint8) for camera in spec.cameras}


def test_spec_round_trips_through_json():
    assert from_dict(WorldSpec, json.loads(json.dumps(to_dict(SPEC))), "spec") == SPEC


@pytest.mark.parametrize(
    "change", [{"cameras": ()}, {"cameras": ("a", "a")}, {"size": 0}, {"fps": 0.0}, {"proprio_dim": -1}, {"context": 0}]
)
def test_invalid_specs_are_refused(change):
    with pytest.raises(UserError):
        replace(SPEC, **change)


def test_select_and_put_leave_the_old_state_unchanged():
    state = make_states(3)
    branched = state.select(torch.tensor([2, 2, 0]))
    assert branched.seeds.tolist() == [102, 102, 100]
    other, active = make_states(3).select(torch.tensor([2])), torch.tensor([False, True, False])
    merged = state.put(torch.tensor([1]), other, active)
    every = state.put(torch.arange(3), make_states(3).select(torch.tensor([0, 2, 1])), active)
    assert every.seeds.tolist() == merged.seeds.tolist()
    assert merged.seeds.tolist() == [100, 102, 102]
    assert merged.memory["latent"][:, 0].tolist() == [0.0, 2.0, 2.0]
    assert state.seeds.tolist() == [100, 101, 102]
    placed = replace(state, slots=torch.tensor([5, 6, 7]))
    assert placed.select(torch.tensor([2, 0])).slots.tolist() == [7, 5]  # type: ignore[union-attr]
    assert placed.put(torch.tensor([1]), placed.select(torch.tensor([2])), active).slots.tolist() == [5, 7, 7]  # type: ignore[union-attr]


def test_the_first_frame_fills_the_context():
    images = {camera: value[:, 0] + 7 for camera, value in frames(SPEC).items()}
    padded, proprio = first_frames(SPEC, images, torch.ones(2, 3))
    check_inputs(SPEC, padded, proprio, None)
    assert padded["wrist"].shape == (2, 2, 3, 8, 8) and bool((padded["wrist"] == 7).all())


def test_wrong_frames_are_refused_with_the_expected_layout():
    images, proprio = frames(SPEC), torch.zeros(2, 2, 3)
    check_inputs(SPEC, images, proprio, torch.zeros(2, 1, 2))
    with pytest.raises(UserError, match=r"cameras \['front', 'wrist'\], got \['front'\]"):
        check_inputs(SPEC, {"front": images["front"]}, proprio, None)
    with pytest.raises(UserError, match=r"camera 'front' must be \(2, 2, 3, 8, 8\) uint8, got \(2, 2, 3, 4, 4\)"):
        check_inputs(SPEC, images | {"front": images["front"][..., :4, :4]}, proprio, None)
    with pytest.raises(UserError, match=r"uint8, got .* float32"):
        check_inputs(SPEC, images | {"front": images["front"].float()}, proprio, None)
    with pytest.raises(UserError, match=r"State vectors must have shape \(2, 2, 3\)"):
        check_inputs(SPEC, images, proprio[:, :, :2], None)
    with pytest.raises(UserError, match=r"Past actions must have shape \(2, 1, 2\)"):
        check_inputs(SPEC, images, proprio, torch.zeros(2, 2, 2))


@pytest.mark.parametrize("shape", [(3, 4, 2), (2, 3, 2), (2, 4, 1), (2, 0, 2), (2, 2)])
def test_wrong_actions_are_refused(shape):
    spec = replace(SPEC, frames_per_call=2)
    check_actions(spec, make_states(2), torch.zeros(2, 4, 2))
    with pytest.raises(UserError, match=r"must have shape \(2, a multiple of 2, 2\)"):
        check_actions(spec, make_states(2), torch.zeros(shape))
