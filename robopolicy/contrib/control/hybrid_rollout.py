"""Rollouts with windows of a dataset."""

from __future__ import annotations

from dataclasses import dataclass

from robopolicy.data.batches import Rollout, Transitions


@dataclass(frozen=True, kw_only=True)
class HybridRollout(Rollout):
    """A rollout with windows of a dataset."""

    offline: Transitions  # B windows
