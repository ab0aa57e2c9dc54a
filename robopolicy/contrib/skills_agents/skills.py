"""A simulator whose policies are sets: every episode shows one of K codes, and pays for what tells it.

The observation `embedding.skill` is the episode's code, drawn alike from K by the episode's seed. A policy that sees it
is a set of K policies, whichever algorithm trains it. With a bonus, a decoder learns on the way to tell the code from
observation and action, and the reward gains `bonus * (log q(z | o, a) + log K)`: skills that all solve the task, each
in its own way. Play the codes afterwards and keep the one that does best where the policy is to go.
Source: Zhang et al. 2021.

Reconstructed from the abstract: the source's constraint between what is common to games and what is special to each,
and its adaptation by first-order gradients, are not built; a chosen code can be fine-tuned like any policy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from robopolicy.constraints import AtLeastTwo, NonNegative, Validated
from robopolicy.contrib.skills_agents.skill_discriminator import SkillDecoder
from robopolicy.errors import UserError
from robopolicy.nets.encoder import CLOUD_PREFIX, EMBEDDING_PREFIX, IMAGE_PREFIX
from robopolicy.sim.contract import TERM_PREFIX, Observation, SimSpec, Step, TensorSpec, VectorSim
from robopolicy.sim.wrappers.base import SimWrapper

SKILL_KEY = f"{EMBEDDING_PREFIX}skill"
_STREAM = 0x5C111  # keeps the draw of the code apart from that of the episode's start
_LR = 1e-3  # of the decoder


@dataclass(frozen=True)
class SkillConfig(Validated):
    """Options of the wrapper `skills`."""

    count: AtLeastTwo = 4  # K, codes of which each episode shows one
    bonus: NonNegative = 0.0  # reward per control step for telling the code from observation and action, in training


class SkillSim(SimWrapper):
    """Another simulator, the observation `embedding.skill` `(K,)`, one-hot, and where wanted the bonus.

    Rewards depend on what the decoder has learnt, so with a bonus an episode is more than its seed.
    """

    name = "skills"
    config_class = SkillConfig
    order: ClassVar[int] = 10  # tells codes from the task's own observations

    def __init__(self, sim: VectorSim, config: SkillConfig) -> None:
        """Wrap `sim`.

        Raises:
            UserError: A bonus, and nothing but images to tell the skills from.
        """
        super().__init__(sim, config)
        self.spec = replace(self.spec, mirror=None)
        self.skills, self.bonus = config.count, config.bonus
        self._told = sorted(key for key in sim.spec.observation if not key.startswith((IMAGE_PREFIX, CLOUD_PREFIX)))
        self._obs: Observation = {}
        self.decoder: SkillDecoder | None = None
        if self.bonus:
            if not self._told:
                raise UserError("Skills are told from vectors, and this simulator shows none; leave the bonus out.")
            self.spec = replace(self.spec, seeded_episodes=False)
            sizes = [int(np.prod(sim.spec.observation[key].shape)) for key in self._told]
            self.decoder = SkillDecoder(sum(sizes) + sim.spec.action_dim, self.skills).to(self.device)
            self._optimiser = torch.optim.Adam(self.decoder.parameters(), _LR)

    @classmethod
    def observation(cls, spec: SimSpec, config: SkillConfig) -> dict[str, TensorSpec]:
        """`embedding.skill` `(K,)`: the code of the episode, one-hot."""
        names = tuple(f"skill_{code}" for code in range(config.count))
        return {SKILL_KEY: TensorSpec((config.count,), names=names)}

    @classmethod
    def options_for(cls, observation: Mapping[str, tuple[int, ...]]) -> dict[str, Any] | None:
        """The number of codes, which is the size of the observation."""
        return {"count": observation[SKILL_KEY][0]} if SKILL_KEY in observation else None

    @classmethod
    def evaluation_config(cls, config: SkillConfig) -> SkillConfig:
        """The codes without the bonus: rewards are those of the task alone."""
        return replace(config, bonus=0.0)

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
