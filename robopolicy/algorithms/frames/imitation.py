"""How algorithms imitate what was played: replay learners beside their critics, GoRL between its stages."""

from __future__ import annotations

import torch
from torch import Tensor

from robopolicy.errors import UserError
from robopolicy.policies.base import Observation, Policy
from robopolicy.policies.wrappers.best_of_n import SelectedPolicy


def require_imitation(policy: Policy, algorithm: str) -> Policy:
    """The policy to train by imitation: the one inside, where `policy` plays the best of another one's samples.

    A run that begins with what such a run has saved would otherwise choose among samples of an old choice.

    Raises:
        UserError: It has no `imitation_loss`.
    """
    while isinstance(policy, SelectedPolicy):
        policy = policy.base
    if type(policy).imitation_loss is Policy.imitation_loss:
        raise UserError(
            f"Algorithm '{algorithm}' trains by imitation_loss, which policy '{policy.name}' lacks; use a flow, "
            "diffusion, autoregressive or Gaussian policy."
        )
    return policy


def imitation_loss(
    policy: Policy,
    obs: Observation,
    chunk: Tensor,
    weight: Tensor | None = None,
    *,
    mask: Tensor | None = None,
    generator: torch.Generator,
    progress: float,
) -> Tensor:
    """Loss `(B,)` of `policy` towards `chunk` `(B, H, A)`, times `weight` `(B,)`; `mask` `(B, H)` is 0 on padded steps.

    `progress` in [0, 1] is the place in its training, for schedules of the policy such as a consistency head's grid.
    Dropout and augmentation are for this loss alone: whoever acts, bootstraps or distils uses the whole network.
    """
    policy.set_progress(progress)
    policy.train()
    loss, _ = policy.imitation_loss(obs, chunk, weight, mask=mask, generator=generator)
    policy.eval()
    return loss
