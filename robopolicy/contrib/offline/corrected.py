"""A frozen policy whose actions are corrected to stay close to a dataset (CDSA, Liu et al. 2024).

    a' = clip(a + c1 S_a(s, a) + c2 (I(s, s_next + h S_s(s_next)) - I(s, s_next)))

S_a and S_s are the gradients of the log-density of the data with respect to the action and to the state, I is the
inverse model (the action that leads from s to s'), and s_next is the prediction of a forward model. The first term
makes the action more likely, the second makes it lead to a more likely state. All networks together are a `DataModel`;
`robopolicy.contrib.offline.cdsa` trains it. Actions are in normalised units, an action is the executed part of a chunk,
and a state is the newest vector observation (images serve as context only).

Use it on a policy that has left the data: fine-tuned or trained offline. With c1 = c2 = 0 it equals the base policy bit
for bit. No action changes by more than `limit`.

Reconstructed from the abstract: architecture, noise levels, the bound and the use of chunks are ours. The scores belong
to the data blurred by one small noise level, as in denoising score matching.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from robopolicy.constraints import NonNegative, Positive, PositiveInt, Validated
from robopolicy.critics.q import copy_normalizers
from robopolicy.errors import UserError
from robopolicy.nets.mlp import MLP
from robopolicy.nets.vision import VisionConfig
from robopolicy.policies.base import Info, Observation, Policy, PolicySpec, Sample
from robopolicy.policies.noise import Randomness, normal
from robopolicy.policies.wrappers.best_of_n import clip_to_bounds
from robopolicy.policies.wrappers.nested import WrappingPolicy, describe, rebuild, same_policy
from robopolicy.schema import from_dict, to_dict


@dataclass(frozen=True)
class DataModelConfig(Validated):
    """Architecture and noise levels of a `DataModel`."""

    hidden: tuple[PositiveInt, ...] = (256, 256)
    activation: str = "silu"
    action_noise: Positive = 0.1  # standard deviation that blurs actions, normalised units; smaller needs more data
    state_noise: Positive = 0.1  # standard deviation that blurs states, normalised units
    vision: VisionConfig = field(default_factory=VisionConfig)


@dataclass(frozen=True)
class Correction(Validated):
    """Strength of the correction."""

    action_coef: NonNegative = 0.01  # c1; action_noise^2 moves an action to the local mean of the data
    state_coef: NonNegative = 0.5  # c2
    state_step: NonNegative = 0.01  # h; state_noise^2 moves a state to the local mean of the data
    limit: Positive = 0.2  # maximum change of one action: norm over its dimensions, normalised units


class DataModel(nn.Module):
    """Model of a dataset's actions, states and transitions, all in normalised units."""

    def __init__(self, config: DataModelConfig, base: Policy) -> None:
        """Build the networks with the normalisers of `base`.

        Raises:
            UserError: The policy has image observations only, or no normalisers.
        """
        super().__init__()
        self.config = config
        self.steps = base.spec.action_horizon
        self.encoder, self.action_normalizer = copy_normalizers(base, config.vision)
        state = self.encoder.vector_dim
        if not state:
            raise UserError(
                f"Correcting actions needs a vector observation as the state; policy '{base.name}' observes "
                f"{sorted(base.spec.observation)}."
            )
        features = base.spec.obs_horizon * self.encoder.feature_dim
        action = self.steps * base.spec.action_dim

        def network(inputs: int, outputs: int) -> MLP:
            return MLP(inputs, config.hidden, outputs, activation=config.activation)

        self.action_noise = network(features + action, action)  # noise in a noisy action, given the context
        self.state_noise = network(state, state)  # noise in a noisy state
        self.inverse = network(features + state, action)
        self.ahead = network(features + action, state)  # change of the state

    def encode(self, obs: Mapping[str, Tensor]) -> Tensor:
        """Context `(B, F)`."""
        return self.encoder(obs).flatten(1)

    def state(self, obs: Mapping[str, Tensor]) -> Tensor:
        """Newest state `(B, S)`."""
        return self.encoder.normalizer.normalize(self.encoder.vectors(obs)[:, -1])

    def action(self, chunk: Tensor) -> Tensor:
        """Executed part of a chunk `(B, H, A)` as `(B, n * A)`."""
        return self.action_normalizer.normalize(chunk[:, : self.steps]).flatten(1)

    def action_score(self, features: Tensor, action: Tensor) -> Tensor:
        """S_a `(B, n * A)`."""
        return -self.action_noise(torch.cat([features, action], -1)) / self.config.action_noise

    def state_score(self, state: Tensor) -> Tensor:
        """S_s `(B, S)`."""
        return -self.state_noise(state) / self.config.state_noise

    def action_between(self, features: Tensor, following: Tensor) -> Tensor:
        """I `(B, n * A)`: the action that leads to the state `following` `(B, S)`."""
        return self.inverse(torch.cat([features, following], -1))

    def following(self, features: Tensor, state: Tensor, action: Tensor) -> Tensor:
        """State `(B, S)` that is expected after the action."""
        return state + self.ahead(torch.cat([features, action], -1))


def data_model_loss(
    model: DataModel,
    obs: Mapping[str, Tensor],
    chunk: Tensor,
    next_obs: Mapping[str, Tensor],
    whole: Tensor,
    generator: Randomness = None,
    executed: Tensor | None = None,
) -> tuple[Tensor, Info]:
    """Denoising score matching of actions and states, plus the errors of both models: the sum of the four means.

    Args:
        model: Networks to train.
        obs: Observations `{key: (B, To, ...)}`.
        chunk: Intended chunks `(B, H, A)`, in env units.
        next_obs: Observations after the executed part.
        whole: `(B,)` 1 where the executed part ended before the episode did, else 0.
        generator: Of the noise.
        executed: Executed chunks `(B, H, A)`, if actions were disturbed.
    """
    features, state, action = model.encode(obs), model.state(obs), model.action(chunk)
    performed = action if executed is None else model.action(executed)
    following = model.state(next_obs)
    action_noise = normal(action.shape, generator, action.device)
    state_noise = normal(state.shape, generator, state.device)
    noisy = torch.cat([features, action + model.config.action_noise * action_noise], -1)
    errors = {
        "action_score": model.action_noise(noisy) - action_noise,
        "inverse": model.action_between(features, following) - performed,
        "forward": model.following(features, state, performed) - following,
    }
    count = whole.sum().clamp(min=1)
    terms = {name: (error.square().mean(1) * whole).sum() / count for name, error in errors.items()}
    denoised = model.state_noise(state + model.config.state_noise * state_noise)
    terms["state_score"] = (denoised - state_noise).square().mean()  # every state counts, for any action
    return torch.stack(list(terms.values())).sum(), {name: term.detach() for name, term in terms.items()}


@dataclass(frozen=True)
class CorrectedConfig:
    """Components of a `CorrectedPolicy`."""

    base: dict[str, Any] = field(default_factory=dict)  # description of the corrected policy, see `nested`
    model: DataModelConfig = field(default_factory=DataModelConfig)  # the networks
    correction: Correction = field(default_factory=Correction)  # strength of the correction


class CorrectedPolicy(WrappingPolicy):
    """A frozen policy with corrected actions; methods `act`, `sample`, and `decode` if the base has it."""

    name: ClassVar[str] = "corrected"
    config_class = CorrectedConfig

    def __init__(
        self,
        config: CorrectedConfig,
        spec: PolicySpec | None = None,
        *,
        base: Policy | None = None,
        model: DataModel | None = None,
    ) -> None:
        """Build the policy.

        Args:
            config: Settings; its descriptions are used if no base and model are given.
            spec: Ignored; taken from the base policy.
            base: Policy to correct, shared with the caller.
            model: Networks, shared with the caller.
        """
        super().__init__()
        self.base = rebuild(config.base) if base is None else base
        self.spec = self.base.spec
        self.model = DataModel(config.model, self.base) if model is None else model
        self.config = config

    @property
    def is_steerable(self) -> bool:
        """Whether the base is steerable."""
        return self.base.is_steerable

    @property
    def noise_shape(self) -> tuple[int, int]:
        """Noise shape of the base."""
        return self.base.noise_shape

    @property
    def nfe(self) -> int:
        """Function evaluations of the base plus five of the networks."""
        return self.base.nfe + 5

    def correct(self, obs: Observation, chunk: Tensor) -> Tensor:
        """Correct the executed actions of `chunk` `(B, H, A)`."""
        by = self.config.correction
        if not by.action_coef and not by.state_coef:
            return chunk
        model = self.model
        start = model.action_normalizer.normalize(chunk[:, : model.steps])
        features, action = model.encode(obs), start.flatten(1)
        following = model.following(features, model.state(obs), action)
        better = following + by.state_step * model.state_score(following)
        move = by.action_coef * model.action_score(features, action)
        move = move + by.state_coef * (
            model.action_between(features, better) - model.action_between(features, following)
        )
        move = move.view_as(start)
        move = move * (by.limit / move.norm(dim=-1, keepdim=True).clamp(min=by.limit))
        corrected = clip_to_bounds(model.action_normalizer, start + move, start)
        return torch.cat([model.action_normalizer.denormalize(corrected), chunk[:, model.steps :]], 1)

    @torch.no_grad()
    def act(self, obs: Observation, *, deterministic: bool = False, generator: Randomness = None) -> Tensor:
        """The corrected chunk of the base."""
        return self.correct(obs, self.base.act(obs, deterministic=deterministic, generator=generator))

    def sample(self, obs: Observation, *, generator: Randomness = None) -> Sample:
        """The corrected chunk; it has no density."""
        return Sample.unscored(self.act(obs, generator=generator))

    def decode(self, obs: Observation, noise: Tensor) -> Tensor:
        """Corrected chunk of the base for `noise` `(B, *noise_shape)`; differentiable where the base is."""
        return self.correct(obs, self.base.decode(obs, noise))

    def update_stats(self, obs: Observation) -> None:
        """Do nothing: base and networks keep the statistics of their training."""

    def with_correction(self, correction: Correction) -> CorrectedPolicy:
        """Copy with the same base and networks and another correction."""
        return CorrectedPolicy(replace(self.config, correction=correction), base=self.base, model=self.model)

    def train(self, mode: bool = True) -> CorrectedPolicy:
        """Set the mode of the networks; the base stays in evaluation mode."""
        super().train(mode)
        self.base.eval()
        return self


def correct(base: Policy, model: DataModel, correction: Correction) -> CorrectedPolicy:
    """Correct `base` with `model`, both shared.

    Raises:
        UserError: The model was trained with other observations or actions.
    """
    fresh = DataModel(model.config, base)
    if not same_policy(fresh, model) or fresh.steps != model.steps:
        raise UserError(
            "The correcting networks were trained with other observations or actions; train them around a policy "
            f"that observes {base.spec.obs_horizon} step(s) of {sorted(base.spec.observation)} and executes "
            f"{base.spec.action_horizon} actions per chunk."
        )
    config = CorrectedConfig(base=describe(base), model=model.config, correction=correction)
    return CorrectedPolicy(config, base=base, model=model)


def correct_composition(policy: Policy, checkpoint: Policy, settings: Mapping[str, Any]) -> CorrectedPolicy:
    """Correct `policy` with the networks of `checkpoint`; the default correction is the checkpoint's.

    Raises:
        UserError: The checkpoint has no such networks, they do not fit the policy, or a setting is wrong.
    """
    if not isinstance(checkpoint, CorrectedPolicy):
        raise UserError(f"Policy '{checkpoint.name}' has no scores of its data; pass a checkpoint of algorithm=cdsa.")
    given = {**to_dict(Correction()), **settings}
    correction = from_dict(Correction, given, "then.correct") if settings else checkpoint.config.correction
    return correct(policy, checkpoint.model, correction)
