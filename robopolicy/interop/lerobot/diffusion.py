"""DiffusionPolicy of LeRobot (Chi et al. 2023) with the interface for composition with our heads.

LeRobot aligns a chunk with the first observation of the history, ours begin at the newest. The noise and the points of
`field` have all rows of the network, rolled: the rows of the chunk first, the rows of the past last. The chunk leaves
out the past.

`decode` uses the steps of diffusers' DDIM, or of LeRobot where the policy samples by DDIM. Most policies are meant for
DDPM, which adds noise in every step: then `act` samples it from `generator`, and `decode` is the deterministic sampler
of the same network on the same levels.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from robopolicy.interop.diffusers import PREDICTIONS
from robopolicy.interop.lerobot.policy import LeRobotConfig, LeRobotPolicy, num_executed, observation_of
from robopolicy.interop.lerobot.source import EXTRA, SavedPolicy
from robopolicy.optional import require
from robopolicy.policies.base import Observation, PolicySpec
from robopolicy.policies.composition.sampler_adapter import TimeGrid, variance_preserving_grid
from robopolicy.policies.noise import Randomness
from robopolicy.policies.path import PathEstimate, estimate, level_at, vp_coefficients


class LeRobotDiffusion(LeRobotPolicy):
    """A diffusion policy of LeRobot; verbs `act`, `decode` and `field`."""

    name: ClassVar[str] = "lerobot_diffusion"
    config_class = LeRobotConfig
    kinds: ClassVar[dict[str, str]] = {"diffusion": "num_inference_steps"}
    level_times: Tensor  # (T,) linear time of each level
    level_log_snr: Tensor  # (T,) log(signal power / noise power), falling

    def __init__(self, config: LeRobotConfig, spec: PolicySpec) -> None:
        """Load the policy that `config` names."""
        super().__init__(config, spec)
        model = self.original.policy.diffusion
        self.ancestral = type(model.noise_scheduler).__name__ == "DDPMScheduler"
        # A copy of the scheduler, which stores its grid; the original is shared.
        schedulers = require("diffusers.schedulers.scheduling_ddim", EXTRA)
        self.scheduler = schedulers.DDIMScheduler.from_config(model.noise_scheduler.config)
        self.scheduler.set_timesteps(model.num_inference_steps)
        settings = self.scheduler.config
        self.action_clip = float(settings.clip_sample_range) if settings.clip_sample else 0.0
        every = self.scheduler.alphas_cumprod.double()
        a, b = vp_coefficients(every)
        self.register_buffer("level_times", (a / (a + b)).float(), persistent=False)
        self.register_buffer("level_log_snr", torch.logit(every).float(), persistent=False)

    @classmethod
    def spec_of(cls, source: SavedPolicy, config: LeRobotConfig, action_horizon: int | None = None) -> PolicySpec:
        """Return the specification, with chunks from the newest observation to the end of the network's horizon."""
        history = source.number("n_obs_steps")
        future = source.number("horizon") - history + 1
        return PolicySpec(
            observation_of(source),
            source.action_dim,
            future,
            num_executed(source, action_horizon, future),
            obs_horizon=history,
        )

    @property
    def noise_shape(self) -> tuple[int, int]:
        """All rows of the network, and the action dimensions."""
        return self.spec.horizon + self.spec.obs_horizon - 1, self.spec.action_dim

    @property
    def nfe(self) -> int:
        """Sampler steps K."""
        return int(self.original.policy.diffusion.num_inference_steps)

    def encode(self, obs: Observation) -> Tensor:
        """Features `(B, F)` of the whole history."""
        batch, cameras = self.prepared(obs), list(self.original.policy.config.image_features)
        if cameras:
            batch["observation.images"] = torch.stack([batch[camera] for camera in cameras], dim=-4)
        return self.original.policy.diffusion._prepare_global_conditioning(batch)

    def velocity(self, features: Tensor, x: Tensor, t: Tensor) -> Tensor:
        """Expected data - noise at the point `x` `(B, *noise_shape)` of the linear path at time `t` `(B,)`."""
        a, b, level = level_at(t, self.level_times, self.level_log_snr)
        past, kind = self.spec.obs_horizon - 1, PREDICTIONS[self.scheduler.config.prediction_type]
        own = x.roll(past, 1) * (a + b)
        found = estimate(kind, self._network(own, level, features), own, a, b)
        if self.action_clip:
            data = found.data.clamp(-self.action_clip, self.action_clip)
            found = PathEstimate(data, (own - a * data) / b)
        return found.velocity.roll(-past, 1)

    def sampler_grid(self) -> TimeGrid:
        """Return the times of the levels of DDIM."""
        levels = self.scheduler.alphas_cumprod.double()[self.scheduler.timesteps]
        return variance_preserving_grid(*vp_coefficients(torch.cat([levels, levels.new_ones(1)])))

    def action_bound(self) -> float:
        """Return the largest normalised action; infinite where the scheduler does not clip."""
        return self.action_clip or float("inf")

    def field(self, obs: Observation, x: Tensor, t: Tensor) -> Tensor:
        """Velocity `(B, *noise_shape)` in normalised units."""
        return self.velocity(self.encode(obs), x, t)

    def generate(self, obs: Observation, noise: Tensor) -> Tensor:
        """Normalised actions `(B, H, A)` by DDIM."""
        past, features = self.spec.obs_horizon - 1, self.encode(obs)
        x = noise.roll(past, 1)
        for level in self.scheduler.timesteps:
            x = self.scheduler.step(self._network(x, level.expand(len(x)), features), level, x).prev_sample
        return x[:, past:]

    def act(self, obs: Observation, *, deterministic: bool = False, generator: Randomness = None) -> Tensor:
        """Sample a chunk with the sampler of the policy; DDPM also adds noise with `deterministic`."""
        if not self.ancestral:
            return super().act(obs, deterministic=deterministic, generator=generator)
        past, last = self.spec.obs_horizon - 1, self.nfe - 1
        with torch.no_grad():
            features = self.encode(obs)
            x = self.draw_noise(obs, generator).roll(past, 1)
            for step, level in enumerate(self.scheduler.timesteps):
                output = self._network(x, level.expand(len(x)), features)
                noise = self.draw_noise(obs, generator).roll(past, 1) if step < last else torch.zeros_like(x)
                # DDPM is DDIM with eta = 1 and clipped data; unlike DDPM, its step takes the noise as an argument.
                x = self.scheduler.step(
                    output, level, x, eta=1.0, use_clipped_model_output=True, variance_noise=noise
                ).prev_sample
            return self.in_action_units(x[:, past:])

    def _network(self, x: Tensor, level: Tensor, features: Tensor) -> Tensor:
        """Prediction of the network at training level `(B,)`, integer or fractional, for `x` in its coordinates."""
        return self.original.policy.diffusion.unet(x, level.to(x.device), global_cond=features)
