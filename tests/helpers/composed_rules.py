"""A check for compositions of parents with different observations."""

from typing import Any

import torch

from robopolicy.critics.q import CriticConfig, QEnsemble
from robopolicy.nets.encoder import ObservationEncoder
from robopolicy.policies.base import PolicySpec
from robopolicy.policies.heads.flow import FlowConfig, FlowPolicy
from robopolicy.policies.wrappers.composed import compose
from robopolicy.policies.wrappers.latent import STEERING_ACTOR, LatentPolicy, NoiseSpace


def seeing(**obs: tuple[int, ...]) -> FlowPolicy:
    """A small flow with statistics of its observations."""
    policy = FlowPolicy(FlowConfig(hidden=(8,)), PolicySpec(obs, 2))
    sizes = {key: (1,) if key.startswith("stock.") else shape for key, shape in obs.items()}
    ranges = {key: {"min": torch.full(size, -1.0), "max": torch.full(size, 3.0)} for key, size in sizes.items()}
    policy.fit_normalizer(ranges | {"action": {"min": [-1.0] * 2, "max": [1.0] * 2}})
    return policy


def check_what_any_parent_knows_serves_critics_and_actors(parents: tuple[Any, Any]) -> None:
    """Critics and steering actors of a composition have the statistics of all its parents."""
    policy = compose([seeing(**obs) for obs in parents])
    obs = {key: torch.rand(2, 1, *shape) for key, shape in policy.spec.observation.items()}
    value = QEnsemble(CriticConfig(hidden=(8,)), policy)(obs, policy.act(obs))
    assert bool(value.isfinite().all())
    steered = LatentPolicy.from_base(policy, NoiseSpace(), STEERING_ACTOR)
    assert bool(steered.act(obs).isfinite().all())
    known = {
        name: buffer
        for part in policy.modules()
        if isinstance(part, ObservationEncoder)
        for name, buffer in part.named_buffers()
        if name.startswith(("clouds.", "entities."))
    }
    own = dict(steered.actor.encoder.named_buffers())
    assert all(torch.equal(own[name], buffer) for name, buffer in known.items())
