"""Alignment of the parents of a composition: observations and action coordinates.

All parents are read on the linear path of one space, the common coordinates z of normalised actions. A parent whose
normaliser is another one sees `ratio * z + shift`. If all entries of `ratio` are the same number r, noise that is
standard normal in z is r times as strong there, which is nothing but another time of the parent's path: the conversion
is exact. If they differ, a parent trained on equal noise in all coordinates has no answer to the question asked; it is
read at the time that fits their geometric mean. A single Gaussian read so keeps its mean, and its standard deviation
is off by `ratio / mean` per coordinate. The common scale is the geometric mean of the parents' scales, weighed as the
parents are, so that these factors cancel: Gaussians of one width are composed with that width whatever their
normalisers. Parents that differ by more than `MOST_MISMATCH` are refused.
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

MOST_MISMATCH = 4.0  # largest factor between the noise a coordinate has and the noise its parent expects

# What goes in.


def check_parent(policy: Policy, place: str) -> None:
    """Refuse a policy that cannot be composed.

    Raises:
        UserError: It describes no velocity of a noisy chunk, or hides the units it describes it in.
    """
    if isinstance(policy, ConsistencyPolicy):
        raise UserError(
            f"{place} is a consistency policy, which knows where a noisy chunk ends but not the score along the way; "
            "compose the policy it was distilled from."
        )
    if type(policy).field is Policy.field:
        raise UserError(
            f"{place} is a policy '{policy.name}', which knows no velocities; composing needs generative heads (flow, "
            "shortcut, meanflow, diffusion, edm), or another policy with field and action_normalizer."
        )
    units(policy)
    if policy.noise_shape[1] != policy.spec.action_dim:
        raise UserError(
            f"{place} denoises {policy.noise_shape[1]} numbers for {policy.spec.action_dim} action dimensions; only "
            "policies that denoise actions can be composed."
        )
    unfitted = unfitted_normalizers(policy)
    if unfitted:
        raise UserError(f"{place} has no normaliser statistics ('{unfitted[0]}' never saw data); fit it to a dataset.")


def joint_spec(specs: Sequence[PolicySpec], action_horizon: int | None = None) -> PolicySpec:
    """Joint specification of a composition of policies with these specifications.

    It needs all their observations, has the longest chunk and, unless `action_horizon` is given, executes as many
    actions of it as the most cautious parent.

    Raises:
        UserError: They disagree about an observation or about the actions.
    """
    observation: dict[str, tuple[int, ...]] = {}
    for number, spec in enumerate(specs, 1):
        if spec.action_dim != specs[0].action_dim:
            raise UserError(
                f"Parent {number} has {spec.action_dim} action dimensions, parent 1 has {specs[0].action_dim}; only "
                "policies for the same actions can be composed."
            )
        for key, shape in spec.observation.items():
            known = observation.setdefault(key, tuple(shape))
            if known != tuple(shape):
                raise UserError(
                    f"Parent {number} expects '{key}' of shape {tuple(shape)}, an earlier parent expects {known}; only "
                    "policies that mean the same by an observation can be composed."
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


def part_of(obs: Observation, spec: PolicySpec) -> Observation:
    """What a parent of that specification sees of `obs`: its own keys, and as many of the newest steps as it knows."""
    return {key: obs[key][:, -spec.obs_horizon :] for key in spec.observation}


def check_unconditioned(policy: Policy, place: str) -> None:
    """Refuse to read a policy without its embeddings that has never learned what that means.

    Raises:
        UserError: It has none, or always saw them.
    """
    if not any(key.startswith(EMBEDDING_PREFIX) for key in policy.spec.observation):
        raise UserError(f"{place} has no '{EMBEDDING_PREFIX}*' observation that could be left out.")
    if isinstance(policy, GenerativePolicy) and not policy.config.embedding.dropout:
        raise UserError(
            f"{place} never saw zeros for embeddings, so it cannot be read without them; imitate with "
            "policy.embedding.dropout=0.1."
        )


def joint_encoder(policies: Sequence[Policy], spec: PolicySpec) -> ObservationEncoder | None:
    """Observation statistics of all parents in one place, for critics and actors; None if the first parent has them.

    Where several parents know an observation, the first one's statistics count.
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
        own, theirs = joint.encoder_of(key), source.encoder_of(key)
        if own is not None and theirs is not None:
            own.load_state_dict(theirs.state_dict())
    joint.normalizer.fitted.fill_(not any(unfitted_normalizers(policy) for policy in policies))


# What comes out.


@dataclass(frozen=True)
class Frame:
    """Map from shared coordinates to the coordinates of one parent, `ratio * z + shift`."""

    ratio: Tensor  # (A,)
    shift: Tensor  # (A,)
    level: float  # geometric mean of the ratio: how much stronger noise is there

    def time(self, t: Tensor) -> Tensor:
        """Time of the parent's path at time `t` of the common one."""
        return t / (t + (1 - t) * self.level)

    def to_parent(self, x: Tensor, t: Tensor) -> Tensor:
        """Point `(B, H, A)` of the parent's path for the point `x` of the common one at time `t` `(B, 1, 1)`."""
        return (self.ratio * x + t * self.shift) / (t + (1 - t) * self.level)

    def to_shared(self, velocity: Tensor, x: Tensor, t: Tensor) -> Tensor:
        """The parent's `velocity` in common coordinates, at the point `x` and time `t` `(B, 1, 1)` there.

        Both paths mean the same clean chunk: `x + (1 - t) * velocity` on either side.
        """
        turned = x * (1 - self.level) + (self.level / self.ratio) * (velocity - self.shift)
        return turned / (t + (1 - t) * self.level)


@dataclass(frozen=True)
class Coordinates:
    """Common coordinates of M parents: `action = offset + scale * z`, and the way to each parent's own."""

    offset: Tensor  # (A,)
    scale: Tensor  # (A,)
    ratio: Tensor  # (M, A)
    shift: Tensor  # (M, A)
    levels: tuple[float, ...]  # M; all 1 and nothing to convert where the parents have one normaliser


def common_coordinates(normalizers: Sequence[Normalizer], weights: Sequence[float]) -> Coordinates:
    """The coordinates described at the top of this file.

    Raises:
        UserError: The parents' units differ too much between action dimensions.
    """
    offsets = torch.stack([normalizer.offset.double() for normalizer in normalizers])  # (M, A)
    scales = torch.stack([normalizer.scale.double() for normalizer in normalizers])
    if bool((offsets == offsets[0]).all() & (scales == scales[0]).all()):
        ones, zeros = torch.ones_like(scales), torch.zeros_like(scales)
        return Coordinates(offsets[0], scales[0], ones, zeros, (1.0,) * len(normalizers))
    share = scales.new_tensor(weights).abs()[:, None]
    share = share / share.sum()
    offset, log_scale = (share * offsets).sum(0), (share * scales.log()).sum(0)
    log_ratio = log_scale - scales.log()
    log_level = log_ratio.mean(1, keepdim=True)
    _check_mismatch((log_ratio - log_level).abs())
    levels = tuple(log_level.exp().flatten().tolist())
    return Coordinates(offset, log_scale.exp(), log_ratio.exp(), (offset - offsets) / scales, levels)


def _check_mismatch(log_mismatch: Tensor) -> None:
    worst = math.exp(float(log_mismatch.max()))
    if worst > MOST_MISMATCH:
        parent, dimension = divmod(int(log_mismatch.argmax()), log_mismatch.shape[1])
        raise UserError(
            f"Parent {parent + 1} normalises action dimension {dimension} {worst:.1f} times differently from its other "
            f"dimensions, compared with the common scale; up to {MOST_MISMATCH:g} times can be composed, so train the "
            "parents with the same action statistics."
        )


def in_frame(field: Field, frame: Frame) -> Field:
    """The velocity of a parent in common coordinates."""

    def converted(x: Tensor, t: Tensor) -> Tensor:
        row = t[:, None, None]
        return frame.to_shared(field(frame.to_parent(x, row), frame.time(t)), x, row)

    return converted
