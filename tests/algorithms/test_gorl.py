"""Tests of GoRL: stage 0 is tanh-Gaussian PPO, PPO leaves decoders fixed, stages retrain decoders, runs resume."""

import copy
import math
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from robopolicy.algorithms.common.algorithm import Algorithm
from robopolicy.algorithms.common.rollout_batch import compute_advantages
from robopolicy.algorithms.gorl import EpisodeReturns, GoRL, GoRLConfig, latent_penalty
from robopolicy.algorithms.ppo import PPO, PPOConfig, ppo_loss
from robopolicy.data.batches import Rollout
from robopolicy.errors import UserError
from robopolicy.policies.base import PolicySpec, Sample
from robopolicy.policies.heads.consistency import ConsistencyConfig, ConsistencyPolicy
from robopolicy.policies.heads.diffusion import DiffusionConfig, DiffusionPolicy
from robopolicy.policies.heads.flow import FlowConfig, FlowPolicy
from robopolicy.policies.heads.gaussian import GaussianConfig, GaussianPolicy
from robopolicy.policies.heads.generative import GenerativePolicy
from robopolicy.rollout.on_policy import RolloutSampler
from robopolicy.sim.chunk import ChunkedSim
from robopolicy.sim.registry import SimOptions, make_sim
from robopolicy.training.checkpoint import load_policy, save_checkpoint, verify_checkpoint

SPEC = PolicySpec({"state": (6,)}, 2, horizon=2, action_horizon=2)
STATE = {"min": [-1.0] * 6, "max": [1.0] * 6}
ACTION = {"action": {"min": [-1.0, -1.0], "max": [1.0, 1.0]}}
ENCODER = GaussianConfig(hidden=(16,), activation="silu", state_dependent_std=True)
SMALL: dict[str, Any] = {"num_steps": 8, "epochs": 2, "batch_size": 64, "encoder": ENCODER, "seed": 3}
QUICK = SMALL | {"stages": (2, 2, 1), "decoder_updates": 2, "decoder_steps": 3, "decoder_batch": 32}


def flow(**config: Any) -> FlowPolicy:
    torch.manual_seed(0)
    policy = FlowPolicy(FlowConfig(**({"hidden": (16, 16), "normalization": "running", "steps": 3} | config)), SPEC)
    policy.fit_normalizer(ACTION if policy.config.normalization == "running" else {"state": STATE, **ACTION})
    return policy


def diffusion() -> DiffusionPolicy:
    torch.manual_seed(0)
    policy = DiffusionPolicy(DiffusionConfig(hidden=(16, 16), normalization="running"), SPEC)
    policy.fit_normalizer(ACTION)
    return policy


def gorl(head: GenerativePolicy | None = None, **overrides: Any) -> GoRL:
    return GoRL(GoRLConfig(**(QUICK | overrides)), head or flow(), total_updates=20)


def sampler_for(algorithm: Algorithm, num_envs: int = 16, seed: int = 0) -> RolloutSampler:
    sim = make_sim("toy/point_mass", SimOptions(num_envs=num_envs, reward="shaped"))
    chunked = ChunkedSim(sim, action_horizon=2, gamma=algorithm.step_discount)
    return RolloutSampler(chunked, decisions=algorithm.config.num_steps, seed=seed)


def snapshot(module: torch.nn.Module) -> dict[str, Tensor]:
    return {key: value.clone() for key, value in module.state_dict().items()}


def same(before: dict[str, Tensor], module: torch.nn.Module) -> bool:
    return all(torch.equal(value, module.state_dict()[key]) for key, value in before.items())


def run(algorithm: GoRL, sampler: RolloutSampler, updates: int) -> list[tuple[int, bool]]:
    """(stage, whether a decoder is being trained) before every update."""
    places = []
    for _ in range(updates):
        places.append((algorithm.stage, algorithm.training_decoder))
        algorithm.update(sampler.collect(algorithm.act))
    return places


def test_stage_zero_updates_equal_tanh_gaussian_ppo_updates() -> None:
    algorithm = gorl(penalty=0.0, stages=(5,), normalize_reward=True)
    squashed = replace(ENCODER, squash=True, action_normalization="minmax")
    policy = GaussianPolicy(squashed, SPEC)
    policy.load_state_dict(algorithm.policy.actor.state_dict())
    policy.fit_normalizer(ACTION)
    shared = {setting.name: getattr(algorithm.config, setting.name) for setting in fields(PPOConfig)}
    plain = PPO(PPOConfig(**shared), policy, total_updates=20)
    plain.critic.load_state_dict(algorithm.ppo.critic.state_dict())
    samplers = sampler_for(algorithm), sampler_for(plain)
    for _ in range(2):
        rollouts = [sampler.collect(a.act) for sampler, a in zip(samplers, (algorithm, plain), strict=True)]
        torch.testing.assert_close(rollouts[0].reward, rollouts[1].reward, atol=1e-5, rtol=1e-5)
        algorithm.update(rollouts[0])
        plain.update(rollouts[1])
        for (key, found), wanted in zip(algorithm.policy.actor.named_parameters(), policy.parameters(), strict=True):
            torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4, msg=key)
        for found, wanted in zip(algorithm.ppo.critic.parameters(), plain.critic.parameters(), strict=True):
            torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("make", [flow, diffusion])
def test_stages_alternate_between_encoder_and_decoder(make: Callable[[], GenerativePolicy]) -> None:
    algorithm = gorl(make())
    sampler = sampler_for(algorithm)
    assert bool(algorithm.decoder.identity) and algorithm.policy.nfe == 1
    places = run(algorithm, sampler, 4)
    assert not bool(algorithm.decoder.identity) and algorithm.policy.nfe == 1 + make().nfe
    places += run(algorithm, sampler, 8)
    encode, decode = (lambda k: (k, False)), (lambda k: (k, True))
    expected = [encode(0)] * 2 + [decode(0)] * 2 + [encode(1)] * 2 + [decode(1)] * 2
    assert places == expected + [encode(2)] * 4  # the last stage continues to the end
    assert algorithm.updates == 12


def test_clip_gradient_bound_and_penalty_change_after_stage_zero() -> None:
    algorithm = gorl()
    sampler = sampler_for(algorithm)
    rows = compute_advantages(sampler.collect(algorithm.act), algorithm.ppo.critic, gamma=0.99, gae_lambda=0.95)
    seen = []
    for _ in range(2):
        plain, _ = ppo_loss(algorithm.policy, rows, algorithm.ppo.estimator)
        loss, info = algorithm.ppo.loss(rows, log_stats=True)
        weight = float(((loss - plain) / info["penalty"]).detach())
        seen.append((algorithm.ppo.config.clip, algorithm.ppo.config.grad_clip, weight))
        run(algorithm, sampler, 4)
    assert seen[0][:2] == (0.15, 0.5) and seen[1][:2] == (0.3, 1.0)
    assert seen[0][2] == pytest.approx(5e-4, rel=1e-2) and seen[1][2] == pytest.approx(1e-3, rel=1e-2)


def test_the_penalty_is_the_mean_square_of_mean_and_deviation() -> None:
    encoder = gorl().policy.actor
    with torch.no_grad():
        for parameter in encoder.parameters():
            parameter.zero_()
        bias = list(encoder.actor.parameters())[-1].view(2, 4)
        bias[:, :2], bias[:, 2:] = 0.5, math.log(2.0)
    penalty = latent_penalty(encoder, {"state": torch.randn(5, 1, 6)})
    assert float(penalty.detach()) == pytest.approx(0.25 + 4.0)
    assert penalty.requires_grad


@pytest.mark.parametrize("updates", [0, 4])  # the identity, a trained decoder
def test_decoder_is_frozen_and_does_not_affect_the_ratio(updates: int) -> None:
    algorithm = gorl()
    sampler = sampler_for(algorithm)
    run(algorithm, sampler, updates)
    before = snapshot(algorithm.decoder)
    for _ in range(2):
        rollout = sampler.collect(algorithm.act)
        rows = compute_advantages(rollout, algorithm.ppo.critic, gamma=0.99, gae_lambda=0.95)
        scores = algorithm.policy.decisions(rows.obs, rows.record).logp
        assert float((torch.exp(scores.detach() - rows.logp) - 1).abs().max()) < 1e-5
        other = copy.deepcopy(algorithm.policy)
        with torch.no_grad():
            for parameter in other.base.parameters():
                parameter.add_(1.0)
        assert torch.equal(other.decisions(rows.obs, rows.record).logp, scores)
        algorithm.update(rollout)
        assert same(before, algorithm.decoder)
    assert all(p.grad is None for p in algorithm.decoder.parameters())


def test_a_new_stage_resets_the_encoder_but_not_its_statistics_and_critic() -> None:
    algorithm = gorl()
    sampler = sampler_for(algorithm)
    run(algorithm, sampler, 3)
    trained, critic = snapshot(algorithm.policy.actor), snapshot(algorithm.ppo.critic)
    head = snapshot(algorithm.decoder.head)
    run(algorithm, sampler, 1)
    fresh = algorithm.policy.actor.state_dict()
    assert all(torch.equal(trained[key], fresh[key]) == ("normalizer" in key) for key in trained if "bias" not in key)
    assert same(critic, algorithm.ppo.critic)
    trainer = algorithm.decoder_trainer
    assert not same(head, algorithm.decoder.head) and same(snapshot(trainer.head), algorithm.decoder.head)
    mean, log_std = algorithm.policy.actor.distribution({"state": torch.zeros(3, 1, 6)})
    assert float(mean.detach().abs().max()) < 0.05 and float(log_std.detach().abs().max()) < 0.05  # near N(0, I)
    actor = set(algorithm.policy.actor.parameters())
    moved = set(algorithm.ppo.optimizer.state)
    assert not actor & moved and set(algorithm.ppo.critic.parameters()) <= moved


def test_each_decoder_is_trained_from_newly_initialised_weights() -> None:
    algorithm = gorl(decoder_lr=1e-9)  # so that the weights stay where they start
    sampler = sampler_for(algorithm)
    run(algorithm, sampler, 3)
    first = snapshot(algorithm.decoder_trainer.head.backbone)
    run(algorithm, sampler, 4)
    second = snapshot(algorithm.decoder_trainer.head.backbone)
    assert all(float((first[key] - second[key]).abs().mean()) > 1e-3 for key in first if key.endswith("weight"))
    moments = algorithm.decoder_trainer.optimizer.state.values()
    assert {int(moment["step"]) for moment in moments} == {QUICK["decoder_steps"]}


def test_the_best_encoder_of_the_stage_collects_the_data(monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm = gorl(stages=(3, 1), lr=0.01)
    sampler = sampler_for(algorithm)
    scores = iter([1.0, 3.0, 2.0, 9.0, 9.0])
    monkeypatch.setattr(algorithm.returns, "update", lambda rollout: next(scores))
    encoders = []
    for _ in range(3):
        encoders.append(snapshot(algorithm.policy.actor))
        run(algorithm, sampler, 1)
    assert algorithm.training_decoder and same(encoders[1], algorithm.policy.actor)
    run(algorithm, sampler, 1)
    assert same(encoders[1], algorithm.policy.actor)  # decoder training does not change it


def test_episode_returns_accumulate_across_rollouts() -> None:
    def rollout(reward: list[list[float]], end: list[list[bool]]) -> Rollout:
        values, ends, empty = torch.tensor(reward), torch.tensor(end), {}
        return Rollout(empty, empty, values, values, values.long(), ends, ends & False, empty, empty)

    returns = EpisodeReturns()
    assert math.isnan(returns.update(rollout([[1.0, 2.0]], [[False, False]])))
    assert returns.update(rollout([[1.0, 2.0], [5.0, 5.0]], [[True, False], [False, True]])) == (2.0 + 9.0) / 2
    assert returns.update(rollout([[1.0, 1.0]], [[True, True]])) == (6.0 + 1.0) / 2


def test_only_episodes_started_in_a_stage_count_for_it() -> None:
    algorithm = gorl(stages=(2, 100))
    sampler = sampler_for(algorithm)
    run(algorithm, sampler, 3)
    assert algorithm.returns.running is not None
    algorithm.returns.running.fill_(1e6)  # return of the old pair in unfinished episodes
    run(algorithm, sampler, 1)
    assert algorithm.stage == 1 and algorithm.returns.fresh is not None and not bool(algorithm.returns.fresh.any())
    other = EpisodeReturns()
    other.load_state_dict(algorithm.returns.state_dict())
    assert other.fresh is not None and torch.equal(other.fresh, algorithm.returns.fresh)
    run(algorithm, sampler, 15)
    assert bool(algorithm.returns.fresh.all()) and -math.inf < algorithm.best_return < 1e5


def test_new_decoders_and_encoders_copy_the_normalisation_of_clouds_and_sets() -> None:
    shapes = {"state": (2,), "point_cloud.front": (3, 3), "entities.others": (2, 4)}
    boxes = {key: {"min": [-3.0] * math.prod(shape), "max": [7.0] * math.prod(shape)} for key, shape in shapes.items()}
    head = FlowPolicy(FlowConfig(hidden=(16,), normalization="minmax"), PolicySpec(shapes, 2))
    head.fit_normalizer(boxes | ACTION)
    algorithm = gorl(head, skip_first_decoder=False)
    algorithm.decoder_trainer.restart(algorithm.policy.actor, seed=0)
    algorithm._begin_stage()
    for part in (algorithm.policy.actor, algorithm.decoder.head, algorithm.decoder_trainer.head):
        for key, fitted in head.encoder.named_buffers():
            assert torch.equal(part.encoder.get_buffer(key), fitted), key


def test_decoder_reproduces_the_distribution_of_executed_actions() -> None:
    """The decoder maps z ~ N(0, I) to the distribution of the encoder's actions, here two-sided and skewed."""
    algorithm = gorl(flow(hidden=(32, 32), steps=10), decoder_lr=2e-3, decoder_steps=900, decoder_batch=256)
    generator = torch.Generator().manual_seed(0)
    obs = {"state": torch.randn(4000, 1, 6, generator=generator)}
    side = torch.sign(torch.randn(4000, 1, 1, generator=generator))
    executed = (0.6 * side + 0.2 + 0.15 * torch.randn(4000, 2, 2, generator=generator)).tanh()
    algorithm.policy.update_stats(obs)
    algorithm.decoder_trainer.restart(algorithm.policy.actor, seed=0)
    algorithm.decoder_trainer.add(obs, executed)
    algorithm.decoder_trainer.train(torch.Generator().manual_seed(1))
    with torch.no_grad():
        again = algorithm.decoder_trainer.head.eval().act(obs, generator=generator)
    assert float((again.mean(0) - executed.mean(0)).abs().max()) < 0.1
    assert float((again.std(0) - executed.std(0)).abs().max()) < 0.1
    assert abs(float((again[:, 0, 0] > 0).float().mean()) - 0.5) < 0.1  # both modes
    assert float((again[:, 0, 0].abs() < 0.1).float().mean()) < 0.12  # and little between them


@pytest.mark.parametrize(("updates", "stage"), [(2, 0), (6, 1)])
def test_the_data_of_a_decoder_are_the_executed_actions(updates: int, stage: int) -> None:
    algorithm, executed = gorl(), list[Tensor]()
    sampler = sampler_for(algorithm)
    run(algorithm, sampler, updates)
    assert (algorithm.stage, algorithm.training_decoder) == (stage, True)

    def act(obs: dict[str, Tensor], **settings: Any) -> Sample:
        sample = algorithm.act(obs, **settings)
        executed.append(sample.chunk)
        return sample

    rollout = sampler.collect(act)
    algorithm.update(rollout)
    data = algorithm.decoder_trainer
    assert data.chunk is not None and torch.equal(data.obs["state"], rollout.obs["state"].flatten(0, 1))
    torch.testing.assert_close(data.chunk, torch.cat(executed))
    assert float((data.chunk - rollout.record["noise"].flatten(0, 1)).abs().mean()) > 0.05


def test_the_grid_of_a_consistency_decoder_grows_from_the_start_of_every_stage() -> None:
    torch.manual_seed(0)
    head = ConsistencyPolicy(ConsistencyConfig(hidden=(16,), normalization="running", levels_last=40), SPEC)
    head.fit_normalizer(ACTION)
    algorithm = gorl(head, decoder_updates=3)
    assert isinstance(algorithm.decoder_trainer.head, ConsistencyPolicy)
    sampler, levels = sampler_for(algorithm), []
    for _ in range(10):
        fitting = algorithm.training_decoder
        run(algorithm, sampler, 1)
        if fitting:
            levels.append(int(algorithm.decoder_trainer.head.levels))
    assert levels == [10, 20, 40] * 2


def test_the_memory_of_the_decoder_stores_the_newest_chunks() -> None:
    algorithm = gorl(decoder_memory=100)
    sampler = sampler_for(algorithm)
    run(algorithm, sampler, 3)
    assert len(algorithm.decoder_trainer) == 100
    rollout = sampler.collect(algorithm.act)
    algorithm.update(rollout)
    assert len(algorithm.decoder_trainer) == 0 and algorithm.stage == 1  # freed in the new stage


def test_an_imitated_policy_can_be_the_first_decoder() -> None:
    head = flow(normalization="minmax")
    algorithm = gorl(head, skip_first_decoder=False)
    assert algorithm.ppo.config.clip == 0.3
    obs = {"state": torch.randn(5, 1, 6)}
    sample = algorithm.act(obs)
    assert torch.equal(sample.chunk, head.decode(obs, sample.record["noise"]))
    run(algorithm, sampler_for(algorithm), 5)
    assert algorithm.stage == 1


@pytest.mark.parametrize("at", [1, 3, 5])  # in stage 0, while a decoder is trained, in stage 1
def test_resumed_run_ends_with_the_weights_of_an_uninterrupted_run(at: int, tmp_path: Path) -> None:
    straight = gorl()
    sampler = sampler_for(straight)
    run(straight, sampler, at)
    state, sim_state = copy.deepcopy(straight.state_dict()), copy.deepcopy(sampler.state_dict())
    observed = {"state": torch.zeros(2, 1, 6)}
    save_checkpoint(tmp_path / "c", straight.inference_policy(), task="toy/point_mass", obs_sample=observed)
    run(straight, sampler, 6)
    resumed = GoRL(GoRLConfig(**QUICK), load_policy(tmp_path / "c")[0].train(), total_updates=20)
    resumed.load_state_dict(state)
    other = sampler_for(resumed)
    other.load_state_dict(sim_state)
    run(resumed, other, 6)
    assert (resumed.stage, resumed.stage_updates) == (straight.stage, straight.stage_updates)
    assert same(snapshot(straight.policy), resumed.policy)
    assert same(snapshot(straight.decoder_trainer.head), resumed.decoder_trainer.head)
    assert same(snapshot(straight.ppo.critic), resumed.ppo.critic) and same(snapshot(straight.best), resumed.best)


@pytest.mark.parametrize("updates", [1, 3, 4])
def test_the_deployed_policy_survives_a_checkpoint_in_every_stage(updates: int, tmp_path: Path) -> None:
    algorithm = gorl()
    run(algorithm, sampler_for(algorithm), updates)
    obs = {"state": torch.randn(4, 1, 6)}
    save_checkpoint(tmp_path / "c", algorithm.inference_policy(), task="toy/point_mass", obs_sample=obs)
    assert verify_checkpoint(tmp_path / "c").ok
    loaded, _ = load_policy(tmp_path / "c")
    assert torch.equal(loaded.act(obs, deterministic=True), algorithm.policy.act(obs, deterministic=True))


def test_losses_stay_finite_under_autocast_and_show_a_nan() -> None:
    algorithm = gorl()
    sampler = sampler_for(algorithm)
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(5):
            metrics = algorithm.update(sampler.collect(algorithm.act))
            assert all(math.isfinite(value) for value in metrics.values())
    run(algorithm, sampler, 1)
    assert algorithm.training_decoder
    rollout = sampler.collect(algorithm.act)
    rollout.obs["state"][0] = float("nan")
    assert math.isnan(algorithm.update(rollout)["decoder/loss"])


def test_unsupported_policies_and_settings_are_refused() -> None:
    with pytest.raises(UserError, match=r"needs a denoising head, e\.g\. flow, got 'gaussian'"):
        GoRL(GoRLConfig(), GaussianPolicy(GaussianConfig(), SPEC), total_updates=1)
    with pytest.raises(UserError, match=r"policy\.normalization=running"):
        GoRL(GoRLConfig(), FlowPolicy(FlowConfig(), SPEC), total_updates=1)
    with pytest.raises(UserError):
        GoRLConfig(stages=())


@pytest.mark.slow
def test_new_decoder_keeps_the_return_of_the_data_collecting_policy() -> None:
    settings: dict[str, Any] = {"num_steps": 20, "epochs": 5, "batch_size": 512, "lr": 2e-3, "stages": (12, 5)}
    head = flow(hidden=(64, 64), steps=5)
    algorithm = gorl(head, **settings, decoder_updates=3, decoder_steps=400, decoder_batch=256, decoder_lr=2e-3)
    sampler = sampler_for(algorithm, num_envs=64)

    def episodes() -> float:
        sampler.collect(algorithm.act)  # episodes that began under another policy end
        sampler.episode_stats()
        for _ in range(3):
            sampler.collect(algorithm.act)
        return sampler.episode_stats()["rollout/return"]

    before = episodes()
    run(algorithm, sampler, 12)
    collecting = episodes()
    run(algorithm, sampler, 3)
    assert algorithm.stage == 1 and not bool(algorithm.decoder.identity)
    decoded = episodes()
    assert collecting > before + 1.0  # PPO improves the return
    assert abs(decoded - collecting) < 0.25 * (collecting - before)
