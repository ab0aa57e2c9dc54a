"""Our policies as LeRobot policies, for its evaluation, rollouts and robots.

    theirs = as_lerobot(policy)
    preprocessor, postprocessor = identity_processors()
    eval_policy(env, theirs, preprocessor=preprocessor, postprocessor=postprocessor, ...)

Our normalisers are part of the policy, so the processors change nothing. Images arrive in the format of LeRobot,
floats in [0, 1], and are rounded back to the bytes they came from.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from robopolicy.data.episodes import is_image
from robopolicy.data.formats.lerobot.layout import feature_of
from robopolicy.errors import UserError
from robopolicy.interop.lerobot.source import ACTION, lerobot_module
from robopolicy.policies.base import Observation, Policy

PAD = "action_is_pad"


def as_lerobot(policy: Policy, *, keys: Mapping[str, str] | None = None) -> Any:
    """Wrap `policy` as a `PreTrainedPolicy`, without copying.

    It offers `select_action(batch, noise=None)`, `predict_action_chunk(batch, noise=None)`, `forward(batch)` (imitation
    loss), `reset` and a configuration with features and horizons. `noise` goes to `decode`.

    Args:
        policy: Policy to wrap.
        keys: Our observation key -> LeRobot feature, where the usual translation gives another name.

    Raises:
        UserError: `lerobot` is not installed, or a key is not observed.
    """
    unknown = sorted(set(keys or {}) - set(policy.spec.observation))
    if unknown:
        raise UserError(f"keys has '{unknown[0]}', but the policy observes {', '.join(policy.spec.observation)}.")
    types = lerobot_module("configs.types")
    features = {key: (keys or {}).get(key) or feature_of(key) for key in policy.spec.observation}
    inputs = {
        feature: types.PolicyFeature(type=types.FeatureType[_kind(key)], shape=tuple(policy.spec.observation[key]))
        for key, feature in features.items()
    }
    action = types.PolicyFeature(type=types.FeatureType.ACTION, shape=(policy.spec.action_dim,))
    config_class, policy_class = _classes()
    config = config_class(
        n_obs_steps=policy.spec.obs_horizon,
        horizon=policy.spec.horizon,
        n_action_steps=policy.spec.action_horizon,
        input_features=inputs,
        output_features={ACTION: action},
        device=str(next((tensor.device for tensor in policy.parameters()), "cpu")),
    )
    return policy_class(config, policy, features)


def identity_processors() -> tuple[Any, Any]:
    """Identity pre- and post-processor, for LeRobot functions that need them."""
    processor, converters = lerobot_module("processor"), lerobot_module("processor.converters")

    def pipeline(read: Any, write: Any) -> Any:
        return processor.PolicyProcessorPipeline(steps=[], to_transition=read, to_output=write)

    return (
        pipeline(converters.batch_to_transition, converters.transition_to_batch),
        pipeline(converters.policy_action_to_transition, converters.transition_to_policy_action),
    )


def _kind(key: str) -> str:
    if is_image(key):
        return "VISUAL"
    return "ENV" if key == "environment_state" else "STATE"


@cache
def _classes() -> tuple[Any, Any]:
    """Configuration and policy class, derived from LeRobot's where it is installed."""
    base_config: Any = lerobot_module("configs.policies").PreTrainedConfig
    base_policy: Any = lerobot_module("policies.pretrained").PreTrainedPolicy

    @base_config.register_subclass("robopolicy")
    @dataclass
    class RobopolicyConfig(base_config):
        """Features and horizons of a policy of ours."""

        horizon: int = 1  # actions per chunk, the first for the newest observation
        n_action_steps: int = 1  # actions executed per chunk

        @property
        def observation_delta_indices(self) -> list[int]:
            """Steps of the history, as datasets count them."""
            return list(range(1 - self.n_obs_steps, 1))

        @property
        def action_delta_indices(self) -> list[int]:
            """Steps of the chunk."""
            return list(range(self.horizon))

        @property
        def reward_delta_indices(self) -> None:
            """No rewards."""
            return None

        def get_optimizer_preset(self) -> Any:
            """None: train with robopolicy."""
            raise UserError("Policies of robopolicy are trained with robopolicy; LeRobot can only run them.")

        def get_scheduler_preset(self) -> None:
            """None."""
            return None

        def validate_features(self) -> None:
            """Nothing to check: the policy exists already."""

    class RobopolicyPolicy(base_policy):
        """A policy of ours with LeRobot's methods."""

        config_class = RobopolicyConfig
        name = "robopolicy"

        def __init__(self, config: Any, policy: Policy, features: Mapping[str, str]) -> None:
            super().__init__(config)
            self.policy = policy
            self.features = dict(features)  # our key -> LeRobot feature
            self.reset()

        def reset(self) -> None:
            """Clear the observations and actions of an episode."""
            self._actions: deque[Tensor] = deque(maxlen=self.policy.spec.action_horizon)
            self._seen: dict[str, deque[Tensor]] = {
                key: deque(maxlen=self.policy.spec.obs_horizon) for key in self.features
            }

        def get_optim_params(self) -> Any:
            """Parameters of the policy."""
            return self.policy.parameters()

        @torch.no_grad()
        def predict_action_chunk(self, batch: dict[str, Tensor], noise: Tensor | None = None, **_: Any) -> Tensor:
            """Chunk `(B, H, A)` for observations `(B, To, ...)`, or `(B, ...)` for an observation horizon of 1."""
            obs: Observation = {}
            for key, value in self._read(batch).items():
                if value.ndim == len(self.policy.spec.observation[key]) + 1:
                    value = value[:, None]
                if value.shape[1] != self.policy.spec.obs_horizon:
                    raise UserError(
                        f"The policy expects {self.policy.spec.obs_horizon} steps of '{self.features[key]}', found "
                        f"{value.shape[1]}; select_action collects them."
                    )
                obs[key] = value
            return self._chunk(obs, noise)

        @torch.no_grad()
        def select_action(self, batch: dict[str, Tensor], noise: Tensor | None = None, **_: Any) -> Tensor:
            """Next action `(B, A)` for the newest observations `(B, ...)`; computes a new chunk if needed."""
            for key, value in self._read(batch).items():
                history = self._seen[key]
                history.extend([value] * (1 if history else self.policy.spec.obs_horizon))
            if not self._actions:
                obs = {key: torch.stack(list(history), 1) for key, history in self._seen.items()}
                self._actions.extend(self._chunk(obs, noise).transpose(0, 1)[: self.policy.spec.action_horizon])
            return self._actions.popleft()

        def forward(self, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Any]]:
            """Imitation loss and metrics of a batch with histories and chunks."""
            obs = {
                key: value if value.ndim == len(self.policy.spec.observation[key]) + 2 else value[:, None]
                for key, value in self._read(batch).items()
            }
            mask = None if PAD not in batch else ~batch[PAD]
            loss, info = self.policy.imitation_loss(obs, batch[ACTION], mask=mask)
            return loss.mean(), {key: float(value) for key, value in info.items()}

        def _save_pretrained(self, save_directory: Path, **_: Any) -> None:
            raise UserError("Save policies of robopolicy with robopolicy.training.checkpoint.save_checkpoint.")

        def _read(self, batch: Mapping[str, Tensor]) -> Observation:
            """Observations `(B, ...)` or `(B, To, ...)` by our names and in our types."""
            missing = sorted(set(self.features.values()) - set(batch))
            if missing:
                raise UserError(f"The policy expects '{missing[0]}', found {', '.join(sorted(batch))}.")
            obs: Observation = {}
            for key, name in self.features.items():
                shape, value = tuple(self.policy.spec.observation[key]), batch[name]
                if tuple(value.shape[-len(shape) :]) != shape:
                    raise UserError(f"The policy expects '{name}' of shape {shape}, found {tuple(value.shape[1:])}.")
                as_bytes = is_image(key) and value.is_floating_point()
                obs[key] = (value * 255).round().to(torch.uint8) if as_bytes else value
            return obs

        def _chunk(self, obs: Observation, noise: Tensor | None) -> Tensor:
            if noise is None:
                return self.policy.act(obs, deterministic=True)
            return self.policy.decode(obs, noise)

    return RobopolicyConfig, RobopolicyPolicy
