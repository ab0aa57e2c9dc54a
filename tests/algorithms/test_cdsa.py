"""CDSA on Gaussian data: what the scores point at, what corrections keep, and what the frozen base keeps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from robopolicy.algorithms.cdsa import CDSA, CDSAConfig, cdsa_loss
from robopolicy.data.chunks import ChunkBatch, ChunkSampler
from robopolicy.data.episodes import Episodes
from robopolicy.errors import UserError
from robopolicy.policies.base import PolicySpec
from robopolicy.policies.heads.flow import FlowConfig, FlowPolicy
from robopolicy.policies.wrappers.corrected import CorrectedPolicy, Correction, DataModelConfig, correct
from robopolicy.training.checkpoint import load_policy, save_checkpoint, verify_checkpoint

SPEC = PolicySpec({"state": (2,)}, action_dim=1, horizon=2, execute=1)
MEAN, STD = 0.3, 0.2  # of the actions, whatever the state
SMALL = DataModelConfig(hidden=(32, 32), action_noise=0.2, state_noise=0.2)


def base() -> FlowPolicy:
    torch.manual_seed(0)
    policy = FlowPolicy(FlowConfig(hidden=(8,), steps=2), SPEC)
    bounds = {"min": [-1.0, -1.0], "max": [1.0, 1.0]}
    policy.fit_normalizer({"state": bounds, "action": {name: value[:1] for name, value in bounds.items()}})
    return policy.eval()


def batch(rows: int, generator: torch.Generator) -> ChunkBatch:
    """Actions of one Gaussian; each moves the first number of the state by itself."""
    state = 0.3 * torch.randn(rows, 1, 2, generator=generator)
    chunk = MEAN + STD * torch.randn(rows, 2, 1, generator=generator)
    following = state + torch.cat([chunk[:, :1], torch.zeros(rows, 1, 1)], 2)
    return ChunkBatch({"state": state}, chunk, torch.ones(rows, 2), None, {"state": following}, torch.ones(rows))


@pytest.fixture(scope="module")
def trained() -> CDSA:
    torch.manual_seed(0)
    algorithm = CDSA(CDSAConfig(model=SMALL, lr=3e-3, warmup=10), base(), total_updates=300)
    data = torch.Generator().manual_seed(1)
    for _ in range(300):
        algorithm.update(batch(128, data))
    return algorithm


def test_the_score_of_gaussian_actions_is_the_distance_to_their_mean_over_their_variance(trained: CDSA) -> None:
    model = trained.policy.model.eval()
    action = torch.linspace(-0.2, 0.8, 11)[:, None]
    with torch.no_grad():
        found = model.action_score(model.encode({"state": torch.zeros(11, 1, 2)}), action)
    expected = (MEAN - action) / (STD**2 + SMALL.action_noise**2)  # of the data blurred by the noise
    torch.testing.assert_close(found, expected.float(), atol=0.8, rtol=0)
    assert float((found * expected).sum() / (found.norm() * expected.norm())) > 0.98


def test_the_models_know_which_action_leads_where(trained: CDSA) -> None:
    model = trained.policy.model.eval()
    obs, action = {"state": torch.tensor([[[0.1, -0.2]]])}, torch.tensor([[0.4]])
    features, state = model.encode(obs), model.state(obs)
    torch.testing.assert_close(model.following(features, state, action), torch.tensor([[0.5, -0.2]]), atol=0.08, rtol=0)
    between = model.action_between(features, torch.tensor([[0.5, -0.2]]))
    torch.testing.assert_close(between, action, atol=0.1, rtol=0)


def test_a_correction_moves_unusual_actions_towards_the_data_and_never_further_than_its_limit(trained: CDSA) -> None:
    obs = {"state": torch.zeros(3, 1, 2)}
    chunk = torch.tensor([[[0.9], [0.9]], [[-0.6], [-0.6]], [[MEAN], [0.9]]])
    with torch.no_grad():
        pulled = trained.policy.with_correction(Correction(0.02, 0.0, limit=0.1)).correct(obs, chunk)
    moved = (pulled - chunk)[:, 0, 0]
    torch.testing.assert_close(moved[:2], torch.tensor([-0.1, 0.1]))
    assert abs(float(moved[2])) < 0.02
    assert torch.equal(pulled[:, 1:], chunk[:, 1:])  # what is not executed stays


def test_coefficients_of_zero_are_the_base_to_the_last_bit(trained: CDSA) -> None:
    obs, noise = {"state": torch.randn(4, 1, 2)}, torch.randn(4, 2, 1)
    policy = trained.policy.with_correction(Correction(0.0, 0.0))
    assert torch.equal(policy.decode(obs, noise), base().decode(obs, noise))


def test_training_leaves_the_base_bit_identical(trained: CDSA) -> None:
    fresh = base().state_dict()
    assert all(torch.equal(value, fresh[name]) for name, value in trained.policy.base.state_dict().items())


def test_a_corrected_policy_is_saved_whole_and_can_be_trained_further(trained: CDSA, tmp_path: Path) -> None:
    obs, noise = {"state": torch.randn(4, 1, 2)}, torch.randn(4, 2, 1)
    save_checkpoint(tmp_path / "corrected", trained.policy, task="toy/point_mass", obs_sample=obs)
    again, _ = load_policy(tmp_path / "corrected")
    assert isinstance(again, CorrectedPolicy) and verify_checkpoint(tmp_path / "corrected").ok
    assert torch.equal(again.decode(obs, noise), trained.policy.decode(obs, noise))
    further = CDSA(CDSAConfig(model=SMALL), again, total_updates=1)
    assert further.policy.base is not again and isinstance(further.policy.base, FlowPolicy)
    with pytest.raises(UserError, match=r"set algorithm\.model"):
        CDSA(CDSAConfig(), again, total_updates=1)


def test_a_chunk_that_was_cut_by_the_end_of_its_episode_teaches_states_alone() -> None:
    algorithm = CDSA(CDSAConfig(model=SMALL), base(), total_updates=1)
    whole = batch(8, torch.Generator().manual_seed(0))
    cut = ChunkBatch(whole.obs, whole.chunk, whole.mask, None, whole.next_obs, torch.zeros(8))
    loss, info = cdsa_loss(algorithm.policy.model, cut, torch.Generator().manual_seed(0))
    assert float(info["action_score"]) == float(info["forward"]) == float(info["inverse"]) == 0.0
    assert float(loss) == float(info["state_score"]) > 0
    with pytest.raises(UserError, match="observations after them"):
        cdsa_loss(algorithm.policy.model, ChunkBatch(whole.obs, whole.chunk, whole.mask))


def test_the_observation_after_a_chunk_lies_its_steps_ahead_in_the_same_episode() -> None:
    frames = np.arange(5, dtype=np.float32)
    column = np.concatenate([frames, frames])[:, None]
    arrays: dict[str, Any] = {"state": column, "action": column}
    episodes = Episodes(arrays, np.array([5, 10]), ("", ""), np.array([0, 1]), control_dt=0.1)
    found = ChunkSampler(episodes, horizon=3, obs_horizon=2, reach=2).take(torch.arange(5, 10))
    assert found.next_obs is not None and found.reached is not None
    histories: Tensor = found.next_obs["state"][:, :, 0]
    assert histories.tolist() == [[1, 2], [2, 3], [3, 4], [3, 4], [3, 4]]
    assert found.reached.tolist() == [1, 1, 1, 0, 0]
    assert ChunkSampler(episodes, horizon=3).take(torch.arange(2)).next_obs is None


def test_only_states_can_be_corrected_towards() -> None:
    sees = PolicySpec({"image.front": (3, 16, 16)}, action_dim=1)
    policy = FlowPolicy(FlowConfig(hidden=(8,), normalization="identity", action_normalization="identity"), sees)
    with pytest.raises(UserError, match="vector observation"):
        CDSA(CDSAConfig(model=SMALL), policy, total_updates=1)
    with pytest.raises(UserError, match="limit must be positive"):
        Correction(limit=0.0)
    with pytest.raises(UserError, match="must be positive"):
        DataModelConfig(action_noise=0.0)
    assert correct(
        base(), CDSA(CDSAConfig(model=SMALL), base(), total_updates=1).policy.model, Correction()
    ).takes_noise
