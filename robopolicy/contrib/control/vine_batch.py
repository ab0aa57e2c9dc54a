"""Rollouts with episodes that branch off at some of their states."""

from __future__ import annotations

from dataclasses import dataclass

from robopolicy.data.batches import GroupRollout, Rollout


@dataclass(frozen=True, kw_only=True)
class VineRollout(Rollout):
    """A rollout, and episodes that were played to their end from several of its moments."""

    branches: tuple[GroupRollout, ...]  # those from one moment in sequence; `group` numbers moment and environment
