"""A policy as a judge of answers: how likely it says that they are right, asked as the task says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from robopolicy.core.decisions import Decisions
from robopolicy.text.policy import TextPolicy
from robopolicy.text.task import Inquiry
from robopolicy.text.world import score, with_choices


@dataclass(frozen=True)
class Judge:
    """Asks a policy, with the weights that it has when it is asked."""

    policy: TextPolicy
    generator: torch.Generator  # of families whose likelihoods are estimates

    @torch.no_grad()
    def __call__(self, asked: Sequence[Inquiry]) -> list[float]:
        """Probability of the message that approves, of the two that were offered."""
        if not asked:
            return []
        written = [[one.prompt, message] for one in asked for message in (one.right, one.wrong)]
        extra, _ = self.policy.conversations(written, self.generator)
        mask = extra.pop("mask")
        extra["temperature"] = torch.ones(len(mask), device=mask.device)
        blank = torch.zeros(mask.shape, device=mask.device)
        rows = with_choices(Decisions(blank, mask=mask, reward=blank, extra=extra))
        rows = self.policy.decided(rows, self.generator)
        logp = score(self.policy, rows).logp.masked_fill(~rows.valid(), 0.0).sum(1)
        if "masked" in rows.extra:  # samples of a bound in place of tokens
            logp = logp / rows.valid().sum(1)
        return logp.view(-1, 2).softmax(1)[:, 0].tolist()
