"""Training of the gate of a composition on demonstrations (`policies/wrappers/learned_gate.py`)."""

from __future__ import annotations

from collections.abc import Callable

import torch

from robopolicy.data.chunks import ChunkSampler
from robopolicy.data.episodes import Episodes
from robopolicy.errors import UserError
from robopolicy.policies.composition.selection import ordering_loss
from robopolicy.policies.wrappers.learned_gate import LearnedGatePolicy


def fit_selector(
    policy: LearnedGatePolicy, episodes: Episodes, *, seed: int = 0, progress: Callable[[int], None] | None = None
) -> float:
    """Train the selector of `policy` to rank its parents by discrepancy; all other weights are unchanged.

    Args:
        policy: Composition with the selector.
        episodes: Demonstrations of the tasks.
        seed: Seed of batches and noise.
        progress: Callback that receives the number of finished gradient steps.

    Returns:
        Fraction of the last quarter of the chunks for which the best parent was ranked first.

    Raises:
        UserError: The demonstrations lack observations or actions of the policy.
    """
    selection, spec = policy.config.selection, policy.spec
    missing = [key for key in spec.observation if key not in episodes.arrays]
    if missing or episodes.arrays["action"].shape[1] != spec.action_dim:
        raise UserError(
            f"Demonstrations for the selector require {sorted(spec.observation)} and {spec.action_dim} actions; "
            f"they lack {missing or 'such actions'}."
        )
    sampler = ChunkSampler(
        episodes,
        horizon=spec.horizon,
        obs_horizon=spec.obs_horizon,
        batch_size=selection.batch_size,
        seed=seed,
    )
    generator, device = torch.Generator().manual_seed(seed), policy.device
    optimizer = torch.optim.Adam(policy.selector.parameters(), selection.lr)
    first: list[float] = []
    for step in range(selection.updates):
        batch = next(sampler)
        obs = {key: batch.obs[key].to(device) for key in spec.observation}
        discrepancies = policy.discrepancies(obs, batch.chunk.to(device), generator=generator)
        loss, info = ordering_loss(policy.selector(obs), discrepancies)
        optimizer.zero_grad(set_to_none=True)
        loss.mean().backward()
        optimizer.step()
        first.append(float(info["first"].mean()))
        if progress is not None:
            progress(step + 1)
    late = first[-max(1, len(first) // 4) :]
    return sum(late) / len(late)
