"""LeRobot policies with our policy interface, including processors and statistics.

The base class converts observations and actions with the processors of the policy. The policy is frozen and shared by
copies. A checkpoint contains its address and the hash of its content instead of weights, so the files must still exist,
or be registered (`source.register_folder`), when the checkpoint is loaded.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors import safe_open
from torch import Tensor

from robopolicy.constraints import PositiveInt, Validated
from robopolicy.errors import UserError
from robopolicy.interop.lerobot.source import (
    ACTION,
    STATISTICS,
    WEIGHTS,
    Normalization,
    SavedPolicy,
    lerobot_module,
    one_line,
    open_source,
)
from robopolicy.nets.encoder import IMAGE_PREFIX, ObservationEncoder
from robopolicy.nets.normalizer import make_normalizer
from robopolicy.policies.base import Observation, Policy, PolicySpec
from robopolicy.policies.noise import Randomness, normal


class FrozenPolicy:
    """Frozen policy of LeRobot with its processors; shared by copies of our policy."""

    def __init__(self, policy: Any, preprocessor: Any, postprocessor: Any) -> None:
        self.policy, self.preprocessor, self.postprocessor = policy, preprocessor, postprocessor

    def __deepcopy__(self, memo: dict[int, Any]) -> FrozenPolicy:
        return self


def load_original(source: SavedPolicy, settings: dict[str, Any]) -> FrozenPolicy:
    """Load the policy with LeRobot's `from_pretrained` on the CPU; `settings` replace entries of config.json."""
    factory, configs = lerobot_module("policies.factory"), lerobot_module("configs.policies")
    with one_line(f"lerobot cannot load {source.folder}"):
        config = configs.PreTrainedConfig.from_pretrained(source.folder, cli_overrides=["--device=cpu"])
        if hasattr(config, "pretrained_backbone_weights"):
            config.pretrained_backbone_weights = None  # otherwise downloaded before the file replaces them
        for name, value in settings.items():
            setattr(config, name, value)
        # Not strict: `check_weights` has better messages, and some kinds continue with random weights after an error.
        policy = factory.get_policy_class(source.kind).from_pretrained(source.folder, config=config, strict=False)
        pipelines = factory.make_pre_post_processors(config, pretrained_path=str(source.folder))
    check_weights(source.folder / WEIGHTS, policy)
    for pipeline in pipelines:  # tensors stay on the device of the observations
        pipeline.steps = [step for step in pipeline.steps if type(step).__name__ != "DeviceProcessorStep"]
    return FrozenPolicy(policy.eval().requires_grad_(False), *pipelines)


def check_weights(file: Path, policy: Any) -> None:
    """Raise a UserError with the first weight of `policy` that differs from `file`, is unknown or missing."""
    state: dict[str, torch.Tensor] = policy.state_dict()
    given: set[str] = set()
    with safe_open(str(file), "pt") as tensors:
        for name in tensors.keys():  # noqa: SIM118 - not a mapping
            own = name if name in state else f"model.{name}"  # files from openpi lack the prefix
            if own not in state:
                raise UserError(f"{file} has weight '{name}', which is unknown to LeRobot's '{policy.name}'.")
            value, loaded = tensors.get_tensor(name), state[own]
            if value.shape != loaded.shape:
                raise UserError(
                    f"Weight '{name}' of {file} has shape {tuple(value.shape)}, but its config.json implies "
                    f"{tuple(loaded.shape)}."
                )
            if value.is_floating_point() and not bool(value.isfinite().all()):
                raise UserError(f"Weight '{name}' of {file} is not finite; use an earlier checkpoint.")
            if not torch.equal(value.to(loaded.dtype), loaded.cpu()):
                raise UserError(
                    f"lerobot did not load weight '{name}' of {file}; load it with lerobot and see its message."
                )
            given.add(own)
    shared = {state[name].data_ptr() for name in given}  # tied weights are stored once
    for name, value in state.items():
        if name not in given and value.numel() and value.data_ptr() not in shared:
            raise UserError(f"{file} lacks weight '{name}' of LeRobot's '{policy.name}'; save the policy again.")


_NEEDS = {"minmax": {"min", "max"}, "meanstd": {"mean", "std"}}
TASK_INDEX = "task_index"  # observation that selects an instruction, named as in datasets


@dataclass(frozen=True)
class LeRobotConfig(Validated):
    """Saved policy and settings of its use; created by `load_lerobot`."""

    source: str = ""  # folder, or id on the Hugging Face hub
    revision: str | None = None  # commit, branch or tag on the hub; None is the newest
    sha256: str = ""  # hash of its files
    instructions: tuple[str, ...] = ()  # instructions of a language policy; `task_index` selects one of several
    keys: dict[str, str] = field(default_factory=dict)  # our observation key -> LeRobot feature, where unusual
    steps: PositiveInt | None = None  # sampler steps per chunk; None for the value of the policy


class LeRobotPolicy(Policy):
    """Base class of all kinds; verbs `act` and `decode`."""

    is_external: ClassVar[bool] = True
    kinds: ClassVar[dict[str, str]]  # LeRobot's names of its policies -> their setting of sampler steps
    config: LeRobotConfig

    def __init__(self, config: LeRobotConfig, spec: PolicySpec) -> None:
        """Load the policy that `config` names; a UserError is raised if its files or `spec` have changed."""
        super().__init__()
        if not config.sha256:
            raise UserError("A LeRobot policy comes from its files; use robopolicy.interop.lerobot.load_lerobot.")
        source = open_source(config.source, revision=config.revision, keys=config.keys, sha256=config.sha256)
        found = self.spec_of(source, config, spec.action_horizon)
        if found.to_dict() != spec.to_dict():
            raise UserError(f"The LeRobot policy in {source.folder} is {found}, expected {spec}.")
        self.config = config
        self.spec = spec
        self.source = source
        self.original = load_original(source, self.settings(source))
        self.encoder = _encoder(source, spec, len(config.instructions))
        mode, statistics = _units(source.normalization[ACTION])
        self.action_normalizer = make_normalizer(source.action_dim, mode)
        self.action_normalizer.fit(statistics)

    # Defined by subclasses.

    @classmethod
    @abstractmethod
    def spec_of(cls, source: SavedPolicy, config: LeRobotConfig, action_horizon: int | None = None) -> PolicySpec:
        """Specification of the policy in `source`; `action_horizon` None keeps its number of executed actions."""

    @abstractmethod
    def generate(self, obs: Observation, noise: Tensor) -> Tensor:
        """Normalised actions `(B, H, A)` for `noise` `(B, *noise_shape)`."""

    # Shared methods.

    def settings(self, source: SavedPolicy) -> dict[str, Any]:
        """Entries of config.json to replace."""
        return {self.kinds[source.kind]: self.config.steps} if self.config.steps else {}

    def decode(self, obs: Observation, noise: Tensor) -> Tensor:
        """Chunk `(B, H, A)` in action units for `noise` `(B, *noise_shape)`, without gradients."""
        with torch.no_grad():
            return self.in_action_units(self.generate(obs, noise))

    def act(self, obs: Observation, *, deterministic: bool = False, generator: Randomness = None) -> Tensor:
        """Chunk for new noise; there is no other randomness."""
        return self.decode(obs, self.draw_noise(obs, generator))

    @property
    def nfe(self) -> int:
        """Sampler steps."""
        return int(getattr(self.original.policy.config, self.kinds[self.source.kind]))

    def draw_noise(self, obs: Observation, generator: Randomness) -> Tensor:
        """Standard normal noise `(B, *noise_shape)`."""
        reference = next(iter(obs.values()))
        return normal((len(reference), *self.noise_shape), generator, reference.device)

    def history(self, value: Tensor) -> Tensor:
        """An observation `(B, To, ...)` in the format of the policy."""
        return value

    def prepared(self, obs: Observation) -> dict[str, Any]:
        """Return the output of the LeRobot processors for `obs`, by feature."""
        self.check_inputs(obs)
        return self.processed({key: self.history(obs[key]) for key in self.source.inputs}, obs)

    def processed(self, values: Observation, obs: Observation) -> dict[str, Any]:
        """Return the output of the LeRobot processors for some of the steps of `obs`, by feature."""
        rows: dict[str, Any] = {
            self.source.inputs[key]: value.float() / 255 if key.startswith(IMAGE_PREFIX) else value.float()
            for key, value in values.items()
        }
        rows["task"] = self._instructions(obs)
        return self.original.preprocessor(rows)

    def check_inputs(self, obs: Observation) -> None:
        """Raise a UserError if an observation is missing or has another shape."""
        for key, shape in self.spec.observation.items():
            found = tuple(obs[key].shape[1:]) if key in obs else f"only {', '.join(sorted(obs))}"
            expected = (self.spec.obs_horizon, *shape)
            if found != expected:
                raise UserError(
                    f"{self.config.source} expects observation '{key}' of shape {expected}, found {found}; where only "
                    "the name differs, load it with keys={'image.ours': 'observation.images.theirs'}."
                )

    def in_action_units(self, actions: Tensor) -> Tensor:
        """Convert normalised actions `(B, H, A)` to action units by the LeRobot processors."""
        return self.original.postprocessor(actions).to(actions.device, torch.float32)

    def _instructions(self, obs: Observation) -> list[str]:
        """Return the instruction of every row; empty for policies without instructions."""
        texts = self.config.instructions
        if len(texts) > 1:
            chosen = [int(index) for index in obs[TASK_INDEX][:, -1, 0]]
            if not set(chosen) <= set(range(len(texts))):
                raise UserError(f"'{TASK_INDEX}' must choose among {len(texts)} instructions, found {sorted(chosen)}.")
            return [texts[index] for index in chosen]
        return [*texts, ""][:1] * len(next(iter(obs.values())))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> LeRobotPolicy:
        # `to(device)` must also reach the policy that is kept out of the state dict.
        super()._apply(fn, recurse)
        self.original.policy._apply(fn, recurse)
        return self


def observation_of(source: SavedPolicy, instructions: tuple[str, ...] = ()) -> dict[str, tuple[int, ...]]:
    """Observation part of a specification."""
    return {**source.shapes, **({TASK_INDEX: (1,)} if len(instructions) > 1 else {})}


def num_executed(source: SavedPolicy, action_horizon: int | None, horizon: int) -> int:
    """Return the number of executed actions of a chunk of `horizon`; None for the setting of LeRobot."""
    count = source.number("n_action_steps") if action_horizon is None else action_horizon
    if not 1 <= count <= horizon:
        raise UserError(
            f"{source.name} plans {horizon} actions from the newest observation on, so action_horizon must lie in "
            f"[1, {horizon}], got {count}{' from its n_action_steps' if action_horizon is None else ''}."
        )
    return count


def _encoder(source: SavedPolicy, spec: PolicySpec, instructions: int) -> ObservationEncoder:
    """Return an encoder of the observed vectors, whose normaliser critics and steering actors use."""
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
    """Return mode and statistics of our normaliser for a LeRobot normalization."""
    if found.mode == "IDENTITY":
        return "identity", {}
    ours = ("mean", "std") if found.mode == "MEAN_STD" else ("min", "max")
    values = [found.statistics[name] for name in STATISTICS[found.mode]]
    return "meanstd" if found.mode == "MEAN_STD" else "minmax", dict(zip(ours, values, strict=True))


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
    def spec_of(cls, source: SavedPolicy, config: LeRobotConfig, action_horizon: int | None = None) -> PolicySpec:
        """Return the specification; requires an instruction and absolute actions."""
        if not config.instructions:
            raise UserError(
                f"The LeRobot policy {source.name} ({source.kind}) needs an instruction, found none; load it with "
                "instructions=['pick up the cube']."
            )
        if source.config.get("use_relative_actions"):
            raise UserError(
                f"The LeRobot policy {source.name} has use_relative_actions=true, so its statistics do not "
                "describe the actions that it returns; only policies with absolute actions can be loaded."
            )
        horizon = source.number("chunk_size")
        return PolicySpec(
            observation_of(source, config.instructions),
            source.action_dim,
            horizon,
            num_executed(source, action_horizon, horizon),
        )

    @property
    def noise_shape(self) -> tuple[int, int]:
        """Actions of a chunk and width of the padded action space."""
        return self.spec.horizon, self.source.number("max_action_dim")

    def history(self, value: Tensor) -> Tensor:
        """The newest step `(B, ...)`, the only input of these policies."""
        return value[:, -1]

    def generate(self, obs: Observation, noise: Tensor) -> Tensor:
        """Normalised actions `(B, H, A)` for `noise` `(B, *noise_shape)`."""
        return self.original.policy.predict_action_chunk(self.prepared(obs), noise=noise)
