"""HARPG: recursive policy gradient with Hessian correction (Fatkhullin et al. 2023), normalised or not.

A Hessian-vector product transports the momentum from the previous weights to the current ones. It estimates the change
of the gradient along the last step at a random point of that step, from half of the environments. The other half runs
with the current weights and gives the gradient. The product costs two more passes; no Hessian is formed.

Use it like `npg_igt`, where the second half of the data helps: long horizons and smooth policies. With tiny steps it is
plain momentum. It needs a policy that can be differentiated twice.

Deviations from the public code: one rollout serves both estimates, with half of the environments each (the code: two
rollouts); the score of a trajectory covers its part in the rollout; advantages are GAE on a learned value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parameters_to_vector

from robopolicy.algorithms.common.rollout_batch import RolloutBatch, normalize
from robopolicy.contrib.control.momentum import MomentumConfig, MomentumGradient
from robopolicy.errors import UserError
from robopolicy.policies.base import Observation, Sample
from robopolicy.policies.noise import Randomness


@dataclass(frozen=True)
class HARPGConfig(MomentumConfig):
    """Settings of HARPG; the schedules are the public code's."""


def hessian_vector(logp: Tensor, advantage: Tensor, learned: Sequence[Tensor], vector: Tensor) -> Tensor:
    """Change `(P,)` of the policy gradient along `vector` `(P,)`: `mean_i [s_i grad L_i + Hess L_i v]`.

    Args:
        logp: (T, M) log-probabilities of the decisions of M trajectories, with a graph.
        advantage: (T, M), constant.
        learned: Weights that `logp` depends on.
        vector: Direction v.

    `L_i` is the sum of `advantage * logp` over trajectory i, and `s_i` the derivative of its log-probability along v:
    the gradient of an expectation also changes with the probabilities of trajectories.
    """
    parts = [piece.view_as(p) for piece, p in zip(vector.split([p.numel() for p in learned]), learned, strict=True)]
    dummy = torch.ones(logp.shape[1], device=logp.device, requires_grad=True)
    carried = torch.autograd.grad((dummy * logp.sum(0)).sum(), learned, create_graph=True)
    along = torch.stack([(g * v).sum() for g, v in zip(carried, parts, strict=True)]).sum()
    (score,) = torch.autograd.grad(along, dummy, retain_graph=True)  # (M,) s_i
    objective = (advantage * logp).sum(0)  # (M,) L_i
    weighted = torch.autograd.grad((score * objective).mean(), learned, retain_graph=True)
    first = torch.autograd.grad(objective.mean(), learned, create_graph=True)
    slope = torch.stack([(g * v).sum() for g, v in zip(first, parts, strict=True)]).sum()
    # Weights that enter the slope linearly have no second derivative.
    second = torch.autograd.grad(slope, learned, allow_unused=True, materialize_grads=True)
    return parameters_to_vector(weighted) + parameters_to_vector(second)


class HARPG(MomentumGradient):
    """Policy gradient with Hessian-corrected momentum; `policy` acts with weights between the last two steps."""

    name = "harpg"
    config_class = HARPGConfig
    data_source = "rollout"
    heads = ("decisions",)
    reference = "fatkhullin2023fisher"
    config: HARPGConfig

    def act(self, obs: Observation, *, generator: Randomness = None) -> Sample:
        """Act with the learned weights in one half of the environments, with interpolated weights in the other."""
        rows = len(next(iter(obs.values())))
        if rows % 2:
            raise UserError(f"HARPG divides the environments between two policies; pass an even number, got {rows}.")
        half = rows // 2
        samples = [
            policy.sample({key: value[part] for key, value in obs.items()}, generator=generator)
            for policy, part in ((self.current, slice(half)), (self.policy, slice(half, None)))
        ]
        record = {key: torch.cat([sample.record[key] for sample in samples]) for key in samples[0].record}
        return Sample(torch.cat([s.chunk for s in samples]), record, torch.cat([s.logp for s in samples]))

    def averaged(self, rows: RolloutBatch, shape: tuple[int, int]) -> Tensor:
        """`(1 - eta) (d + change) + eta g`."""
        steps, envs = shape
        first = torch.arange(envs, device=rows.logp.device).expand(shape).flatten() < envs // 2
        between = rows[~first]
        with sdpa_kernel(SDPBackend.MATH):  # the fast kernels of attention cannot be differentiated twice
            change = hessian_vector(
                self.log_probabilities(between).view(steps, -1),
                normalize(between.advantage).view(steps, -1) / steps,
                self.learned,
                self.trace.weights - self.trace.previous,
            )
        self._load(self.policy, self.trace.weights)
        gradient = self.gradient(rows[first])
        return (self.trace.direction + change).lerp(gradient, self.share)

    def sampling_weights(self) -> Tensor:
        """Interpolate at a random point of the last step."""
        q = torch.rand((), generator=self.generator, device=self.generator.device).to(self.trace.weights)
        return torch.lerp(self.trace.previous, self.trace.weights, q)
