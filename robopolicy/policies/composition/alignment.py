"""Alignment of the parents of a composition: observations and action coordinates.

All parents are evaluated on the linear path of one space, the common coordinates z of normalised actions. A parent with
another normaliser uses `ratio * z + shift`. If all entries of `ratio` equal one number r, noise that is standard normal
in z is r times as strong for the parent, which corresponds to another time of its path: the conversion is exact. If
they differ, a parent trained on equal noise in all coordinates is evaluated at the time that fits their geometric mean.
A single Gaussian then keeps its mean, and its standard deviation is wrong by `ratio / mean` per coordinate. The common
scale is the geometric mean of the scales of the parents with their weights, so that these factors cancel: Gaussians of
one width are composed with that width for any normalisers. Differences above `MAX_MISMATCH` raise an error.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from robopolicy.errors import UserError
from robopolicy.nets.encoder import EMBEDDING_PREFIX, Layout, ObservationEncoder
from robopolicy.nets.normalizer import Normalizer, unfitted_normalizers
from robopolicy.policies.base import Observation, Policy, PolicySpec
from robopolicy.policies.composition.joint_field import Field
from robopolicy.policies.composition.sampler_adapter import units
from robopolicy.policies.heads.consistency import ConsistencyPolicy
from robopolicy.policies.heads.generative import GenerativePolicy

MAX_MISMATCH = 4.0  # maximum factor between the noise of a coordinate and the noise that its parent expects


def check_parent(policy: Policy, name: str) -> None:
    """Raise a `UserError` if a policy has no velocity field, or one in unknown units."""
    if isinstance(policy, ConsistencyPolicy):
        raise UserError(
            f"{name} is a consistency policy, which has no score along the denoising path; "
            "compose the policy it was distilled from."
        )
    if type(policy).field is Policy.field:
        raise UserError(
            f"{name} is a policy '{policy.name}' without velocities; composition needs generative heads (flow, "
            "shortcut, meanflow, diffusion, edm), or another policy with field and action_normalizer."
        )
    units(policy)
    if policy.noise_shape[1] != policy.spec.action_dim:
        raise UserError(
            f"{name} denoises {policy.noise_shape[1]} numbers for {policy.spec.action_dim} action dimensions; only "
            "policies that denoise actions can be composed."
        )
    unfitted = unfitted_normalizers(policy)
    if unfitted:
        raise UserError(f"{name} has no normaliser statistics ('{unfitted[0]}' is not fitted); fit it to a dataset.")


def number_parents(count: int) -> tuple[str, ...]:
    """Names of parents in messages where they have no others."""
    return tuple(f"Parent {number}" for number in range(1, count + 1))


def joint_spec(
    specs: Sequence[PolicySpec], action_horizon: int | None = None, names: Sequence[str] | None = None
) -> PolicySpec:
    """Joint specification of a composition of policies with these specifications, which must be compatible.

    It has all observations and the longest chunk; `action_horizon` is by default the shortest of the parents. Messages
    call the parents by `names`.
    """
    names = names or number_parents(len(specs))
    observation: dict[str, tuple[int, ...]] = {}
    first: dict[str, str] = {}  # observation -> first parent with it
    for name, spec in zip(names, specs, strict=True):
        if spec.action_dim != specs[0].action_dim:
            raise UserError(
                f"{name} has {spec.action_dim} action dimensions, {names[0]} has {specs[0].action_dim}; only policies "
                "for the same actions can be composed."
            )
        for key, shape in spec.observation.items():
            known, other = observation.setdefault(key, tuple(shape)), first.setdefault(key, name)
            if known != tuple(shape):
                raise UserError(
                    f"{name} expects '{key}' of shape {tuple(shape)}, {other} expects {known}; only policies with "
                    "equal observations can be composed."
                )
    horizon = max(spec.horizon for spec in specs)
    action_horizon = min(spec.action_horizon for spec in specs) if action_horizon is None else action_horizon
    if not 1 <= action_horizon <= horizon:
        raise UserError(
            f"action_horizon must lie in [1, {horizon}], the longest chunk of the parents, got {action_horizon}."
        )
    return PolicySpec(
        observation, specs[0].action_dim, horizon, action_horizon, max(spec.obs_horizon for spec in specs)
    )


def parent_observation(obs: Observation, spec: PolicySpec) -> Observation:
    """Select the keys and the newest steps of `obs` that a parent with `spec` uses."""
    return {key: obs[key][:, -spec.obs_horizon :] for key in spec.observation}


def check_unconditioned(policy: Policy, name: str) -> None:
    """Raise a `UserError` if a policy has no embeddings, or was never trained without them."""
    if not any(key.startswith(EMBEDDING_PREFIX) for key in policy.spec.observation):
        raise UserError(f"{name} has no '{EMBEDDING_PREFIX}*' observation that could be removed.")
    if isinstance(policy, GenerativePolicy) and not policy.config.embedding.dropout:
        raise UserError(
            f"{name} was not trained with embedding dropout, so it needs its embeddings; imitate with "
            "policy.embedding.dropout=0.1."
        )


def joint_encoder(policies: Sequence[Policy], spec: PolicySpec) -> ObservationEncoder | None:
    """Joint observation statistics of all parents, for critics and actors; None if the first parent has them all.

    If several parents have an observation, the statistics of the first one are used.
    """
    known = {key: spec.observation[key] for key in Layout.of(spec.observation).normalized}
    if known.keys() <= policies[0].spec.observation.keys():
        return None
    return ObservationEncoder(known, normalization="meanstd")


def gather_statistics(joint: ObservationEncoder, policies: Sequence[Policy]) -> None:
    """Copy the statistics of `policies` into the `joint_encoder`."""
    encoders = [part for policy in policies for part in policy.modules() if isinstance(part, ObservationEncoder)]
    for key, columns in joint.columns().items():
        source = next(encoder for encoder in encoders if key in encoder.columns())
        for name in ("offset", "scale"):
            getattr(joint.normalizer, name)[columns] = getattr(source.normalizer, name)[source.columns()[key]]
        own, other = joint.encoder_of(key), source.encoder_of(key)
        if own is not None and other is not None:
            own.load_state_dict(other.state_dict())
    joint.normalizer.fitted.fill_(not any(unfitted_normalizers(policy) for policy in policies))


@dataclass(frozen=True)
class Frame:
    """Map from shared coordinates to the coordinates of one parent, `ratio * z + shift`."""

    ratio: Tensor  # (A,)
    shift: Tensor  # (A,)
    level: float  # geometric mean of the ratio: relative strength of noise for the parent

    def time(self, t: Tensor) -> Tensor:
        """Time of the path of the parent at time `t` of the common path."""
        return t / (t + (1 - t) * self.level)

    def to_parent(self, x: Tensor, t: Tensor) -> Tensor:
        """Point `(B, H, A)` of the path of the parent for the point `x` of the common path at time `t` `(B, 1, 1)`."""
        return (self.ratio * x + t * self.shift) / (t + (1 - t) * self.level)

    def to_shared(self, velocity: Tensor, x: Tensor, t: Tensor) -> Tensor:
        """Convert `velocity` of the parent to common coordinates, at the point `x` and time `t` `(B, 1, 1)` there.

        Both paths have the same clean chunk: `x + (1 - t) * velocity` in either coordinates.
        """
        converted = x * (1 - self.level) + (self.level / self.ratio) * (velocity - self.shift)
        return converted / (t + (1 - t) * self.level)


@dataclass(frozen=True)
class Coordinates:
    """Common coordinates of M parents: `action = offset + scale * z`, and the maps to each parent."""

    offset: Tensor  # (A,)
    scale: Tensor  # (A,)
    ratio: Tensor  # (M, A)
    shift: Tensor  # (M, A)
    levels: tuple[float, ...]  # M; all 1 without any conversion if the parents share one normaliser


def common_coordinates(
    normalizers: Sequence[Normalizer], weights: Sequence[float], names: Sequence[str] | None = None
) -> Coordinates:
    """Compute common coordinates (see the module); raise a `UserError` if the units of the parents differ too much.

    Messages call the parents by `names`.
    """
    offsets = torch.stack([normalizer.offset.double() for normalizer in normalizers])  # (M, A)
    scales = torch.stack([normalizer.scale.double() for normalizer in normalizers])
    if bool((offsets == offsets[0]).all() & (scales == scales[0]).all()):
        ones, zeros = torch.ones_like(scales), torch.zeros_like(scales)
        return Coordinates(offsets[0], scales[0], ones, zeros, (1.0,) * len(normalizers))
    fractions = scales.new_tensor(weights).abs()[:, None]
    fractions = fractions / fractions.sum()
    offset, log_scale = (fractions * offsets).sum(0), (fractions * scales.log()).sum(0)
    log_ratio = log_scale - scales.log()
    log_level = log_ratio.mean(1, keepdim=True)
    _check_mismatch((log_ratio - log_level).abs(), names or number_parents(len(normalizers)))
    levels = tuple(log_level.exp().flatten().tolist())
    return Coordinates(offset, log_scale.exp(), log_ratio.exp(), (offset - offsets) / scales, levels)


def _check_mismatch(log_mismatch: Tensor, names: Sequence[str]) -> None:
    worst = math.exp(float(log_mismatch.max()))
    if worst > MAX_MISMATCH:
        parent, dimension = divmod(int(log_mismatch.argmax()), log_mismatch.shape[1])
        raise UserError(
            f"{names[parent]} normalises action dimension {dimension} {worst:.1f} times differently from its other "
            f"dimensions, compared with the common scale; up to {MAX_MISMATCH:g} times can be composed, so train the "
            "parents with the same action statistics."
        )


def to_shared_field(field: Field, frame: Frame) -> Field:
    """Velocity field of a parent in common coordinates."""

    def converted(x: Tensor, t: Tensor) -> Tensor:
        row = t[:, None, None]
        return frame.to_shared(field(frame.to_parent(x, row), frame.time(t)), x, row)

    return converted
