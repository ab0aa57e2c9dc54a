"""Batched policies of one architecture: every row of a batch uses its own weights.

A *member* is a vector: the weights of the network and, for networks with an observation `descriptor`, its constant
value. A descriptor-conditioned policy is a member for each descriptor, and a plain policy has a fixed constant, so that
both kinds are varied, selected and evaluated in the same way.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from robopolicy.contrib.quality_diversity.behavior import DESCRIPTOR
from robopolicy.policies.base import Observation
from robopolicy.policies.heads.gaussian import GaussianPolicy


class Population:
    """Members with the architecture and the normalisers of a policy."""

    def __init__(self, policy: GaussianPolicy) -> None:
        self.policy = policy
        (self.descriptor_dim,) = policy.spec.observation.get(DESCRIPTOR, (0,))  # C
        self._shapes = {name: parameter.shape for name, parameter in policy.named_parameters()}
        self.weight_dim = sum(shape.numel() for shape in self._shapes.values())
        self._mode = _Mode(policy)

    def weights(self, policy: nn.Module | None = None) -> Tensor:
        """Weights `(D,)` of `policy`, by default of the population's policy."""
        return torch.cat([p.detach().flatten() for p in (policy or self.policy).parameters()])

    def member(self, descriptor: Tensor) -> Tensor:
        """The policy at descriptors `(K, C)`, as members `(K, D + C)`."""
        return torch.cat([self.weights().expand(len(descriptor), -1), descriptor.to(self.policy.device)], 1)

    def split(self, members: Tensor) -> tuple[Tensor, Tensor]:
        """Weights `(K, D)` and constants `(K, C)` of members."""
        return members[:, : self.weight_dim], members[:, self.weight_dim :]

    def modes(self, weights: Tensor, constants: Tensor, obs: Observation) -> Tensor:
        """Chunks `(K, B, H, A)` of K members at B observations each, `{key: (K, B, To, ...)}`; differentiable.

        Args:
            weights: (K, D).
            constants: (K, C).
            obs: Observations; their `descriptor` is replaced by the constants.
        """
        rows = next(iter(obs.values())).shape[1]
        if self.descriptor_dim:
            obs = {**obs, DESCRIPTOR: constants[:, None, None].expand(-1, rows, self.policy.spec.obs_horizon, -1)}
        return vmap(self._one)(weights, obs)

    @torch.no_grad()
    def act(self, members: Tensor, obs: Observation) -> Tensor:
        """Chunks `(N, H, A)` of members `(N, D + C)` at one observation `{key: (N, To, ...)}` each."""
        batched = {key: value[:, None] for key, value in obs.items()}
        return self.modes(*self.split(members), batched)[:, 0]

    def fresh(self, count: int, seed: int) -> Tensor:
        """Weights `(count, D)`: the policy and newly initialised networks."""
        kind: type[GaussianPolicy] = type(self.policy)
        with torch.random.fork_rng(), torch.device(self.policy.device):
            torch.manual_seed(seed)
            networks = [self.policy, *(kind(self.policy.config, self.policy.spec) for _ in range(count - 1))]
        return torch.stack([self.weights(network) for network in networks])

    def _one(self, weights: Tensor, obs: Mapping[str, Tensor]) -> Tensor:
        parts = weights.split([shape.numel() for shape in self._shapes.values()])
        named = {
            f"policy.{name}": part.view(shape) for (name, shape), part in zip(self._shapes.items(), parts, strict=True)
        }
        return functional_call(self._mode, named, (obs,))

    @torch.no_grad()
    def put(self, member: Tensor, policy: nn.Module) -> None:
        """Copy the weights of a member `(D + C,)` to `policy`, which has this architecture."""
        parts = member[: self.weight_dim].split([shape.numel() for shape in self._shapes.values()])
        for parameter, part in zip(policy.parameters(), parts, strict=True):
            parameter.copy_(part.view_as(parameter))


class _Mode(nn.Module):
    """Module whose forward pass is the mode of a policy, for `functional_call`."""

    def __init__(self, policy: GaussianPolicy) -> None:
        super().__init__()
        self.policy = policy

    def forward(self, obs: Observation) -> Tensor:
        return self.policy.mode(obs)
