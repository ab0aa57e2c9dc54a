"""Rollouts with vines: the simulator is restored repeatedly at some decisions, and every vine runs to its end.

All vines from one branch point of an environment begin in the same state and differ by exploration only. Unlike groups
(`rollout/groups.py`) vines begin in the middle of episodes, in states that the policy visits.
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
    """`RolloutSampler` with vines, which do not affect its rollouts."""

    def __init__(self, sim: ChunkedSim, *, decisions: int, branch_points: int, branches: int, seed: int = 0) -> None:
        """Create the sampler.

        Args:
            sim: Simulator with chunk execution and observation history.
            decisions: T, chunk decisions per environment in one rollout.
            branch_points: Randomly drawn decisions of each rollout at which vines begin in every environment.
            branches: V, vines from each branch point.
            seed: First episode seed, and seed of the exploration noise.
        """
        super().__init__(sim, decisions=decisions, seed=seed)
        try:
            sim.state_dict()
        except RuntimeError as error:
            raise UserError(
                f"Vines need a backend that saves its state, got {sim.sim.spec.task}; choose another sim."
            ) from error
        self.branch_points, self.branches = branch_points, branches
        self._noise = torch.Generator(sim.sim.device).manual_seed(seed + 1)  # of the vines
        self._moments: dict[int, Any] = {}  # decision of the rollout -> state of the simulator
        self._decision = 0

    def collect(self, act: Act) -> VineRollout:
        """Run `decisions` chunks per environment, and vines to the end of their episodes."""
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
        """State that determines the next rollout and its vines."""
        return {**super().state_dict(), "noise": self._noise.get_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`."""
        super().load_state_dict(state)
        self._noise.set_state(state["noise"])
