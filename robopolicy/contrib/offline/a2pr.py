"""A2PR: TD3 on a dataset, regularised to the better of the data's and a generated action (Liu et al. 2024).

A variational autoencoder (VAE) learns the actions of the data whose advantage is positive. It maps the actor's chunk to
a similar chunk of the data. The actor is regularised to the one of this and the batch's chunk with the greater
advantage, and not at all where neither advantage is positive, so that bad data does not constrain it.

Use it for offline data of mixed quality, above all where good actions are the minority. It trains two more networks
than td3_bc, and its gate depends on the accuracy of V and Q. Do not use it for multimodal data that one deterministic
actor cannot represent.

The formulas follow the public code. It adds the two conditions of the gate as booleans, which is a logical or in torch,
and the same here; a sum of numbers would double the regulariser where both hold. Deviations: the target of the
regulariser is a constant (the code: a gradient passes through the VAE into the actor); V and the VAE learn after the
critic's step, and V draws its own next action; chunks replace single actions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from robopolicy.algorithms.common.algorithm import Checkpointable, Metrics, Observer
from robopolicy.algorithms.common.off_policy import UpdateStats, optimizer_step
from robopolicy.algorithms.td3 import q1, smoothed_chunk
from robopolicy.algorithms.td3_bc import TD3BC, TD3BCConfig, chunk_distance, executed_actions
from robopolicy.constraints import NonNegative, NonNegativeInt, Positive, PositiveInt, Validated
from robopolicy.critics.q import CriticConfig, copy_normalizers
from robopolicy.critics.value import ValueConfig, ValueNet
from robopolicy.data.batches import Transitions
from robopolicy.nets.mlp import MLP
from robopolicy.nets.vision import VisionConfig
from robopolicy.policies.base import Info, Observation, Policy
from robopolicy.policies.noise import Randomness, normal


@dataclass(frozen=True)
class ChunkVAEConfig(Validated):
    """Settings of the VAE of good actions."""

    hidden: tuple[PositiveInt, ...] = (750, 750)  # of encoder and decoder
    latent: NonNegativeInt = 0  # latent dimensions; 0 means two per number of the executed chunk
    lr: Positive = 1e-3  # learning rate
    weight: Positive = 1.5  # of the reconstruction, relative to half the KL; 1 for Hopper and HalfCheetah
    vision: VisionConfig = field(default_factory=VisionConfig)


@dataclass(frozen=True)
class A2PRConfig(TD3BCConfig):
    """Settings of A2PR; defaults are the public code's for Walker2d."""

    critic: CriticConfig = field(
        default_factory=lambda: CriticConfig(hidden=(256, 256, 256, 256), activation="relu", layer_norm=False)
    )
    value: ValueConfig = field(
        default_factory=lambda: ValueConfig(hidden=(256, 256, 256, 256), activation="relu", orthogonal_init=False)
    )
    vae: ChunkVAEConfig = field(default_factory=ChunkVAEConfig)
    reg_coef: NonNegative = 1.0  # weight of the regulariser; .4 for Hopper


class ChunkVAE(nn.Module):
    """Conditional VAE of executed chunks `(B, n, A)` in normalised units, bounded to [-1, 1]."""

    def __init__(self, config: ChunkVAEConfig, policy: Policy) -> None:
        super().__init__()
        spec = policy.spec
        self.shape = (spec.action_horizon, spec.action_dim)
        self.encoder, _ = copy_normalizers(policy, config.vision)  # of observations
        features, size = spec.obs_horizon * self.encoder.feature_dim, spec.action_horizon * spec.action_dim
        self.latent = config.latent or 2 * size
        self.recognition = MLP(features + size, config.hidden, 2 * self.latent, activation="relu")
        self.decoder = MLP(features + self.latent, config.hidden, size, activation="relu")

    def forward(
        self, obs: Observation, action: Tensor, *, generator: Randomness = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Reconstruction `(B, n, A)` of `action`, and mean and log standard deviation `(B, L)` of its latent."""
        features = self.encoder(obs).flatten(1)
        mean, log_std = self.recognition(torch.cat([features, action.flatten(1)], 1)).chunk(2, 1)
        log_std = log_std.clamp(-4, 15)
        latent = mean + log_std.exp() * normal(mean.shape, generator, mean.device)
        decoded = self.decoder(torch.cat([features, latent], 1)).tanh()
        return decoded.unflatten(1, self.shape), mean, log_std


def vae_loss(decoded: Tensor, action: Tensor, good: Tensor, mean: Tensor, log_std: Tensor, weight: float) -> Tensor:
    """Reconstruction loss of the rows with `good` `(B,)`, plus half the KL of all rows per latent dimension."""
    error = (decoded - action).square().flatten(1).mean(1)
    divergence = 0.5 * (mean.square() + (2 * log_std).exp() - 1 - 2 * log_std).mean()
    return weight * (error * good).mean() + 0.5 * divergence


def better_of(generated: Tensor, own: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Masks `(B,)`: whether the generated chunk is at least as good as the data's, and whether the better one is good.

    Args:
        generated: (B,) Q of the generated chunks.
        own: (B,) Q of the data's chunks.
        value: (B,) V of the observations.
    """
    return generated >= own, (generated >= value) | (own > value)


class A2PR(TD3BC):
    """TD3 regularised to good actions only."""

    name = "a2pr"
    config_class = A2PRConfig
    data_source = "replay"
    heads = ("squashed_gaussian",)
    reference = "liu2024a2pr"
    config: A2PRConfig

    def __init__(self, config: A2PRConfig, policy: Policy, *, total_updates: int) -> None:
        """Build TD3's networks, V and the VAE for a squashed Gaussian `policy`."""
        super().__init__(config, policy, total_updates=total_updates)
        self.critic.eval()  # evaluated without dropout
        self.value = ValueNet.for_policy(config.value, policy)
        self.vae = ChunkVAE(config.vae, policy)
        self.value_optimizer = torch.optim.Adam(self.value.parameters(), lr=config.critic_lr, fused=True)
        self.vae_optimizer = torch.optim.Adam(self.vae.parameters(), lr=config.vae.lr, fused=True)

    def fit_models(self, batch: Transitions) -> Info:
        """Take a step of V to the lesser of two targets, and one of the VAE; return the log."""
        value_loss = ((self.value(batch.obs) - self.value_target(batch)).square() * batch.weight).mean()
        optimizer_step(self.value_optimizer, value_loss)
        action = executed_actions(self.policy, batch.chunk)
        with torch.no_grad():
            good = q1(self.critic, batch.obs, batch.chunk) > self.value(batch.obs)
        decoded, mean, log_std = self.vae(batch.obs, action, generator=self.generator)
        generation_loss = vae_loss(decoded, action, good, mean, log_std, self.config.vae.weight)
        optimizer_step(self.vae_optimizer, generation_loss)
        return {"value_loss": value_loss, "vae_loss": generation_loss, "good": good.float().mean()}

    def update(self, batch: Transitions) -> Metrics:
        """Take steps of critic, V and VAE on consecutive minibatches, with delayed actor steps in between."""
        stats = UpdateStats()
        for part in self.minibatches(batch):
            stats.critic(self.critic_step(part) | self.fit_models(part))
            if self.policy_due():
                loss, info = self.actor_loss(part)
                optimizer_step(self.optimizer, loss)
                self._policy_update.step(self.config.target_policy_tau)
                self._policy_update.copy_buffers()
                stats.actor(loss=loss, **info)
        return self.finish(batch, stats)

    @torch.no_grad()
    def value_target(self, batch: Transitions) -> Tensor:
        """Lesser target `(B,)` of the online and the target critic."""
        chunk = smoothed_chunk(self.target_policy, batch.next_obs, self.config, self.generator)
        online = batch.reward + batch.discount * self.critic(batch.next_obs, chunk).amin(0)
        return torch.minimum(online, self.bootstrap(batch, chunk))

    @torch.no_grad()
    def regularization_target(self, batch: Transitions, chunk: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Target of the regulariser for `chunk`: chunk `(B, n, A)`, mask `(B, n)`, and whether it applies `(B,)`."""
        steps = self.policy.spec.action_horizon
        decoded, _, _ = self.vae(batch.obs, executed_actions(self.policy, chunk), generator=self.generator)
        generated = self.policy.action_normalizer.denormalize(decoded)
        q_generated = q1(self.critic, batch.obs, generated)
        q_own = q1(self.critic, batch.obs, batch.chunk)
        take, gate = better_of(q_generated, q_own, self.value(batch.obs))
        target = torch.where(take[:, None, None], generated, batch.chunk[:, :steps])
        return target, torch.where(take[:, None], 1.0, batch.mask[:, :steps]), gate

    def penalty(self, batch: Transitions, chunk: Tensor) -> tuple[Tensor, Info]:
        """Squared distance to the better action, 0 where neither is good."""
        target, mask, gate = self.regularization_target(batch, chunk)
        active = gate.to(chunk.dtype)
        distance = chunk_distance(self.policy, chunk, target, mask)
        return self.config.reg_coef * active * distance, {"pulled": active.mean()}

    def observers(self) -> tuple[Observer, ...]:
        """The shared observers, V and the VAE."""
        return *super().observers(), self.value, self.vae.encoder

    def checkpoint_items(self) -> Mapping[str, Checkpointable]:
        """Items of TD3, V, the VAE and their optimisers."""
        return {
            **super().checkpoint_items(),
            "value": self.value,
            "value_optimizer": self.value_optimizer,
            "vae": self.vae,
            "vae_optimizer": self.vae_optimizer,
        }
