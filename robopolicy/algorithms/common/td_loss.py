"""Temporal-difference losses of a Q ensemble."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from robopolicy.critics.q import QEnsemble
from robopolicy.data.batches import Transitions
from robopolicy.nets.module_state import training_mode
from robopolicy.policies.base import Info


def td_loss(critic: QEnsemble, batch: Transitions, target: Callable[[Transitions], Tensor]) -> tuple[Tensor, Info]:
    """Weighted temporal-difference loss, summed over members and averaged over the batch, and metrics.

    `target(batch)` is `(B,)`, `(M, B)` per member, or probabilities, see `QEnsemble.regression`, and is called after
    the critic and without gradients. Dropout of the critic is active, in any mode of the critic.
    """
    with training_mode(critic):
        output = critic.output(critic.encode(batch.obs), batch.chunk)
    with torch.no_grad():
        targets = target(batch)
    return regression_loss(critic, batch, output, targets)


def regression_loss(critic: QEnsemble, batch: Transitions, output: Tensor, targets: Tensor) -> tuple[Tensor, Info]:
    """Weighted loss of raw outputs to `targets`, and the metrics `value`, `target` and `td_errors` `(M, B)`."""
    loss = (critic.regression(output, targets) * (batch.weight / len(batch))).sum()
    value = critic.value(output.detach())
    if targets.dim() == 3 and critic.histogram is not None:
        targets = critic.histogram.expected(targets)
    return loss, {"value": value, "target": targets, "td_errors": value - targets}
