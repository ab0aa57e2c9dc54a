"""Mirror symmetry in on-policy learning: mirrored minibatches, and a loss on mirrored means (Mittal et al. 2024).

Mirrored decisions have the advantages and old log-probabilities of the original ones, as the mirrored policy would have
chosen them: their ratios start at 1 for a symmetric policy and correct for the difference otherwise, as in rsl_rl.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from robopolicy.algorithms.common.rollout_batch import RolloutBatch
from robopolicy.constraints import NonNegative, Validated
from robopolicy.critics.value import ValueNet
from robopolicy.errors import UserError
from robopolicy.mirror_symmetry import MirrorSymmetry
from robopolicy.policies.base import Info, Observation, Policy
from robopolicy.policies.heads.explicit import ExplicitPolicy
from robopolicy.policies.heads.gaussian import GaussianPolicy


@dataclass(frozen=True)
class SymmetryConfig(Validated):
    """Use of the mirror symmetry of a task."""

    augment: bool = False  # also train actor and critic on mirrored decisions
    mirror_coef: NonNegative = 0.0  # weight of the squared distance to the mirrored mean in the mirrored state

    @property
    def used(self) -> bool:
        """Whether the mirror is needed."""
        return self.augment or self.mirror_coef > 0


class Symmetry:
    """Mirrored minibatches and mirror loss of a policy and its critics."""

    def __init__(
        self, config: SymmetryConfig, mirror: MirrorSymmetry | None, policy: Policy, critics: list[ValueNet]
    ) -> None:
        """Raise `UserError` unless the mirror covers all observations and matches the actions."""
        if mirror is None:
            raise UserError("The task has no mirror symmetry; leave algorithm.symmetry at its defaults.")
        if config.mirror_coef and not isinstance(policy, GaussianPolicy):
            raise UserError(f"symmetry.mirror_coef needs a Gaussian policy, got '{policy.name}'; use augment.")
        inputs = [policy.spec.observation, *(critic.observation for critic in critics)]
        for key, shape in [entry for shapes in inputs for entry in shapes.items()]:
            reflection = mirror.observation.get(key)
            if reflection is None or (reflection.size,) != tuple(shape):
                raise UserError(f"The task's mirror has no '{key}' of shape {tuple(shape)}; switch symmetry off.")
        if not isinstance(policy, ExplicitPolicy) or policy.name == "autoregressive":
            raise UserError(f"Only Gaussians and mixtures can be mirrored, got '{policy.name}'; switch symmetry off.")
        self.config = config
        self.mirror = mirror
        self.policy = policy
        offset, scale = policy.action_normalizer.offset, policy.action_normalizer.scale
        if mirror.action.size != policy.spec.action_dim or not (
            torch.allclose(mirror.action(offset), offset) and torch.allclose(mirror.action.permute(scale), scale)
        ):
            raise UserError("The bounds of the actions are not symmetric in the task's mirror; switch symmetry off.")

    def image(self, rows: RolloutBatch) -> RolloutBatch | None:
        """Mirrored rows with the old log-probabilities and advantages; None without `augment`.

        Normalised actions are mirrored like raw ones, before and after tanh, because their bounds are symmetric.
        """
        if not self.config.augment:
            return None
        record = rows.record | {"raw": self.mirror.action(rows.record["raw"])}
        return replace(rows, obs=self.mirror.mirror_obs(rows.obs), record=record)

    def mirror_loss(self, obs: Observation) -> tuple[Tensor, Info]:
        """Weighted mean squared distance of the mean in the mirrored state to the mirrored mean, and metrics."""
        assert isinstance(self.policy, GaussianPolicy)
        mean, _ = self.policy.distribution(self.mirror.mirror_obs(obs))
        with torch.no_grad():
            image = self.mirror.action(self.policy.distribution(obs)[0])
        distance = (mean - image).square().mean()
        return self.config.mirror_coef * distance, {"mirror_loss": distance.detach()}


def with_image(loss: Callable[[RolloutBatch], Tensor], rows: RolloutBatch, image: RolloutBatch | None) -> Tensor:
    """Mean of `loss` over the rows and, if not None, their mirror image."""
    return loss(rows) if image is None else (loss(rows) + loss(image)) / 2
