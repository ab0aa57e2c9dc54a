"""Test-time composition: several pretrained generative policies denoise one chunk together (GPC, Cao et al. 2025).

    both = compose([by_camera, by_state], weights=[0.3, 0.7])
    mixture = compose([left, right], Or(sampler="sde"))
    told = compose([policy], Affine((2.0, -1.0)), unconditioned=(0,))  # classifier-free guidance, scale 2

Parents may be any heads that know the velocity of a noisy chunk (flow, shortcut, meanflow, diffusion, EDM), with any
backbone, observations, chunk length, number of steps and action normaliser; `composition/` brings them together and
holds the operators. They are shared with the caller and never change.

All parents are read at the times of the sampler that takes most steps (or on `steps` equal ones). Actions that only
some parents plan come from these alone. A parent whose weight is 1 acts exactly as it does without composition.

Use it where two policies know different things and neither is poor: by their inputs, their data or their heads. A
parent that is much weaker than the other only harms. Choose the weights by a search on seeds of their own.

Deviations from the paper: heads of different families and normalisers are converted exactly instead of assumed equal;
unequal chunk lengths; `and` has the term that keeps log-densities level in its stochastic form too. EDM's second-order
corrections are left out: composed steps are Euler's. Steps of finite length that heads have learned (shortcut,
meanflow) are taken where all parents have learned them; elsewhere these heads are read as plain flows.
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
    in_frame,
    joint_encoder,
    joint_spec,
    part_of,
)
from robopolicy.policies.composition.guidance import ValueGuidance, fitting, guide, value_gradient
from robopolicy.policies.composition.joint_field import (
    Field,
    JointField,
    SamplerStep,
    adaptive_calls,
    adaptive_step,
    rows_of,
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
    """Parents that share one chunk; verbs `act`, `decode` and `field`."""

    name: ClassVar[str] = "composed"
    config_class = ComposedConfig
    fallback_hint: ClassVar[str] = "fine-tune one of its parents, or steer it by dsrl_na or dsrl_sac"
    config: ComposedConfig
    ratio: Tensor  # (M, A) of the units of the readings that play a part, see `alignment.Frame`
    shift: Tensor  # (M, A)
    low: Tensor  # (A,) bounds in common coordinates: the smallest box around those of the parents
    high: Tensor  # (A,)

    def __init__(
        self,
        config: ComposedConfig,
        spec: PolicySpec | None = None,
        *,
        parents: Sequence[Policy] | None = None,
        critic: QEnsemble | None = None,
    ) -> None:
        """Build the policy.

        Args:
            config: Settings; its descriptions of parents and critic are used where none are given.
            spec: The joint specification of the parents; only `action_horizon` may differ.
            parents: Policies to compose, shared with the caller.
            critic: What guides them, shared with the caller.

        Raises:
            UserError: The parents do not fit each other, the operator or the specification.
        """
        super().__init__()
        sources = [rebuild(description) for description in config.parents] if parents is None else list(parents)
        if not sources:
            raise UserError("A composed policy is made of others; compose checkpoints and use the result.")
        self.config = config
        self.operator = make_operator(config.operator)
        self.spec = joint_spec([parent.spec for parent in sources], None if spec is None else spec.action_horizon)
        if spec is not None and spec.to_dict() != self.spec.to_dict():
            raise UserError(f"The parents make up {self.spec}, but the policy is to be {spec}; compose them again.")
        statistics = joint_encoder(sources, self.spec)
        if statistics is not None:  # before the parents, so that critics and actors find it first
            self.statistics = statistics
        modes = {sampler_adapter.units(parent).mode for parent in sources}
        self.action_normalizer = make_normalizer(self.spec.action_dim, modes.pop() if len(modes) == 1 else "meanstd")
        self.parents = nn.ModuleList(sources)
        self.training = any(parent.training for parent in sources)
        self._cast_parts()
        shape = (len(self._playing), self.spec.action_dim)
        self.register_buffer("ratio", torch.ones(shape), persistent=False)
        self.register_buffer("shift", torch.zeros(shape), persistent=False)
        self.register_buffer("low", torch.zeros(shape[1]), persistent=False)
        self.register_buffer("high", torch.zeros(shape[1]), persistent=False)
        self.to(sources[0].device)
        self.align()
        self.register_load_state_dict_post_hook(_realign)
        if config.guidance is not None:
            own = QEnsemble(config.guidance.critic, self) if critic is None else fitting(critic, self)
            self.critic = own.to(self.device)

    def _cast_parts(self) -> None:
        """Select the operands that are used, from the configuration."""
        blind = self.config.unconditioned
        if not all(0 <= index < len(self.parents) for index in blind):
            raise UserError(f"unconditioned names parents 0 to {len(self.parents) - 1}, got {list(blind)}.")
        self._readings = [(index, False) for index in range(len(self.parents))] + [(index, True) for index in blind]
        self._weights = self.operator.nominal(len(self._readings))
        heard = [number for number, weight in enumerate(self._weights) if weight]
        self._alone = heard[0] if len(heard) == 1 else None
        if max(self._policy(number).spec.horizon for number in heard) < self.spec.horizon:
            # The end of the chunk is planned by parents that have no say about its start.
            heard += [n for n in range(len(self._readings)) if self._policy(n).spec.horizon == self.spec.horizon]
        self._playing = sorted(heard)
        extras = self.config.guidance is not None or self.config.corrector is not None
        if extras and isinstance(self.operator, DensityWeighted):
            raise UserError(f"Guidance and corrector need weights known in advance; '{self.operator.name}' has none.")
        policies = [self._policy(number) for number in self._playing]
        self._horizons = tuple(policy.spec.horizon for policy in policies)
        self._private = tuple(sampler_adapter.private_rows(policy) for policy in policies)
        steps = self.config.steps or max(policy.nfe for policy in policies)
        self._may_leap = (
            not extras
            and isinstance(self.operator, Prescribed)
            and sampler_adapter.supports_large_steps(policies, steps)
        )
        self._bounds_iterates = all(sampler_adapter.bounds_iterates(policy) for policy in policies)

    def align(self) -> None:
        """Find the common coordinates and times; needed again only after statistics of a parent have changed.

        Raises:
            UserError: The parents' action normalisers differ too much.
        """
        policies = [self._policy(number) for number in self._playing]
        weights = [self._weights[number] for number in self._playing]
        found = common_coordinates([sampler_adapter.units(policy) for policy in policies], weights)
        self.action_normalizer.offset.copy_(found.offset)
        self.action_normalizer.scale.copy_(found.scale)
        self.action_normalizer.fitted.fill_(not any(unfitted_normalizers(parent) for parent in self._sources))
        self.ratio.copy_(found.ratio)
        self.shift.copy_(found.shift)
        self._levels = found.levels
        self._one_frame = bool((self.ratio == 1).all() & (self.shift == 0).all())
        limit = self.low.new_tensor([sampler_adapter.bound(policy) for policy in policies])[:, None]
        self.low.copy_(((-limit - self.shift) / self.ratio).amin(0))
        self.high.copy_(((limit - self.shift) / self.ratio).amax(0))
        self._leaps = self._may_leap and self._one_frame
        self._grid = self._joint_grid(policies)
        if hasattr(self, "statistics"):
            gather_statistics(self.statistics, self._sources)

    def _joint_grid(self, policies: Sequence[Policy]) -> sampler_adapter.TimeGrid:
        """The finest sampler's steps, in common times."""
        if self.config.steps:
            return sampler_adapter.uniform_grid(self.config.steps)
        grids = [
            sampler_adapter.native_grid(policy, leaps=self._leaps).snr_from(level)
            for policy, level in zip(policies, self._levels, strict=True)
        ]
        return max(grids, key=lambda grid: (grid.steps, grid.times))

    @property
    def _sources(self) -> list[Policy]:
        return [cast(Policy, parent) for parent in self.parents]

    def _policy(self, number: int) -> Policy:
        """The parent behind a reading."""
        return cast(Policy, self.parents[self._readings[number][0]])

    def _seen(self, number: int, obs: Observation) -> Observation:
        """What a reading sees of `obs`."""
        seen = part_of(obs, self._policy(number).spec)
        return without_embeddings(seen) if self._readings[number][1] else seen

    def _blend(self, obs: Observation, length: float = 0.0) -> JointField:
        """The parents at `obs`; each encodes it once."""
        fields: list[Field] = []
        for place, number in enumerate(self._playing):
            field = sampler_adapter.velocity_field(self._policy(number), self._seen(number, obs), length)
            if not self._one_frame:
                field = in_frame(field, Frame(self.ratio[place], self.shift[place], self._levels[place]))
            fields.append(field)
        return JointField(
            fields, self._horizons, self._private, tuple(self._weights[number] for number in self._playing)
        )

    def _weights_at(self, t: Tensor, gates: Tensor | None) -> Weights:
        """Weights of the operands in use at time `t` `(B,)`, where `gates` are 1."""
        operator = cast(Prescribed, self.operator)
        every = operator.at(t, len(self._readings))
        return apply_gates([every[number] for number in self._playing], gates)

    def _gates(self, obs: Observation) -> Tensor | None:
        """Operands in use for `obs`, `(B, M)` of 1 and 0; None is all, subclasses choose."""
        return None

    def with_weights(self, weights: Sequence[float]) -> ComposedPolicy:
        """The same parents with other weights, one per reading: parents first, then those without embeddings."""
        operator = self.operator.with_weights(weights)
        config = replace(self.config, operator=describe_operator(operator))
        return ComposedPolicy(config, self.spec, parents=self._sources, critic=getattr(self, "critic", None))

    # Verbs.

    def act(self, obs: Observation, *, deterministic: bool = False, generator: Randomness = None) -> Tensor:
        """Chunk from fresh noise; what `or`, `and` and the corrector inject belongs to the sampler."""
        reference = next(iter(obs.values()))
        with torch.no_grad():
            if self._alone is not None and self._as_by_itself(self._alone):
                policy, seen = self._policy(self._alone), self._seen(self._alone, obs)
                return policy.act(seen, deterministic=deterministic, generator=generator)
            shape = (len(reference), *self.noise_shape)
            return self._play(obs, normal(shape, generator, reference.device), generator, stochastic=True)

    def decode(self, obs: Observation, noise: Tensor) -> Tensor:
        """Map `noise` `(B, *noise_shape)` to the chunk by the deterministic sampler; differentiable."""
        return self._play(obs, noise, None, stochastic=False)

    def field(self, obs: Observation, x: Tensor, t: Tensor) -> Tensor:
        """Joint velocity in the units of `action_normalizer`.

        Raises:
            UserError: The weights depend on the path that leads to `x`.
        """
        if isinstance(self.operator, DensityWeighted):
            raise UserError(f"Operator '{self.operator.name}' weighs whole paths, so the composition has no field.")
        blend = self._blend(obs)
        velocity = blend.mix(blend.velocities(x, t), self._weights_at(t, self._gates(obs)))
        guidance = self.config.guidance
        if guidance is None:
            return velocity
        return self._guided(self.critic.encode(obs), velocity, x, t[:, None, None])

    def _as_by_itself(self, number: int) -> bool:
        """Whether one parent plans the whole chunk without interference."""
        config = self.config
        free = config.guidance is None and config.corrector is None
        return free and self._policy(number).spec.horizon == self.spec.horizon

    def _play(self, obs: Observation, noise: Tensor, generator: Randomness, *, stochastic: bool) -> Tensor:
        """Chunk in env units; a single parent decodes by itself."""
        if self._alone is None or self.config.guidance is not None or self.config.corrector is not None:
            return self._integrate(obs, noise, generator, stochastic=stochastic)
        policy = self._policy(self._alone)
        rows = rows_of(noise, self._horizons, self._private)[self._playing.index(self._alone)]
        own = policy.decode(self._seen(self._alone, obs), rows)
        if own.shape[1] == self.spec.horizon:
            return own
        rest = self._integrate(obs, noise, generator, stochastic=stochastic)
        return torch.cat([own, rest[:, own.shape[1] :]], 1)

    def _integrate(self, obs: Observation, noise: Tensor, generator: Randomness, *, stochastic: bool) -> Tensor:
        grid, operator, corrector = self._grid, self.operator, self.config.corrector
        blend = self._blend(obs, 1 / grid.steps if self._leaps else 0.0)
        features = self.critic.encode(obs) if self.config.guidance is not None else None
        x, levels = grid.spread * noise, noise.new_zeros(len(noise), len(blend.fields))
        gates = self._gates(obs)

        def velocity(x: Tensor, t: Tensor) -> Tensor:
            joint = blend.mix(blend.velocities(x, t), self._weights_at(t, gates))
            return joint if features is None else self._guided(features, joint, x, t[:, None, None])

        if isinstance(operator, DensityWeighted):
            operator = cast(DensityWeighted, operator.with_weights(blend.nominal))
        probing = torch.Generator().manual_seed(PROBE_SEED)
        for time, to in pairwise(grid.times):
            if isinstance(operator, DensityWeighted):
                step = (SamplerStep.sde if stochastic and operator.sampler == "sde" else SamplerStep.ode)(time, to)
                x, levels = adaptive_step(blend, operator, step, x, levels, generator, probing)
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
        """`velocity` with the pull of the critic, at time `t` `(B, 1, 1)`."""
        guidance = cast(ValueGuidance, self.config.guidance)
        data = (x + (1 - t) * velocity).clamp(self.low, self.high)
        gradient = value_gradient(self.critic, features, self.action_normalizer, data, guidance.reduction)
        return guide(velocity, gradient, t, guidance)

    # What follows from it.

    @property
    def noise_shape(self) -> tuple[int, int]:
        """Shape of a chunk, followed by the further rows that parents denoise."""
        return self.spec.horizon + sum(self._private), self.spec.action_dim

    @property
    def nfe(self) -> int:
        """Those of all parents at all steps; a derivative along one direction counts as two more calls."""
        if self._alone is not None and self._as_by_itself(self._alone):
            return self._policy(self._alone).nfe
        parents, steps, corrector = len(self._playing), self._grid.steps, self.config.corrector
        if isinstance(self.operator, DensityWeighted):
            size = min(self._horizons) * self.spec.action_dim
            return parents * adaptive_calls(self.operator, steps, parents, size)
        critic = 2 if self.config.guidance is not None else 0
        return (steps + (0 if corrector is None else corrector.steps * (steps - 1))) * (parents + critic)

    def fit_normalizer(self, statistics: Statistics) -> None:
        """Refused: its parents have been trained with statistics of their own."""
        raise UserError("A composed policy has no statistics to fit: its parents keep those they were trained with.")

    def update_stats(self, obs: Observation) -> None:
        """Nothing: the parents keep the statistics they were trained with."""

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
    **settings: Any,
) -> ComposedPolicy:
    """Compose `parents`, which are shared, not copied.

    Args:
        parents: At least one policy; in the order of the weights.
        operator: An operator, or the name of one with its default settings.
        weights: One number per parent (and, after them, per entry of `unconditioned`); equal ones by default.
        action_horizon: Actions executed per chunk; by default the smallest number of all parents.
        critic: Values that guide the samples with the strength of `guidance`.
        settings: Further fields of `ComposedConfig`.

    Raises:
        UserError: A parent cannot be composed, or they do not fit each other.
    """
    for number, parent in enumerate(parents, 1):
        if isinstance(parent, ComposedPolicy):
            raise UserError(f"Parent {number} is itself a composition; compose its parents together with the others.")
        check_parent(parent, f"Parent {number}")
    for index in settings.get("unconditioned", ()):
        if 0 <= index < len(parents):
            check_unconditioned(parents[index], f"Parent {index + 1}")
    chosen = make_operator({"name": operator}) if isinstance(operator, str) else operator
    if weights is not None:
        chosen = chosen.with_weights(weights)
    if critic is not None:
        settings["guidance"] = replace(settings.get("guidance") or ValueGuidance(), critic=critic.config)
    descriptions = tuple(describe(parent) for parent in parents)
    config = ComposedConfig(parents=descriptions, operator=describe_operator(chosen), **settings)
    spec = joint_spec([parent.spec for parent in parents], action_horizon) if parents else None
    return ComposedPolicy(config, spec, parents=parents, critic=critic)


def _realign(policy: nn.Module, _: Any) -> None:
    cast(ComposedPolicy, policy).align()
