"""Rollouts with vines: at some of their moments the simulator is restored again and again, and played to the end.

Every vine from one moment of one environment begins in the same state and differs from the others by exploration alone.
Unlike groups (`samplers/group.py`) vines begin in the middle of episodes, where the policy has really been.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch

from robopolicy.contrib.control.vine_batch import VineRollout
from robopolicy.data.batches import GroupRollout
from robopolicy.errors import UserError
from robopolicy.policies.base import Sample
from robopolicy.rollout.groups import rollout_to_end
from robopolicy.rollout.on_policy import Act, RolloutSampler
from robopolicy.sim.chunk import ChunkedSim, ChunkStep


class VineSampler(RolloutSampler):
    """As `RolloutSampler`; what it plays besides leaves no trace in the rollouts."""

    def __init__(self, sim: ChunkedSim, *, decisions: int, branch_points: int, branches: int, seed: int = 0) -> None:
        """Get ready.

        Args:
            sim: Simulator with chunk execution and observation history.
            decisions: T, chunk decisions per environment in one rollout.
            branch_points: Moments of each rollout, drawn at random, at which vines begin in every environment.
            branches: V, vines from each moment.
            seed: First episode seed, and seed of the exploration noise.
        """
        super().__init__(sim, decisions=decisions, seed=seed)
        try:
            sim.state_dict()
        except RuntimeError as error:
            raise UserError(
                f"The backend of {sim.sim.spec.task} cannot save its state, from which vines grow; choose another."
            ) from error
        self.branch_points, self.branches = branch_points, branches
        self._noise = torch.Generator(sim.sim.device).manual_seed(seed + 1)  # of the vines
        self._moments: dict[int, Any] = {}  # decision of the rollout -> state of the simulator
        self._decision = 0

    def collect(self, act: Act) -> VineRollout:
        """Play `decisions` chunks per environment, and vines to the end of their episodes."""
        drawn = torch.randperm(self.decisions, generator=self._noise, device=self._noise.device)[: self.branch_points]
        self._moments, self._decision = dict.fromkeys(sorted(drawn.tolist())), 0
        rollout = super().collect(act)
        end = copy.deepcopy(self.sim.state_dict())
        envs = torch.arange(self.sim.sim.num_envs, device=rollout.reward.device)
        branches: list[GroupRollout] = []
        for number, state in enumerate(self._moments.values()):
            for _ in range(self.branches):
                obs = self.sim.load_state_dict(copy.deepcopy(state))
                branches.append(rollout_to_end(self.sim, act, obs, self._noise, group=number * len(envs) + envs))
        self.sim.load_state_dict(end)
        self._moments = {}
        self.env_steps += sum(int(vine.steps.sum()) for vine in branches)
        return VineRollout(**vars(rollout), branches=tuple(branches))

    def _step(self, sample: Sample) -> ChunkStep:
        if self._decision in self._moments:
            self._moments[self._decision] = copy.deepcopy(self.sim.state_dict())
        self._decision += 1
        return super()._step(sample)

    def state_dict(self) -> dict[str, Any]:
        """Everything that decides the next rollout and its vines."""
        return {**super().state_dict(), "noise": self._noise.get_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`."""
        super().load_state_dict(state)
        self._noise.set_state(state["noise"])
