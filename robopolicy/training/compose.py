"""Composition of a run's configuration from groups, presets and `key=value` overrides, with Hydra."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from robopolicy.errors import UserError, did_you_mean
from robopolicy.files import parse_yaml
from robopolicy.policies.migration import migrate
from robopolicy.resources import folder
from robopolicy.schema import from_dict, to_dict
from robopolicy.training.config import TrainConfig, check_settings
from robopolicy.training.migration import migrate_config
from robopolicy.training.names import GROUPS, multiple_values_error, read_settings
from robopolicy.training.schemas import register_plugins

BUDGETS = ("budget.updates", "budget.env_steps")


def compose_config(overrides: Sequence[str] = ()) -> TrainConfig:
    """Compose and check a configuration from the `group=preset` and `key.path=value` of a command line.

    Raises:
        UserError: A group, preset or key is unknown, or a value has the wrong type or range; one line.
    """
    register_plugins()
    pairs = read_settings(overrides)
    with initialize_config_dir(str(folder("configs")), version_base="1.3"):
        choices = [f"{key}={value}" for key, value in pairs if key in GROUPS]
        settings = _one_budget({key: value for key, value in pairs if key not in GROUPS})
        base = _compose(choices)
        # Values of text settings are used verbatim, so that paths may contain any character; Hydra parses the others.
        texts = {key: value for key, value in settings.items() if isinstance(_setting(base, key), str)}
        others = {key: value for key, value in settings.items() if key not in texts}
        # The prefix ++ also adds new keys.
        overrides = [*choices, *(f"++{key}={_as_integer(value)}" for key, value in others.items())]
        composed = _compose(overrides) if others else base
    for key, value in texts.items():
        _set(composed, key, value)
    config = from_dict(TrainConfig, composed, "")
    check_settings(config)
    return config


def read_config(file: Path) -> TrainConfig:
    """Read and check the `config.yaml` of a run of this or an earlier version; invalid settings raise a UserError."""
    content = migrate_config(config_content(file))
    try:
        config = from_dict(TrainConfig, content, "")
        check_settings(config)
    except UserError as error:
        raise UserError(f"{file}: {error}") from error
    return config


def config_file(folder: Path) -> Path:
    """Return the `config.yaml` of a run; a UserError is raised if the folder is not a run."""
    file = folder / "config.yaml"
    if not file.is_file():
        raise UserError(f"{folder} is not a run: it has no config.yaml; pass a folder such as runs/NAME.")
    return file


def config_content(file: Path) -> Any:
    """Read the plain values of a `config.yaml`, migrated to present names; an unreadable file raises a UserError."""
    try:
        content = parse_yaml(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read: {error}.") from error
    return migrate(content) if isinstance(content, Mapping) else content


def config_text(config: Any) -> str:
    """Format the full configuration as YAML."""
    return yaml.safe_dump(to_dict(config), sort_keys=False, allow_unicode=True)


def _as_integer(value: str) -> str:
    """Convert an integer in scientific notation such as `1e6`, a float in YAML; other values are unchanged."""
    number = re.fullmatch(r"\d+(\.\d+)?e\+?\d{1,2}", value, re.IGNORECASE)
    return str(int(float(value))) if number and float(value).is_integer() else value


def _compose(overrides: list[str]) -> dict[str, Any]:
    parser = OverridesParser.create()
    for text in overrides:
        setting = text.lstrip("+")
        try:
            override = parser.parse_override(text)
        except HydraException as error:
            raise UserError(f"The value in '{setting}' cannot be read; write lists as key=[1,2].") from error
        if override.is_sweep_override():
            raise multiple_values_error(setting)
    try:
        plain = OmegaConf.to_container(compose("train", overrides), resolve=True, throw_on_missing=True)
    except (HydraException, OmegaConfBaseException) as error:
        preset = re.search(r"In '([\w/]+)'.*full_key: (\w+)\.([\w.]+)", str(error), re.DOTALL)
        if preset:
            name, group, key = preset.groups()
            raise UserError(f"Preset {name} sets {group}.{key}, which the chosen {group} does not have.") from error
        cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
        subject = re.search(r"override '?\+*([\w.]+)", str(error))
        where = f"{subject[1]}: " if subject else ""
        reason = str(cause).strip().splitlines()[0].rstrip(".")
        if "ListConfig" in reason:  # OmegaConf's name for a list
            reason = f"expected a list, e.g. {subject[1] if subject else 'key'}=[a,b]"
        raise UserError(f"{where}{reason}.") from error
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


def _setting(tree: Mapping[str, Any], key: str) -> Any:
    """Return the value at a dotted key, which must exist and not be a section; an empty section accepts any entry."""
    node: Any = tree
    for depth, part in enumerate(key.split(".")):
        if node == {}:
            return None
        if not isinstance(node, Mapping) or part not in node:
            raise _unknown_key(tree, key, depth)
        node = node[part]
    if isinstance(node, Mapping):
        raise UserError(f"'{key}' is a section; set one of {', '.join(f'{key}.{name}' for name in node or ['NAME'])}.")
    return node


def _one_budget(settings: dict[str, str]) -> dict[str, str]:
    """Set the budget of the other unit to 0, so that it replaces the budget of a preset."""
    chosen = [unit for unit in BUDGETS if settings.get(unit, "0") != "0"]
    if len(chosen) != 1:
        return settings
    return {**dict.fromkeys(BUDGETS, "0"), **settings}


def _set(tree: dict[str, Any], key: str, value: Any) -> None:
    *path, last = key.split(".")
    for part in path:
        tree = tree[part]
    tree[last] = value


def _unknown_key(base: Mapping[str, Any], key: str, depth: int) -> UserError:
    """Build the error with the nearest full key and the settings of the deepest section that exists."""
    # policy=NAME and algorithm=NAME choose the names, so their keys are not suggested.
    known = [*GROUPS, *(leaf for leaf in leaves(base) if leaf not in ("policy.name", "algorithm.name"))]
    prefix = ".".join(key.split(".")[:depth])
    start = f"{prefix}." if prefix else ""
    siblings = sorted({leaf.removeprefix(start).split(".")[0] for leaf in known if leaf.startswith(start)})
    place = f"Settings of {prefix}" if prefix else "Settings"
    near = [name for name in known if name not in GROUPS] if "." in key else known
    return UserError(f"Unknown setting '{key}'.{did_you_mean(key, near)} {place}: {', '.join(siblings)}.")


def leaves(node: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the dotted keys of the values in nested mappings."""
    for key, value in node.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"
