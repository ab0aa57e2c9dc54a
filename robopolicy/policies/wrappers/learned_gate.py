"""Composition with a learned selector of the parents for every observation (He et al. 2024).

    gated = make_learned_gate(compose([left, right]), Selection(top=1))
    fit_selector(gated, episodes)  # robopolicy.training.fit_selector

The selected parents keep the weights of the composition. With all parents selected it equals the composition bit for
bit; with one it denoises as that parent does, at the times of the composition.

Use it for parents that are good in different situations, which a plain composition does not distinguish. All parents
are still evaluated in every step, and the selection is as good as the demonstrations of its training.

Reconstructed from the abstract of DynamicControl (conditions of an image generator). Its double-cycle scores, how well
a condition is recovered from the generated image, become here how well a parent recovers a demonstrated chunk from
noise; its multimodal language model, which learns the order of these scores, is a small network. Actions at the end of
the chunk that only some parents plan keep their weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from robopolicy.critics.q import QEnsemble
from robopolicy.errors import UserError
from robopolicy.policies.base import Observation, Policy, PolicySpec
from robopolicy.policies.composition.operators import Convex, Scheduled, describe_operator
from robopolicy.policies.composition.selection import Selection, Selector, choose_parents
from robopolicy.policies.noise import Randomness, normal
from robopolicy.policies.path import interpolate
from robopolicy.policies.wrappers.composed import ComposedPolicy
from robopolicy.policies.wrappers.composed_config import ComposedConfig


@dataclass(frozen=True)
class LearnedGateConfig(ComposedConfig):
    """Settings of a `LearnedGatePolicy`; created by `make_learned_gate`."""

    selection: Selection = field(default_factory=Selection)  # selection of the parents


class LearnedGatePolicy(ComposedPolicy):
    """`ComposedPolicy` of the parents that its selector activates."""

    name: ClassVar[str] = "gated"
    config_class = LearnedGateConfig
    config: LearnedGateConfig

    def __init__(
        self,
        config: LearnedGateConfig,
        spec: PolicySpec | None = None,
        *,
        parents: Sequence[Policy] | None = None,
        critic: QEnsemble | None = None,
        names: Sequence[str] | None = None,
        selector: Selector | None = None,
    ) -> None:
        """Build a `ComposedPolicy` with a shared or a new `selector`; it needs prescribed, non-negative weights."""
        super().__init__(config, spec, parents=parents, critic=critic, names=names)
        if not isinstance(self.operator, Convex | Scheduled):
            raise UserError(f"Selection needs weights >= 0; operator '{self.operator.name}' has other weights.")
        if any(self._private):
            raise UserError("Parents that denoise more than their chunk cannot be selected; remove the selection.")
        network = Selector(config.selection, self, len(self._operands)) if selector is None else selector
        self.selector = network.to(self.device)

    @property
    def nfe(self) -> int:
        """Evaluations of the composition, and one of the selector."""
        return super().nfe + 1

    def with_weights(self, weights: Sequence[float]) -> LearnedGatePolicy:
        """Copy with the same parents and selector and other weights."""
        return make_learned_gate(super().with_weights(weights), self.config.selection, self.selector)

    def _gates(self, obs: Observation) -> Tensor:
        """Select among the active parents."""
        return choose_parents(self.selector(obs)[:, self._active], self.config.selection)

    @torch.no_grad()
    def discrepancies(self, obs: Observation, chunk: Tensor, *, generator: Randomness = None) -> Tensor:
        """Error `(B, M)` of the clean chunk expected by each of the M operands, given a noisy demonstrated `chunk`.

        Mean squared error in common coordinates over the actions that all parents plan, on evenly spread noise levels
        with the same noise for all; `chunk` is `(B, H, A)`.
        """
        composed = self if len(self._active) == len(self._operands) else self._all_parents()
        joint_field, levels = composed._joint_field(obs), self.config.selection.draws
        data = composed.action_normalizer.normalize(chunk)
        total = data.new_zeros(len(data), len(joint_field.fields))
        for index in range(levels):
            t = data.new_full((len(data),), (index + 0.5) / levels)
            noise = normal(data.shape, generator, data.device)
            velocities = joint_field.velocities(interpolate(noise, data, t[:, None, None]), t)
            errors = [(joint_field.flat(u) - joint_field.flat(data - noise)).square().mean(1) for u in velocities]
            total = total + torch.stack(errors, 1) * (1 - t[0]) ** 2  # error of the clean chunk, not of the velocity
        return total / levels

    def _all_parents(self) -> ComposedPolicy:
        """Composition of the same parents with equal weights."""
        config = replace(self.config, operator=describe_operator(Convex()))
        parts = {"critic": getattr(self, "critic", None), "names": self.names}
        return ComposedPolicy(config, self.spec, parents=self._sources, **parts)


def make_learned_gate(
    composed: ComposedPolicy, selection: Selection, selector: Selector | None = None
) -> LearnedGatePolicy:
    """Add a given or a new selector to `composed`, whose parents are shared."""
    plain: dict[str, Any] = {entry.name: getattr(composed.config, entry.name) for entry in fields(ComposedConfig)}
    return LearnedGatePolicy(
        LearnedGateConfig(**plain, selection=selection),
        composed.spec,
        parents=composed._sources,
        critic=getattr(composed, "critic", None),
        names=composed.names,
        selector=selector,
    )
