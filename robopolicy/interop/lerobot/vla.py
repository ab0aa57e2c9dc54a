"""LeRobot's flow-matching policies that read an instruction: SmolVLA, pi0 and pi0.5.

They integrate from noise (their time 1) to actions (their time 0) by Euler steps. Their noise is wider than the action:
it fills the padded action space the network was trained in. All of it can be steered; of the chunk only the robot's own
dimensions come out.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from robopolicy.errors import UserError
from robopolicy.interop.lerobot.policy import LeRobotConfig, LeRobotPolicy, observation_of, played
from robopolicy.interop.lerobot.source import Source
from robopolicy.policies.base import Observation, PolicySpec


class LeRobotVLA(LeRobotPolicy):
    """A vision-language-action policy of LeRobot; verbs `act` and `decode`."""

    name: ClassVar[str] = "lerobot_vla"
    config_class = LeRobotConfig
    kinds: ClassVar[dict[str, str]] = {
        "smolvla": "num_steps",
        "pi0": "num_inference_steps",
        "pi05": "num_inference_steps",
    }

    @classmethod
    def spec_of(cls, source: Source, config: LeRobotConfig, execute: int | None = None) -> PolicySpec:
        """Chunks of `chunk_size` actions, of which `n_action_steps` are played.

        Raises:
            UserError: No instruction is given, more actions are to be played than planned, or they are relative.
        """
        if not config.instructions:
            raise UserError(
                f"The LeRobot policy {source.name} ({source.kind}) reads an instruction, found none; load it with "
                "instructions=['what the robot is to do']."
            )
        if source.config.get("use_relative_actions"):
            raise UserError(
                f"The LeRobot policy {source.name} has use_relative_actions=true, so its statistics are not those of "
                "the actions that it plays; only policies with absolute actions can be loaded."
            )
        horizon = source.number("chunk_size")
        return PolicySpec(
            observation_of(source, config.instructions), source.action_dim, horizon, played(source, execute, horizon)
        )

    @property
    def noise_shape(self) -> tuple[int, int]:
        """Actions of a chunk and width of the padded action space."""
        return self.spec.horizon, self.source.number("max_action_dim")

    def history(self, value: Tensor) -> Tensor:
        """The newest step `(B, ...)`, all that these policies see."""
        return value[:, -1]

    def generate(self, obs: Observation, noise: Tensor) -> Tensor:
        """Normalised actions `(B, H, A)` for `noise` `(B, *noise_shape)`."""
        return self.original.policy.predict_action_chunk(self.prepared(obs), noise=noise)
