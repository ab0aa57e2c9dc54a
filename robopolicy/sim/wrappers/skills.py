"""A simulator whose policies are sets: every episode shows one of K codes, and pays for what tells it (S140).

The observation `embedding.skill` is the episode's code, drawn alike from K by the episode's seed. A policy that sees it
is a set of K policies, whichever algorithm trains it. With a bonus, a decoder learns on the way to tell the code from
observation and action, and the reward gains `bonus * (log q(z | o, a) + log K)`: skills that all solve the task, each
in its own way. Play the codes afterwards and keep the one that does best where the policy is to go.

Reconstructed from the abstract: the source's constraint between what is common to games and what is special to each,
and its adaptation by first-order gradients, are not built; a chosen code can be fine-tuned like any policy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from robopolicy.errors import UserError
from robopolicy.nets.encoder import CLOUD_PREFIX, EMBEDDING_PREFIX, IMAGE_PREFIX
from robopolicy.nets.skills import SkillDecoder
from robopolicy.sim.contract import TERM_PREFIX, Observation, Step, TensorSpec, VectorSim
from robopolicy.sim.wrapped import WrappedSim

SKILL_KEY = f"{EMBEDDING_PREFIX}skill"
_STREAM = 0x5C111  # keeps the draw of the code apart from that of the episode's start
_LR = 1e-3  # of the decoder


class SkillSim(WrappedSim):
    """Another simulator, the observation `embedding.skill` `(K,)`, one-hot, and where wanted the bonus.

    Rewards depend on what the decoder has learnt, so with a bonus an episode is more than its seed.
    """

    def __init__(self, sim: VectorSim, skills: int, bonus: float = 0.0) -> None:
        """Wrap `sim`.

        Args:
            sim: The simulator.
            skills: K.
            bonus: Of telling the code, in units of reward per control step; 0 only shows it.

        Raises:
            UserError: Fewer than two skills, a negative bonus, or nothing but images to tell them from.
        """
        if skills < 2 or bonus < 0:
            raise UserError(f"Skills need at least 2 codes and a bonus >= 0, got {skills} and {bonus:g}.")
        names = tuple(f"skill_{code}" for code in range(skills))
        super().__init__(sim, SKILL_KEY, TensorSpec((skills,), names=names))
        self.spec = replace(self.spec, mirror=None)
        self.skills, self.bonus = skills, bonus
        self._told = sorted(key for key in sim.spec.observation if not key.startswith((IMAGE_PREFIX, CLOUD_PREFIX)))
        self._obs: Observation = {}
        self.decoder: SkillDecoder | None = None
        if bonus:
            if not self._told:
                raise UserError("Skills are told from vectors, and this simulator shows none; leave the bonus out.")
            self.spec = replace(self.spec, seeded_episodes=False)
            sizes = [int(np.prod(sim.spec.observation[key].shape)) for key in self._told]
            self.decoder = SkillDecoder(sum(sizes) + sim.spec.action_dim, skills).to(self.device)
            self._optimiser = torch.optim.Adam(self.decoder.parameters(), _LR)

    @property
    def skill(self) -> Tensor:
        """(N,) codes of the episodes now running."""
        seeds = self.sim.episode_seed.tolist()
        codes = [int(np.random.default_rng([_STREAM, seed]).integers(self.skills)) for seed in seeds]
        return torch.tensor(codes, device=self.device)

    def reset(self, seed: int | Sequence[int] = 0) -> Observation:
        """Start every environment anew, each with its code."""
        return self._keep(self.sim.reset(seed))

    def step(self, action: Tensor, active: Tensor | None = None) -> Step:
        """Step the simulator, pay the bonus, and let the decoder learn."""
        skill, before = self.skill, self._obs
        step = self.sim.step(action, active)
        final = {**step.final_obs, SKILL_KEY: self._shown(skill)}
        reward, info = step.reward, dict(step.info)
        if self.decoder is not None and before:
            low, high = self.spec.action_low.to(self.device), self.spec.action_high.to(self.device)
            parts = [before[key].flatten(1).float() for key in self._told]
            behaviour = torch.cat([*parts, action.to(self.device).clamp(low, high)], 1)
            moving = torch.ones_like(step.done) if active is None else active.to(self.device)
            bonus = self.bonus * self._learn(self.decoder, behaviour, skill, moving)
            reward = reward + bonus
            info[f"{TERM_PREFIX}skill"] = bonus
        return replace(step, obs=self._keep(step.obs), final_obs=final, reward=reward, info=info)

    def state_dict(self) -> dict[str, Any]:
        """State of the simulator, and of the decoder."""
        state = super().state_dict()
        if self.decoder is not None:
            parts = {"decoder": self.decoder.state_dict(), "optimiser": self._optimiser.state_dict()}
            state |= deepcopy(parts)  # they learn on
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> Observation:
        """Restore `state_dict`."""
        if self.decoder is not None:
            self.decoder.load_state_dict(state["decoder"])
            self._optimiser.load_state_dict(deepcopy(state["optimiser"]))
        return self._keep(super().load_state_dict(state))

    def _learn(self, decoder: SkillDecoder, behaviour: Tensor, skill: Tensor, moving: Tensor) -> Tensor:
        """Bonus `(N,)` by what the decoder knew; then it sees the rows that move."""
        if not bool(moving.any()):
            return torch.zeros_like(behaviour[:, 0])
        decoder.normalizer.update(behaviour[moving])
        with torch.no_grad():
            bonus = torch.where(moving, decoder.bonus(behaviour, skill), 0.0)
        loss = decoder.loss(behaviour[moving], skill[moving]).mean()
        self._optimiser.zero_grad()
        loss.backward()
        self._optimiser.step()
        return bonus

    def _shown(self, skill: Tensor) -> Tensor:
        return torch.nn.functional.one_hot(skill, self.skills).float()

    def _keep(self, obs: Observation) -> Observation:
        self._obs = {**obs, SKILL_KEY: self._shown(self.skill)}
        return dict(self._obs)
