"""Simulator wrapper for skill discovery: every episode has one of K codes, with a bonus for distinct behavior.

The observation `embedding.skill` is the episode's code, drawn uniformly from K by the episode's seed. A policy that
observes it is a set of K policies, with any algorithm. With a bonus, a decoder learns during training to infer the code
from observation and action, and the reward increases by `bonus * (log q(z | o, a) + log K)`: all skills solve the task,
each in a different way. Evaluate the codes afterwards and keep the best one for the target environment. Source: Zhang
et al. 2021.

Reconstructed from the abstract. Not implemented are the source's constraint between common and game-specific parts, and
its adaptation by first-order gradients; a chosen code can be fine-tuned like any policy.
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
_STREAM = 0x5C111  # separates the draw of the code from the draw of the initial state
_LR = 1e-3  # of the decoder


@dataclass(frozen=True)
class SkillConfig(Validated):
    """Options of the wrapper `skills`."""

    count: AtLeastTwo = 4  # K, number of codes
    bonus: NonNegative = 0.0  # training reward per control step for a decodable code


class SkillSim(SimWrapper):
    """Adds the one-hot observation `embedding.skill` `(K,)` and optionally the bonus to another simulator.

    Rewards with a bonus depend on the state of the decoder, so seeds do not determine episodes.
    """

    name = "skills"
    config_class = SkillConfig
    order: ClassVar[int] = 10  # first, to decode from the task's own observations

    def __init__(self, sim: VectorSim, config: SkillConfig) -> None:
        """Wrap `sim`.

        Raises:
            UserError: A bonus is set without vector observations.
        """
        super().__init__(sim, config)
        self.spec = replace(self.spec, mirror=None)
        self.skills, self.bonus = config.count, config.bonus
        self._vectors = sorted(key for key in sim.spec.observation if not key.startswith((IMAGE_PREFIX, CLOUD_PREFIX)))
        self._obs: Observation = {}
        self.decoder: SkillDecoder | None = None
        if self.bonus:
            if not self._vectors:
                raise UserError("The bonus of 'skills' needs vector observations, got none; drop the bonus.")
            self.spec = replace(self.spec, seeded_episodes=False)
            sizes = [int(np.prod(sim.spec.observation[key].shape)) for key in self._vectors]
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
        """The codes without the bonus, so that rewards are the task's."""
        return replace(config, bonus=0.0)

    @property
    def skill(self) -> Tensor:
        """(N,) codes of the running episodes."""
        seeds = self.sim.episode_seed.tolist()
        codes = [int(np.random.default_rng([_STREAM, seed]).integers(self.skills)) for seed in seeds]
        return torch.tensor(codes, device=self.device)

    def reset(self, seed: int | Sequence[int] = 0) -> Observation:
        """Reset the simulator; every episode gets its code."""
        return self._keep(self.sim.reset(seed))

    def step(self, action: Tensor, active: Tensor | None = None) -> Step:
        """Step the simulator, add the bonus, and train the decoder."""
        skill, before = self.skill, self._obs
        step = self.sim.step(action, active)
        final = {**step.final_obs, SKILL_KEY: self._one_hot(skill)}
        reward, info = step.reward, dict(step.info)
        if self.decoder is not None and before:
            low, high = self.spec.action_low.to(self.device), self.spec.action_high.to(self.device)
            parts = [before[key].flatten(1).float() for key in self._vectors]
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
            state |= deepcopy(parts)  # their tensors change in place
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> Observation:
        """Restore `state_dict`."""
        if self.decoder is not None:
            self.decoder.load_state_dict(state["decoder"])
            self._optimiser.load_state_dict(deepcopy(state["optimiser"]))
        return self._keep(super().load_state_dict(state))

    def _learn(self, decoder: SkillDecoder, behaviour: Tensor, skill: Tensor, moving: Tensor) -> Tensor:
        """Bonus `(N,)` of the decoder before its step on the rows that move."""
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

    def _one_hot(self, skill: Tensor) -> Tensor:
        return torch.nn.functional.one_hot(skill, self.skills).float()

    def _keep(self, obs: Observation) -> Observation:
        self._obs = {**obs, SKILL_KEY: self._one_hot(self.skill)}
        return dict(self._obs)
