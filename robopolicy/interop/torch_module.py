"""A plain `torch.nn.Module` in this process as a black box; its weights are stored, its code is not.

    policy = ModulePolicy.wrap("my_flow", network, spec)

It is called in evaluation mode, in batches and without gradients, as `module(obs, noise) -> chunk`, or `module(obs)`
where `noise=False` says that it takes none. A checkpoint holds its weights and its name; loading one needs a fresh
module of the same kind: call `provide_module(name, make)` first.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from robopolicy.errors import UserError
from robopolicy.policies.base import Observation, PolicySpec
from robopolicy.policies.wrappers.black_box import BlackBoxConfig, BlackBoxPolicy

MODULES: dict[str, Callable[[], nn.Module]] = {}
"""Makers of modules that checkpoints may name in this process."""


def provide_module(name: str, make: Callable[[], nn.Module]) -> None:
    """Let checkpoints that name `name` build their module by `make`; their weights are loaded into it."""
    MODULES[name] = make


@dataclass(frozen=True)
class ModuleConfig(BlackBoxConfig):
    """How a module is called; the module itself is passed to `provide_module` or `ModulePolicy.wrap`."""

    module: str = ""  # its name


class ModulePolicy(BlackBoxPolicy):
    """A torch module as a policy."""

    name: ClassVar[str] = "module"
    config_class = ModuleConfig
    config: ModuleConfig

    def __init__(self, config: ModuleConfig, spec: PolicySpec, module: nn.Module | None = None) -> None:
        """Wrap `module`, or a fresh one of the name in `config`.

        Raises:
            UserError: Nothing of that name has been provided in this process.
        """
        super().__init__(config, spec)
        if module is None:
            if config.module not in MODULES:
                raise UserError(
                    f"This policy is the module '{config.module}', whose code no checkpoint can hold; pass it with "
                    f"robopolicy.interop.torch_module.provide_module('{config.module}', make) first."
                )
            module = MODULES[config.module]()
        self.module = module.eval()

    @classmethod
    def wrap(cls, name: str, module: nn.Module, spec: PolicySpec, **settings: Any) -> ModulePolicy:
        """Wrap `module`, which is shared, and provide copies of it under `name`; `settings` as in `ModuleConfig`."""
        provide_module(name, lambda: copy.deepcopy(module))
        return cls(ModuleConfig(module=name, **settings), spec, module)

    @property
    def label(self) -> str:
        """By its name."""
        return f"The module '{self.config.module}'"

    def answer(self, obs: Observation, noise: Tensor | None) -> Any:
        """Call the module."""
        return self.module(obs) if noise is None else self.module(obs, noise)

    def train(self, mode: bool = True) -> ModulePolicy:
        """Set the mode of everything but the module, which stays in evaluation mode."""
        super().train(mode)
        self.module.eval()
        return self
