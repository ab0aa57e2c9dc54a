"""Skill decoder, which infers the code of a behavior, and its bonus (Zhang et al. 2021).

A policy conditioned on a code z, drawn uniformly from K codes, is a set of policies. The dependence of the behavior on
the code is measured by the mutual information I(z; o, a), which is at least the mean of `log q(z | o, a) + log K` for
any decoder q (Barber and Agakov 2003). As a reward it makes the codes distinct skills, as in DIAYN (Eysenbach et al.
2018).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from robopolicy.errors import UserError
from robopolicy.nets.mlp import MLP
from robopolicy.nets.normalizer import RunningNormalizer


class SkillDecoder(nn.Module):
    """q(z | o, a): observations and actions `(B, D)` to logits `(B, K)`."""

    def __init__(self, in_dim: int, skills: int, hidden: tuple[int, ...] = (64, 64)) -> None:
        super().__init__()
        if skills < 2:
            raise UserError(f"Skills need at least 2 codes, got {skills}.")
        self.skills = skills
        self.normalizer = RunningNormalizer(in_dim)
        self.body = MLP(in_dim, hidden, skills)
        nn.init.zeros_(self.body[-1].weight)  # type: ignore[arg-type]
        nn.init.zeros_(self.body[-1].bias)  # type: ignore[arg-type]

    def forward(self, behaviour: Tensor) -> Tensor:
        """Logits of the codes, initially uniform."""
        return self.body(self.normalizer.normalize(behaviour))

    def bonus(self, behaviour: Tensor, skill: Tensor) -> Tensor:
        """`log q(z | o, a) + log K` `(B,)` of codes `(B,)`: 0 for a uniform q, log K for a certain one."""
        return _chosen(self(behaviour).log_softmax(-1), skill) + math.log(self.skills)

    def loss(self, behaviour: Tensor, skill: Tensor) -> Tensor:
        """Cross-entropy loss `(B,)` of the decoder."""
        return -_chosen(self(behaviour).log_softmax(-1), skill)


def _chosen(logp: Tensor, skill: Tensor) -> Tensor:
    return torch.gather(logp, 1, skill[:, None])[:, 0]
