"""Sampling error of executed decisions: the difference to an ideal sample of the policy.

A finite sample misses some actions and repeats others, so another policy explains it better than the one that drew it:
`mean[log pi_mle(a | s) - log pi(a | s)]`, with the maximum-likelihood policy of the same form (Corrado and Hanna 2023).
"""

from __future__ import annotations

import torch

from robopolicy.policies.base import Observation, Policy, Record


def sampling_error(
    policy: Policy, fitted: Policy, obs: Observation, record: Record, *, steps: int = 2000, lr: float = 1e-3
) -> float:
    """Sampling error [nats per decision], 0 for an ideal sample.

    Args:
        policy: The policy that made the decisions.
        fitted: A copy that is fitted by maximum likelihood. Only parameters with gradients are fitted; in the paper the
            last layer and the standard deviation, because a whole network memorises single decisions.
        obs: (B, To, ...) observations of the decisions.
        record: (B, ...) recorded decisions.
        steps: Adam steps on all decisions.
        lr: Adam learning rate.
    """
    optimizer = torch.optim.Adam([weight for weight in fitted.parameters() if weight.requires_grad], lr=lr)
    with torch.enable_grad():
        for _ in range(steps):
            loss = -fitted.decisions(obs, record).logp.sum(1).mean()
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
    with torch.no_grad():
        gain = fitted.decisions(obs, record).logp - policy.decisions(obs, record).logp
    return float(gain.sum(1).mean())
