"""Scenarios of known dynamics, and their differentiable rollout.

A scenario contains everything random of an episode, so the return of a deterministic policy is a function of the
policy's parameters, with an exact gradient: no critic and no likelihood ratio is needed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from robopolicy.contrib.known_dynamics.dynamics import DifferentiableDynamics, Outcome
from robopolicy.contrib.known_dynamics.linear import LinearDynamics
from robopolicy.sim.contract import Observation

Decide = Callable[[Observation], Tensor]
"""Maps histories `{key: (B, To, ...)}` to chunks `(B, H, A)`; differentiable if gradients are needed."""


@dataclass(frozen=True)
class Scenarios:
    """B episodes before their rollout."""

    dynamics: DifferentiableDynamics
    state: Tensor  # (B, S) initial states
    noise: Tensor  # (B, T, W) disturbances of every control step


@dataclass(frozen=True)
class Plans(Scenarios):
    """Scenarios of linear dynamics with convex costs, which allow plans of whole episodes."""

    dynamics: LinearDynamics


@dataclass(frozen=True)
class Unrolled:
    """B whole episodes."""

    action: Tensor  # (B, T, A) within the bounds
    reward: Tensor  # (B, T)
    obs: Observation  # (B * T, 1, ...) observation before every step, without gradients


def unroll(
    scenarios: Scenarios,
    decide: Decide,
    *,
    action_horizon: int = 1,
    obs_horizon: int = 1,
    step: Callable[[Tensor, Tensor, Tensor], Outcome] | None = None,
) -> Unrolled:
    """Roll out `scenarios` to their end and keep the graph.

    Args:
        scenarios: Episodes to roll out.
        decide: The policy.
        action_horizon: Executed control steps of each chunk.
        obs_horizon: To, observations of the policy; the first is repeated at the start.
        step: Step function; the default is the step of the dynamics.
    """
    dynamics, state = scenarios.dynamics, scenarios.state
    step = step or dynamics.step
    low, high = (bound.to(state) for bound in (dynamics.spec.action_low, dynamics.spec.action_high))
    history: list[Observation] = []
    actions: list[Tensor] = []
    rewards: list[Tensor] = []
    chunk = state.new_zeros(0)
    for t in range(scenarios.noise.shape[1]):
        history.append(dynamics.observe(state))
        if t % action_horizon == 0:
            recent = history[-obs_horizon:]
            recent = [recent[0]] * (obs_horizon - len(recent)) + recent
            chunk = decide({key: torch.stack([obs[key] for obs in recent], 1) for key in recent[0]})
        actions.append(chunk[:, t % action_horizon].clamp(low, high))
        outcome = step(state, actions[-1], scenarios.noise[:, t])
        rewards.append(outcome.reward)
        state = outcome.state
    observed = {
        key: torch.stack([obs[key].detach() for obs in history], 1).flatten(0, 1)[:, None] for key in history[0]
    }
    return Unrolled(torch.stack(actions, 1), torch.stack(rewards, 1), observed)
