"""Tests of CDSA on Gaussian data: scores, corrections, and the unchanged base policy."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from robopolicy.contrib.offline.cdsa import CDSA, CDSAConfig, cdsa_loss
from robopolicy.contrib.offline.corrected import CorrectedPolicy, Correction, DataModel, DataModelConfig, correct
from robopolicy.data.chunks import ChunkBatch, ChunkSampler
from robopolicy.data.episodes import Episodes
from robopolicy.errors import UserError
from robopolicy.policies.base import PolicySpec
from robopolicy.policies.heads.flow import FlowConfig, FlowPolicy
from robopolicy.training.checkpoint import load_policy, save_checkpoint, verify_checkpoint

SPEC = PolicySpec({"state": (2,)}, action_dim=1, horizon=2, action_horizon=1)
MEAN, STD = 0.3, 0.2  # of the actions, independent of the state
STATE_STD = 0.3  # of the states, around 0
SMALL = DataModelConfig(hidden=(32, 32), action_noise=0.2, state_noise=0.2)


def base(spec: PolicySpec = SPEC) -> FlowPolicy:
    torch.manual_seed(0)
    policy = FlowPolicy(FlowConfig(hidden=(8,), steps=2), spec)
    dims = {"state": 2, "action": spec.action_dim}
    policy.fit_normalizer({key: {"min": [-1.0] * count, "max": [1.0] * count} for key, count in dims.items()})
    return policy.eval()


def batch(rows: int, generator: torch.Generator) -> ChunkBatch:
    """Gaussian actions; each adds to the first component of the state."""
    state = STATE_STD * torch.randn(rows, 1, 2, generator=generator)
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


def test_gaussian_action_score_equals_mean_difference_over_variance(trained: CDSA) -> None:
    model = trained.policy.model.eval()
    action = torch.linspace(-0.2, 0.8, 11)[:, None]
    with torch.no_grad():
        found = model.action_score(model.encode({"state": torch.zeros(11, 1, 2)}), action)
    expected = (MEAN - action) / (STD**2 + SMALL.action_noise**2)  # of the data with added noise
    torch.testing.assert_close(found, expected.float(), atol=0.8, rtol=0)
    assert float((found * expected).sum() / (found.norm() * expected.norm())) > 0.98


def test_the_score_of_gaussian_states_points_to_their_mean(trained: CDSA) -> None:
    model = trained.policy.model.eval()
    state = torch.stack([torch.linspace(-0.6, 0.6, 11), torch.linspace(0.3, -0.5, 11)], 1)
    with torch.no_grad():
        found = model.state_score(state)
    expected = -state / (STATE_STD**2 + SMALL.state_noise**2)
    torch.testing.assert_close(found, expected, atol=0.8, rtol=0)
    assert float((found * expected).sum() / (found.norm() * expected.norm())) > 0.98


def test_the_state_term_moves_actions_towards_likely_next_states(trained: CDSA) -> None:
    correction = Correction(0.0, 0.5, state_step=SMALL.state_noise**2)
    place = torch.tensor([0.3, -0.6])
    obs = {"state": torch.stack([place, torch.zeros(2)], 1)[:, None]}
    chunk = torch.full((2, 2, 1), MEAN)
    with torch.no_grad():
        moved = (trained.policy.with_correction(correction).correct(obs, chunk) - chunk)[:, 0, 0]
    score = -(place + MEAN) / (STATE_STD**2 + SMALL.state_noise**2)
    torch.testing.assert_close(moved, 0.5 * SMALL.state_noise**2 * score, atol=0.03, rtol=0)


def test_dynamics_models_use_executed_actions_and_scores_use_commanded_actions() -> None:
    policy = base()
    model = DataModel(DataModelConfig(hidden=()), policy)
    linear(model.inverse, [[-1.0, 0.0, 1.0, 0.0]], [0.0])
    linear(model.ahead, [[0.0, 0.0, 1.0], [0.0, 0.0, 0.0]], [0.0, 0.0])
    data = batch(64, torch.Generator().manual_seed(1))
    disturbed = replace(data, chunk=data.chunk + 0.3, executed=data.chunk)
    errors = cdsa_loss(model, disturbed, torch.Generator().manual_seed(2))[1]
    assert float(errors["inverse"]) == pytest.approx(0.0, abs=1e-9) == float(errors["forward"])
    commanded = cdsa_loss(model, replace(disturbed, executed=None), torch.Generator().manual_seed(2))[1]
    assert float(commanded["inverse"]) > 0.05
    assert errors["action_score"] == commanded["action_score"]


def linear(network: nn.Sequential, weight: list[list[float]], bias: list[float]) -> None:
    """Set a network without hidden layers to this affine map."""
    (layer,) = network
    layer.load_state_dict({"weight": torch.tensor(weight), "bias": torch.tensor(bias)})


def test_a_correction_equals_its_formula_for_known_networks() -> None:
    """Actions are N(0.3, 0.5) and states N((0.2, -0.1), 0.8) with added noise; action a adds 2 a to component 0.

    c1 S_a(a) + c2 (I(s, s' + h S_s(s')) - I(s, s')) = c1 (0.3 - a) / 0.5 + c2 h (0.2 - s') / 0.8 / 2, s' = s + 2 a
    """
    policy = base()
    model = DataModel(DataModelConfig(hidden=(), action_noise=0.25, state_noise=0.4), policy)
    linear(model.action_noise, [[0.0, 0.0, 0.25 / 0.5]], [-0.25 * 0.3 / 0.5])
    linear(model.state_noise, [[0.4 / 0.8, 0.0], [0.0, 0.4 / 0.8]], [-0.4 * 0.2 / 0.8, 0.4 * 0.1 / 0.8])
    linear(model.inverse, [[-0.5, 0.0, 0.5, 0.0]], [0.0])
    linear(model.ahead, [[0.0, 0.0, 2.0], [0.0, 0.0, 0.0]], [0.0, 0.0])
    state, chunk = torch.tensor([-0.3, 0.0, 0.4]), torch.tensor([-0.2, 0.1, 0.5])
    obs = {"state": torch.stack([state, torch.full((3,), 0.7)], 1)[:, None]}
    usual, reached = (0.3 - chunk) / 0.5, (0.2 - (state + 2 * chunk)) / 0.8
    for c1, c2, h in ((0.1, 0.0, 0.1), (0.0, 0.8, 0.2), (0.1, 0.8, 0.2)):
        corrected = correct(policy, model, Correction(c1, c2, h, limit=10.0))
        with torch.no_grad():
            found = corrected.correct(obs, chunk[:, None, None].expand(3, 2, 1))
        torch.testing.assert_close(found[:, 0, 0], chunk + c1 * usual + c2 * h * reached / 2)
        assert torch.equal(found[:, 1, 0], chunk)


def test_the_norm_of_each_corrected_step_is_bounded_over_all_its_dimensions() -> None:
    policy = base(PolicySpec({"state": (2,)}, action_dim=3, horizon=3, action_horizon=2))
    torch.manual_seed(0)
    model = DataModel(DataModelConfig(hidden=(16,)), policy)
    obs, chunk = {"state": torch.randn(64, 1, 2)}, 0.4 * torch.rand(64, 3, 3) - 0.2
    correction = Correction(0.02, 1.0, state_step=0.2, limit=1e6)
    with torch.no_grad():
        free = correct(policy, model, correction).correct(obs, chunk) - chunk
        found = correct(policy, model, replace(correction, limit=0.1)).correct(obs, chunk) - chunk
        one_term = correct(policy, model, replace(correction, state_coef=0.0)).correct(obs, chunk) - chunk
        far = correct(policy, model, replace(correction, state_coef=50.0)).correct(obs, 0.99 * chunk.sign())
    size = free.norm(dim=-1, keepdim=True)
    assert 0.2 < float((size[:, :2] > 0.1).float().mean()) < 0.8 and float((free + chunk).abs().max()) < 1.0
    torch.testing.assert_close(found, free * (0.1 / size).clamp(max=1.0).nan_to_num(), atol=1e-6, rtol=0)
    assert float((free - one_term)[:, :2].norm(dim=-1).min()) > 1e-3  # the second term has an effect
    assert torch.equal(found[:, 2], torch.zeros(64, 3))
    assert float(far.abs().max()) == 1.0


def test_the_dynamics_models_predict_next_states_and_actions(trained: CDSA) -> None:
    model = trained.policy.model.eval()
    obs, action = {"state": torch.tensor([[[0.1, -0.2]]])}, torch.tensor([[0.4]])
    features, state = model.encode(obs), model.state(obs)
    torch.testing.assert_close(model.following(features, state, action), torch.tensor([[0.5, -0.2]]), atol=0.08, rtol=0)
    between = model.action_between(features, torch.tensor([[0.5, -0.2]]))
    torch.testing.assert_close(between, action, atol=0.1, rtol=0)


def test_corrections_move_unlikely_actions_towards_the_data_within_the_limit(trained: CDSA) -> None:
    obs = {"state": torch.zeros(3, 1, 2)}
    chunk = torch.tensor([[[0.9], [0.9]], [[-0.6], [-0.6]], [[MEAN], [0.9]]])
    with torch.no_grad():
        pulled = trained.policy.with_correction(Correction(0.02, 0.0, limit=0.1)).correct(obs, chunk)
    moved = (pulled - chunk)[:, 0, 0]
    torch.testing.assert_close(moved[:2], torch.tensor([-0.1, 0.1]))
    assert abs(float(moved[2])) < 0.02
    assert torch.equal(pulled[:, 1:], chunk[:, 1:])  # steps that are not executed stay unchanged


def test_zero_coefficients_reproduce_the_base_policy_bit_identically(trained: CDSA) -> None:
    obs, noise = {"state": torch.randn(4, 1, 2)}, torch.randn(4, 2, 1)
    policy = trained.policy.with_correction(Correction(0.0, 0.0))
    assert torch.equal(policy.decode(obs, noise), base().decode(obs, noise))


def test_training_leaves_the_base_policy_bit_identical(trained: CDSA) -> None:
    fresh = base().state_dict()
    assert all(torch.equal(value, fresh[name]) for name, value in trained.policy.base.state_dict().items())


def test_a_corrected_policy_is_saved_with_its_base_and_can_be_trained_further(trained: CDSA, tmp_path: Path) -> None:
    obs, noise = {"state": torch.randn(4, 1, 2)}, torch.randn(4, 2, 1)
    save_checkpoint(tmp_path / "corrected", trained.policy, task="toy/point_mass", obs_sample=obs)
    again, _ = load_policy(tmp_path / "corrected")
    assert isinstance(again, CorrectedPolicy) and verify_checkpoint(tmp_path / "corrected").ok
    assert torch.equal(again.decode(obs, noise), trained.policy.decode(obs, noise))
    further = CDSA(CDSAConfig(model=SMALL), again, total_updates=1)
    assert further.policy.base is not again and isinstance(further.policy.base, FlowPolicy)
    with pytest.raises(UserError, match=r"set algorithm\.model"):
        CDSA(CDSAConfig(), again, total_updates=1)


def test_losses_are_finite_under_autocast_and_propagate_nan() -> None:
    algorithm = CDSA(CDSAConfig(model=SMALL, warmup=0), base(), total_updates=4)
    data = batch(32, torch.Generator().manual_seed(1))
    with torch.autocast("cpu", torch.bfloat16):
        metrics = algorithm.update(data)
    assert all(math.isfinite(value) for value in metrics.values())
    assert all(bool(weight.isfinite().all()) for weight in algorithm.policy.parameters())
    data.chunk[3, 0] = torch.nan
    metrics = algorithm.update(data)
    assert math.isnan(metrics["model/loss"]) and math.isnan(metrics["model/action_score"])


def test_a_chunk_cut_by_the_end_of_its_episode_trains_only_the_state_score() -> None:
    algorithm = CDSA(CDSAConfig(model=SMALL), base(), total_updates=1)
    whole = batch(8, torch.Generator().manual_seed(0))
    cut = ChunkBatch(whole.obs, whole.chunk, whole.mask, None, whole.next_obs, torch.zeros(8))
    loss, info = cdsa_loss(algorithm.policy.model, cut, torch.Generator().manual_seed(0))
    assert float(info["action_score"]) == float(info["forward"]) == float(info["inverse"]) == 0.0
    assert float(loss) == float(info["state_score"]) > 0
    with pytest.raises(UserError, match="observations after them"):
        cdsa_loss(algorithm.policy.model, ChunkBatch(whole.obs, whole.chunk, whole.mask))


def test_the_next_observation_is_the_lookahead_frame_of_the_same_episode() -> None:
    frames = np.arange(5, dtype=np.float32)
    column = np.concatenate([frames, frames])[:, None]
    arrays: dict[str, Any] = {"state": column, "action": column}
    episodes = Episodes(arrays, np.array([5, 10]), ("", ""), np.array([0, 1]), control_dt=0.1)
    found = ChunkSampler(episodes, horizon=3, obs_horizon=2, lookahead_steps=2).take(torch.arange(5, 10))
    assert found.next_obs is not None and found.next_obs_valid is not None
    histories: Tensor = found.next_obs["state"][:, :, 0]
    assert histories.tolist() == [[1, 2], [2, 3], [3, 4], [3, 4], [3, 4]]
    assert found.next_obs_valid.tolist() == [1, 1, 1, 0, 0]
    assert ChunkSampler(episodes, horizon=3).take(torch.arange(2)).next_obs is None


def test_invalid_observations_and_settings_are_refused() -> None:
    image_spec = PolicySpec({"image.front": (3, 16, 16)}, action_dim=1)
    policy = FlowPolicy(FlowConfig(hidden=(8,), normalization="identity", action_normalization="identity"), image_spec)
    with pytest.raises(UserError, match="vector observation"):
        CDSA(CDSAConfig(model=SMALL), policy, total_updates=1)
    with pytest.raises(UserError, match="limit must be positive"):
        Correction(limit=0.0)
    with pytest.raises(UserError, match="must be positive"):
        DataModelConfig(action_noise=0.0)
    assert correct(
        base(), CDSA(CDSAConfig(model=SMALL), base(), total_updates=1).policy.model, Correction()
    ).is_steerable
