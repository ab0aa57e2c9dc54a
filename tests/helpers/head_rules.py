"""Checks for all heads on every backbone, with observations of every kind."""

from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn

from robopolicy.nets.backbone import BACKBONES, BackboneConfig
from robopolicy.nets.encoder import EmbeddingConfig, ObservationEncoder, without_embeddings
from robopolicy.nets.vision import VisionConfig
from robopolicy.policies.base import Observation, Policy, PolicySpec
from robopolicy.policies.heads.explicit import ExplicitPolicy
from robopolicy.policies.heads.generative import GenerativePolicy
from robopolicy.policies.registry import POLICIES, make_policy

SHAPES = {"state": (3,), "goal": (2,), "image.front": (3, 16, 16), "image.wrist": (3, 14, 18), "embedding.task": (6,)}

SPEC = PolicySpec(SHAPES, action_dim=2, horizon=5, action_horizon=3, obs_horizon=2)

STATISTICS = {
    key: {"min": -torch.ones(n), "max": torch.ones(n), "mean": torch.zeros(n), "std": torch.ones(n), "count": [9]}
    for key, n in (("state", 3), ("goal", 2), ("action", 2))
}

SMALL = {"hidden": (16, 16, 16), "unet_channels": (8, 16), "transformer_width": 16, "transformer_layers": 1}
SMALL |= {"transformer_heads": 2, "steps": 2, "spacing": "trailing", "bins": 8, "experts": 2}
SMALL |= {
    "width": 16,
    "attention_heads": 2,
    "feedforward": 16,
    "posterior_layers": 1,
    "dropout": 0.0,
}

CAMERAS = {
    "resnet": VisionConfig(widths=(16,), keypoints=4, crop=0.8),
    "vit": VisionConfig(kind="vit", vit_patch=4, vit_width=16, vit_features=8, crop=0.8),
}


def pairs(rings: tuple[str, ...], wanted: str) -> list[tuple[str, str]]:
    """Pairs of heads and backbones of some rings, with at least one of each pair from the wanted ring."""
    found: list[tuple[str, str]] = []
    for name in (name for name in POLICIES if POLICIES.ring(name) in rings):
        policy = POLICIES[name]
        if not issubclass(policy, ExplicitPolicy | GenerativePolicy):
            continue
        takes = issubclass(policy.config_class, BackboneConfig)
        backbones = [each for each in BACKBONES if BACKBONES.ring(each) in rings] if takes else ["its own"]
        for backbone in backbones:
            own = POLICIES.ring(name), BACKBONES.ring(backbone) if takes else ""
            if wanted in own:
                found.append((name, backbone))
    return found


def make(name: str, backbone: str, camera: str = "resnet", spec: PolicySpec = SPEC, **settings: Any) -> Policy:
    torch.manual_seed(0)
    config_class = POLICIES[name].config_class
    names = {entry.name for entry in fields(config_class)}
    chosen = {key: value for key, value in (SMALL | {"backbone": backbone}).items() if key in names}
    config = config_class(vision=CAMERAS[camera], **(chosen | settings))
    policy = make_policy(name, config, spec)
    policy.fit_normalizer(STATISTICS)
    return policy


def observations(rows: int) -> Observation:
    generator = torch.Generator().manual_seed(1)
    obs: Observation = {}
    for key, shape in SHAPES.items():
        size = (rows, SPEC.obs_horizon, *shape)
        image = key.startswith("image.")
        draw = torch.randint(0, 256, size, generator=generator) if image else torch.randn(size, generator=generator)
        obs[key] = draw.to(torch.uint8) if image else draw
    return obs


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def imitate(policy: Policy, obs: Observation, chunk: Tensor, mask: Tensor | None = None) -> Tensor:
    torch.manual_seed(0)
    return policy.imitation_loss(obs, chunk, mask=mask, generator=seeded())[0]


def _network(policy: Policy) -> nn.Module:
    """The module that outputs one vector per step of the chunk, or per token."""
    if isinstance(policy, GenerativePolicy):
        return policy.backbone
    return policy.actor if hasattr(policy, "actor") else policy.output  # type: ignore[return-value]


def check_imitates_and_acts_from_every_kind_of_input(name: str, backbone: str) -> None:
    """A head imitates and acts from vectors, images and embeddings."""
    policy, obs = make(name, backbone, "vit" if backbone in ("unet", "its own") else "resnet"), observations(4)
    loss = imitate(policy, obs, torch.rand(4, 5, 2) - 0.5)
    assert loss.shape == (4,) and bool(loss.isfinite().all())
    loss.mean().backward()
    encoder = policy.encoder
    assert isinstance(encoder, ObservationEncoder)
    for part in (*encoder.cameras.values(), *encoder.projections.values()):
        assert any(bool(p.grad.any()) for p in part.parameters() if p.grad is not None)
    policy.eval()
    chunk = policy.act(obs, deterministic=True, generator=seeded())
    assert chunk.shape == (4, 5, 2) and bool(chunk.isfinite().all())
    assert not [part for part in policy.modules() if isinstance(part, nn.modules.batchnorm._BatchNorm)]


def check_rows_of_a_loss_know_nothing_of_each_other(name: str, backbone: str) -> None:
    """The loss of a row does not depend on the other rows."""
    policy, obs = make(name, backbone).eval(), observations(4)
    chunk = torch.rand(4, 5, 2) - 0.5
    loss = imitate(policy, obs, chunk)
    other = {key: torch.cat([value[:1], value[1:].flip(0)]) for key, value in obs.items()}
    torch.testing.assert_close(imitate(policy, other, chunk)[0], loss[0], atol=1e-5, rtol=1e-4)


def check_padded_steps_send_no_gradient_back(name: str, backbone: str) -> None:
    """Masked steps have no gradient."""
    policy, obs = make(name, backbone).eval(), observations(4)
    mask = torch.ones(4, 5)
    mask[1, 3:], mask[2] = 0, 0
    outputs: list[Tensor] = []
    network = _network(policy)

    def keep(_module: nn.Module, _inputs: Any, output: Any) -> None:
        if output.requires_grad:
            outputs.append(output)
            output.retain_grad()

    handle = network.register_forward_hook(keep)
    loss = imitate(policy, obs, torch.rand(4, 5, 2) - 0.5, mask)
    handle.remove()
    assert float(loss[2].detach()) == 0
    loss.sum().backward()
    # (4, 5, channels), or (4, To - 1 + 5 * 2, bins) for tokens, or five times (4, channels)
    gradients = [output.grad for output in outputs if output.grad is not None]
    if gradients[0].dim() == 2:
        gradients = [torch.stack(gradients, 1)]
    touched = 0
    for gradient in gradients:
        if gradient.shape[1] != SPEC.horizon:
            gradient = gradient[:, SPEC.obs_horizon - 1 :].reshape(4, 5, -1)
        gradient = gradient.abs().sum(-1)
        assert not bool(gradient[mask == 0].any())
        touched += bool((gradient[mask == 1] > 0).all())
    assert touched
    policy.zero_grad()
    imitate(policy, obs, torch.rand(4, 5, 2) - 0.5, torch.zeros(4, 5)).sum().backward()
    assert not any(bool(p.grad.any()) for p in policy.parameters() if p.grad is not None)


def check_crops_and_dropped_embeddings_are_for_imitation_alone(name: str, backbone: str) -> None:
    """Random crops and embedding dropout apply only to the imitation loss in training mode."""
    policy = make(name, backbone, embedding=EmbeddingConfig(width=4, dropout=0.5))
    obs, chunk = observations(8), torch.rand(8, 5, 2) - 0.5

    def acted(observation: Observation) -> Tensor:
        return policy.act(observation, deterministic=True, generator=seeded())

    policy.train()
    assert torch.equal(acted(obs), acted(obs))
    # The crop and the dropped rows come from the generator.
    first = policy.imitation_loss(obs, chunk, generator=seeded())[0]
    assert torch.equal(first, policy.imitation_loss(obs, chunk, generator=seeded())[0])
    in_training = acted(obs)
    policy.eval()
    torch.testing.assert_close(acted(obs), in_training, atol=1e-5, rtol=1e-5)
    evaluated = imitate(policy, obs, chunk)
    assert not torch.equal(first, evaluated)
    assert not torch.equal(imitate(policy, without_embeddings(obs), chunk), evaluated)


def check_stays_finite_under_autocast_and_shows_a_nan(name: str, backbone: str) -> None:
    """Losses and chunks are finite in half precision; a NaN in an observation or chunk affects only its row."""
    policy, obs, chunk = make(name, backbone), observations(4), torch.rand(4, 5, 2) - 0.5
    with torch.autocast("cpu", torch.bfloat16):
        assert bool(imitate(policy, obs, chunk).isfinite().all())
        assert bool(policy.act(obs, generator=seeded()).isfinite().all())
    obs["state"][2], chunk[1, 1, 0] = torch.nan, torch.nan
    assert imitate(policy, obs, chunk).isnan().tolist() == [False, True, True, False]
