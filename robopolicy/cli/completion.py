"""`robopolicy completion`: shell completion of commands, options, presets, tasks and settings."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from typing import Any

SHELLS = ("bash", "zsh", "fish")

EXAMPLES = """\
examples:
  robopolicy completion bash

to load it in every shell:
  bash  eval "$(robopolicy completion bash)"   in ~/.bashrc
  zsh   eval "$(robopolicy completion zsh)"    in ~/.zshrc, after compinit
  fish  robopolicy completion fish | source    in ~/.config/fish/config.fish
"""


def add_parser(subparsers: Any) -> None:
    """Register the command."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "completion",
        description="Print a script that completes commands, options, presets, tasks and settings with the tab key. "
        "Names are looked up on completion, so tasks and algorithms of installed packages are included.",
        epilog=EXAMPLES,
    )
    parser.add_argument("shell", choices=SHELLS, help=" | ".join(SHELLS))


def run(args: argparse.Namespace) -> int:
    """Print the script; return 0."""
    import argcomplete

    print(argcomplete.shellcode(["robopolicy"], shell=args.shell))
    return 0


def add_completers(parser: argparse.ArgumentParser) -> None:
    """Attach completers to the arguments of `parser`."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                add_completers(inner)
        elif action.dest in COMPLETERS:
            action.completer = COMPLETERS[action.dest]  # type: ignore[attr-defined]


def complete_setting(prefix: str, **_: Any) -> list[str]:
    """Complete `group=preset` and `key=value`: names after `group=`, otherwise keys."""
    from robopolicy.training.names import GROUPS, options

    group, equals, _value = prefix.partition("=")
    if not equals:
        return [*(f"{name}=" for name in GROUPS), *_keys()]
    names = options(group) if group in GROUPS else []
    return [f"{group}={name}" for name in (*names, *(complete_task() if group == "task" else ()))]


def complete_task(**_: Any) -> list[str]:
    """Return the names of registered tasks."""
    from robopolicy.sim.registry import task_names

    return task_names()


def complete_kind(**_: Any) -> list[str]:
    """Return the kinds of `robopolicy list`."""
    from robopolicy.cli.list import kinds

    return list(kinds())


def _keys() -> Iterator[str]:
    """Yield the settings of every run, without the settings of policies and algorithms, which are slow to import."""
    from robopolicy.schema import to_dict
    from robopolicy.training.config import TrainConfig
    from robopolicy.training.names import GROUPS

    for key, value in to_dict(TrainConfig()).items():
        if isinstance(value, Mapping):
            yield from (f"{key}.{name}=" for name in value)
        elif key not in GROUPS:
            yield f"{key}="


COMPLETERS: dict[str, Callable[..., list[str]]] = {
    "settings": complete_setting,
    "task": complete_task,
    "what": complete_kind,
}
"""Argument -> function that `argcomplete` calls with `prefix` and other keywords."""
