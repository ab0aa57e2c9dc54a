"""Diffusion model of whole trajectory segments, sampled under the guidance of a policy (PGD, Jackson et al. 2024).

A segment is a chunk of transitions `[observations, action, reward, terminated]` (`segments.py`), so an unconditional
EDM head learns their distribution p(tau) under the behavior policy, dynamics included. It samples all steps of a
segment together, so that errors do not accumulate as in a one-step model. During sampling, guidance moves the actions,
and only these, towards a target policy pi: the samples approach p(tau) prod pi(a|s)^w, likely under both.

At noise level sigma the model expects the clean actions D with variance v = sigma^2 / (1 + sigma^2) (standardised
actions). Guidance replaces D by the policy's posterior mean of an action observed as D with noise of variance w v
(`posterior_mean.py`). This is the policy's score, blurred by the remaining uncertainty. With Gaussians and a mean that
does not depend on the state the samples follow p pi^w exactly; no guidance scale overshoots the policy.

Use it to show an offline learner the actions of its policy, close to the data. Where the policy prefers actions far
from the dataset, segments stay with the dataset, or become implausible as w grows.

Deviations: the paper adds the gradient of log pi at the noisy action, of unit length and times a coefficient that
decreases with the steps; here blurring bounds the guidance without either. Policies decide in chunks and take
histories. Denoising heads guide by their own score, policies without a density as Gaussians. Other defaults are listed
in docs/methods/composition.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor, nn

from robopolicy.constraints import AtLeastTwo, NonNegative, Positive, Validated
from robopolicy.contrib.offline.posterior_mean import expected_chunk
from robopolicy.contrib.offline.segments import NOTHING, TransitionLayout, nothing
from robopolicy.errors import UserError
from robopolicy.policies.base import Policy, PolicySpec
from robopolicy.policies.heads.edm import EDMConfig, EDMPolicy
from robopolicy.policies.noise import normal

Pull = Callable[[Tensor, float], Tensor]
"""Maps expected clean segments `(B, L, D)` and their variance to guided ones; both normalised."""


def _head() -> EDMConfig:
    return EDMConfig(
        backbone="unet",
        steps=64,
        solver="heun",
        sigma_data=1.0,
        normalization="identity",
        action_normalization="meanstd",
        action_clip=0.0,
    )


@dataclass(frozen=True)
class TrajectoryConfig(Validated):
    """Sizes of a `TrajectoryModel` and its sampler."""

    length: AtLeastTwo = 32  # L, transitions per segment
    head: EDMConfig = field(default_factory=_head)  # network, noise levels and solver
    churn: NonNegative = 80.0  # noise added again while sampling, which corrects errors; 0 samples deterministically
    churn_min: NonNegative = 0.05  # minimum noise level at which it is added
    churn_max: NonNegative = 50.0  # maximum noise level

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.head.action_normalization != "meanstd" or self.head.normalization != "identity":
            raise UserError(
                "Segments are standardised; set head.action_normalization=meanstd and head.normalization=identity."
            )


@dataclass(frozen=True)
class PolicyGuidance(Validated):
    """Guidance of a policy on the actions of synthetic segments."""

    strength: NonNegative = 1.0  # w, guidance scale: exponent of the policy's density; 0 uses the behavior policy
    std: Positive = 0.5  # of policies without a density, around their action, relative to the data's actions


class TrajectoryModel(nn.Module):
    """Generator of segments `(L, D)` in the units of the dataset."""

    low: Tensor  # (A,) range of the dataset's actions, which bounds synthetic ones
    high: Tensor  # (A,)

    def __init__(self, config: TrajectoryConfig, layout: TransitionLayout) -> None:
        super().__init__()
        self.config, self.layout = config, layout
        spec = PolicySpec({NOTHING: (1,)}, layout.size, horizon=config.length, action_horizon=config.length)
        self.head = EDMPolicy(config.head, spec)
        self.register_buffer("low", torch.full((layout.action_dim,), -math.inf))
        self.register_buffer("high", torch.full((layout.action_dim,), math.inf))

    def fit(self, rows: Tensor) -> None:
        """Store the statistics of a dataset's transitions `(F, D)`."""
        statistics = {"mean": rows.mean(0), "std": rows.std(0, unbiased=False)}
        self.head.fit_normalizer({"action": statistics})
        actions = rows[:, self.layout.actions]
        self.low.copy_(actions.amin(0))
        self.high.copy_(actions.amax(0))

    @torch.no_grad()
    def generate(self, count: int, *, pull: Pull | None = None, generator: torch.Generator | None = None) -> Tensor:
        """Draw `count` segments `(count, L, D)` from noise, guided by `pull`."""
        head, device = self.head, self.low.device
        features = head.encode(dict(nothing(count, device)))
        shape = (count, self.config.length, self.layout.size)

        def slope(x: Tensor, sigma: float) -> Tensor:
            data = head.denoise(features, x, x.new_full((count, 1, 1), sigma))
            if pull is not None:
                data = pull(data, sigma**2 / (1 + sigma**2))
            return (x - data) / sigma

        x = head.init_sample(normal(shape, generator, device))
        levels = head.sigmas.tolist()
        for sigma, following in pairwise(levels):
            higher = sigma * (1 + self._churn(sigma))
            if higher > sigma:
                x = x + math.sqrt(higher**2 - sigma**2) * normal(shape, generator, device)
            first = slope(x, higher)
            euler = x + (following - higher) * first
            if head.config.solver == "heun" and following > 0:
                euler = x + (following - higher) * (first + slope(euler, following)) / 2
            x = euler
        rows = head.action_normalizer.denormalize(x)
        columns = self.layout.actions
        rows[..., columns] = rows[..., columns].clamp(self.low, self.high)
        return rows

    def _churn(self, sigma: float) -> float:
        """Relative rise of the noise level before the step from `sigma`, as in Karras et al. (2022)."""
        config = self.config
        inside = config.churn_min <= sigma <= config.churn_max
        return min(config.churn / config.head.steps, math.sqrt(2) - 1) if inside else 0.0


class PolicyPull:
    """Guidance by `policy` of the actions of segments that `model` samples."""

    def __init__(self, model: TrajectoryModel, policy: Policy, guidance: PolicyGuidance) -> None:
        """Check that the policy fits the segments.

        Raises:
            UserError: The policy needs observations that segments lack, has other actions, or is recurrent.
        """
        layout, spec = model.layout, policy.spec
        known = dict(zip(layout.keys, ((size,) for size in layout.sizes), strict=True))
        for key, shape in spec.observation.items():
            if known.get(key) != tuple(shape):
                found = known.get(key, "nothing")
                raise UserError(f"The policy observes '{key}' {tuple(shape)}, but segments contain {found}.")
        if spec.action_dim != layout.action_dim:
            raise UserError(
                f"The policy's actions have {spec.action_dim} dimensions, but segments have {layout.action_dim}."
            )
        if spec.hidden_dim:
            raise UserError("A recurrent policy cannot guide: segments begin in the middle of episodes.")
        self.model, self.policy, self.guidance = model, policy.eval(), guidance
        starts = torch.arange(0, model.config.length, spec.action_horizon)  # frames at which the policy decides
        self._history = (starts[:, None] + torch.arange(1 - spec.obs_horizon, 1)).clamp(min=0)  # (N, To)
        ahead = starts[:, None] + torch.arange(spec.horizon)
        self._future = ahead.clamp(max=model.config.length - 1)  # (N, H)

    def __call__(self, data: Tensor, variance: float) -> Tensor:
        """Guide the actions of `data` `(B, L, D)`, whose uncertainty is `variance`."""
        if not self.guidance.strength:
            return data
        columns, normalizer = self.model.layout.actions, self.model.head.action_normalizer
        scale = normalizer.scale[columns]
        rows = normalizer.denormalize(data)
        wide = self.guidance.strength * variance * scale.square()
        expected = self._expected(rows, wide, self.guidance.std * scale)
        guided = data.clone()
        guided[..., columns] = (expected - normalizer.offset[columns]) / scale
        return guided

    @torch.no_grad()
    def distance(self, rows: Tensor) -> Tensor:
        """RMS distance `(B,)` of the actions of `rows` `(B, L, D)` to the policy's mean actions [data's deviations]."""
        columns = self.model.layout.actions
        scale = self.model.head.action_normalizer.scale[columns]
        expected = self._expected(rows, 1e6 * scale.square(), self.guidance.std * scale)
        return ((rows[..., columns] - expected) / scale).square().mean((1, 2)).sqrt()

    def _expected(self, rows: Tensor, variance: Tensor, std: Tensor) -> Tensor:
        """Posterior mean of the actions `(B, L, A)` of `rows` `(B, L, D)` under the policy, all in env units."""
        layout, spec, batch = self.model.layout, self.policy.spec, len(rows)
        observed = layout.observations(rows[:, self._history].flatten(0, 1))  # {key: (B N, To, n)}
        obs = {key: observed[key] for key in spec.observation}
        chunk = rows[:, self._future][..., layout.actions].flatten(0, 1)  # (B N, H, A)
        found = expected_chunk(self.policy, obs, chunk, variance, std)[:, : spec.action_horizon]
        return found.unflatten(0, (batch, -1)).flatten(1, 2)[:, : rows.shape[1]]
