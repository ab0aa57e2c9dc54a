"""Policies of other libraries for `robopolicy import`, and checkpoints as chunk policies."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from robopolicy.deploy.contract import Observed
from robopolicy.device import use_configured_threads
from robopolicy.errors import UserError, unknown_name
from robopolicy.policies.base import Observation, Policy, PolicySpec
from robopolicy.policies.noise import PerRowGenerator
from robopolicy.policies.wrappers.black_box import BlackBoxConfig, BlackBoxPolicy
from robopolicy.spec import HIDDEN_STATE, IMAGE_PREFIX, TaskMetadata


@dataclass(frozen=True)
class ImportSource:
    """Location and options of a policy of another library, from the command line."""

    address: str  # file, folder or URL
    observation: Mapping[str, tuple[int, ...]]  # observations of the task without cameras
    rename: Mapping[str, str] = field(default_factory=dict)  # our name -> theirs
    config: str = ""  # configuration file, if the kind needs one
    action_horizon: int = 0  # actions executed per chunk; 0 leaves it to the policy
    instructions: tuple[str, ...] = ()  # instructions of a language policy


def open_policy(kind: str, source: ImportSource) -> Policy:
    """Open the policy of `source`; a UserError is raised for an unknown kind or an unreadable policy."""
    if kind not in KINDS:
        raise unknown_name("kind of policy", kind, KINDS)
    return KINDS[kind](source)


def _lerobot(source: ImportSource) -> Policy:
    from robopolicy.interop.lerobot.loading import load_lerobot

    _refuse(source, "config")
    return load_lerobot(
        source.address,
        instructions=source.instructions,
        keys=source.rename,
        action_horizon=source.action_horizon or None,
    )


def _onnx(source: ImportSource) -> Policy:
    from robopolicy.interop.onnx import open_onnx

    _refuse(source, "config", "instructions")
    return open_onnx(
        source.address,
        rename=source.rename,
        action_horizon=source.action_horizon,
        action_normalization="minmax",
        threads=1,
    )


def _openpi(source: ImportSource) -> Policy:
    from robopolicy.interop.openpi import open_openpi

    _refuse(source, "config")
    if len(source.instructions) > 1:
        raise UserError("A request of openpi has one instruction; pass --instruction once.")
    rename = dict(source.rename)
    actions = rename.pop("chunk", "")
    return open_openpi(
        source.address,
        source.observation,
        rename=rename,
        actions=actions.split(",") if actions else (),
        prompt="".join(source.instructions),
        action_horizon=source.action_horizon,
        action_normalization="minmax",
    )


def _remote(source: ImportSource) -> Policy:
    from robopolicy.interop.remote import open_remote

    _refuse(source, "config", "instructions", "rename")
    return open_remote(source.address, action_horizon=source.action_horizon, action_normalization="minmax")


def _sb3(source: ImportSource) -> Policy:
    from robopolicy.interop.sb3_actor import read_model

    _refuse(source, "config", "action_horizon", "instructions")
    if len(source.rename) > 1:
        raise UserError(f"The model has one observation vector; rename one key to it, got {dict(source.rename)}.")
    return read_model(source.address, next(iter(source.rename), "state"))


def _rsl_rl(source: ImportSource) -> Policy:
    from robopolicy.interop.rsl_rl import read_actor, read_config

    _refuse(source, "action_horizon", "instructions")
    config = Path(source.config) if source.config else Path(source.address).parent / "params" / "agent.yaml"
    if not config.is_file():
        raise UserError(f"The runner's configuration {config} does not exist; pass it by --config FILE.")
    return read_actor(source.address, read_config(config), source.observation, rename=source.rename)


def _refuse(source: ImportSource, *names: str) -> None:
    for name in names:
        if getattr(source, name):
            raise UserError(f"This kind of policy takes no --{name.replace('_', '-').rstrip('s')}; drop it.")


KINDS: dict[str, Callable[[ImportSource], Policy]] = {
    "lerobot": _lerobot,
    "onnx": _onnx,
    "openpi": _openpi,
    "remote": _remote,
    "rsl_rl": _rsl_rl,
    "sb3": _sb3,
}
"""Kind -> function that opens a policy; each imports its adapter and packages when called."""


class CheckpointChunkPolicy:
    """Chunk policy of a checkpoint, in torch; noise is a function of episode and decision, as in an evaluation."""

    takes_prefix = False

    def __init__(
        self, policy: Policy, *, deterministic: bool = True, task_metadata: TaskMetadata | None = None
    ) -> None:
        """Put the policy into evaluation mode; `deterministic` disables exploration noise."""
        self.policy, self.task_metadata = policy.eval(), task_metadata
        self.deterministic = deterministic
        self._device = policy.device
        self._hidden: Tensor | None = None
        self.reset(0)

    @property
    def spec(self) -> PolicySpec:
        """Specification of the policy."""
        return self.policy.spec

    def reset(self, seed: int) -> None:
        """Start the episode `seed`."""
        self._seed, self._decision = seed, 0
        size = self.spec.hidden_dim
        self._hidden = torch.zeros(1, 1, size, device=self._device) if size else None

    def chunk(self, obs: Observed, prefix: NDArray[Any] | None = None) -> NDArray[np.float32]:
        """Return the chunk `(H, A)` for one observation `{key: (To, ...)}`, which must be finite; takes no prefix."""
        if prefix is not None:
            raise UserError("This policy cannot continue given actions; use the chunk blending 'replace'.")
        batch: dict[str, Tensor] = {}
        for key, shape in self.spec.observation.items():
            if key == HIDDEN_STATE:
                continue
            expected, found = (self.spec.obs_horizon, *shape), np.shape(obs[key]) if key in obs else "nothing"
            if found != expected:
                raise UserError(f"The policy expects '{key}' of shape {expected}, found {found}.")
            value = np.ascontiguousarray(obs[key])
            if key.startswith(IMAGE_PREFIX) and value.dtype != np.uint8:
                raise UserError(f"The policy expects '{key}' in uint8, found {value.dtype}.")
            if value.dtype.kind == "f" and not np.isfinite(value).all():  # it would remain in the hidden state
                raise UserError(f"Observation '{key}' is not finite.")
            batch[key] = torch.from_numpy(value)[None].to(self._device)
        use_configured_threads()  # the control loop has a thread for the policy
        with torch.inference_mode():
            if self._hidden is not None:
                batch[HIDDEN_STATE] = self._hidden
            noise = PerRowGenerator([self._seed], [self._decision])
            chunk = self.policy.act(batch, deterministic=self.deterministic, generator=noise)
            if self._hidden is not None:
                self._hidden = self.policy.next_hidden(batch)
        self._decision += 1
        return chunk[0].float().cpu().numpy()

    def close(self) -> None:
        """Do nothing: there are no resources."""


MODULES: dict[str, Callable[[], nn.Module]] = {}
"""Factories of modules by their names in checkpoints."""


def register_module(name: str, make: Callable[[], nn.Module]) -> None:
    """Register a factory for modules that checkpoints call `name`; their weights are loaded into the module."""
    MODULES[name] = make


@dataclass(frozen=True)
class ModuleConfig(BlackBoxConfig):
    """Settings of a wrapped module; the module is passed to `register_module` or `ModulePolicy.wrap`."""

    module: str = ""  # its name


class ModulePolicy(BlackBoxPolicy):
    """A torch module as a policy."""

    name: ClassVar[str] = "module"
    config_class = ModuleConfig
    config: ModuleConfig

    def __init__(self, config: ModuleConfig, spec: PolicySpec, module: nn.Module | None = None) -> None:
        """Wrap `module`, or a new one from the factory that `config` names, which must be registered."""
        super().__init__(config, spec)
        if module is None:
            if config.module not in MODULES:
                raise UserError(
                    f"This policy is the module '{config.module}', whose code is not in a checkpoint; register it by "
                    f"robopolicy.interop.sources.register_module('{config.module}', make) first."
                )
            module = MODULES[config.module]()
        self.module = module.eval()

    @classmethod
    def wrap(cls, name: str, module: nn.Module, spec: PolicySpec, **settings: Any) -> ModulePolicy:
        """Wrap `module`, which is shared, and register copies of it under `name`; `settings` as in `ModuleConfig`."""
        register_module(name, lambda: copy.deepcopy(module))
        return cls(ModuleConfig(module=name, **settings), spec, module)

    @property
    def label(self) -> str:
        """Name for messages."""
        return f"The module '{self.config.module}'"

    def call(self, obs: Observation, noise: Tensor | None) -> Any:
        """Call the module."""
        return self.module(obs) if noise is None else self.module(obs, noise)

    def train(self, mode: bool = True) -> ModulePolicy:
        """Set the training mode, except of the module, which stays in evaluation mode."""
        super().train(mode)
        self.module.eval()
        return self
