"""Kinds of policies that `robopolicy import` turns into checkpoints, after which they are like any other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from robopolicy.errors import UserError, unknown_name
from robopolicy.policies.base import Policy


@dataclass(frozen=True)
class Source:
    """A policy from elsewhere, as named on the command line."""

    address: str  # file, folder or URL
    observation: Mapping[str, tuple[int, ...]]  # what the task shows without cameras
    rename: Mapping[str, str] = field(default_factory=dict)  # our name -> theirs
    config: str = ""  # configuration beside the weights, where the kind needs one
    execute: int = 0  # actions played per chunk; 0 leaves it to the policy
    instructions: tuple[str, ...] = ()  # what a language policy is told


def open_policy(kind: str, source: Source) -> Policy:
    """The policy behind `source`.

    Raises:
        UserError: The kind is unknown, or the policy cannot be read.
    """
    if kind not in KINDS:
        raise unknown_name("kind of policy", kind, KINDS)
    return KINDS[kind](source)


def _lerobot(source: Source) -> Policy:
    from robopolicy.interop.lerobot.loading import load_lerobot

    _refuse(source, "config")
    return load_lerobot(
        source.address, instructions=source.instructions, keys=source.rename, execute=source.execute or None
    )


def _onnx(source: Source) -> Policy:
    from robopolicy.interop.onnx import open_onnx

    _refuse(source, "config", "instructions")
    return open_onnx(
        source.address, rename=source.rename, execute=source.execute, action_normalization="minmax", threads=1
    )


def _remote(source: Source) -> Policy:
    from robopolicy.interop.remote import open_remote

    _refuse(source, "config", "instructions", "rename")
    return open_remote(source.address, execute=source.execute, action_normalization="minmax")


def _sb3(source: Source) -> Policy:
    from robopolicy.interop.sb3_actor import read_model

    _refuse(source, "config", "execute", "instructions")
    if len(source.rename) > 1:
        raise UserError(f"The model has one vector of observations; rename one key to it, got {dict(source.rename)}.")
    return read_model(source.address, next(iter(source.rename), "state"))


def _rsl_rl(source: Source) -> Policy:
    from robopolicy.interop.rsl_rl import read_actor, read_config

    _refuse(source, "execute", "instructions")
    config = Path(source.config) if source.config else Path(source.address).parent / "params" / "agent.yaml"
    if not config.is_file():
        raise UserError(f"The runner's configuration {config} does not exist; pass it by --config FILE.")
    return read_actor(source.address, read_config(config), source.observation, rename=source.rename)


def _refuse(source: Source, *names: str) -> None:
    for name in names:
        if getattr(source, name):
            raise UserError(f"This kind of policy takes no --{name.rstrip('s')}; drop it.")


KINDS: dict[str, Callable[[Source], Policy]] = {
    "lerobot": _lerobot,
    "onnx": _onnx,
    "remote": _remote,
    "rsl_rl": _rsl_rl,
    "sb3": _sb3,
}
"""Kind -> what opens it; each imports its adapter, and with it the packages that it needs, when it is called."""
