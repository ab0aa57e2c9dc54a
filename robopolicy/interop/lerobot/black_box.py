"""Any other policy of LeRobot, loaded and called by LeRobot's own code: only its actions are known here.

`act` resets the policy and passes it the observation history step by step, so that rows and episodes never share its
internal queues. The chunk is the one that it plans at the newest observation, or a single action for policies that plan
no chunks. There is no noise, likelihood or training.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from robopolicy.constraints import PositiveInt
from robopolicy.errors import UserError
from robopolicy.interop.lerobot.policy import (
    LeRobotConfig,
    LeRobotPolicy,
    load_original,
    num_executed,
    observation_of,
)
from robopolicy.interop.lerobot.source import SavedPolicy, one_line
from robopolicy.policies.base import Observation, PolicySpec
from robopolicy.policies.noise import Randomness, normal

STEPS = "n_action_steps"  # setting of the actions that a policy executes before it plans again
IMAGES = "observation.images"  # all cameras together, which some policies keep in their queues


@dataclass(frozen=True)
class LeRobotBlackBoxConfig(LeRobotConfig):
    """Saved policy and what is known of it; created by `load_lerobot`."""

    horizon: PositiveInt = 1  # actions of a chunk, found by a first call


class LeRobotBlackBox(LeRobotPolicy):
    """A policy of LeRobot of any kind; verb `act`."""

    name: ClassVar[str] = "lerobot"
    config_class = LeRobotBlackBoxConfig
    kinds: ClassVar[dict[str, str]] = {}
    config: LeRobotBlackBoxConfig

    @classmethod
    def spec_of(cls, source: SavedPolicy, config: Any, action_horizon: int | None = None) -> PolicySpec:
        """Return the specification, with chunks of `config.horizon` actions."""
        default = None if STEPS in source.config and config.horizon > 1 else config.horizon
        executed = num_executed(source, action_horizon or default, config.horizon)
        observation = observation_of(source, config.instructions)
        return PolicySpec(observation, source.action_dim, config.horizon, executed, _history(source))

    @property
    def is_steerable(self) -> bool:
        """No: its noise cannot be chosen."""
        return False

    @property
    def nfe(self) -> int:
        """Unknown number of network evaluations; 1."""
        return 1

    def settings(self, source: SavedPolicy) -> dict[str, Any]:
        """Single actions are planned anew at every observation."""
        return {STEPS: 1} if self.config.horizon == 1 and STEPS in source.config else {}

    def decode(self, obs: Observation, noise: Tensor) -> Tensor:
        """Raise a TypeError: there is no noise."""
        raise self._lacks("decode")

    def generate(self, obs: Observation, noise: Tensor) -> Tensor:
        """Raise a TypeError: there is no noise."""
        raise self._lacks("generate")

    @torch.no_grad()
    def act(self, obs: Observation, *, deterministic: bool = False, generator: Randomness = None) -> Tensor:
        """Chunk that LeRobot plans; its random numbers are a function of `generator` and of the rows together."""
        self.check_inputs(obs)
        draws = normal((len(next(iter(obs.values()))), 1), generator, torch.device("cpu"))
        with torch.random.fork_rng(), one_line(f"The LeRobot policy {self.config.source} gave no action"):
            torch.manual_seed(int.from_bytes(draws.numpy().tobytes()[:8], "little"))
            steps = [
                self.processed({key: obs[key][:, step] for key in self.source.inputs}, obs)
                for step in range(self.spec.obs_horizon)
            ]
            planned = plan(self.original.policy, steps, chunk=self.spec.horizon > 1)
            chunk = self.in_action_units(planned)
        expected = (len(draws), self.spec.horizon, self.spec.action_dim)
        if tuple(chunk.shape) != expected or not bool(chunk.isfinite().all()):
            text = f"shape {tuple(chunk.shape)}" if tuple(chunk.shape) != expected else "numbers that are not finite"
            raise UserError(f"The LeRobot policy {self.config.source} returned {text}, expected shape {expected}.")
        return chunk


def plan(policy: Any, steps: list[dict[str, Any]], *, chunk: bool) -> Tensor:
    """Normalised actions `(B, H, A)` of a policy of LeRobot after the processed observations `steps`, oldest first."""
    policy.reset()
    if not chunk:
        return [policy.select_action(dict(step)) for step in steps][-1][:, None]
    newest = dict(steps[-1])
    if len(steps) > 1:  # fills its queues
        for step in steps:
            policy.select_action(dict(step))
        if cameras := [newest[name] for name in policy.config.image_features]:
            newest[IMAGES] = torch.stack(cameras, -4)
    return policy.predict_action_chunk(newest)


def find_horizon(source: SavedPolicy) -> int:
    """Actions that the policy plans at once, by a call with zeros; 1 if it plans none."""
    original = load_original(source, {})
    zeros: dict[str, Any] = {name: torch.zeros(1, *source.shapes[key]) for key, name in source.inputs.items()}
    zeros["task"] = [""]
    with torch.no_grad():
        steps = [original.preprocessor(dict(zeros)) for _ in range(_history(source))]
        try:
            found = plan(original.policy, steps, chunk=True)
        except Exception as error:  # every kind has its own reason to plan no chunks
            if _history(source) > 1 and STEPS not in source.config:
                reason = (str(error) or type(error).__name__).splitlines()[0].rstrip(".")
                raise UserError(f"{source.name} plans no chunk ({reason}) and lacks the setting {STEPS}.") from error
            return 1
    return found.shape[1] if found.dim() == 3 and found.shape[2] == source.action_dim else 1


def _history(source: SavedPolicy) -> int:
    return source.number("n_obs_steps") if "n_obs_steps" in source.config else 1
