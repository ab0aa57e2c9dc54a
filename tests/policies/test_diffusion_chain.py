"""Tests of the diffusion chain: densities of the trained last steps, the frozen base, and the deployed policy."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from robopolicy.errors import UserError
from robopolicy.nets.vision import VisionConfig
from robopolicy.policies.base import Observation, PolicySpec
from robopolicy.policies.exploration.diffusion_chain import DiffusionChain
from robopolicy.policies.heads.diffusion import DiffusionConfig, DiffusionPolicy
from robopolicy.policies.heads.flow import FlowConfig, FlowPolicy
from robopolicy.policies.noise import PerRowGenerator
from robopolicy.policies.wrappers.staged import StagedDiffusion, StagedDiffusionConfig, make_staged
from robopolicy.training.checkpoint import load_policy, save_checkpoint, verify_checkpoint

SPEC = PolicySpec({"state": (3,)}, action_dim=2, horizon=4, action_horizon=2, obs_horizon=2)
OBS = {"state": torch.randn(16, 2, 3, generator=torch.Generator().manual_seed(0))}
RAW = {"hidden": (32, 32), "normalization": "identity", "action_normalization": "identity"}


def head(seed: int = 0, **config: object) -> DiffusionPolicy:
    torch.manual_seed(seed)
    return DiffusionPolicy(DiffusionConfig(**(RAW | {"steps": 6} | config)), SPEC)  # type: ignore[arg-type]


def chain(first: int = 0, seed: int = 0, **settings: object) -> DiffusionChain:
    config = {key: settings.pop(key) for key in ("sampler", "action_clip", "prediction") if key in settings}
    base = make_staged((0,), [head(seed, **config)])
    return DiffusionChain(head(seed, **config), base, first=first, **settings)  # type: ignore[arg-type]


def seeded(seed: int = 3) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


SETTINGS = {
    "ddim": {},
    "ddpm": {"sampler": "ddpm"},
    "last-step": {"first": 5},
    "half": {"first": 3, "noise_clip": 0.0},
    "learned-eta": {"eta": (0.1, 1.0)},
    "furniture": {"std_min": 0.04},
    "v-unbounded": {"prediction": "v", "action_clip": 0.0},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SETTINGS)
def test_ratio_of_fresh_chains_is_one(name: str, dtype: torch.dtype) -> None:
    policy = chain(**SETTINGS[name])
    policy.chain_dtype = dtype
    sample = policy.sample(OBS, generator=seeded())
    count = 6 - policy.first_trained_step
    assert sample.logp.shape == (16, count) and sample.record["chain"].shape == (16, count + 1, 4, 2)
    assert sample.record["chain"].dtype == dtype
    rows = torch.randperm(16)[:7]
    for index in (torch.arange(16), rows, rows[:1]):
        record = {"chain": sample.record["chain"][index]}
        output = policy.decisions({"state": OBS["state"][index]}, record)
        assert float((output.logp.detach() - sample.logp[index]).exp().sub(1).abs().max()) < 1e-5
        assert output.entropy.shape == output.logp.shape


def test_transitions_are_the_posterior_with_a_minimum_std() -> None:
    policy = chain(std_min=0.1)
    record = policy.sample(OBS, generator=seeded()).record
    mean, log_std = policy.transitions(OBS, record)
    features = policy.head.encode(OBS)
    for k in range(6):
        expected, std = policy.head.posterior(features, record["chain"][:, k], torch.full((16,), k), 1.0)
        torch.testing.assert_close(mean[:, k], expected)
        torch.testing.assert_close(log_std[:, k].exp(), std.clamp(min=0.1))
    torch.testing.assert_close(log_std[:, -1].exp(), torch.full((16, 4, 2), 0.1))
    assert float(log_std[:, 0].exp().min()) > 0.2


def test_log_probability_uses_only_executed_dimensions_and_is_clamped() -> None:
    policy = chain(std_min=0.01)  # densities above the upper bound
    sample = policy.sample(OBS, generator=seeded())
    mean, log_std = policy.transitions(OBS, sample.record)
    x = sample.record["chain"][:, 1:]
    density = torch.distributions.Normal(mean, log_std.exp()).log_prob(x)[:, :, :2]  # Ta = 2 of H = 4
    torch.testing.assert_close(sample.logp, density.clamp(-5, 2).mean((2, 3)))
    assert float(density.detach().max()) > 2
    entropy = torch.distributions.Normal(mean, log_std.exp()).entropy()[:, :, :2].mean((2, 3))
    torch.testing.assert_close(policy.score(sample.record, mean, log_std).entropy, entropy)


def test_a_mean_shift_changes_the_log_ratio_in_closed_form_and_half_the_std_quadruples_it() -> None:
    policy = chain()
    mean, x, shift = torch.zeros(8, 4, 2), torch.full((8, 4, 2), 0.05), 0.02
    ratios = []
    for std in (0.2, 0.1):
        log_std = torch.full_like(mean, std).log()
        ratio = policy.step_logp(x, mean + shift, log_std) - policy.step_logp(x, mean, log_std)
        expected = (2 * shift * 0.05 - shift**2) / (2 * std**2)
        torch.testing.assert_close(ratio, torch.full((8,), expected))
        ratios.append(ratio)
    torch.testing.assert_close(ratios[1], 4 * ratios[0])


def test_noise_is_clipped_at_noise_clip_standard_deviations() -> None:
    policy = chain(noise_clip=0.5)
    record = policy.sample(OBS, generator=seeded()).record
    mean, log_std = policy.transitions(OBS, record)
    assert float(((record["chain"][:, 1:] - mean) / log_std.exp()).detach().abs().max()) <= 0.5 + 1e-5


@pytest.mark.parametrize("first", [0, 1])
def test_base_is_not_called_when_all_steps_are_trained(first: int) -> None:
    policy = chain(first=first)
    with torch.no_grad():
        for parameter in policy.base.parameters():
            parameter.fill_(float("nan"))
    sample = policy.sample(OBS)
    assert bool(sample.logp.isfinite().all()) == (first == 0)
    assert bool(policy.decisions(OBS, sample.record).logp.isfinite().all()) == (first == 0)


def test_base_runs_the_first_steps_with_the_same_noise_stream() -> None:
    policy, whole = chain(first=4), chain(first=0)  # equal weights
    original, reference = policy.sample(OBS, generator=seeded()), whole.sample(OBS, generator=seeded())
    assert torch.equal(original.record["chain"], reference.record["chain"][:, 4:])
    with torch.no_grad():
        for parameter in policy.head.parameters():
            parameter.add_(0.05)
    changed = policy.sample(OBS, generator=seeded())
    assert torch.equal(changed.record["chain"][:, 0], original.record["chain"][:, 0])
    assert not torch.allclose(changed.record["chain"][:, 1], original.record["chain"][:, 1])


def test_log_probabilities_give_gradients_to_the_head_only() -> None:
    policy = chain(first=3)
    policy.base.requires_grad_(False)
    policy.decisions(OBS, policy.sample(OBS).record).logp.sum().backward()
    assert all(p.grad is None for p in policy.base.parameters())
    assert any(bool(p.grad.any()) for p in policy.head.parameters() if p.grad is not None)


def test_eta_is_learned_between_its_bounds() -> None:
    policy = chain(eta=(0.2, 0.8), std_min=1e-3)
    eta = policy.eta
    assert isinstance(eta, Tensor) and float(eta) == pytest.approx(0.2 + 0.9 * 0.6)
    policy.decisions(OBS, policy.sample(OBS).record).entropy.sum().backward()
    assert policy.eta_logit is not None and policy.eta_logit.grad is not None and float(policy.eta_logit.grad) > 0
    fixed = chain(eta=(0.5, 0.5))
    assert fixed.eta == 0.5 and fixed.eta_logit is None
    assert not fixed.decisions(OBS, fixed.sample(OBS).record).entropy.requires_grad


def test_running_statistics_of_the_base_do_not_change() -> None:
    running = [DiffusionPolicy(DiffusionConfig(**(RAW | {"normalization": "running"})), SPEC) for _ in "ab"]  # type: ignore[arg-type]
    policy = DiffusionChain(running[0], make_staged((0,), [running[1]]), first=2)
    before = {key: value.clone() for key, value in policy.state_dict().items()}
    policy.update_stats(OBS)
    changed = {key for key, value in policy.state_dict().items() if not torch.equal(before[key], value)}
    assert changed and all(key.startswith("head.") for key in changed)


def test_pixels_are_encoded_by_both_networks() -> None:
    torch.manual_seed(0)
    spec = PolicySpec({"state": (3,), "image.wrist": (3, 24, 24)}, action_dim=2, horizon=2)
    config = DiffusionConfig(
        hidden=(16,),
        steps=4,
        normalization="identity",
        action_normalization="identity",
        vision=VisionConfig(widths=(16,), keypoints=4),
    )
    obs: Observation = {"state": torch.randn(5, 1, 3), "image.wrist": torch.randint(0, 256, (5, 1, 3, 24, 24)).byte()}
    policy = DiffusionChain(DiffusionPolicy(config, spec), make_staged((0,), [DiffusionPolicy(config, spec)]), first=2)
    sample = policy.sample(obs)
    ratio = (policy.decisions(obs, sample.record).logp - sample.logp).exp()
    torch.testing.assert_close(ratio, torch.ones(5, 2), atol=1e-5, rtol=0)


@pytest.mark.parametrize("sampler", ["ddim", "ddpm"])
def test_stages_with_equal_weights_equal_the_plain_policy(sampler: str) -> None:
    plain = head(sampler=sampler)
    staged = make_staged((0, 2, 5), [head(sampler=sampler) for _ in range(3)])
    assert torch.equal(staged.act(OBS, generator=seeded()), plain.act(OBS, generator=seeded()))
    noise = torch.randn(16, 4, 2)
    assert torch.equal(staged.decode(OBS, noise), plain.decode(OBS, noise))
    x, t = torch.randn(16, 4, 2), torch.rand(16)
    torch.testing.assert_close(staged.field(OBS, x, t), plain.field(OBS, x, t))
    assert staged.nfe == 6
    streams = staged.act({"state": OBS["state"][[3, 1]]}, generator=PerRowGenerator([3, 1], [0, 0]))
    whole = staged.act(OBS, generator=PerRowGenerator(range(16), [0] * 16))
    torch.testing.assert_close(streams, whole[[3, 1]], atol=1e-5, rtol=1e-5)


def test_each_stage_runs_its_own_steps() -> None:
    heads = [head(seed) for seed in range(2)]
    staged = make_staged((0, 4), heads)
    noise = torch.randn(16, 4, 2)
    x = noise
    for k in range(6):
        stage = heads[int(k >= 4)]
        x = stage.sampler_step(stage.encode(OBS), x, torch.full((16,), k))
    torch.testing.assert_close(staged.decode(OBS, noise), x.clamp(-1, 1))
    early, late = torch.full((16,), 0.05), torch.full((16,), 0.95)
    assert torch.equal(staged.field(OBS, noise, early), heads[0].field(OBS, noise, early))
    assert torch.equal(staged.field(OBS, noise, late), heads[1].field(OBS, noise, late))


def test_a_staged_policy_round_trips_through_a_checkpoint(tmp_path: Path) -> None:
    staged = make_staged((0, 3), [head(0), head(1)])
    save_checkpoint(tmp_path / "c", staged, task="toy/point_mass", obs_sample=OBS)
    loaded, manifest = load_policy(tmp_path / "c")
    assert manifest.policy == "staged_diffusion" and isinstance(loaded, StagedDiffusion)
    assert torch.equal(loaded.act(OBS, generator=seeded()), staged.act(OBS, generator=seeded()))
    assert verify_checkpoint(tmp_path / "c").ok


def test_invalid_arguments_are_refused() -> None:
    with pytest.raises(UserError, match="is created by dppo"):
        StagedDiffusion(StagedDiffusionConfig(), SPEC)
    with pytest.raises(UserError, match="one start each, rising from 0"):
        make_staged((1,), [head()])
    with pytest.raises(UserError, match="one sampler"):
        make_staged((0, 2), [head(), head(sampler="ddpm")])
    with pytest.raises(UserError, match="one sampler"):
        make_staged((0,), [FlowPolicy(FlowConfig(**RAW), SPEC)])  # type: ignore[arg-type,list-item]
    with pytest.raises(UserError, match="last 1 to 6"):
        chain(first=6)
    with pytest.raises(UserError, match="std_min > 0"):
        chain(std_min=0.0)
    with pytest.raises(UserError, match="is 1 for the sampler ddpm"):
        chain(sampler="ddpm", eta=(0.5, 0.5))
