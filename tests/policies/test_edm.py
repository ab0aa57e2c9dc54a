"""Tests of the EDM head: preconditioning, the Karras grid, and both solvers against closed forms and diffusers."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from closed_forms import BOUNDED, GAUSSIAN, POINT, RAW, TWO_MODES, check_two_modes, exact_edm, learn, nothing
from torch import Tensor

from robopolicy.errors import UserError
from robopolicy.policies.base import PolicySpec
from robopolicy.policies.heads.edm import EDMConfig, EDMPolicy, preconditioning
from robopolicy.policies.noise import PerRowGenerator
from robopolicy.policies.path import karras_sigmas, step_index
from robopolicy.policies.registry import make_policy

CHUNK = PolicySpec({"state": (2,)}, action_dim=2, horizon=6, action_horizon=2, obs_horizon=2)
SOLVERS = pytest.mark.parametrize("solver", ["euler", "heun"])


def edm(spec: PolicySpec = CHUNK, **settings: Any) -> EDMPolicy:
    torch.manual_seed(0)
    return EDMPolicy(EDMConfig(**({"hidden": (32,), **RAW} | settings)), spec)


def observations(rows: int) -> dict[str, Tensor]:
    return {"state": torch.rand(rows, 2, 2)}


def test_grid_matches_the_paper() -> None:
    sigmas = karras_sigmas(18, 0.002, 80.0, 7.0)
    assert sigmas.shape == (19,) and float(sigmas[-1]) == 0.0
    assert float(sigmas[0]) == pytest.approx(80.0) and float(sigmas[17]) == pytest.approx(0.002)
    middle = (80 ** (1 / 7) + 9 / 17 * (0.002 ** (1 / 7) - 80 ** (1 / 7))) ** 7
    assert float(sigmas[9]) == pytest.approx(middle)
    assert karras_sigmas(1, 0.002, 80.0, 7.0).tolist() == pytest.approx([80.0, 0.0])


def test_preconditioning_gives_inputs_and_targets_of_unit_variance() -> None:
    data, noise = 0.5 * torch.randn(200_000), torch.randn(200_000)
    for level in (0.002, 0.3, 1.0, 80.0):
        c_skip, c_out, c_in = preconditioning(torch.tensor(level), 0.5)
        x = data + level * noise
        assert float((c_in * x).var()) == pytest.approx(1.0, abs=0.02)
        assert float(((data - c_skip * x) / c_out).var()) == pytest.approx(1.0, abs=0.02)


def test_loss_is_the_denoising_error_weighted_by_the_noise_level() -> None:
    policy = edm()
    features, data, noise = torch.randn(20, 2, 2), torch.rand(20, 6, 2) * 2 - 1, torch.randn(20, 6, 2)
    sigma = torch.logspace(-2, 1.5, 20).view(-1, 1, 1)
    weight = (sigma**2 + 0.5**2) / (sigma * 0.5) ** 2
    expected = weight[..., 0] * (policy.denoise(features, data + sigma * noise, sigma) - data).square().mean(-1)
    found = policy.matching_loss(features, data, noise, 1 / (1 + sigma.flatten()))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_training_noise_is_lognormal() -> None:
    t = edm().sample_times(50_000, torch.Generator().manual_seed(0))
    log_sigma = ((1 - t) / t).log()
    assert float(log_sigma.mean()) == pytest.approx(-1.2, abs=0.02)
    assert float(log_sigma.std()) == pytest.approx(1.2, abs=0.02)


def test_iterates_start_at_the_highest_noise_level() -> None:
    policy, noise = edm(steps=1), torch.randn(4, 6, 2)
    assert torch.equal(policy.init_sample(noise), 80.0 * noise)
    obs = observations(4)
    expected = policy.denoise(policy.encode(obs), 80.0 * noise, torch.full((4, 1, 1), 80.0))
    torch.testing.assert_close(policy.decode(obs, noise), expected, atol=1e-5, rtol=1e-5)


@SOLVERS
def test_decode_runs_every_sampler_step_and_nfe_counts_the_calls(solver: str) -> None:
    policy = edm(solver=solver, steps=6, action_clip=1.0)
    calls: list[int] = []
    policy.backbone.register_forward_hook(lambda *_: calls.append(1))
    obs, noise = observations(4), torch.randn(4, 6, 2)
    chunk = policy.decode(obs, noise)
    assert len(calls) == policy.nfe == (11 if solver == "heun" else 6)
    features, x = policy.encode(obs), policy.init_sample(noise)
    for k in range(6):
        x = policy.sampler_step(features, x, step_index(k, x))
    assert torch.equal(chunk, x.clamp(-1, 1))


def test_rows_at_different_steps_do_not_mix() -> None:
    policy = edm(solver="heun", steps=4)
    features, x = torch.randn(4, 2, 2), torch.randn(4, 6, 2) * policy.sigmas[:4].view(-1, 1, 1)
    together = policy.sampler_step(features, x, torch.arange(4))
    for k in range(4):
        alone = policy.sampler_step(features[k : k + 1], x[k : k + 1], torch.tensor([k]))
        torch.testing.assert_close(together[k : k + 1], alone, atol=1e-5, rtol=1e-4)


def test_solvers_converge_to_the_gaussian_map_with_their_orders() -> None:
    noise = torch.linspace(-2, 2, 9).view(-1, 1, 1)
    errors: dict[str, list[float]] = {}
    for solver in ("euler", "heun"):
        for steps in (40, 80):
            policy = exact_edm(GAUSSIAN, solver=solver, steps=steps)
            exact = 0.4 + 0.3 * 80 / (80**2 + 0.3**2) ** 0.5 * (
                noise - 0.4 / 80
            )  # from N(0, 80^2), not from N(0.4, ...)
            error = (policy.decode(nothing(9), noise) - exact).abs().max()
            errors.setdefault(solver, []).append(float(error))
    assert errors["euler"][1] == pytest.approx(errors["euler"][0] / 2, rel=0.2)
    assert errors["heun"][1] < 0.35 * errors["heun"][0] and errors["heun"][1] < 0.1 * errors["euler"][1]


@SOLVERS
def test_the_exact_denoiser_samples_both_modes(solver: str) -> None:
    policy = exact_edm(TWO_MODES, solver=solver, steps=18, action_clip=1.0)
    check_two_modes(policy.act(nothing(4000)))


def test_imitation_learns_two_modes_and_their_probabilities() -> None:
    config = EDMConfig(hidden=(64, 64), **BOUNDED)
    policy = EDMPolicy(config, POINT)
    learn(policy, TWO_MODES)
    check_two_modes(policy.act(nothing(4000)))
    heun = EDMPolicy(replace(config, solver="heun", steps=18), POINT)
    heun.load_state_dict(policy.state_dict())
    check_two_modes(heun.act(nothing(4000)))


def test_every_euler_step_matches_diffusers() -> None:
    schedulers = pytest.importorskip("diffusers.schedulers")
    policy = edm(steps=12)
    scheduler = schedulers.EDMEulerScheduler()
    scheduler.set_timesteps(12)
    torch.testing.assert_close(scheduler.sigmas, policy.sigmas)
    obs, noise = observations(3), torch.randn(3, 6, 2)
    features = policy.encode(obs)
    x = reference = policy.init_sample(noise)
    for k, timestep in enumerate(scheduler.timesteps):
        scaled = scheduler.scale_model_input(reference, timestep)
        reference = scheduler.step(
            policy.backbone(scaled, timestep.expand(3), features), timestep, reference
        ).prev_sample
        x = policy.sampler_step(features, x, torch.full((3,), k))
        torch.testing.assert_close(x, reference, atol=1e-5, rtol=1e-4)


def test_noise_comes_from_the_stream_of_each_row_and_decode_is_deterministic() -> None:
    policy, obs = edm(action_clip=1.0), observations(6)
    whole = policy.act(obs, generator=PerRowGenerator(range(6), [2] * 6))
    some = policy.act({"state": obs["state"][[4, 1]]}, generator=PerRowGenerator([4, 1], [2, 2]))
    torch.testing.assert_close(some, whole[[4, 1]], atol=1e-5, rtol=1e-4)
    noise = torch.randn(6, 6, 2)
    assert torch.equal(policy.decode(obs, noise), policy.decode(obs, noise))


@SOLVERS
@pytest.mark.parametrize("backbone", ["mlp", "unet", "transformer"])
def test_every_backbone_decodes_differentiably(backbone: str, solver: str) -> None:
    sizes = {"unet_channels": (8, 16), "transformer_width": 16, "transformer_layers": 1}
    policy = edm(backbone=backbone, steps=3, solver=solver, **sizes)
    noise = torch.randn(2, 6, 2, requires_grad=True)
    policy.decode(observations(2), noise).square().sum().backward()
    assert noise.grad is not None and bool(noise.grad.isfinite().all()) and bool(noise.grad.any())
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in policy.parameters())


def test_an_unknown_solver_is_refused() -> None:
    with pytest.raises(UserError, match="Did you mean 'heun'"):
        make_policy("edm", EDMConfig(solver="huen"), POINT)
