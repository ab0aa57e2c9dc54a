"""GoRL: online training of a generative policy without likelihoods of its samples (Zhang et al. 2025).

An encoder, a Gaussian over the noise z, is trained by PPO; a frozen decoder, a denoising head, maps z to actions.
Stages alternate. In stage 0 the decoder is the identity, so PPO trains a tanh-Gaussian policy. At the end of a stage
the best encoder collects data, and a new decoder is trained on them from scratch by flow matching (or its own loss),
with N(0, I) as its source, not the encoder's z. The encoder is then reset near N(0, I), where the new decoder
reproduces the old pair, and trained by PPO with a penalty that keeps it near N(0, I).

Use it to train a multimodal policy from scratch with dense rewards and many environments, or
(`skip_first_decoder=false`) to improve an imitated one in stages. Every decoder costs rollouts and also clones bad
actions. With demonstrations and sparse rewards use `dsrl_na` or `reinflow`.

Deviations from the public code: decoders output bounded actions and clip, where the code's outputs pass a tanh, so an
imitated policy can be the first decoder and any of them can be deployed; the critic is kept over stages, because a new
decoder reproduces the old pair; the decoder takes gradient steps while its data are collected; the best encoder is
selected by the returns of training episodes.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from robopolicy.algorithms.common.algorithm import Algorithm, Checkpointable, Metrics, frozen_copy
from robopolicy.algorithms.common.offline import imitation_loss
from robopolicy.algorithms.common.rollout_batch import flatten
from robopolicy.algorithms.ppo import PPO, PPOConfig, ppo_estimator
from robopolicy.constraints import NonNegative, Positive, PositiveInt, Validated
from robopolicy.core.gradients import backward
from robopolicy.critics.value import ValueConfig
from robopolicy.data.batches import Rollout
from robopolicy.device import move
from robopolicy.errors import UserError
from robopolicy.mirror_symmetry import MirrorSymmetry
from robopolicy.policies.base import Info, Observation, Policy
from robopolicy.policies.heads.gaussian import GaussianConfig, GaussianPolicy
from robopolicy.policies.heads.generative import GenerativePolicy
from robopolicy.policies.wrappers.latent import LatentPolicy, NoiseSpace
from robopolicy.policies.wrappers.nested import describe, rebuild
from robopolicy.policies.wrappers.staged import StagedDecoder

UNBOUNDED = NoiseSpace(bound=0.0)


@dataclass(frozen=True)
class DecoderStageConfig(Validated):
    """Settings of PPO in the stages with a decoder."""

    clip: Positive = 0.3  # ratio bounds
    grad_clip: Positive = 1.0  # largest norm of the joint gradient
    penalty: NonNegative = 1e-3  # weight of mean(mu^2) + mean(sigma^2) of the encoder


@dataclass(frozen=True)
class GoRLConfig(PPOConfig):
    """Settings of GoRL; the settings of PPO apply to the encoder."""

    stages: tuple[PositiveInt, ...] = (60, 60, 30, 30)  # PPO updates per stage; the last stage continues to the end
    decoder_updates: PositiveInt = 20  # updates between stages that collect data and train the next decoder
    decoder_steps: PositiveInt = 200  # gradient steps of the decoder per such update
    decoder_batch: PositiveInt = 1024  # chunks per gradient step of the decoder
    decoder_lr: Positive = 3e-4  # Adam learning rate of the decoder
    decoder_memory: PositiveInt = 1_000_000  # number of latest chunks stored as data of the decoder
    skip_first_decoder: bool = True  # stage 0 has no decoder; false: the given policy is the first decoder
    clip: Positive = 0.15  # ratio bounds in stage 0
    grad_clip: Positive = 0.5  # largest norm of the joint gradient in stage 0
    penalty: NonNegative = 5e-4  # weight of mean(mu^2) + mean(sigma^2) of the encoder in stage 0
    decoder_stage: DecoderStageConfig = DecoderStageConfig()  # settings of later stages
    encoder: GaussianConfig = field(  # network of the encoder
        default_factory=lambda: GaussianConfig(hidden=(32, 32, 32, 32), activation="silu", state_dependent_std=True)
    )
    critic: ValueConfig = field(  # network of the critic (paper: 5 x 256)
        default_factory=lambda: ValueConfig(hidden=(256, 256, 256), activation="silu")
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.stages:
            raise UserError("algorithm.stages must list at least one number of updates, got none.")


def latent_penalty(encoder: GaussianPolicy, obs: Observation) -> Tensor:
    """`mean(mu^2) + mean(sigma^2)` of the encoder, to keep its noise where the decoder was trained."""
    mean, log_std = encoder.distribution(obs)
    return mean.square().mean() + (2 * log_std).exp().mean()


class DecoderTrainer:
    """The next decoder, its optimiser and its training data."""

    def __init__(self, head: GenerativePolicy, config: GoRLConfig) -> None:
        self.config = config
        self.head = copy.deepcopy(head).requires_grad_(True)
        self.optimizer = torch.optim.Adam(self.head.parameters(), lr=config.decoder_lr)
        self.obs: dict[str, Tensor] = {}  # {key: (M, To, ...)}
        self.chunk: Tensor | None = None  # (M, H, A)

    def __len__(self) -> int:
        return 0 if self.chunk is None else len(self.chunk)

    def restart(self, encoder: GaussianPolicy, seed: int) -> None:
        """Reset the weights and clear the data; observation statistics are copied from the encoder."""
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            fresh = rebuild(describe(self.head))
        assert isinstance(fresh, GenerativePolicy)
        fresh.action_normalizer.load_state_dict(self.head.action_normalizer.state_dict())
        fresh.encoder.copy_stats(encoder.encoder)
        self.head.load_state_dict(fresh.state_dict())
        self.optimizer.state.clear()
        self.obs, self.chunk = {}, None

    def add(self, obs: Observation, chunk: Tensor) -> None:
        """Add executed chunks and drop the oldest beyond `decoder_memory`."""
        keep = self.config.decoder_memory
        if self.chunk is not None:
            obs = {key: torch.cat([self.obs[key], value]) for key, value in obs.items()}
            chunk = torch.cat([self.chunk, chunk])
        self.obs, self.chunk = {key: value[-keep:] for key, value in obs.items()}, chunk[-keep:]

    def train(self, generator: torch.Generator, previous: int = 0) -> Tensor:
        """Take `decoder_steps` gradient steps, after `previous` calls; returns the mean imitation loss."""
        assert self.chunk is not None
        config, losses = self.config, list[Tensor]()
        for step in range(config.decoder_steps):
            progress = (previous + step / config.decoder_steps) / config.decoder_updates
            index = torch.randint(len(self.chunk), (config.decoder_batch,), generator=generator)
            index = index.to(self.chunk.device)
            obs = {key: value[index] for key, value in self.obs.items()}
            loss = imitation_loss(self.head, obs, self.chunk[index], generator=generator, progress=progress).mean()
            self.optimizer.zero_grad(set_to_none=True)
            backward(loss)
            self.optimizer.step()
            losses.append(loss.detach())
        return torch.stack(losses).mean()

    def state_dict(self) -> dict[str, Any]:
        """Weights, moments and data."""
        state = {"head": self.head.state_dict(), "optimizer": self.optimizer.state_dict()}
        return {**state, "obs": dict(self.obs), "chunk": self.chunk}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`."""
        self.head.load_state_dict(state["head"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.obs, self.chunk = move((dict(state["obs"]), state["chunk"]), self.head.device)


class EpisodeReturns:
    """Returns of the episodes that end in a rollout; episodes continue over rollouts."""

    def __init__(self) -> None:
        self.running: Tensor | None = None  # (N,)
        self.fresh: Tensor | None = None  # (N,) bool, whether the running episodes count; None: all

    def discard(self) -> None:
        """Exclude the running episodes, which another policy began."""
        self.fresh = None if self.running is None else torch.zeros_like(self.running, dtype=torch.bool)

    def reset_episodes(self) -> None:
        """Discard the running episodes, whose remaining steps will not be collected."""
        self.running = self.fresh = None

    def update(self, rollout: Rollout) -> float:
        """Mean return of the finished episodes, NaN if there are none."""
        start = torch.zeros_like(rollout.reward[0])
        running = start if self.running is None else self.running.to(start.device)
        fresh = torch.ones_like(start, dtype=torch.bool) if self.fresh is None else self.fresh.to(start.device)
        returns: list[Tensor] = []
        finished: list[Tensor] = []
        for reward, end in zip(rollout.reward, rollout.terminated | rollout.truncated, strict=True):
            running = running + reward
            returns.append(running)
            finished.append(end & fresh)
            running, fresh = torch.where(end, 0.0, running), fresh | end
        self.running, self.fresh = running, fresh
        return float(torch.stack(returns)[torch.stack(finished)].mean())

    def state_dict(self) -> dict[str, Any]:
        """Running returns and their mask."""
        return {"running": self.running, "fresh": self.fresh}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`."""
        self.running, self.fresh = state["running"], state["fresh"]


class GoRL(Algorithm):
    """PPO on the noise of a decoder that is retrained between stages."""

    name = "gorl"
    config_class = GoRLConfig
    data_source = "rollout"
    heads = ("decode",)
    reference = "zhang2025gorl"
    may_regress = True  # at the start of a stage
    config: GoRLConfig
    policy: LatentPolicy

    def __init__(self, config: GoRLConfig, policy: Policy, *, total_updates: int) -> None:
        """Use `policy`, a denoising head, as the type of the decoders, or continue with a policy of GoRL."""
        super().__init__(latent_policy(policy, config), total_updates=total_updates)
        self.config = config
        self.ppo = PPO(config, self.policy, total_updates=total_updates)
        self.generator = self.ppo.generator  # shared, so that the order of draws is fixed
        self.step_discount = self.ppo.step_discount
        assert isinstance(self.policy.base, StagedDecoder)
        self.decoder = self.policy.base
        self.decoder_trainer = DecoderTrainer(self.decoder.head, config)
        self.best = frozen_copy(self.policy.actor)
        self.returns = EpisodeReturns()
        self.best_return = -math.inf  # of this stage
        self.stage, self.stage_updates = 0, 0  # index of the stage, updates within it
        self._apply_stage()

    @property
    def training_decoder(self) -> bool:
        """Whether the next decoder is being trained."""
        last = self.stage >= len(self.config.stages) - 1
        return not last and self.stage_updates >= self.config.stages[self.stage]

    def attach_symmetry(self, mirror: MirrorSymmetry | None) -> None:
        """Pass the mirror to PPO, which raises an error for this policy if symmetry is configured."""
        self.ppo.attach_symmetry(mirror)

    def update(self, batch: Rollout) -> Metrics:
        """Update the encoder by PPO, or train the next decoder, on a rollout."""
        mean_return = self.returns.update(batch)
        if self.training_decoder:
            metrics = self._train_decoder(batch)
        else:
            self._keep_best(mean_return)  # weights of the rollout
            metrics = self.ppo.update(batch)
        self.updates = self.ppo.updates = self.updates + 1
        self.stage_updates += 1
        if self.training_decoder:
            encoder_updates = self.config.stages[self.stage]
            if self.stage_updates == encoder_updates:
                self._begin_decoder()
            elif self.stage_updates == encoder_updates + self.config.decoder_updates:
                self._begin_stage()
        return metrics | {"train/stage": float(self.stage)}

    def _keep_best(self, mean_return: float) -> None:
        if mean_return > self.best_return:
            self.best_return = mean_return
            self.best.load_state_dict(self.policy.actor.state_dict())

    def _begin_decoder(self) -> None:
        """Restore the best encoder, whose chunks are the data of the next decoder."""
        if self.best_return > -math.inf:
            self.policy.actor.load_state_dict(self.best.state_dict())
        self.decoder_trainer.restart(self.policy.actor, self._seed())

    def _train_decoder(self, batch: Rollout) -> Metrics:
        obs = flatten(batch.obs)
        w = batch.record["noise"].flatten(0, 1)
        self.decoder_trainer.add(obs, self.policy.decode_free_noise(obs, w))
        self.ppo.update_reward_scale(batch)
        loss = self.decoder_trainer.train(self.generator, self.stage_updates - self.config.stages[self.stage])
        return {"decoder/loss": float(loss), "decoder/chunks": float(len(self.decoder_trainer))}

    def _begin_stage(self) -> None:
        """Set the new decoder and reset the encoder, except for its observation statistics."""
        self.decoder.head.load_state_dict(self.decoder_trainer.head.state_dict())
        self.decoder.identity.fill_(False)
        self.decoder_trainer.obs, self.decoder_trainer.chunk = {}, None
        actor = self.policy.actor
        with torch.random.fork_rng():
            torch.manual_seed(self._seed())
            fresh = GaussianPolicy(actor.config, actor.spec)
        fresh.encoder.copy_stats(actor.encoder)
        fresh.action_normalizer.load_state_dict(actor.action_normalizer.state_dict())
        actor.load_state_dict(fresh.state_dict())
        for parameter in actor.parameters():
            self.ppo.optimizer.state.pop(parameter, None)
        self.stage, self.stage_updates, self.best_return = self.stage + 1, 0, -math.inf
        self.returns.discard()
        self._apply_stage()

    def _apply_stage(self) -> None:
        """Apply the settings of the current stage."""
        config, penalty = self.config, self.config.penalty
        if not bool(self.decoder.identity):
            later = config.decoder_stage
            config, penalty = replace(config, clip=later.clip, grad_clip=later.grad_clip), later.penalty
        self.ppo.config, self.ppo.estimator = config, ppo_estimator(config)
        self.ppo.regularizer = partial(self.latent_loss, penalty) if penalty else None

    def latent_loss(self, weight: float, obs: Observation) -> tuple[Tensor, Info]:
        """Weighted penalty on the encoder, and metrics."""
        penalty = latent_penalty(self.policy.actor, obs)
        return weight * penalty, {"penalty": penalty.detach()}

    def _seed(self) -> int:
        return int(torch.randint(2**31, (), generator=self.generator))

    def checkpoint_items(self) -> Mapping[str, Checkpointable]:
        """Items of PPO, the next decoder, the best encoder and the running returns."""
        own = {"fit": self.decoder_trainer, "best": self.best, "returns": self.returns}
        return {**self.ppo.checkpoint_items(), **own}

    def state_dict(self) -> dict[str, Any]:
        """States of all checkpoint items and the position in the schedule."""
        position = {"stage": self.stage, "played": self.stage_updates, "best_return": self.best_return}
        return {**super().state_dict(), **position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`."""
        super().load_state_dict(state)
        self.ppo.updates = self.updates
        self.stage, self.stage_updates = int(state["stage"]), int(state["played"])
        self.best_return = float(state["best_return"])
        self._apply_stage()


def latent_policy(policy: Policy, config: GoRLConfig) -> LatentPolicy:
    """Build an encoder for the decoder `policy`, a denoising head with statistics, or return a policy of GoRL."""
    if isinstance(policy, LatentPolicy) and isinstance(policy.base, StagedDecoder):
        return policy
    if not isinstance(policy, GenerativePolicy):
        raise UserError(f"GoRL needs a denoising head, e.g. flow, got '{policy.name}'; use ppo for a Gaussian.")
    normalizer = policy.encoder.normalizer
    if not bool(normalizer.fitted):
        if normalizer.mode != "running":
            raise UserError(
                f"A decoder with normalization '{normalizer.mode}' needs statistics; set policy.normalization=running "
                "to learn from scratch, or imitate first."
            )
        normalizer.fitted.fill_(True)  # unused by the identity, and fitted when the decoder is trained
    decoder = StagedDecoder.wrap(policy, identity=config.skip_first_decoder)
    return LatentPolicy.from_base(decoder, UNBOUNDED, config.encoder)
