"""How far decisions that were played are from a sample without chance of what the policy plays.

A finite sample has missed some actions and repeated others, so another policy explains it better than the one that
drew it: `mean[log pi_mle(a | s) - log pi(a | s)]`, with the likeliest policy of the same form (Corrado and Hanna 2023).
"""

from __future__ import annotations

import torch

from robopolicy.policies.base import Observation, Policy, Record


def sampling_error(
    policy: Policy, fitted: Policy, obs: Observation, record: Record, *, steps: int = 2000, lr: float = 1e-3
) -> float:
    """Sampling error [nats per decision], 0 for a sample without chance.

    Args:
        policy: Whose decisions they should be.
        fitted: A copy, which becomes the likeliest policy; only what has a gradient is fitted, in the paper the last
            layer and the spread, as a whole network remembers single decisions.
        obs: (B, To, ...) what was decided on.
        record: (B, ...) what was decided.
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
