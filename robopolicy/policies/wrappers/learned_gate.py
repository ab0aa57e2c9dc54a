"""A composition with a learned selector of the parents for every observation (He et al. 2024).

    both = gate(compose([left, right]), Selection(top=1))
    fit_selector(both, episodes)  # robopolicy.training.fit_selector

Weights are those of the composition among the parents that were chosen. With all of them chosen it is the composition
to the last bit; with one it denoises as that parent does, at the times of the composition.

Use it where the parents are good in different situations, which a plain composition does not distinguish. All parents
are still evaluated at every step, and the choice is as good as the demonstrations it was trained on.

Reconstructed from the abstract of DynamicControl (conditions of an image generator): its double-cycle scores, how well
a condition is found again in what was generated, are here how well a parent finds a demonstrated chunk again under
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
    """What a `LearnedGatePolicy` consists of; `make_learned_gate` fills it in."""

    selection: Selection = field(default_factory=Selection)  # selection of the parents


class LearnedGatePolicy(ComposedPolicy):
    """`ComposedPolicy` of those parents that its selector chooses."""

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
        selector: Selector | None = None,
    ) -> None:
        """Build the policy.

        Args:
            config: Settings, as of a `ComposedPolicy`.
            spec: As of a `ComposedPolicy`.
            parents: Policies to compose, shared with the caller.
            critic: What guides them, shared with the caller.
            selector: What chooses among them, shared with the caller.

        Raises:
            UserError: The weights of the operator are not known in advance or may be negative, or parents do not fit.
        """
        super().__init__(config, spec, parents=parents, critic=critic)
        if not isinstance(self.operator, Convex | Scheduled):
            raise UserError(f"Parents are chosen among weights >= 0; operator '{self.operator.name}' has others.")
        if any(self._private):
            raise UserError("Parents that denoise more than their chunk cannot be chosen among; leave selection out.")
        chosen = Selector(config.selection, self, len(self._readings)) if selector is None else selector
        self.selector = chosen.to(self.device)

    @property
    def nfe(self) -> int:
        """Those of the composition, and one of the selector."""
        return super().nfe + 1

    def with_weights(self, weights: Sequence[float]) -> LearnedGatePolicy:
        """The same parents and selector with other weights."""
        return make_learned_gate(super().with_weights(weights), self.config.selection, self.selector)

    def _gates(self, obs: Observation) -> Tensor:
        """Chosen among the parents that have a weight."""
        return choose_parents(self.selector(obs)[:, self._playing], self.config.selection)

    @torch.no_grad()
    def discrepancies(self, obs: Observation, chunk: Tensor, *, generator: Randomness = None) -> Tensor:
        """How far from a shown `chunk` `(B, H, A)` lies what each of the M readings expects, given it under noise.

        Mean squared error `(B, M)` in common coordinates over the actions that all plan, on evenly spread noise levels
        and with the same noise for all.
        """
        every = self if len(self._playing) == len(self._readings) else self._with_all()
        blend, draws = every._blend(obs), self.config.selection.draws
        data = every.action_normalizer.normalize(chunk)
        total = data.new_zeros(len(data), len(blend.fields))
        for index in range(draws):
            t = data.new_full((len(data),), (index + 0.5) / draws)
            noise = normal(data.shape, generator, data.device)
            velocities = blend.velocities(interpolate(noise, data, t[:, None, None]), t)
            errors = [(blend.flat(u) - blend.flat(data - noise)).square().mean(1) for u in velocities]
            total = total + torch.stack(errors, 1) * (1 - t[0]) ** 2  # of the clean chunk, not of the velocity
        return total / draws

    def _with_all(self) -> ComposedPolicy:
        """The same parents with equal weights."""
        config = replace(self.config, operator=describe_operator(Convex()))
        return ComposedPolicy(config, self.spec, parents=self._sources, critic=getattr(self, "critic", None))


def make_learned_gate(
    composed: ComposedPolicy, selection: Selection, selector: Selector | None = None
) -> LearnedGatePolicy:
    """`composed` with a selector, a fresh one unless given; its parents are shared.

    Raises:
        UserError: Its operator or its parents do not allow a choice.
    """
    plain: dict[str, Any] = {entry.name: getattr(composed.config, entry.name) for entry in fields(ComposedConfig)}
    return LearnedGatePolicy(
        LearnedGateConfig(**plain, selection=selection),
        composed.spec,
        parents=composed._sources,
        critic=getattr(composed, "critic", None),
        selector=selector,
    )
