"""A policy of LeRobot behind our contract, with its processors and statistics.

Base of all kinds: observations become what the policy was trained on, actions come back in the robot's units. The
policy is frozen, and copies share it. A checkpoint holds no weights of it but its place and the hash of its content, so
the files must still be there, or be provided (`source.provide`), when the checkpoint is loaded.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from robopolicy.errors import UserError
from robopolicy.interop.lerobot.original import load_original
from robopolicy.interop.lerobot.source import ACTION, STATISTICS, Normalization, Source, open_source
from robopolicy.limits import Count, Ranged
from robopolicy.nets.encoder import IMAGE_PREFIX, ObservationEncoder
from robopolicy.nets.normalizer import make_normalizer
from robopolicy.policies.base import Observation, Policy, PolicySpec
from robopolicy.policies.noise import Randomness, normal

_NEEDS = {"minmax": {"min", "max"}, "meanstd": {"mean", "std"}}
TASK_INDEX = "task_index"  # observation that chooses among several instructions, as the datasets name it


@dataclass(frozen=True)
class LeRobotConfig(Ranged):
    """Which saved policy, and how it is used; `load_lerobot` fills it in."""

    source: str = ""  # folder, or id on the Hugging Face hub
    revision: str | None = None  # commit, branch or tag on the hub; None is the newest
    sha256: str = ""  # content of its files
    instructions: tuple[str, ...] = ()  # what a language policy is told; of several, `task_index` chooses one
    keys: dict[str, str] = field(default_factory=dict)  # our observation key -> LeRobot feature, where unusual
    steps: Count | None = None  # sampler steps per chunk; None takes the policy's own


class LeRobotPolicy(Policy):
    """What all kinds share; verbs `act` and `decode`."""

    kinds: ClassVar[dict[str, str]]  # LeRobot's names of the policies it holds -> their setting of sampler steps
    config: LeRobotConfig

    def __init__(self, config: LeRobotConfig, spec: PolicySpec) -> None:
        """Load the policy that `config` names.

        Raises:
            UserError: `lerobot` is missing, the files have changed, or `spec` is not that of the policy.
        """
        super().__init__()
        if not config.sha256:
            raise UserError("A LeRobot policy comes from its files; use robopolicy.interop.lerobot.load_lerobot.")
        source = open_source(config.source, revision=config.revision, keys=config.keys, sha256=config.sha256)
        found = self.spec_of(source, config, spec.execute)
        if found.to_dict() != spec.to_dict():
            raise UserError(f"The LeRobot policy in {source.folder} is {found}, expected {spec}.")
        self.config = config
        self.spec = spec
        self.source = source
        self.original = load_original(source, {self.kinds[source.kind]: config.steps} if config.steps else {})
        self.encoder = _encoder(source, spec, len(config.instructions))
        mode, statistics = _units(source.normalization[ACTION])
        self.action_normalizer = make_normalizer(source.action_dim, mode)
        self.action_normalizer.fit(statistics)

    # What a kind defines.

    @classmethod
    @abstractmethod
    def spec_of(cls, source: Source, config: LeRobotConfig, execute: int | None = None) -> PolicySpec:
        """What goes into the policy in `source` and what comes out; `execute` None plays as many actions as it does."""

    @abstractmethod
    def generate(self, obs: Observation, noise: Tensor) -> Tensor:
        """Normalised actions `(B, H, A)` for `noise` `(B, *noise_shape)`."""

    # What follows from it.

    def decode(self, obs: Observation, noise: Tensor) -> Tensor:
        """Chunk `(B, H, A)` in action units for `noise` `(B, *noise_shape)`, without gradients."""
        with torch.no_grad():
            return self.in_action_units(self.generate(obs, noise))

    def act(self, obs: Observation, *, deterministic: bool = False, generator: Randomness = None) -> Tensor:
        """Chunk for fresh noise; there is no other randomness to remove."""
        return self.decode(obs, self.draw_noise(obs, generator))

    @property
    def network_calls(self) -> int:
        """Sampler steps."""
        return int(getattr(self.original.policy.config, self.kinds[self.source.kind]))

    def draw_noise(self, obs: Observation, generator: Randomness) -> Tensor:
        """Standard normal noise `(B, *noise_shape)`."""
        reference = next(iter(obs.values()))
        return normal((len(reference), *self.noise_shape), generator, reference.device)

    def history(self, value: Tensor) -> Tensor:
        """An observation `(B, To, ...)` as the policy takes it."""
        return value

    def prepared(self, obs: Observation) -> dict[str, Any]:
        """What LeRobot's processors make of `obs`, by feature.

        Raises:
            UserError: An observation is missing or has another shape.
        """
        rows: dict[str, Any] = {}
        for key, shape in self.spec.observation.items():
            found = tuple(obs[key].shape[1:]) if key in obs else f"only {', '.join(sorted(obs))}"
            expected = (self.spec.obs_horizon, *shape)
            if found != expected:
                raise UserError(
                    f"{self.config.source} expects observation '{key}' of shape {expected}, found {found}; where only "
                    "the name differs, load it with keys={'image.ours': 'observation.images.theirs'}."
                )
            if key in self.source.inputs:
                value = self.history(obs[key].float())
                rows[self.source.inputs[key]] = value / 255 if key.startswith(IMAGE_PREFIX) else value
        rows["task"] = self._told(obs)
        return self.original.preprocessor(rows)

    def in_action_units(self, actions: Tensor) -> Tensor:
        """Normalised actions `(B, H, A)` as LeRobot's processors hand them to the robot."""
        return self.original.postprocessor(actions).to(actions.device, torch.float32)

    def _told(self, obs: Observation) -> list[str]:
        """Instruction of every row; empty for policies that read none."""
        told = self.config.instructions
        if len(told) > 1:
            chosen = [int(index) for index in obs[TASK_INDEX][:, -1, 0]]
            if not set(chosen) <= set(range(len(told))):
                raise UserError(f"'{TASK_INDEX}' must choose among {len(told)} instructions, found {sorted(chosen)}.")
            return [told[index] for index in chosen]
        return [*told, ""][:1] * len(next(iter(obs.values())))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> LeRobotPolicy:
        # `to(device)` must also reach the policy that is kept out of the state dict.
        super()._apply(fn, recurse)
        self.original.policy._apply(fn, recurse)
        return self


def observation_of(source: Source, instructions: tuple[str, ...] = ()) -> dict[str, tuple[int, ...]]:
    """Observation part of a specification."""
    return {**source.shapes, **({TASK_INDEX: (1,)} if len(instructions) > 1 else {})}


def played(source: Source, execute: int | None, horizon: int) -> int:
    """Actions to play of a chunk of `horizon`; None takes LeRobot's setting.

    Raises:
        UserError: There are not as many.
    """
    count = source.number("n_action_steps") if execute is None else execute
    if not 1 <= count <= horizon:
        raise UserError(
            f"{source.name} plans {horizon} actions from the newest observation on, so execute must lie in "
            f"[1, {horizon}], got {count}{' from its n_action_steps' if execute is None else ''}."
        )
    return count


def _encoder(source: Source, spec: PolicySpec, instructions: int) -> ObservationEncoder:
    """The observed vectors with their statistics, from which critics and steering actors take their normaliser."""
    shapes = {key: shape for key, shape in spec.observation.items() if not key.startswith(IMAGE_PREFIX)}
    statistics = {key: source.normalization[source.inputs[key]].statistics for key in shapes if key in source.inputs}
    if TASK_INDEX in shapes:
        every = torch.arange(float(instructions))
        statistics[TASK_INDEX] = {"min": every[:1], "max": every[-1:], "mean": every.mean(), "std": every.std()}
    known = [mode for mode in ("minmax", "meanstd") if all(_NEEDS[mode] <= set(found) for found in statistics.values())]
    encoder = ObservationEncoder(shapes, normalization=[*known, "identity"][0])
    encoder.fit_normalizer(statistics)
    return encoder


def _units(found: Normalization) -> tuple[str, dict[str, Tensor]]:
    """Mode and statistics of our normaliser for a scaling of LeRobot's."""
    if found.mode == "IDENTITY":
        return "identity", {}
    ours = ("mean", "std") if found.mode == "MEAN_STD" else ("min", "max")
    values = [found.statistics[name] for name in STATISTICS[found.mode]]
    return "meanstd" if found.mode == "MEAN_STD" else "minmax", dict(zip(ours, values, strict=True))
