"""Registry of the commands of `robopolicy`, imported on use.

A command is a module with a cheap `add_parser(subparsers)` (no torch) and `run(args) -> int`. Contrib themes add
commands as rows of `theme.toml` with the fields of `Command`; installed packages add `Command` objects by the
entry-point group `robopolicy.commands`.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from robopolicy.plugins import Registry, load


@dataclass(frozen=True)
class Command:
    """Module of a command and its line in `robopolicy --help`."""

    module: str  # e.g. "robopolicy.cli.train"
    help: str  # one line
    needs_mujoco: bool = True  # whether it may import MuJoCo, so that MUJOCO_GL is checked first
    loads_policies: bool = True  # whether it has the options --allow-code and --unsafe-code
    imports_torch_late: bool = False  # whether it resolves `device=auto` itself, since that imports PyTorch
    registries: tuple[str, ...] = ()  # "module:REGISTRY" of its components, for `robopolicy list` and `doctor`

    def load(self) -> ModuleType:
        """Import the module."""
        return importlib.import_module(self.module)


_PRODUCT = {  # in the order of the help
    "collect": Command("robopolicy.cli.collect", "record demonstrations of a scripted expert or a policy"),
    "teleop": Command(
        "robopolicy.cli.teleop",
        "move a task by hand and record demonstrations",
        loads_policies=False,
        registries=("robopolicy.teleop.devices:DEVICES",),
    ),
    "data": Command("robopolicy.cli.data", "describe datasets, and convert them between formats", False, False),
    "import": Command("robopolicy.cli.import", "write a policy of another library as a checkpoint", True, False),
    "train": Command("robopolicy.cli.train", "train a policy from demonstrations or by RL, or resume a run"),
    "bench": Command("robopolicy.cli.bench", "train several seeds and report intervals and learning curves"),
    "compose": Command("robopolicy.cli.compose", "combine policies into one and search for their weights"),
    "eval": Command("robopolicy.cli.eval", "measure success and return with intervals"),
    "worldmodel": Command("robopolicy.cli.worldmodel", "train a video world model and evaluate policies in it"),
    "ope": Command("robopolicy.cli.ope", "estimate returns from logged episodes (off-policy evaluation)"),
    "export": Command("robopolicy.cli.export", "write a checkpoint as a bundle for a robot"),
    "serve": Command("robopolicy.cli.serve", "serve a policy's chunks over the network", needs_mujoco=False),
    "verify": Command("robopolicy.cli.verify", "recompute the golden chunk of a checkpoint or bundle", False),
    "play": Command("robopolicy.cli.play", "record a video of a checkpoint, the expert or random actions"),
    "view": Command(
        "robopolicy.cli.view",
        "show a task, policy, dataset or training run in 3D in a browser",
        imports_torch_late=True,
    ),
    "list": Command("robopolicy.cli.list", "list tasks, policies, algorithms, experiments and more", False, False),
    "completion": Command("robopolicy.cli.completion", "print a script for shell completion", False, False),
    "doctor": Command("robopolicy.cli.doctor", "report versions, GL, GPU and optional packages", False, False),
}

COMMANDS: Registry[Command] = Registry("commands", _PRODUCT, read=lambda row: Command(**row))


def command_names() -> list[str]:
    """Return all commands: the product's in the order of use, then the others, sorted."""
    return [*_PRODUCT, *(name for name in COMMANDS if name not in _PRODUCT)]


def extra_registries() -> list[Registry[Any]]:
    """Return the registries of components of commands, such as the transports of `deploy`.

    Their classes define the constants `module` (required package, or empty), `extra` (of robopolicy, which installs it)
    and `install` (installation hint if there is no extra).
    """
    return [load(target) for name in command_names() for target in COMMANDS[name].registries]
