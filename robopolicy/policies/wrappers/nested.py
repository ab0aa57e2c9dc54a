"""Nested policies: description of the policies inside a wrapper (latent, best-of-n or composed).

The configuration of a wrapper contains the description of each inner policy as plain values, so that a checkpoint can
rebuild it: `config.base = describe(inner)`, and in the constructor `self.base = rebuild(config.base)`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor, nn

from robopolicy.errors import UserError, unknown_name
from robopolicy.nets.normalizer import Normalizer
from robopolicy.policies.base import Info, Observation, Policy, PolicySpec
from robopolicy.policies.noise import Randomness
from robopolicy.policies.registry import POLICIES
from robopolicy.schema import from_dict


class WrappingPolicy(Policy):
    """Base of policies around another policy `base`, whose imitation loss they use."""

    fallback_hint: ClassVar[str] = "fine-tune its inner policy"
    base: Policy

    def imitation_loss(
        self,
        obs: Observation,
        chunk: Tensor,
        weight: Tensor | None = None,
        *,
        mask: Tensor | None = None,
        generator: Randomness = None,
    ) -> tuple[Tensor, Info]:
        """Loss of the wrapped policy."""
        return self.base.imitation_loss(obs, chunk, weight, mask=mask, generator=generator)

    def set_progress(self, progress: float) -> None:
        """Delegate to the wrapped policy."""
        self.base.set_progress(progress)


def describe(policy: Policy) -> dict[str, Any]:
    """Name, configuration and specification of `policy` as plain values; its state dict holds the weights."""
    return {"name": policy.name, "config": policy.config_dict(), "spec": policy.spec.to_dict()}


def rebuild(description: Mapping[str, Any]) -> Policy:
    """Build a new policy from a description; an invalid description raises a `UserError`."""
    if not {"name", "config", "spec"} <= set(description):
        raise UserError("A wrapped policy is described by name, config and spec; build the wrapper from a checkpoint.")
    if description["name"] not in POLICIES:
        raise unknown_name("policy", str(description["name"]), POLICIES)
    policy_class = POLICIES[description["name"]]
    config_class = policy_class.config_class
    config = from_dict(config_class, description["config"], f"wrapped policy '{description['name']}'")
    return policy_class(config, PolicySpec.from_dict(description["spec"]))  # type: ignore[call-arg]


def same_policy(first: nn.Module, second: nn.Module) -> bool:
    """Whether networks of one class have equal weight shapes and normaliser modes."""
    shapes = [{key: value.shape for key, value in part.state_dict().items()} for part in (first, second)]
    modes = [[n.mode for n in part.modules() if isinstance(n, Normalizer)] for part in (first, second)]
    return shapes[0] == shapes[1] and modes[0] == modes[1]
