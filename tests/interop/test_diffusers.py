"""Tests against diffusers: samplers reproduce its schedulers, and scheduler files convert to configs and back."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from robopolicy.errors import UserError
from robopolicy.interop.diffusers import (
    grid_arguments,
    model_output,
    network_time,
    read_scheduler,
    scheduler_config,
    step_arguments,
    write_scheduler,
)
from robopolicy.policies.base import PolicySpec
from robopolicy.policies.heads.average_velocity import ShortcutConfig
from robopolicy.policies.heads.diffusion import DiffusionConfig, DiffusionPolicy
from robopolicy.policies.heads.flow import FlowConfig, FlowPolicy
from robopolicy.policies.heads.generative import GenerativePolicy
from robopolicy.policies.path import spaced_levels

schedulers = pytest.importorskip("diffusers.schedulers")

SPEC = PolicySpec({"state": (2,)}, action_dim=2, horizon=6, action_horizon=2)
OBS = {"state": torch.randn(5, 1, 2, generator=torch.Generator().manual_seed(0))}
RAW: dict[str, Any] = {"normalization": "identity", "action_normalization": "identity", "hidden": (32,)}
PREDICTIONS = pytest.mark.parametrize("prediction", ["noise", "data", "v"])
CLIPS = pytest.mark.parametrize("clip", [0.0, 1.0])


def diffusion(**settings: Any) -> DiffusionPolicy:
    torch.manual_seed(0)
    return DiffusionPolicy(DiffusionConfig(**(RAW | settings)), SPEC)


def scheduler_of(policy: GenerativePolicy) -> Any:
    config = policy.config
    assert isinstance(config, DiffusionConfig | FlowConfig)
    settings = scheduler_config(config)
    scheduler = getattr(schedulers, settings["_class_name"]).from_config(settings)
    scheduler.set_timesteps(**grid_arguments(config))
    return scheduler


def prediction_at(policy: GenerativePolicy, features: Tensor, x: Tensor, timestep: Tensor) -> Tensor:
    """Model output in diffusers' convention from our network at a diffusers timestep."""
    config = policy.config
    assert isinstance(config, DiffusionConfig | FlowConfig)
    return model_output(config, policy.backbone(x, network_time(config, timestep).expand(len(x)), features))


def saved(scheduler: Any) -> dict[str, Any]:
    """The content that diffusers writes to the scheduler's file."""
    return json.loads(scheduler.to_json_string())


def close(found: Tensor, expected: Tensor) -> None:
    """Assert equality up to the rounding of diffusers' single-precision tables.

    Tolerances are relative to the largest value: without clipping, the first data estimates are in the thousands.
    """
    scale = max(1.0, float(expected.detach().abs().max()))
    torch.testing.assert_close(found / scale, expected / scale, atol=5e-5, rtol=5e-4)


@PREDICTIONS
@CLIPS
@pytest.mark.parametrize("eta", [0.0, 0.5, 1.0])
@pytest.mark.parametrize(
    ("spacing", "steps", "train_steps"),
    [("leading", 10, 100), ("leading", 7, 100), ("trailing", 10, 100), ("leading", 50, 50)],
)
def test_ddim_steps_equal_diffusers(
    prediction: str, clip: float, eta: float, spacing: str, steps: int, train_steps: int
) -> None:
    policy = diffusion(prediction=prediction, action_clip=clip, spacing=spacing, steps=steps, train_steps=train_steps)
    scheduler = scheduler_of(policy)
    features, x = policy.encode(OBS), torch.randn(5, 6, 2)
    assert scheduler.timesteps.tolist() == policy.config.levels()
    for k, timestep in enumerate(scheduler.timesteps):
        noise = torch.randn(5, 6, 2)
        output = prediction_at(policy, features, x, timestep)
        reference = scheduler.step(
            output, timestep, x, eta=eta, use_clipped_model_output=clip > 0, variance_noise=noise if eta else None
        ).prev_sample
        mean, std = policy.posterior(features, x, torch.full((5,), k), eta)
        close(mean + std * noise, reference)
        x = reference.detach()


@PREDICTIONS
@CLIPS
@pytest.mark.parametrize("schedule", ["squared_cosine", "linear"])
@pytest.mark.parametrize(
    ("spacing", "steps"), [("leading", 1.0), ("leading", 0.07), ("trailing", 0.1), ("linspace", 0.1)]
)
def test_ddpm_steps_equal_diffusers(prediction: str, clip: float, schedule: str, spacing: str, steps: float) -> None:
    train_steps = 100 if schedule == "squared_cosine" else 1000
    policy = diffusion(
        prediction=prediction,
        action_clip=clip,
        spacing=spacing,
        schedule=schedule,
        train_steps=train_steps,
        steps=round(steps * train_steps) if steps < 1 else train_steps,
        sampler="ddpm",
    )
    scheduler = scheduler_of(policy)
    levels = policy.config.levels()
    assert scheduler.timesteps.tolist() == levels
    features, x = policy.encode(OBS), torch.randn(5, 6, 2)
    for k in {0, 1, len(levels) // 2, len(levels) - 2, len(levels) - 1}:
        timestep = scheduler.timesteps[k]
        output = prediction_at(policy, features, x, timestep)
        reference = scheduler.step(output, timestep, x, generator=torch.Generator().manual_seed(k)).prev_sample
        mean, std = policy.posterior(features, x, torch.full((5,), k))
        close(mean + std * torch.randn(5, 6, 2, generator=torch.Generator().manual_seed(k)), reference)


@pytest.mark.parametrize("sampler", ["ddim", "ddpm"])
def test_sampled_chunk_equals_the_documented_diffusers_loop(sampler: str) -> None:
    policy = diffusion(sampler=sampler, steps=20)
    scheduler = scheduler_of(policy)
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(5, 6, 2, generator=generator)
    arguments = step_arguments(policy.config) | ({"generator": generator} if sampler == "ddpm" else {})
    for timestep in scheduler.timesteps:
        output = prediction_at(policy, policy.encode(OBS), x, timestep)
        x = scheduler.step(output, timestep, x, **arguments).prev_sample
    ours = policy.act(OBS, generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(ours, x.detach(), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("levels", [50, 100, 1000])
@pytest.mark.parametrize("spacing", ["trailing", "linspace", "leading"])
def test_sampler_levels_equal_diffusers_timesteps(spacing: str, levels: int) -> None:
    scheduler = schedulers.DDIMScheduler(levels, timestep_spacing=spacing)
    for steps in [*range(1, min(levels, 120) + 1), *range(121, levels, 37)]:
        scheduler.set_timesteps(steps)
        assert spaced_levels(spacing, levels, steps) == scheduler.timesteps.tolist()[:steps], steps


def test_training_noise_equals_diffusers_add_noise() -> None:
    policy = diffusion()
    data, noise, level = torch.rand(100, 6, 2), torch.randn(100, 6, 2), torch.arange(100)
    reference = schedulers.DDPMScheduler.from_config(scheduler_config(policy.config)).add_noise(data, noise, level)
    a, b, _ = policy._on_path(policy.level_times)
    torch.testing.assert_close(a * data + b * noise, reference, atol=1e-5, rtol=0)


@pytest.mark.parametrize("steps", [1, 4, 10])
def test_flow_steps_equal_diffusers(steps: int) -> None:
    torch.manual_seed(0)
    policy = FlowPolicy(FlowConfig(steps=steps, action_clip=0.0, **RAW), SPEC)
    scheduler = scheduler_of(policy)
    noise = torch.randn(5, 6, 2)
    features, x, reference = policy.encode(OBS), noise, noise
    for k, timestep in enumerate(scheduler.timesteps):
        reference = scheduler.step(
            prediction_at(policy, features, reference, timestep), timestep, reference
        ).prev_sample
        x = policy.sampler_step(features, x, torch.full((5,), k))
        torch.testing.assert_close(x, reference, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(policy.decode(OBS, noise), reference, atol=1e-5, rtol=1e-5)


CONFIGS = {
    "ddim": DiffusionConfig(steps=20, prediction="v", spacing="trailing", action_clip=0.0),
    "ddpm": DiffusionConfig(steps=100, train_steps=1000, sampler="ddpm", schedule="linear", beta_end=0.03),
    "flow": FlowConfig(steps=6, action_clip=0.0, hidden=(8,), time_distribution="beta"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_configs_survive_a_scheduler_file_round_trip(name: str, tmp_path: Path) -> None:
    config = CONFIGS[name]
    file = write_scheduler(config, tmp_path / "scheduler")
    for source in (file, file.parent, str(file), json.loads(file.read_text())):
        assert read_scheduler(source, steps=config.steps, base=config) == config
    settings = scheduler_config(config)
    loaded = getattr(schedulers, settings["_class_name"]).from_pretrained(file.parent)
    assert settings.items() <= saved(loaded).items()
    assert read_scheduler(saved(loaded), steps=config.steps, base=config) == config


def test_missing_scheduler_keys_use_diffusers_defaults_and_other_fields_the_base() -> None:
    ddpm = read_scheduler(saved(schedulers.DDPMScheduler()), steps=1000)
    assert ddpm == DiffusionConfig(
        steps=1000, train_steps=1000, sampler="ddpm", schedule="linear", prediction="noise", action_clip=1.0
    )
    assert read_scheduler({"_class_name": "DDPMScheduler"}, steps=1000) == ddpm
    ddim = schedulers.DDIMScheduler(100, beta_schedule="squaredcos_cap_v2", prediction_type="sample", clip_sample=False)
    base = DiffusionConfig(backbone="unet", unet_channels=(16, 32))
    found = read_scheduler(saved(ddim), steps=5, base=base)
    assert found == DiffusionConfig(
        steps=5, prediction="data", action_clip=0.0, backbone="unet", unet_channels=(16, 32)
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"_class_name": "DDIMSchedule"}, "Did you mean 'DDIMScheduler'"),
        ({}, "Unknown scheduler ''"),
        ({"_class_name": "DDPMScheduler", "thresholding": True}, "'thresholding' of scheduler is True"),
        ({"_class_name": "DDIMScheduler", "steps_offset": 1}, "'steps_offset' of scheduler is 1"),
        ({"_class_name": "DDIMScheduler", "set_alpha_to_one": False}, "only reproduce True"),
        ({"_class_name": "DDPMScheduler", "variance_type": "learned"}, "only reproduce 'fixed_small'"),
        ({"_class_name": "DDPMScheduler", "beta_schedule": "sigmoid"}, "Unknown beta_schedule 'sigmoid'"),
        ({"_class_name": "DDPMScheduler", "prediction_type": "epsilo"}, "Did you mean 'epsilon'"),
        ({"_class_name": "DDPMScheduler", "num_train_timesteps": "many"}, "must be a value of type int"),
        ({"_class_name": "DDPMScheduler", "beta_sta": 0.1}, "Did you mean 'beta_start'"),
        ({"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": 3.0}, "'shift' of scheduler is 3.0"),
    ],
)
def test_unsupported_scheduler_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_scheduler(settings, steps=10)


def test_unreadable_files_and_wrong_bases_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read as JSON"):
        read_scheduler(tmp_path, steps=10)
    (tmp_path / "scheduler_config.json").write_text("[]")
    with pytest.raises(UserError, match="must hold a mapping, found list"):
        read_scheduler(tmp_path, steps=10)
    with pytest.raises(UserError, match="belongs to a FlowConfig, got a DiffusionConfig as base"):
        read_scheduler({"_class_name": "FlowMatchEulerDiscreteScheduler"}, steps=4, base=DiffusionConfig())
    with pytest.raises(UserError, match="belongs to a FlowConfig, got a ShortcutConfig as base"):
        read_scheduler({"_class_name": "FlowMatchEulerDiscreteScheduler"}, steps=4, base=ShortcutConfig())
    with pytest.raises(UserError, match="supports the head of a ShortcutConfig"):
        write_scheduler(ShortcutConfig(), tmp_path)
