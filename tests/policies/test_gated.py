"""Tests of the learned gate: limits where it equals another policy, and a ranking of parents learned from data."""

from typing import Any

import pytest
import torch
from composition_forms import exact, network, nothing, observations, round_
from torch import Tensor

from robopolicy.data.episodes import Episode, Episodes
from robopolicy.errors import UserError
from robopolicy.policies.composition.operators import apply_gates
from robopolicy.policies.composition.selection import Selection, choose_parents, ordering_loss
from robopolicy.policies.wrappers.composed import compose
from robopolicy.policies.wrappers.learned_gate import LearnedGatePolicy, make_learned_gate
from robopolicy.training.checkpoint import load_policy, save_checkpoint, verify_checkpoint
from robopolicy.training.fit_selector import fit_selector

SMALL = {"hidden": (16,), "updates": 150, "batch_size": 64, "lr": 5e-3}


def prefer(policy: LearnedGatePolicy, *scores: float) -> LearnedGatePolicy:
    """Make the selector return `scores` for every observation."""
    last = policy.selector.body[-1]
    torch.nn.init.zeros_(last.weight)  # type: ignore[arg-type]
    last.bias.data = torch.tensor(scores)
    return policy


def parents() -> list[Any]:
    return [network("flow", seed) for seed in range(3)]


def test_gate_with_all_parents_selected_equals_the_composition_bit_for_bit():
    plain, obs, noise = compose(parents(), weights=[0.2, 0.3, 0.5]), observations(5), torch.randn(5, 4, 2)
    every = make_learned_gate(plain, Selection(top=3, **SMALL))
    assert torch.equal(every.decode(obs, noise), plain.decode(obs, noise))
    t = torch.linspace(0.1, 0.9, 5)
    assert torch.equal(every.field(obs, noise, t), plain.field(obs, noise, t))


@pytest.mark.parametrize("chosen", range(3))
def test_gate_with_one_parent_selected_equals_that_parent(chosen):
    several, obs, noise = parents(), observations(5), torch.randn(5, 4, 2)
    scores = [float(index == chosen) for index in range(3)]
    one = prefer(make_learned_gate(compose(several, weights=[0.2, 0.3, 0.5]), Selection(top=1, **SMALL)), *scores)
    torch.testing.assert_close(one.decode(obs, noise), several[chosen].decode(obs, noise), atol=1e-5, rtol=1e-5)


def test_gate_with_two_parents_selected_equals_their_composition():
    several, obs, noise = parents(), observations(5), torch.randn(5, 4, 2)
    two = prefer(
        make_learned_gate(compose(several, weights=[0.2, 0.3, 0.5]), Selection(top=2, **SMALL)), 1.0, -1.0, 2.0
    )
    expected = compose([several[0], several[2]], weights=[2 / 7, 5 / 7]).decode(obs, noise)
    torch.testing.assert_close(two.decode(obs, noise), expected, atol=1e-5, rtol=1e-5)
    far = prefer(
        make_learned_gate(compose(several), Selection(top=2, least=0.5, **SMALL)), 1.0, -1.0, 2.0
    )  # exp(1 - 2) < 0.5
    torch.testing.assert_close(far.decode(obs, noise), several[2].decode(obs, noise), atol=1e-5, rtol=1e-5)


def test_a_row_does_not_depend_on_its_neighbours():
    torch.manual_seed(0)
    policy, obs, noise = (
        make_learned_gate(compose(parents()), Selection(top=1, **SMALL)),
        observations(6),
        torch.randn(6, 4, 2),
    )
    for parameter in policy.selector.body.parameters():
        parameter.data = 5 * torch.randn(parameter.shape)
    assert len(policy._gates(obs).unique(dim=0)) > 1
    some = policy.decode({"state": obs["state"][:2]}, noise[:2])
    torch.testing.assert_close(policy.decode(obs, noise)[:2], some, atol=1e-6, rtol=1e-6)


def test_gates_match_hand_computed_values():
    scores = torch.tensor([[0.0, 2.0, 1.0], [3.0, 0.0, 2.9]])
    assert choose_parents(scores, Selection(top=1)).tolist() == [[0, 1, 0], [1, 0, 0]]
    assert choose_parents(scores, Selection(top=2)).tolist() == [[0, 1, 1], [1, 0, 1]]
    assert choose_parents(scores, Selection(top=3, least=0.5)).tolist() == [[0, 1, 0], [1, 0, 1]]
    weights = apply_gates([0.25, 0.25, 0.5], torch.tensor([[1.0, 0, 1], [1, 1, 0], [1, 1, 1]]))
    rows = torch.stack([torch.as_tensor(weight).flatten() for weight in weights], 1)
    torch.testing.assert_close(rows, torch.tensor([[1 / 3, 0, 2 / 3], [0.5, 0.5, 0], [0.25, 0.25, 0.5]]))
    blocked = apply_gates([0.0, 1.0], torch.tensor([[1.0, 0.0]]))  # no parent with a weight remains
    assert [float(torch.as_tensor(weight)) for weight in blocked] == [0.0, 1.0]


def test_ordering_loss_matches_its_closed_form():
    scores = torch.tensor([[1.0, 0.0]])
    right, wrong = (ordering_loss(scores, torch.tensor([gap])) for gap in ([0.1, 0.2], [0.2, 0.1]))
    odds = torch.tensor(1.0).sigmoid()
    torch.testing.assert_close(torch.cat([right[0], wrong[0]]), torch.stack([-odds.log(), -(1 - odds).log()]))
    assert right[1]["first"] == 1 and wrong[1]["first"] == 0


def test_discrepancy_is_lowest_for_the_parent_that_matches_the_chunk():
    means = ((0.8, 0.0), (-0.8, 0.0))
    policy = make_learned_gate(compose([exact("flow", round_(mean, 0.1)) for mean in means]), Selection(**SMALL))
    chunk = torch.tensor(means)[:, None]
    found = policy.discrepancies(nothing(2), chunk, generator=torch.Generator().manual_seed(0))
    assert found[0, 0] < 0.2 * found[0, 1] and found[1, 1] < 0.2 * found[1, 0]
    zero_weight = policy.with_weights([1.0, 0.0])  # a parent with zero weight still gets a discrepancy
    again = zero_weight.discrepancies(nothing(2), chunk, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(again, found)


def sides() -> LearnedGatePolicy:
    """Return a gate over two parents: one always goes left, the other always goes right."""
    torch.manual_seed(0)
    return make_learned_gate(
        compose([exact("flow", round_((x, 0.0), 0.1), steps=16) for x in (-0.8, 0.8)]), Selection(**SMALL)
    )


def demonstrations(rows: int) -> Episodes:
    """Return episodes that go left where the state is negative and right where it is positive."""
    generator = torch.Generator().manual_seed(0)
    state = torch.rand(rows, 1, generator=generator) * 2 - 1
    action = torch.cat([0.8 * state.sign(), torch.zeros(rows, 1)], 1) + 0.1 * torch.randn(rows, 2, generator=generator)
    return Episodes.from_list([Episode({"state": state.numpy(), "action": action.numpy()}, "toy/point_mass")], 0.05)


def test_selector_learns_the_parent_of_each_state_from_demonstrations():
    both = sides()
    before = {key: value.clone() for key, value in both.state_dict().items() if not key.startswith("selector.body")}
    assert fit_selector(both, demonstrations(512)) > 0.95
    assert all(torch.equal(both.state_dict()[key], value) for key, value in before.items())
    state = torch.tensor([-0.9, -0.4, 0.4, 0.9]).view(-1, 1, 1)
    assert both._gates({"state": state}).tolist() == [[1, 0], [1, 0], [0, 1], [0, 1]]
    actions = both.act({"state": state.repeat(50, 1, 1)}, generator=torch.Generator().manual_seed(0))[:, 0, 0]
    torch.testing.assert_close(actions.view(50, 4).mean(0), 0.8 * state.flatten().sign(), atol=0.1, rtol=0)


def test_a_checkpoint_stores_the_selector(tmp_path):
    torch.manual_seed(0)
    policy = make_learned_gate(compose(parents()), Selection(top=2, **SMALL))
    save_checkpoint(tmp_path / "chosen", policy, task="toy/point_mass", obs_sample=observations(4))
    assert verify_checkpoint(tmp_path / "chosen").ok
    loaded, obs = load_policy(tmp_path / "chosen")[0], observations(5)
    assert isinstance(loaded, LearnedGatePolicy) and loaded.config.selection.top == 2
    assert torch.equal(loaded._gates(obs), policy._gates(obs))
    moved = policy.with_weights([0.6, 0.2, 0.2])
    assert isinstance(moved, LearnedGatePolicy) and moved.selector is policy.selector


def test_invalid_compositions_and_data_are_refused():
    several = parents()
    with pytest.raises(UserError, match="operator 'or' has other weights"):
        make_learned_gate(compose(several, "or"), Selection())
    with pytest.raises(UserError, match="operator 'affine' has other weights"):
        make_learned_gate(compose(several[:2], "affine", [2, -1]), Selection())
    with pytest.raises(UserError, match="top must be at least 1"):
        Selection(top=0)
    other: dict[str, Tensor] = {"goal": torch.zeros(4, 3), "action": torch.zeros(4, 2)}
    wrong = Episodes.from_list([Episode({key: value.numpy() for key, value in other.items()}, "x")], 0.05)
    with pytest.raises(UserError, match=r"they lack \['state'\]"):
        fit_selector(make_learned_gate(compose(several), Selection(**SMALL)), wrong)
