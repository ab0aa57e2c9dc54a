"""Tests that loaded policies act as in `lerobot`, which builds and saves them; `make test-lerobot` runs them."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

pytest.importorskip("lerobot.policies", reason="needs robopolicy[lerobot]: make test-lerobot")

from lerobot.policies.factory import make_pre_post_processors
from lerobot_pi import save_pi
from lerobot_saved import HISTORY, HORIZON, observations, save_diffusion, save_smolvla, statistics, theirs

from robopolicy.errors import UserError
from robopolicy.interop.lerobot.loading import load_lerobot
from robopolicy.policies.noise import PerRowGenerator
from robopolicy.training.checkpoint import load_policy, save_checkpoint, verify_checkpoint

PAST = HISTORY - 1


def noise_for(policy: Any, rows: int = 3) -> Tensor:
    return torch.randn(rows, *policy.noise_shape, generator=torch.Generator().manual_seed(9))


def lerobot_chunk(saved: Any, folder: Path, obs: dict[str, Tensor], noise: Tensor) -> Tensor:
    """The actions of lerobot for these observations and this noise, in its layout."""
    before, after = make_pre_post_processors(saved.config, pretrained_path=str(folder))
    saved.reset()
    batch = before(theirs(obs))
    features = saved.config.image_features
    batch["observation.images"] = torch.stack([batch[key] for key in features], -4) if features else None
    with torch.no_grad():
        return after(saved.diffusion.generate_actions(batch, noise=noise))


@pytest.mark.parametrize(
    ("camera", "prediction", "clip"), [(False, "epsilon", True), (False, "sample", False), (True, "epsilon", False)]
)
def test_same_noise_gives_lerobots_chunk(tmp_path: Path, camera: bool, prediction: str, clip: bool) -> None:
    saved = save_diffusion(tmp_path / "p", camera=camera, prediction_type=prediction, clip_sample=clip)
    policy = load_lerobot(tmp_path / "p")
    spec = policy.spec
    assert (spec.horizon, spec.action_horizon, spec.obs_horizon, policy.nfe) == (HORIZON - PAST, 4, HISTORY, 5)
    obs, noise = observations(3, camera=camera), noise_for(policy)
    expected = lerobot_chunk(saved, tmp_path / "p", obs, noise.roll(PAST, 1))
    assert torch.equal(policy.decode(obs, noise)[:, : spec.action_horizon], expected)
    assert float(expected.std()) > 0.1


def test_act_samples_the_noise_that_decodes_to_its_chunk(tmp_path: Path) -> None:
    save_diffusion(tmp_path / "p")
    policy = load_lerobot(tmp_path / "p")
    obs = observations(3, camera=False)
    noise = PerRowGenerator([5, 6, 7], [0] * 3).normal((3, *policy.noise_shape))
    assert torch.equal(policy.act(obs, generator=PerRowGenerator([5, 6, 7], [0] * 3)), policy.decode(obs, noise))


@pytest.mark.parametrize("steps", [50, 10])
def test_ancestral_sampling_equals_ddpm_steps(tmp_path: Path, steps: int) -> None:
    settings = {"noise_scheduler_type": "DDPM", "num_inference_steps": steps}
    saved = save_diffusion(tmp_path / "p", **settings)
    policy = load_lerobot(tmp_path / "p")
    obs = observations(3, camera=False)
    found = policy.act(obs, generator=torch.Generator().manual_seed(4))
    # lerobot samples the same numbers from the global generator, in its layout.
    draws = torch.Generator().manual_seed(4)
    scheduler, noises = saved.diffusion.noise_scheduler, [torch.randn(3, HORIZON, 2, generator=draws).roll(PAST, 1)]
    noises += [torch.randn(3, HORIZON, 2, generator=draws).roll(PAST, 1) for _ in range(steps - 1)]
    before, after = make_pre_post_processors(saved.config, pretrained_path=str(tmp_path / "p"))
    features = saved.diffusion._prepare_global_conditioning(before(theirs(obs)))
    x = noises[0]
    scheduler.set_timesteps(steps)
    for index, level in enumerate(scheduler.timesteps):
        output = saved.diffusion.unet(x, level.expand(3), global_cond=features)
        step = scheduler.step(output, level, x, generator=torch.Generator().manual_seed(0))
        spread = scheduler._get_variance(level) ** 0.5
        if level > 0:
            step.prev_sample -= spread * torch.randn(x.shape, generator=torch.Generator().manual_seed(0))
            step.prev_sample += spread * noises[index + 1]
        x = step.prev_sample
    torch.testing.assert_close(found, after(x.detach()[:, PAST:]), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("prediction", ["epsilon", "sample"])
def test_field_equals_the_schedulers_data_estimate(tmp_path: Path, prediction: str) -> None:
    saved = save_diffusion(tmp_path / "p", prediction_type=prediction, clip_sample=False)
    policy: Any = load_lerobot(tmp_path / "p")
    obs = observations(3, camera=False)
    before, _ = make_pre_post_processors(saved.config, pretrained_path=str(tmp_path / "p"))
    features = saved.diffusion._prepare_global_conditioning(before(theirs(obs)))
    scheduler = saved.diffusion.noise_scheduler
    scheduler.set_timesteps(5)
    for level in scheduler.timesteps:
        x = torch.randn(3, HORIZON, 2, generator=torch.Generator().manual_seed(int(level)))
        output = saved.diffusion.unet(x, level.expand(3), global_cond=features)
        data = scheduler.step(output, level, x).pred_original_sample
        a, b = scheduler.alphas_cumprod[level] ** 0.5, (1 - scheduler.alphas_cumprod[level]) ** 0.5
        expected = data - (x - a * data) / b
        found = policy.field(obs, (x / (a + b)).roll(-PAST, 1), (a / (a + b)).expand(3)).roll(PAST, 1)
        torch.testing.assert_close(found, expected, atol=2e-3, rtol=2e-3)


def test_sampler_steps_and_action_horizon_can_be_overridden(tmp_path: Path) -> None:
    saved = save_diffusion(tmp_path / "p", noise_scheduler_type="DDPM", num_inference_steps=None)
    assert load_lerobot(tmp_path / "p").nfe == saved.config.num_train_timesteps
    policy = load_lerobot(tmp_path / "p", steps=4, action_horizon=2)
    assert (policy.nfe, policy.spec.action_horizon) == (4, 2)


@pytest.mark.parametrize("kind", ["smolvla", "pi0", "pi05"])
def test_language_policies_use_the_given_noise_and_instruction(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = save_smolvla(tmp_path / "p") if kind == "smolvla" else save_pi(kind, tmp_path / "p", monkeypatch)
    obs = observations(3, camera=True, history=1)
    conditioned = load_lerobot(tmp_path / "p", instructions=["push the block", "open the drawer"])
    spec = conditioned.spec
    assert (spec.horizon, spec.action_horizon, spec.action_dim, conditioned.noise_shape) == (6, 3, 2, (6, 4))
    noise, choice = noise_for(conditioned), torch.tensor([0.0, 1.0, 0.0]).reshape(3, 1, 1)
    before, after = make_pre_post_processors(saved.config, pretrained_path=str(tmp_path / "p"))
    newest = {key: value[:, -1] for key, value in theirs(obs).items()}
    tasks = ["push the block", "open the drawer", "push the block"]
    expected = after(saved.predict_action_chunk(before(newest | {"task": tasks}), noise=noise))
    found = conditioned.decode(obs | {"task_index": choice}, noise)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)
    for changed in (
        conditioned.decode(obs | {"task_index": choice}, noise + 1),
        conditioned.decode(obs | {"task_index": 1 - choice}, noise),
    ):
        assert float((changed - expected).abs().amax((1, 2)).min()) > 1e-4
    with pytest.raises(UserError, match=r"choose among 2 instructions, found \[0, 1, 2\]"):
        conditioned.decode(obs | {"task_index": torch.arange(3.0).reshape(3, 1, 1)}, noise)


def test_single_instruction_needs_no_task_index(tmp_path: Path) -> None:
    save_smolvla(tmp_path / "p")
    obs, instruction = observations(3, camera=True, history=1), "push the block"
    one = load_lerobot(tmp_path / "p", instructions=[instruction])
    two = load_lerobot(tmp_path / "p", instructions=["open the drawer", instruction])
    noise = noise_for(one)
    assert torch.equal(one.decode(obs, noise), two.decode(obs | {"task_index": torch.ones(3, 1, 1)}, noise))


def test_checkpoint_references_the_policy_and_verifies(tmp_path: Path) -> None:
    save_diffusion(tmp_path / "p")
    policy, obs = load_lerobot(tmp_path / "p"), observations(3, camera=False)
    save_checkpoint(tmp_path / "c", policy, task="toy/point_mass", obs_sample=obs)
    assert not any("unet" in key for key in load_file(tmp_path / "c" / "model.safetensors"))
    assert verify_checkpoint(tmp_path / "c").ok
    loaded, _ = load_policy(tmp_path / "c")
    noise = noise_for(policy)
    assert torch.equal(loaded.decode(obs, noise), policy.decode(obs, noise))
    weights = load_file(tmp_path / "p" / "model.safetensors")
    save_file({key: value + 1 for key, value in weights.items()}, tmp_path / "p" / "model.safetensors")
    with pytest.raises(UserError, match="has changed: expected content"):
        load_policy(tmp_path / "c")


def test_copies_share_the_frozen_original(tmp_path: Path) -> None:
    save_diffusion(tmp_path / "p")
    policy = load_lerobot(tmp_path / "p")
    assert copy.deepcopy(policy).original is policy.original
    policy.train()
    assert not policy.original.policy.training
    assert not any(parameter.requires_grad for parameter in policy.original.policy.parameters())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda weights: weights | {"diffusion.extra": torch.zeros(1)}, "weight 'diffusion.extra', which is unknown"),
        (lambda weights: dict(list(weights.items())[1:]), "lacks weight 'diffusion"),
        (lambda weights: {key: value + float("nan") for key, value in weights.items()}, "is not finite"),
        (lambda weights: {key: value[:1] for key, value in weights.items()}, "has shape|size mismatch|Error"),
    ],
)
def test_mismatched_weights_are_refused(tmp_path: Path, change: Any, message: str) -> None:
    save_diffusion(tmp_path / "p")
    file = tmp_path / "p" / "model.safetensors"
    save_file({key: value.contiguous() for key, value in change(load_file(file)).items()}, file)
    with pytest.raises(UserError, match=message) as caught:
        load_lerobot(tmp_path / "p")
    assert "\n" not in str(caught.value)


def test_missing_statistics_are_refused(tmp_path: Path) -> None:
    found = {key: value for key, value in statistics().items() if key != "action"}
    save_diffusion(tmp_path / "p", stats=found)
    with pytest.raises(UserError, match="no statistics of 'action': MIN_MAX expects min and max, found none"):
        load_lerobot(tmp_path / "p")


def test_wrong_cameras_are_refused(tmp_path: Path) -> None:
    save_diffusion(tmp_path / "p", camera=True)
    obs = observations(2, camera=True)
    policy = load_lerobot(tmp_path / "p")
    with pytest.raises(UserError, match=r"expects observation 'image.front' .* found only image.top, state"):
        policy.act({"state": obs["state"], "image.top": obs["image.front"]})
    with pytest.raises(UserError, match=r"'image.front' of shape \(2, 3, 32, 32\), found \(2, 3, 16, 16\)"):
        policy.act(obs | {"image.front": obs["image.front"][..., ::2, ::2]})
    renamed = load_lerobot(tmp_path / "p", keys={"image.top": "observation.images.front"})
    noise = noise_for(policy, 2)
    seen = {"state": obs["state"], "image.top": obs["image.front"]}
    assert torch.equal(renamed.decode(seen, noise), policy.decode(obs, noise))


def test_processor_steps_with_foreign_code_are_refused(tmp_path: Path) -> None:
    save_diffusion(tmp_path / "p")
    file = tmp_path / "p" / "policy_preprocessor.json"
    pipeline = json.loads(file.read_text())
    pipeline["steps"].append({"class": "pathlib.Path", "config": {}})
    file.write_text(json.dumps(pipeline))
    with pytest.raises(UserError, match=r"'pathlib.Path', which is not part of lerobot"):
        load_lerobot(tmp_path / "p")
