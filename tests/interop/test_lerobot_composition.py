"""A diffusion policy of LeRobot and one of ours denoise one chunk; `make test-lerobot` runs this."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("lerobot.policies", reason="needs robopolicy[lerobot]: make test-lerobot")

from lerobot_saved import ACTION, DIMS, observations, save_diffusion, statistics

from robopolicy.interop.lerobot.diffusion import LeRobotDiffusion
from robopolicy.interop.lerobot.loading import load_lerobot
from robopolicy.policies.base import Policy, PolicySpec
from robopolicy.policies.heads.flow import FlowConfig, FlowPolicy
from robopolicy.policies.wrappers.composed import compose
from robopolicy.training.checkpoint import load_policy, save_checkpoint, verify_checkpoint

OBS = observations(3, camera=False)
AHEAD = 7  # of the eight rows of lerobot's network; the other one is of the past


def loaded(folder: Path, **settings: Any) -> LeRobotDiffusion:
    save_diffusion(folder, **settings)
    policy = load_lerobot(folder)
    assert isinstance(policy, LeRobotDiffusion)
    return policy


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> LeRobotDiffusion:
    return loaded(tmp_path_factory.mktemp("saved") / "policy", num_inference_steps=3)


def flow(horizon: int = AHEAD) -> FlowPolicy:
    """A policy of ours that sees the state alone."""
    torch.manual_seed(0)
    spec = PolicySpec({"state": (DIMS,)}, 2, horizon=horizon, action_horizon=3)
    policy = FlowPolicy(FlowConfig(hidden=(16,), steps=2), spec)
    stats = statistics()
    policy.fit_normalizer({"state": stats["observation.state"], "action": stats[ACTION]})
    return policy.eval()


def noise_for(policy: Policy) -> Tensor:
    return torch.randn(3, *policy.noise_shape, generator=torch.Generator().manual_seed(2))


def seen_by(policy: Policy) -> dict[str, Tensor]:
    return {key: OBS[key][:, -policy.spec.obs_horizon :] for key in policy.spec.observation}


@pytest.mark.parametrize("horizon", [5, AHEAD, 12])
def test_a_parent_with_all_the_weight_decides_all_that_it_plans(theirs: LeRobotDiffusion, horizon: int) -> None:
    own = flow(horizon)
    assert compose([theirs, own]).noise_shape == (max(AHEAD, horizon) + 1, 2)
    by_theirs = compose([theirs, own], weights=[1.0, 0.0])
    noise = noise_for(by_theirs)
    alone = theirs.decode(seen_by(theirs), torch.cat([noise[:, :AHEAD], noise[:, -1:]], 1))
    assert torch.equal(by_theirs.decode(OBS, noise)[:, :AHEAD], alone)
    by_own = compose([theirs, own], weights=[0.0, 1.0])
    noise = noise_for(by_own)
    with torch.no_grad():
        alone = own.decode(seen_by(own), noise[:, :horizon])
        assert torch.equal(by_own.decode(OBS, noise)[:, :horizon], alone)


def test_acting_alone_it_draws_its_own_noise(theirs: LeRobotDiffusion) -> None:
    both = compose([theirs, flow()], weights=[1.0, 0.0])
    found, alone = (policy.act(OBS, generator=torch.Generator().manual_seed(0)) for policy in (both, theirs))
    assert torch.equal(found, alone)


def test_weights_move_the_chunk_from_one_to_the_other(theirs: LeRobotDiffusion) -> None:
    own = flow()
    noise = noise_for(compose([theirs, own]))
    with torch.no_grad():
        ends = [theirs.decode(seen_by(theirs), noise), own.decode(seen_by(own), noise[:, :AHEAD])]
        chunks = [compose([theirs, own], weights=[w, 1 - w]).decode(OBS, noise) for w in (0.9, 0.5, 0.1)]
    distances = torch.tensor([[float((chunk - end).square().mean()) for chunk in chunks] for end in ends])
    assert bool((distances[0].diff() > 0).all()) and bool((distances[1].diff() < 0).all())


def test_the_order_of_the_parents_does_not_matter(theirs: LeRobotDiffusion) -> None:
    own = flow()
    first, second = compose([theirs, own], weights=[0.6, 0.4]), compose([own, theirs], weights=[0.4, 0.6])
    noise = noise_for(first)
    with torch.no_grad():
        torch.testing.assert_close(first.decode(OBS, noise), second.decode(OBS, noise), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("operator", ["or", "and"])
def test_adaptive_operators_differentiate_through_lerobots_network(theirs: LeRobotDiffusion, operator: str) -> None:
    both = compose([theirs, flow()], operator)
    with torch.no_grad():
        chunk = both.decode(OBS, noise_for(both))
    assert chunk.shape == (3, AHEAD, 2) and bool(chunk.isfinite().all())


def test_its_own_levels_are_visited(tmp_path: Path) -> None:
    """Almost alone, so that the composition's Euler steps count: on lerobot's levels they are its DDIM steps."""
    theirs = loaded(tmp_path / "p", clip_sample=False, num_inference_steps=10)
    both = compose([theirs, flow()], weights=[1 - 1e-6, 1e-6])
    assert both.nfe == 2 * 10
    noise = noise_for(theirs)
    with torch.no_grad():
        torch.testing.assert_close(both.decode(OBS, noise), theirs.decode(OBS, noise), atol=2e-3, rtol=2e-3)


def test_its_bound_holds_for_the_composition(theirs: LeRobotDiffusion) -> None:
    both = compose([theirs, theirs])
    with torch.no_grad():
        chunk = both.decode(OBS, 10 * noise_for(both))
    assert float(theirs.action_normalizer.normalize(chunk).abs().max()) <= theirs.action_bound() + 1e-6


def test_a_composed_checkpoint_verifies(theirs: LeRobotDiffusion, tmp_path: Path) -> None:
    both = compose([theirs, flow()])
    save_checkpoint(tmp_path / "c", both, task="toy/point_mass", obs_sample=OBS)
    assert verify_checkpoint(tmp_path / "c").ok
    again, _ = load_policy(tmp_path / "c")
    noise = noise_for(both)
    assert torch.equal(again.decode(OBS, noise), both.decode(OBS, noise))
