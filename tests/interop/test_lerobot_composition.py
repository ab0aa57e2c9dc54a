"""Tests of composing a LeRobot diffusion policy with a robopolicy policy; `make test-lerobot` runs them."""

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
AHEAD = 7  # future rows among the eight rows of lerobot's network; the other row is in the past


def loaded(folder: Path, **settings: Any) -> LeRobotDiffusion:
    save_diffusion(folder, **settings)
    policy = load_lerobot(folder)
    assert isinstance(policy, LeRobotDiffusion)
    return policy


@pytest.fixture(scope="module")
def lerobot_policy(tmp_path_factory: pytest.TempPathFactory) -> LeRobotDiffusion:
    return loaded(tmp_path_factory.mktemp("saved") / "policy", num_inference_steps=3)


def flow(horizon: int = AHEAD) -> FlowPolicy:
    """A flow policy with the state as its only observation."""
    torch.manual_seed(0)
    spec = PolicySpec({"state": (DIMS,)}, 2, horizon=horizon, action_horizon=3)
    policy = FlowPolicy(FlowConfig(hidden=(16,), steps=2), spec)
    stats = statistics()
    policy.fit_normalizer({"state": stats["observation.state"], "action": stats[ACTION]})
    return policy.eval()


def noise_for(policy: Policy) -> Tensor:
    return torch.randn(3, *policy.noise_shape, generator=torch.Generator().manual_seed(2))


def observed_by(policy: Policy) -> dict[str, Tensor]:
    return {key: OBS[key][:, -policy.spec.obs_horizon :] for key in policy.spec.observation}


@pytest.mark.parametrize("horizon", [5, AHEAD, 12])
def test_parent_with_weight_one_determines_its_whole_chunk(lerobot_policy: LeRobotDiffusion, horizon: int) -> None:
    own = flow(horizon)
    assert compose([lerobot_policy, own]).noise_shape == (max(AHEAD, horizon) + 1, 2)
    by_lerobot = compose([lerobot_policy, own], weights=[1.0, 0.0])
    noise = noise_for(by_lerobot)
    alone = lerobot_policy.decode(observed_by(lerobot_policy), torch.cat([noise[:, :AHEAD], noise[:, -1:]], 1))
    assert torch.equal(by_lerobot.decode(OBS, noise)[:, :AHEAD], alone)
    by_own = compose([lerobot_policy, own], weights=[0.0, 1.0])
    noise = noise_for(by_own)
    with torch.no_grad():
        alone = own.decode(observed_by(own), noise[:, :horizon])
        assert torch.equal(by_own.decode(OBS, noise)[:, :horizon], alone)


def test_composition_with_weight_one_acts_like_the_parent(lerobot_policy: LeRobotDiffusion) -> None:
    both = compose([lerobot_policy, flow()], weights=[1.0, 0.0])
    found, alone = (policy.act(OBS, generator=torch.Generator().manual_seed(0)) for policy in (both, lerobot_policy))
    assert torch.equal(found, alone)


def test_weights_interpolate_between_the_parents(lerobot_policy: LeRobotDiffusion) -> None:
    own = flow()
    noise = noise_for(compose([lerobot_policy, own]))
    with torch.no_grad():
        ends = [
            lerobot_policy.decode(observed_by(lerobot_policy), noise),
            own.decode(observed_by(own), noise[:, :AHEAD]),
        ]
        chunks = [compose([lerobot_policy, own], weights=[w, 1 - w]).decode(OBS, noise) for w in (0.9, 0.5, 0.1)]
    distances = torch.tensor([[float((chunk - end).square().mean()) for chunk in chunks] for end in ends])
    assert bool((distances[0].diff() > 0).all()) and bool((distances[1].diff() < 0).all())


def test_the_order_of_the_parents_does_not_matter(lerobot_policy: LeRobotDiffusion) -> None:
    own = flow()
    first, second = (
        compose([lerobot_policy, own], weights=[0.6, 0.4]),
        compose([own, lerobot_policy], weights=[0.4, 0.6]),
    )
    noise = noise_for(first)
    with torch.no_grad():
        torch.testing.assert_close(first.decode(OBS, noise), second.decode(OBS, noise), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("operator", ["or", "and"])
def test_adaptive_operators_differentiate_through_lerobots_network(
    lerobot_policy: LeRobotDiffusion, operator: str
) -> None:
    both = compose([lerobot_policy, flow()], operator)
    with torch.no_grad():
        chunk = both.decode(OBS, noise_for(both))
    assert chunk.shape == (3, AHEAD, 2) and bool(chunk.isfinite().all())


def test_composition_uses_the_noise_levels_of_lerobot(tmp_path: Path) -> None:
    """Euler steps of a composition with weight almost 1 on lerobot's noise levels equal its DDIM steps."""
    lerobot_policy = loaded(tmp_path / "p", clip_sample=False, num_inference_steps=10)
    both = compose([lerobot_policy, flow()], weights=[1 - 1e-6, 1e-6])
    assert both.nfe == 2 * 10
    noise = noise_for(lerobot_policy)
    with torch.no_grad():
        torch.testing.assert_close(both.decode(OBS, noise), lerobot_policy.decode(OBS, noise), atol=2e-3, rtol=2e-3)


def test_action_bound_of_lerobot_holds_for_the_composition(lerobot_policy: LeRobotDiffusion) -> None:
    both = compose([lerobot_policy, lerobot_policy])
    with torch.no_grad():
        chunk = both.decode(OBS, 10 * noise_for(both))
    assert float(lerobot_policy.action_normalizer.normalize(chunk).abs().max()) <= lerobot_policy.action_bound() + 1e-6


def test_composed_checkpoint_verifies(lerobot_policy: LeRobotDiffusion, tmp_path: Path) -> None:
    both = compose([lerobot_policy, flow()])
    save_checkpoint(tmp_path / "c", both, task="toy/point_mass", obs_sample=OBS)
    assert verify_checkpoint(tmp_path / "c").ok
    again, _ = load_policy(tmp_path / "c")
    noise = noise_for(both)
    assert torch.equal(again.decode(OBS, noise), both.decode(OBS, noise))
