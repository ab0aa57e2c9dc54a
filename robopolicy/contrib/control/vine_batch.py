"""Rollouts with episodes that branch off at some of their states."""

from __future__ import annotations

from dataclasses import dataclass

from robopolicy.data.batches import GroupRollout, Rollout


@dataclass(frozen=True, kw_only=True)
class VineRollout(Rollout):
    """A rollout, and complete episodes that branch off at several of its decisions."""

    branches: tuple[GroupRollout, ...]  # in order of branch points; `group` numbers branch point and environment
