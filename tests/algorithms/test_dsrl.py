"""Tests of DSRL: closed-form steering of a linear base, distillation, a black-box base, checkpoints, the point mass."""

import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from chunk_bandit import Known
from dsrl_bandit import ACTOR, BOUND, GAIN, GOAL, LINEAR, POINT_MASS, Kind, bandit, flow, linear, make, value
from torch import Tensor, nn

from robopolicy.algorithms.dsrl_na import DSRLNA, distill_loss
from robopolicy.algorithms.dsrl_sac import DSRLSAC
from robopolicy.critics.q import CriticConfig, QEnsemble
from robopolicy.data.replay import Replay
from robopolicy.errors import UserError
from robopolicy.policies.base import Observation, PolicySpec
from robopolicy.policies.heads.flow import FlowConfig, FlowPolicy
from robopolicy.policies.heads.gaussian import GaussianConfig, GaussianPolicy
from robopolicy.policies.wrappers.black_box import CallablePolicy
from robopolicy.policies.wrappers.latent import LatentPolicy, NoiseSpace
from robopolicy.rollout.off_policy import ReplaySampler
from robopolicy.sim.chunk import ChunkedSim
from robopolicy.sim.registry import SimOptions, make_sim
from robopolicy.training.checkpoint import load_policy, save_checkpoint, verify_checkpoint


class ExactQ(nn.Module):
    """A critic of two members that return the true value of a chunk."""

    def forward(self, obs: Observation, chunk: Tensor) -> Tensor:
        return value(chunk).expand(2, -1)


def point_mass(algorithm: Any, num_envs: int = 8, reward: str = "shaped") -> ReplaySampler:
    task = make_sim("toy/point_mass", SimOptions(num_envs=num_envs, reward=reward))
    sim = ChunkedSim(task, action_horizon=algorithm.policy.spec.action_horizon)
    return ReplaySampler(sim, Replay(20_000, num_envs), seed=0)


def states(algorithm: Any) -> dict[str, Tensor]:
    return {key: item.clone() for key, item in algorithm.policy.state_dict().items()}


kinds = pytest.mark.parametrize("kind", [DSRLSAC, DSRLNA])


def test_noise_critic_distillation_converges_for_a_linear_base_and_quadratic_q() -> None:
    algorithm = make(DSRLNA, CallablePolicy.wrap("linear", linear, LINEAR), critic_lr=5e-3)
    algorithm.critic = ExactQ()
    errors = [float(algorithm.distill_step(bandit(128, seed).obs)["distill_error"]) for seed in range(600)]
    assert errors[0] > 1.0
    assert sum(errors[-20:]) / 20 < 0.08


@pytest.mark.parametrize("kind", [DSRLSAC, DSRLNA])
def test_actor_converges_to_the_closed_form_noise_clipped_at_the_bound(kind: Kind) -> None:
    base = CallablePolicy.wrap("linear", linear, LINEAR)
    more: dict[str, Any] = {"distill": 1.0} if kind is DSRLNA else {}
    algorithm = make(kind, base, temperature=0.01, temperature_lr=0.0, lr=4e-3, critic_lr=4e-3, batch_size=64, **more)
    for seed in range(50):
        algorithm.update(bandit(8 * 64, seed))
    obs = bandit(200, 999).obs
    with torch.no_grad():
        w = algorithm.policy.actor.act(obs, deterministic=True)
    best = ((GOAL - obs["state"]) / GAIN).clamp(-BOUND, BOUND)
    assert bool((best.abs() == BOUND).any())  # the bound is active here
    assert float((w - best).abs().mean()) < 0.2
    regret = value(linear(obs, best)) - value(linear(obs, w))
    assert float(regret.mean()) < 0.1 < 1.0 < float((value(linear(obs, best)) - value(linear(obs, 0 * w))).mean())
    assert bool((w.abs() <= BOUND).all())


def test_every_noise_critic_member_regresses_on_the_same_action_critic_member() -> None:
    algorithm = make(DSRLNA, CallablePolicy.wrap("linear", linear, LINEAR))
    batch = bandit(64, 0)
    w = batch.record["noise"]
    with torch.no_grad():
        found, wanted = algorithm.noise_critic(batch.obs, w), algorithm.critic(batch.obs, batch.chunk)  # (M, B)
    loss, info = distill_loss(algorithm.noise_critic, algorithm.critic, batch.obs, w, batch.chunk)
    expected = (found - wanted).square()
    torch.testing.assert_close(loss.detach(), expected.mean(1).sum())
    torch.testing.assert_close(info["distill_error"], expected.mean().sqrt())
    for other in (wanted.flip(0), wanted.amin(0), wanted.mean(0)):
        assert not torch.isclose(expected.mean(1).sum(), (found - other).square().mean(1).sum())


def share_of_gaussian(low: float, high: float) -> float:
    """Probability that a standard normal number is between two bounds."""
    return (math.erf(high / math.sqrt(2)) - math.erf(low / math.sqrt(2))) / 2


@kinds
def test_warmup_actions_use_clipped_gaussian_noise_for_every_actor(kind: Kind) -> None:
    algorithm = make(kind, CallablePolicy.wrap("linear", linear, LINEAR))
    obs = bandit(4000, 0).obs
    sample = algorithm.warmup_action(obs, generator=torch.Generator().manual_seed(0))
    w = sample.record["noise"]
    assert torch.equal(sample.chunk, linear(obs, w))
    found = [(w == -BOUND), (w > -BOUND) & (w <= -0.5), (w > -0.5) & (w <= 0.5), (w == BOUND)]
    edges = [(-9.0, -BOUND), (-BOUND, -0.5), (-0.5, 0.5), (BOUND, 9.0)]
    for inside, (low, high) in zip(found, edges, strict=True):
        share = share_of_gaussian(low, high)
        assert float(inside.float().mean()) == pytest.approx(share, abs=4 * math.sqrt(share * (1 - share) / w.numel()))
    with torch.no_grad():
        for parameter in algorithm.policy.actor.parameters():
            parameter.fill_(0.1)
    assert torch.equal(algorithm.warmup_action(obs, generator=torch.Generator().manual_seed(0)).chunk, sample.chunk)
    assert not torch.equal(algorithm.act(obs, generator=torch.Generator().manual_seed(0)).chunk, sample.chunk)


def test_noise_critic_ignores_the_noise_if_the_base_policy_ignores_it() -> None:
    def constant(obs: Observation, noise: Tensor) -> Tensor:
        return obs["state"] + 0 * noise

    algorithm = make(DSRLNA, CallablePolicy.wrap("constant", constant, LINEAR))
    obs = bandit(64, 0).obs
    noise = [algorithm.policy.draw(64, None, obs["state"].device) for _ in range(2)]
    chunks = [algorithm.policy.decode_free_noise(obs, w) for w in noise]
    losses = [distill_loss(algorithm.noise_critic, algorithm.critic, obs, noise[0], chunk)[0] for chunk in chunks]
    assert torch.equal(losses[0], losses[1])  # the target is the same for every noise
    algorithm.critic = ExactQ()

    def spread() -> float:
        with torch.no_grad():
            values = torch.stack(
                [algorithm.noise_critic(obs, algorithm.policy.draw(64, None, obs["state"].device)) for _ in range(20)]
            )
        return float(values.std(0).mean() / values.mean(0).std())

    before = spread()
    for seed in range(400):
        algorithm.distill_step(bandit(256, seed).obs)
    assert spread() < 0.03 < before


def test_critic_target_and_loss_do_not_depend_on_the_recorded_noise() -> None:
    algorithm = make(DSRLNA, CallablePolicy.wrap("linear", linear, LINEAR))
    batch = bandit(128, 0)
    for record in (batch.record, {"noise": torch.zeros(128, 1, 2)}, {}):
        assert torch.equal(algorithm.target(replace(batch, record=record)), batch.reward)
        loss, _ = algorithm.critic_loss(replace(batch, record=record))
        assert torch.equal(loss, algorithm.critic_loss(batch)[0])


@kinds
@pytest.mark.parametrize("backup_entropy", [True, False])
def test_the_target_is_the_soft_value_of_the_next_steered_action(kind: Kind, backup_entropy: bool) -> None:
    base = CallablePolicy.wrap("linear", linear, LINEAR)
    algorithm = make(kind, base, temperature=0.2, backup_entropy=backup_entropy)
    algorithm.target_critic = Known(*(lambda s, a, i=i: s.sum(-1) + value(a[:, None]) - i for i in range(2)))
    batch = replace(bandit(64, 0), discount=torch.full((64,), 0.9), next_obs=bandit(64, 1).obs)
    algorithm.generator.manual_seed(5)
    actual = algorithm.target(batch)
    w, logp = algorithm.policy.actor.rsample(batch.next_obs, generator=torch.Generator().manual_seed(5))
    critic_input = linear(batch.next_obs, w) if kind is DSRLNA else w  # critics on actions, or on noise
    soft = algorithm.target_critic(batch.next_obs, critic_input)[1] - 0.2 * backup_entropy * logp
    torch.testing.assert_close(actual, batch.reward + 0.9 * soft)


@kinds
def test_the_target_entropy_is_zero_or_minus_the_free_noise(kind: Kind) -> None:
    assert make(kind, flow()).target_entropy == 0.0
    for space, free in ((NoiseSpace("full"), 4 * 2), (NoiseSpace("repeat"), 2), (NoiseSpace("truncated", steps=3), 6)):
        assert make(kind, flow(), noise_space=space, target_entropy=None).target_entropy == -free


@kinds
def test_actor_and_critics_share_the_normalisation_of_clouds_and_sets_with_the_base(kind: Kind) -> None:
    shapes = {"state": (2,), "point_cloud.front": (3, 3), "entities.others": (2, 4)}
    boxes = {key: {"min": [-3.0] * math.prod(shape), "max": [7.0] * math.prod(shape)} for key, shape in shapes.items()}
    base = FlowPolicy(FlowConfig(hidden=(16,), normalization="minmax"), PolicySpec(shapes, 2))
    base.fit_normalizer(boxes | {"action": {"min": [-1.0] * 2, "max": [1.0] * 2}})
    algorithm = make(kind, base)
    noise_critic = getattr(algorithm, "noise_critic", algorithm.critic)
    for encoder in (algorithm.policy.actor.encoder, algorithm.critic.encoder, noise_critic.encoder):
        for key, buffer in base.encoder.named_buffers():
            assert torch.equal(encoder.get_buffer(key), buffer), key


@kinds
@pytest.mark.parametrize(
    "space", [NoiseSpace("repeat", 0.3), NoiseSpace("truncated", 0.4, steps=2, rest="draw"), NoiseSpace("full", 0.9)]
)
def test_noise_stays_within_the_bound_in_base_policy_and_critic_inputs(
    kind: Kind, space: NoiseSpace, monkeypatch: pytest.MonkeyPatch
) -> None:
    to_base: list[Tensor] = []
    to_critic: list[Tensor] = []

    def function(obs: Observation, noise: Tensor) -> Tensor:
        to_base.append(noise.clone())
        return noise

    algorithm = make(kind, CallablePolicy.wrap("spy", function, POINT_MASS), noise_space=space, lr=0.1, batch_size=16)
    original, free = QEnsemble.output, space.rows(4)

    def output(self: QEnsemble, features: Tensor, chunk: Tensor, members: Tensor | None = None) -> Tensor:
        if self is not algorithm.critic or kind is DSRLSAC:
            assert chunk.shape[1] == free or self is not algorithm.noise_critic
            to_critic.append(chunk.detach().clone())
        return original(self, features, chunk, members)

    monkeypatch.setattr(QEnsemble, "output", output)
    sampler = point_mass(algorithm)
    sampler.collect(algorithm.warmup_action, 4)
    for _ in range(3):
        sampler.collect(algorithm.act)
        algorithm.update(sampler.replay.sample(algorithm.sample_spec, algorithm.generator, batches=2))
    assert len(to_base) >= 7 and len(to_critic) >= 6
    for noise in (*to_base, *to_critic):
        assert bool((noise.abs() <= torch.tensor(space.bound)).all())


@kinds
def test_base_policy_decodes_each_chunk_exactly_once(kind: Kind) -> None:
    base = CallablePolicy.wrap("linear", lambda obs, noise: noise, POINT_MASS)
    algorithm = make(kind, base, batch_size=16)
    meter, sampler = algorithm.policy.base.meter, point_mass(algorithm)
    sampler.collect(algorithm.warmup_action, 5)
    sampler.collect(algorithm.act, 3)
    assert meter.calls == 8
    algorithm.update(sampler.replay.sample(algorithm.sample_spec, algorithm.generator, batches=4))
    # Targets of four minibatches, distillation on half of them.
    assert meter.calls == 8 + (0 if kind is DSRLSAC else 4 + 2)


@kinds
def test_base_policy_weights_are_bit_identical_after_training(kind: Kind) -> None:
    base = flow()
    before = {key: item.clone() for key, item in base.state_dict().items()}
    algorithm = make(kind, base, batch_size=32)
    actor = {key: item.clone() for key, item in algorithm.policy.actor.state_dict().items()}
    sampler = point_mass(algorithm)
    sampler.collect(algorithm.warmup_action, 4)
    for _ in range(3):
        sampler.collect(algorithm.act)
        algorithm.update(sampler.replay.sample(algorithm.sample_spec, algorithm.generator, batches=2))
    assert all(p.grad is None for p in algorithm.policy.base.parameters())
    inside = algorithm.policy.base.state_dict()
    assert all(
        torch.equal(item, inside[key]) and torch.equal(item, base.state_dict()[key]) for key, item in before.items()
    )
    assert any(not torch.equal(item, algorithm.policy.actor.state_dict()[key]) for key, item in actor.items())


@kinds
def test_the_deployed_policy_survives_a_checkpoint(kind: Kind, tmp_path: Path) -> None:
    algorithm = make(kind, flow())
    obs = {"state": torch.randn(4, 1, 6)}
    save_checkpoint(tmp_path / "c", algorithm.inference_policy(), task="toy/point_mass", obs_sample=obs)
    assert verify_checkpoint(tmp_path / "c").ok
    loaded, _ = load_policy(tmp_path / "c")
    assert torch.equal(loaded.act(obs, deterministic=True), algorithm.policy.act(obs, deterministic=True))
    again = make(kind, loaded)  # a steered policy can be steered further
    assert torch.equal(again.policy.act(obs, deterministic=True), loaded.act(obs, deterministic=True))


def test_only_dsrl_na_accepts_demonstrations() -> None:
    offline = replace(bandit(128, 0), record={}, online=torch.zeros(128).bool())
    make(DSRLNA, CallablePolicy.wrap("linear", linear, LINEAR)).update(offline)
    with pytest.raises(UserError, match="noise of actions, which datasets lack; use algorithm=dsrl_na"):
        make(DSRLSAC, CallablePolicy.wrap("linear", linear, LINEAR)).update(offline)


def test_unsupported_policies_and_settings_are_refused() -> None:
    with pytest.raises(UserError, match="takes none; train it with ppo or sac"):
        make(DSRLNA, GaussianPolicy(GaussianConfig(), LINEAR))
    with pytest.raises(UserError, match=r"set algorithm\.noise_space\.bound"):
        make(DSRLNA, flow(), noise_space=NoiseSpace(bound=0.0))
    with pytest.raises(UserError, match=r"must be a multiple of the \d+ executed steps, got 3"):
        make(DSRLSAC, flow(), n_step=3)
    with pytest.raises(UserError, match="or start from its base"):
        make(DSRLNA, LatentPolicy.from_base(flow(), NoiseSpace("repeat"), ACTOR))


@kinds
def test_a_steered_policy_is_reused_only_with_its_own_actor_settings(kind: Kind) -> None:
    steered = LatentPolicy.from_base(flow(), NoiseSpace(bound=BOUND), ACTOR)
    assert make(kind, steered).policy is steered
    with pytest.raises(UserError, match=r"noise actor has hidden=\(64, 64\);"):
        make(kind, steered, actor=replace(ACTOR, hidden=(128,)))


@pytest.mark.slow
@kinds
def test_dsrl_solves_the_point_mass_with_a_slow_black_box_base_policy(kind: Kind) -> None:
    def function(obs: Observation, noise: Tensor) -> Tensor:
        time.sleep(0.0005)
        return (0.7 * noise).clamp(-1, 1)

    base = CallablePolicy.wrap("random", function, POINT_MASS)
    settings: dict[str, Any] = {"noise_space": NoiseSpace("repeat"), "critic": CriticConfig(hidden=(64, 64))}
    algorithm = make(kind, base, lr=1e-3, critic_lr=1e-3, temperature=0.1, tau=0.02, **settings)
    sampler = point_mass(algorithm, num_envs=16)
    sampler.collect(algorithm.warmup_action, 30)
    before = sampler.episode_stats()["rollout/return"]
    for _ in range(60):
        sampler.collect(algorithm.act)
        algorithm.update(sampler.replay.sample(algorithm.sample_spec, algorithm.generator, batches=8))
    sampler.episode_stats()
    sampler.collect(algorithm.act, 20)
    assert before < -6 and sampler.episode_stats()["rollout/return"] > -2.5
    assert algorithm.policy.base.meter.latency >= 0.0005
