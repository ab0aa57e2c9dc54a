"""Symmetry in on-policy learning: mirrored rollouts, and a loss on what the mirror shows (Mittal et al. 2024).

Mirrored decisions are judged as the played ones are. What would have played them is the mirrored policy, which gives
them the log-probability of the originals: their ratios start at 1 where the policy is symmetric already, and correct
for the difference where it is not. Both losses follow rsl_rl.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from robopolicy.algorithms.frames.on_policy import Rows
from robopolicy.constraints import NotNegative, Ranged
from robopolicy.critics.value import ValueNet
from robopolicy.errors import UserError
from robopolicy.mirror_symmetry import Mirror
from robopolicy.policies.base import Observation, Policy
from robopolicy.policies.heads.explicit import ExplicitPolicy
from robopolicy.policies.heads.gaussian import GaussianPolicy


@dataclass(frozen=True)
class SymmetryConfig(Ranged):
    """What to make of the mirror symmetry that a task declares."""

    augment: bool = False  # actor and critic also learn from mirrored decisions
    mirror_coef: NotNegative = 0.0  # weight of the squared distance to the mirrored mean in the mirrored state

    @property
    def used(self) -> bool:
        """Whether learning needs the mirror."""
        return self.augment or self.mirror_coef > 0


class Symmetry:
    """A mirror that fits a policy and its critics."""

    def __init__(self, mirror: Mirror, policy: Policy, critics: list[ValueNet]) -> None:
        """Check that everything they see and do has an image.

        Raises:
            UserError: An observation has none, or the actions of policy and mirror do not fit each other.
        """
        seen = [policy.spec.observation, *(critic.observation for critic in critics)]
        for key, shape in [entry for shapes in seen for entry in shapes.items()]:
            reflection = mirror.observation.get(key)
            if reflection is None or (reflection.size,) != tuple(shape):
                raise UserError(f"The task's mirror shows no '{key}' of shape {tuple(shape)}; switch symmetry off.")
        if not isinstance(policy, ExplicitPolicy) or policy.name == "autoregressive":
            raise UserError(f"Only Gaussians and mixtures can be mirrored, got '{policy.name}'; switch symmetry off.")
        self.mirror = mirror
        self.policy = policy
        offset, scale = policy.action_normalizer.offset, policy.action_normalizer.scale
        if mirror.action.size != policy.spec.action_dim or not (
            torch.allclose(mirror.action(offset), offset) and torch.allclose(mirror.action.permute(scale), scale)
        ):
            raise UserError("The bounds of the actions are not symmetric in the task's mirror; switch symmetry off.")

    def rows(self, rows: Rows) -> Rows:
        """The mirrored decisions, with log-probabilities and judgement of the played ones.

        Normalised actions mirror like raw ones, before and after tanh, as their bounds are symmetric.
        """
        record = rows.record | {"raw": self.mirror.action(rows.record["raw"])}
        return replace(rows, obs=self.mirror.observe(rows.obs), record=record)

    def loss(self, obs: Observation) -> Tensor:
        """Mean squared distance of the mean in the mirrored state to the mirrored mean, which is held fixed."""
        assert isinstance(self.policy, GaussianPolicy)
        mean, _ = self.policy.distribution(self.mirror.observe(obs))
        with torch.no_grad():
            image = self.mirror.action(self.policy.distribution(obs)[0])
        return (mean - image).square().mean()
