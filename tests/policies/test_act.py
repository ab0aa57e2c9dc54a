"""Tests of the Action Chunking Transformer: formulas by hand, tokens of every input, and learning."""

import math
from typing import Any

import pytest
import torch

from robopolicy.errors import UserError
from robopolicy.nets.act import ACTSizes, grid_positions, sines
from robopolicy.nets.recurrent import RecurrentConfig
from robopolicy.nets.resnet18 import FrozenBatchNorm
from robopolicy.nets.vision import VisionConfig
from robopolicy.policies.base import PolicySpec
from robopolicy.policies.heads.act import ACTConfig, ACTPolicy

SMALL: dict[str, Any] = {"width": 8, "attention_heads": 2, "feedforward": 8, "posterior_layers": 1, "latent_dim": 2}
SMALL |= {"dropout": 0.0, "normalization": "identity", "action_normalization": "identity"}
SPEC = PolicySpec({"state": (3,), "goal": (2,)}, action_dim=2, horizon=4, action_horizon=2)
CAMERA = VisionConfig(widths=(16,), crop=1.0)


def make(spec: PolicySpec = SPEC, **settings: Any) -> ACTPolicy:
    torch.manual_seed(0)
    return ACTPolicy(ACTConfig(**(SMALL | settings)), spec)


def observed(spec: PolicySpec = SPEC, rows: int = 3) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    return {
        key: torch.randint(0, 256, (rows, spec.obs_horizon, *shape), generator=draw, dtype=torch.uint8)
        if key.startswith("image.")
        else torch.randn(rows, spec.obs_horizon, *shape, generator=draw)
        for key, shape in spec.observation.items()
    }


def test_it_learns_a_chunk_that_depends_on_the_state_and_acts_without_noise() -> None:
    policy, obs = make(latent_dim=1), observed(rows=32)
    chunk = obs["state"][:, :, :2].tanh().expand(32, 4, 2)
    optimizer = torch.optim.Adam(policy.parameters(), 1e-2)
    for _ in range(150):
        loss, info = policy.imitation_loss(obs, chunk)
        optimizer.zero_grad()
        loss.mean().backward()
        optimizer.step()
    policy.eval()
    assert float(info["l1"]) < 0.2 and float((policy.act(obs) - chunk).abs().mean()) < 0.2
    assert torch.equal(policy.act(obs), policy.act(obs, generator=torch.Generator().manual_seed(3)))
    assert not policy.is_steerable


def test_the_loss_is_absolute_error_plus_weighted_divergence() -> None:
    policy, obs, chunk = make(kl_weight=3.0), observed(), torch.randn(3, 4, 2)
    for layer, bias in ((policy.posterior.output, [1.0, 0.0, math.log(4.0), 0.0]), (policy.output, [0.5, 0.5])):
        torch.nn.init.zeros_(layer.weight)
        layer.bias.data.copy_(torch.tensor(bias))
    divergence = 0.5 * (1 + 4 - 1 - math.log(4.0))  # of N(1, 4) from N(0, 1); the second latent variable has none
    mask = torch.tensor([[1.0, 1, 1, 1], [1, 1, 0, 0], [0, 0, 0, 0]])
    error = (chunk - 0.5).abs().mean(2)
    expected = torch.stack([error[0].mean() + 3 * divergence, error[1, :2].mean() + 3 * divergence, torch.zeros(())])
    torch.testing.assert_close(policy.imitation_loss(obs, chunk, mask=mask)[0], expected)


def test_padded_actions_are_not_encoded() -> None:
    policy, obs = make(), observed()
    chunk, mask = torch.randn(3, 4, 2), torch.tensor([[1.0, 1, 0, 0]] * 3)
    other = torch.where(mask[..., None] == 1, chunk, 99.0)
    losses = [
        policy.imitation_loss(obs, each, mask=mask, generator=torch.Generator().manual_seed(0))[0]
        for each in (chunk, other)
    ]
    torch.testing.assert_close(*losses)


def test_every_step_and_every_pixel_is_a_token() -> None:
    spec = PolicySpec({"state": (3,), "image.front": (3, 16, 16), "image.wrist": (3, 16, 16)}, 2, 4, 2, obs_horizon=2)
    policy = make(spec, vision=CAMERA)
    lengths: list[int] = []
    policy.transformer.encoder[0].register_forward_hook(lambda _, inputs, __: lengths.append(inputs[0].shape[1]))
    obs = observed(spec)
    first = policy.eval().act(obs)
    assert lengths == [1 + 2 * (1 + 2 * 4 * 4)]  # latent, and per step a state and 4 x 4 pixels of two cameras
    for key, value in obs.items():
        changed = obs | {
            key: torch.cat([value[:, :1] // 2 if value.dtype == torch.uint8 else -value[:, :1], value[:, 1:]], 1)
        }
        assert not torch.equal(policy.act(changed), first), key


def test_cameras_share_a_network_of_one_size() -> None:
    spec = PolicySpec({"image.front": (3, 16, 16), "image.wrist": (3, 16, 16)}, 2)
    policy = make(spec, vision=VisionConfig(widths=(16,), shared=True))
    assert list(policy.encoder.cameras) == ["image/front"]  # type: ignore[arg-type]
    policy.imitation_loss(observed(spec), torch.zeros(3, 1, 2))[0].sum().backward()
    with pytest.raises(UserError, match=r"vision.shared needs images of one size, found image.front \(3, 16, 16\)"):
        make(PolicySpec({"image.front": (3, 16, 16), "image.wrist": (3, 16, 20)}, 2), vision=VisionConfig(shared=True))


@pytest.mark.parametrize("size", [(64, 96), (33, 40)])
def test_feature_map_of_resnet18_is_a_32nd_of_the_image(size: tuple[int, int]) -> None:
    spec = PolicySpec({"image.front": (3, *size)}, 2)
    policy = make(spec, vision=VisionConfig(kind="resnet18", crop=1.0))
    assert policy.transformer.grid_positions.shape == (math.ceil(size[0] / 32) * math.ceil(size[1] / 32), 8)
    assert policy.act(observed(spec)).shape == (3, 1, 2)


def test_frozen_batch_normalisation_uses_its_constants() -> None:
    layer = FrozenBatchNorm(1)
    layer.weight.fill_(3.0), layer.bias.fill_(1.0), layer.running_mean.fill_(2.0), layer.running_var.fill_(4.0)
    assert layer(torch.full((1, 1, 1, 1), 4.0)).item() == pytest.approx(3 * (4 - 2) / 2 + 1, abs=1e-4)
    assert not list(layer.parameters())


def test_positions_are_sines_of_their_index_and_of_row_and_column() -> None:
    found = sines(3, 4)
    assert found[2].tolist() == pytest.approx([math.sin(2), math.cos(2), math.sin(0.02), math.cos(0.02)])
    grid = grid_positions(2, 4, 8)
    assert grid.shape == (8, 8)
    row, column = 2 * math.pi * 2 / 2, 2 * math.pi * 3 / 4  # second row, third column, counted from 1
    expected = [f(a) for angle in (row, column) for a in (angle, angle / 100) for f in (math.sin, math.cos)]
    assert grid[4 + 2].tolist() == pytest.approx(expected, abs=1e-4)


def test_settings_without_a_meaning_are_refused() -> None:
    with pytest.raises(UserError, match="width 6 must be a multiple of 4 and of the attention heads 2"):
        ACTSizes(width=6, attention_heads=2)
    with pytest.raises(UserError, match="act has no memory"):
        ACTConfig(recurrent=RecurrentConfig("gru", 4))
