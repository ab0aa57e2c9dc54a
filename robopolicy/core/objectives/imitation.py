"""Imitation by f-divergences to a reference: how hard a demonstration pulls depends on how far it has come (S111)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from robopolicy.core.advantages.targets import DIVERGENCES
from robopolicy.core.aggregate import masked_mean
from robopolicy.core.decisions import Decisions
from robopolicy.core.ratios import log_ratio


@dataclass(frozen=True)
class DivergenceImitation:
    """`-f'(pi / pi_ref)` of every shown decision.

    With the reverse KL that is the negative log-likelihood, which pulls forever; the others fade once the policy has
    left the reference, Jensen-Shannon's by `sigmoid(-log pi / pi_ref)`.
    """

    divergence: str = "jensen_shannon"  # reverse_kl | jensen_shannon | forward_kl | chi_squared

    def __post_init__(self) -> None:
        smooth = [name for name in DIVERGENCES if name != "total_variation"]  # whose slope has no gradient
        if self.divergence not in smooth:
            raise ValueError(f"Unknown divergence '{self.divergence}' to imitate by; known: {', '.join(smooth)}.")

    def __call__(self, decisions: Decisions, advantage: Tensor, logp: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Mean over the decisions."""
        mask, change = decisions.valid(), log_ratio(logp, decisions.need("logp_ref"), decisions)
        return masked_mean(-DIVERGENCES[self.divergence](change), mask), {"kl_ref": masked_mean(change.detach(), mask)}
