"""Test-time composition: several pretrained generative policies denoise one chunk together (GPC, Cao et al. 2025).

    both = compose([by_camera, by_state], weights=[0.3, 0.7])
    mixture = compose([left, right], Or(sampler="sde"))
    guided = compose([policy], Affine((2.0, -1.0)), unconditioned=(0,))  # classifier-free guidance, scale 2

Parents may be any heads with a velocity field (flow, shortcut, meanflow, diffusion, EDM), with any backbone,
observations, chunk length, number of steps and action normaliser; `composition/` aligns them and contains the
operators. They are shared with the caller and never change. All parents are evaluated at the times of the sampler with
most steps (or on `steps` equal ones). Actions that only some parents plan are composed from these parents. A parent
whose weight is 1 acts exactly as without composition.

Use it for two good policies with different knowledge: different inputs, data or heads. A much weaker parent only harms.
Choose the weights by a search on separate seeds.

Deviations from the paper: heads of different families and normalisers are converted exactly instead of assumed equal;
chunk lengths may differ; `and` has the term that keeps log-densities equal also in its stochastic form. Second-order
corrections of EDM are omitted: composed steps are Euler steps. Learned steps of finite length (shortcut, meanflow) are
used if all parents have learned them; otherwise these heads are used as plain flows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from robopolicy.critics.q import QEnsemble
from robopolicy.errors import UserError
from robopolicy.nets.encoder import without_embeddings
from robopolicy.nets.normalizer import Statistics, make_normalizer, unfitted_normalizers
from robopolicy.policies.base import Observation, Policy, PolicySpec
from robopolicy.policies.composition import sampler_adapter
from robopolicy.policies.composition.alignment import (
    Frame,
    check_parent,
    check_unconditioned,
    common_coordinates,
    gather_statistics,
    joint_encoder,
    joint_spec,
    number_parents,
    parent_observation,
    to_shared_field,
)
from robopolicy.policies.composition.guidance import ValueGuidance, check_critic, guide, value_gradient
from robopolicy.policies.composition.joint_field import (
    Field,
    JointField,
    SamplerStep,
    adaptive_calls,
    adaptive_step,
    parent_rows,
)
from robopolicy.policies.composition.operators import (
    DensityWeighted,
    Operator,
    Prescribed,
    Weights,
    apply_gates,
    describe_operator,
    make_operator,
)
from robopolicy.policies.noise import Randomness, normal
from robopolicy.policies.wrappers.composed_config import PROBE_SEED, ComposedConfig
from robopolicy.policies.wrappers.nested import describe, rebuild


class ComposedPolicy(Policy):
    """Composition of parents for one chunk; methods `act`, `decode` and `field`."""

    name: ClassVar[str] = "composed"
    config_class = ComposedConfig
    fallback_hint: ClassVar[str] = "fine-tune one of its parents, or steer it by dsrl_na or dsrl_sac"
    config: ComposedConfig
    ratio: Tensor  # (M, A) of the active operands, see `alignment.Frame`
    shift: Tensor  # (M, A)
    low: Tensor  # (A,) bounds in common coordinates: bounding box of the bounds of the parents
    high: Tensor  # (A,)

    def __init__(
        self,
        config: ComposedConfig,
        spec: PolicySpec | None = None,
        *,
        parents: Sequence[Policy] | None = None,
        critic: QEnsemble | None = None,
        names: Sequence[str] | None = None,
    ) -> None:
        """Build the policy from shared `parents` and `critic`, or else from their descriptions in `config`.

        `spec` is the joint specification of the parents, with any valid `action_horizon`. Messages call the parents
        by `names` (Parent 1, Parent 2, ... by default).

        Raises:
            UserError: The parents are incompatible with each other, the operator or the specification.
        """
        super().__init__()
        sources = [rebuild(description) for description in config.parents] if parents is None else list(parents)
        if not sources:
            raise UserError("A composed policy needs parents; compose checkpoints and use the result.")
        self.config = config
        self.operator = make_operator(config.operator)
        self.names = tuple(names or number_parents(len(sources)))
        action_horizon = None if spec is None else spec.action_horizon
        self.spec = joint_spec([parent.spec for parent in sources], action_horizon, self.names)
        if spec is not None and spec.to_dict() != self.spec.to_dict():
            raise UserError(
                f"The parents have the joint specification {self.spec}, expected {spec}; compose them again."
            )
        statistics = joint_encoder(sources, self.spec)
        if statistics is not None:  # before the parents, so that critics and actors use it
            self.statistics = statistics
        modes = {sampler_adapter.units(parent).mode for parent in sources}
        self.action_normalizer = make_normalizer(self.spec.action_dim, modes.pop() if len(modes) == 1 else "meanstd")
        self.parents = nn.ModuleList(sources)
        self.training = any(parent.training for parent in sources)
        self._select_operands()
        shape = (len(self._active), self.spec.action_dim)
        self.register_buffer("ratio", torch.ones(shape), persistent=False)
        self.register_buffer("shift", torch.zeros(shape), persistent=False)
        self.register_buffer("low", torch.zeros(shape[1]), persistent=False)
        self.register_buffer("high", torch.zeros(shape[1]), persistent=False)
        self.to(sources[0].device)
        self.align()
        self.register_load_state_dict_post_hook(_realign)
        if config.guidance is not None:
            own = QEnsemble(config.guidance.critic, self) if critic is None else check_critic(critic, self)
            own.require_policy_obs()
            self.critic = own.to(self.device)

    def _select_operands(self) -> None:
        """Select the active operands from the configuration."""
        unconditioned = self.config.unconditioned
        if not all(0 <= index < len(self.parents) for index in unconditioned):
            raise UserError(f"unconditioned names parents 0 to {len(self.parents) - 1}, got {list(unconditioned)}.")
        self._operands = [(index, False) for index in range(len(self.parents))] + [
            (index, True) for index in unconditioned
        ]
        self._weights = self.operator.nominal(len(self._operands))
        active = [number for number, weight in enumerate(self._weights) if weight]
        self._single = active[0] if len(active) == 1 else None
        if max(self._policy(number).spec.horizon for number in active) < self.spec.horizon:
            # Parents without weight plan the end of the chunk.
            active += [n for n in range(len(self._operands)) if self._policy(n).spec.horizon == self.spec.horizon]
        self._active = sorted(active)
        extras = self.config.guidance is not None or self.config.corrector is not None
        if extras and isinstance(self.operator, DensityWeighted):
            raise UserError(
                f"Guidance and corrector need prescribed weights; operator '{self.operator.name}' has none."
            )
        policies = [self._policy(number) for number in self._active]
        self._horizons = tuple(policy.spec.horizon for policy in policies)
        self._private = tuple(sampler_adapter.private_rows(policy) for policy in policies)
        steps = self.config.steps or max(policy.nfe for policy in policies)
        self._may_use_large_steps = (
            not extras
            and isinstance(self.operator, Prescribed)
            and sampler_adapter.supports_large_steps(policies, steps)
        )
        self._bounds_iterates = all(sampler_adapter.bounds_iterates(policy) for policy in policies)

    def align(self) -> None:
        """Compute common coordinates and times; call again if the statistics of a parent change."""
        policies = [self._policy(number) for number in self._active]
        weights = [self._weights[number] for number in self._active]
        names = [self.names[self._operands[number][0]] for number in self._active]
        found = common_coordinates([sampler_adapter.units(policy) for policy in policies], weights, names)
        self.action_normalizer.set_transform(found.offset, found.scale)
        self.action_normalizer.fitted.fill_(not any(unfitted_normalizers(parent) for parent in self._sources))
        self.ratio.copy_(found.ratio)
        self.shift.copy_(found.shift)
        self._levels = found.levels
        self._one_frame = bool((self.ratio == 1).all() & (self.shift == 0).all())
        limit = self.low.new_tensor([sampler_adapter.bound(policy) for policy in policies])[:, None]
        self.low.copy_(((-limit - self.shift) / self.ratio).amin(0))
        self.high.copy_(((limit - self.shift) / self.ratio).amax(0))
        self._large_steps = self._may_use_large_steps and self._one_frame
        self._grid = self._joint_grid(policies)
        if hasattr(self, "statistics"):
            gather_statistics(self.statistics, self._sources)

    def _joint_grid(self, policies: Sequence[Policy]) -> sampler_adapter.TimeGrid:
        """Steps of the finest sampler, in common times."""
        if self.config.steps:
            return sampler_adapter.uniform_grid(self.config.steps)
        grids = [
            sampler_adapter.native_grid(policy, large_steps=self._large_steps).snr_from(level)
            for policy, level in zip(policies, self._levels, strict=True)
        ]
        return max(grids, key=lambda grid: (grid.steps, grid.times))

    @property
    def _sources(self) -> list[Policy]:
        return [cast(Policy, parent) for parent in self.parents]

    def _policy(self, number: int) -> Policy:
        """Parent of an operand."""
        return cast(Policy, self.parents[self._operands[number][0]])

    def _parent_observation(self, number: int, obs: Observation) -> Observation:
        """Observations of an operand."""
        selected = parent_observation(obs, self._policy(number).spec)
        return without_embeddings(selected) if self._operands[number][1] else selected

    def _joint_field(self, obs: Observation, length: float = 0.0) -> JointField:
        """Velocity fields of the parents at `obs`; each encodes it once."""
        fields: list[Field] = []
        for position, number in enumerate(self._active):
            field = sampler_adapter.velocity_field(self._policy(number), self._parent_observation(number, obs), length)
            if not self._one_frame:
                field = to_shared_field(
                    field, Frame(self.ratio[position], self.shift[position], self._levels[position])
                )
            fields.append(field)
        return JointField(
            fields, self._horizons, self._private, tuple(self._weights[number] for number in self._active)
        )

    def _weights_at(self, t: Tensor, gates: Tensor | None) -> Weights:
        """Weights of the active operands at time `t` `(B,)`, where `gates` are 1."""
        operator = cast(Prescribed, self.operator)
        weights = operator.at(t, len(self._operands))
        return apply_gates([weights[number] for number in self._active], gates)

    def _gates(self, obs: Observation) -> Tensor | None:
        """Gates `(B, M)` of 1 and 0 on the operands for `obs`; None is all, subclasses may select."""
        return None

    def with_weights(self, weights: Sequence[float]) -> ComposedPolicy:
        """Copy with other weights, one per operand: the parents, then parents without embeddings."""
        operator = self.operator.with_weights(weights)
        config = replace(self.config, operator=describe_operator(operator))
        parts = {"critic": getattr(self, "critic", None), "names": self.names}
        return ComposedPolicy(config, self.spec, parents=self._sources, **parts)

    def act(self, obs: Observation, *, deterministic: bool = False, generator: Randomness = None) -> Tensor:
        """Chunk from fresh noise; the noise of `or`, `and` and the corrector is part of the sampler."""
        reference = next(iter(obs.values()))
        with torch.no_grad():
            if self._single is not None and self._is_single_parent(self._single):
                policy, selected = self._policy(self._single), self._parent_observation(self._single, obs)
                return policy.act(selected, deterministic=deterministic, generator=generator)
            shape = (len(reference), *self.noise_shape)
            return self._generate(obs, normal(shape, generator, reference.device), generator, stochastic=True)

    def decode(self, obs: Observation, noise: Tensor) -> Tensor:
        """Map `noise` `(B, *noise_shape)` to the chunk by the deterministic sampler; differentiable."""
        return self._generate(obs, noise, None, stochastic=False)

    def field(self, obs: Observation, x: Tensor, t: Tensor) -> Tensor:
        """Joint velocity in the units of `action_normalizer`; weights that depend on the path raise a `UserError`."""
        if isinstance(self.operator, DensityWeighted):
            raise UserError(
                f"Operator '{self.operator.name}' computes weights along a path, so the composition has no field."
            )
        joint_field = self._joint_field(obs)
        velocity = joint_field.mix(joint_field.velocities(x, t), self._weights_at(t, self._gates(obs)))
        guidance = self.config.guidance
        if guidance is None:
            return velocity
        return self._guided(self.critic.encode(obs), velocity, x, t[:, None, None])

    def _is_single_parent(self, number: int) -> bool:
        """Whether one parent alone generates the whole chunk."""
        config = self.config
        free = config.guidance is None and config.corrector is None
        return free and self._policy(number).spec.horizon == self.spec.horizon

    def _generate(self, obs: Observation, noise: Tensor, generator: Randomness, *, stochastic: bool) -> Tensor:
        """Chunk in env units; a single parent uses its own `decode`."""
        if self._single is None or self.config.guidance is not None or self.config.corrector is not None:
            return self._integrate(obs, noise, generator, stochastic=stochastic)
        policy = self._policy(self._single)
        rows = parent_rows(noise, self._horizons, self._private)[self._active.index(self._single)]
        own = policy.decode(self._parent_observation(self._single, obs), rows)
        if own.shape[1] == self.spec.horizon:
            return own
        rest = self._integrate(obs, noise, generator, stochastic=stochastic)
        return torch.cat([own, rest[:, own.shape[1] :]], 1)

    def _integrate(self, obs: Observation, noise: Tensor, generator: Randomness, *, stochastic: bool) -> Tensor:
        grid, operator, corrector = self._grid, self.operator, self.config.corrector
        joint_field = self._joint_field(obs, 1 / grid.steps if self._large_steps else 0.0)
        features = self.critic.encode(obs) if self.config.guidance is not None else None
        x, levels = grid.spread * noise, noise.new_zeros(len(noise), len(joint_field.fields))
        gates = self._gates(obs)

        def velocity(x: Tensor, t: Tensor) -> Tensor:
            joint = joint_field.mix(joint_field.velocities(x, t), self._weights_at(t, gates))
            return joint if features is None else self._guided(features, joint, x, t[:, None, None])

        if isinstance(operator, DensityWeighted):
            operator = cast(DensityWeighted, operator.with_weights(joint_field.nominal))
        probe_generator = torch.Generator().manual_seed(PROBE_SEED)
        for time, to in pairwise(grid.times):
            if isinstance(operator, DensityWeighted):
                step = (SamplerStep.sde if stochastic and operator.sampler == "sde" else SamplerStep.ode)(time, to)
                x, levels = adaptive_step(joint_field, operator, step, x, levels, generator, probe_generator)
            else:
                x = SamplerStep.ode(time, to).apply(x, velocity(x, x.new_full((len(x),), time)))
            if self._bounds_iterates:
                x = x.clamp(self.low, self.high)
            if corrector is not None and stochastic and to < 1:
                t = x.new_full((len(x),), to)
                for _ in range(corrector.steps):
                    x = corrector.move(x, velocity(x, t), normal(x.shape, generator, x.device), to)
        return self.action_normalizer.denormalize(x[:, : self.spec.horizon].clamp(self.low, self.high))

    def _guided(self, features: Tensor, velocity: Tensor, x: Tensor, t: Tensor) -> Tensor:
        """Add the guidance of the critic to `velocity` at time `t` `(B, 1, 1)`."""
        guidance = cast(ValueGuidance, self.config.guidance)
        data = (x + (1 - t) * velocity).clamp(self.low, self.high)
        gradient = value_gradient(self.critic, features, self.action_normalizer, data, guidance.reduction)
        return guide(velocity, gradient, t, guidance)

    @property
    def noise_shape(self) -> tuple[int, int]:
        """Shape of a chunk with the private rows of the parents."""
        return self.spec.horizon + sum(self._private), self.spec.action_dim

    @property
    def nfe(self) -> int:
        """Evaluations of all parents in all steps; a directional derivative counts as two more."""
        if self._single is not None and self._is_single_parent(self._single):
            return self._policy(self._single).nfe
        parents, steps, corrector = len(self._active), self._grid.steps, self.config.corrector
        if isinstance(self.operator, DensityWeighted):
            size = min(self._horizons) * self.spec.action_dim
            return parents * adaptive_calls(self.operator, steps, parents, size)
        critic = 2 if self.config.guidance is not None else 0
        return (steps + (0 if corrector is None else corrector.steps * (steps - 1))) * (parents + critic)

    def fit_normalizer(self, statistics: Statistics) -> None:
        """Raise a `UserError`, as the parents keep their statistics."""
        raise UserError("A composed policy has no statistics to fit: its parents keep their training statistics.")

    def update_stats(self, obs: Observation) -> None:
        """Do nothing, as the parents keep their training statistics."""

    def train(self, mode: bool = True) -> ComposedPolicy:
        """Set the mode; the parents stay in evaluation mode."""
        super().train(mode)
        self.parents.eval()
        return self


def compose(
    parents: Sequence[Policy],
    operator: str | Operator = "convex",
    weights: Sequence[float] | None = None,
    *,
    action_horizon: int | None = None,
    critic: QEnsemble | None = None,
    names: Sequence[str] | None = None,
    **settings: Any,
) -> ComposedPolicy:
    """Compose `parents`, which are shared, not copied; incompatible parents raise a `UserError`.

    Args:
        parents: At least one policy; in the order of the weights.
        operator: An operator, or the name of one with its default settings.
        weights: One number per parent (and, after them, per entry of `unconditioned`); equal by default.
        action_horizon: Actions executed per chunk; by default the minimum over the parents.
        critic: Guides the samples with the strength of `guidance`.
        names: Names of the parents in messages; Parent 1, Parent 2, ... by default.
        settings: Further fields of `ComposedConfig`.
    """
    names = names or number_parents(len(parents))
    for name, parent in zip(names, parents, strict=True):
        if isinstance(parent, ComposedPolicy):
            raise UserError(f"{name} is itself a composition; compose its parents together with the others.")
        check_parent(parent, name)
    for index in settings.get("unconditioned", ()):
        if 0 <= index < len(parents):
            check_unconditioned(parents[index], names[int(index)])
    chosen = make_operator({"name": operator}) if isinstance(operator, str) else operator
    if weights is not None:
        chosen = chosen.with_weights(weights)
    if critic is not None:
        settings["guidance"] = replace(settings.get("guidance") or ValueGuidance(), critic=critic.config)
    descriptions = tuple(describe(parent) for parent in parents)
    config = ComposedConfig(parents=descriptions, operator=describe_operator(chosen), **settings)
    spec = joint_spec([parent.spec for parent in parents], action_horizon, names) if parents else None
    return ComposedPolicy(config, spec, parents=parents, critic=critic, names=names)


def _realign(policy: nn.Module, _: Any) -> None:
    cast(ComposedPolicy, policy).align()
