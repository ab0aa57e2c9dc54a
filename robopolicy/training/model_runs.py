"""Runs of models that are no policies: world models and models of trajectories.

Such a run has the training loop and the folder of every other run; what its model is trained on and how it is tested
is its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from robopolicy.errors import UserError, cannot_write, did_you_mean
from robopolicy.files import parse_yaml, recover
from robopolicy.limits import Count, InnerShare, Natural, Ranged
from robopolicy.schema import from_plain, to_plain
from robopolicy.training.checkpoint import load_training_state
from robopolicy.training.compose import config_content, config_file, config_text, leaves
from robopolicy.training.config import GuardConfig, LoggingConfig, check_run_name
from robopolicy.training.loop import Trainer
from robopolicy.training.manifest import Listing
from robopolicy.training.resuming import restore

Config = TypeVar("Config", bound="ModelRunConfig")
Settings = TypeVar("Settings")
AnyTrainer = TypeVar("AnyTrainer", bound=Trainer)
Build = Callable[[Config], Any]
"""Reads the data of a run and makes everything that it consists of."""


@dataclass(frozen=True)
class ModelRunConfig(Ranged):
    """What such runs have in common; the rest is their model, its learner and its tests."""

    dataset: str = ""  # folder of episodes
    validation: InnerShare = 0.1  # share of the episodes of every behaviour that is held back
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    guards: GuardConfig = field(default_factory=GuardConfig)
    checkpoint_every: Natural = 0  # updates between resume points; 0 is a tenth of the budget
    seed: Natural = 0  # of weights, batches, noise and the split
    device: str = "cpu"
    threads: Count = 1  # torch threads
    out: str = "runs"  # parent folder
    name: str = ""  # run folder; empty composes it from dataset and seed
    init_from: str = ""  # such models start afresh


class ModelParts:
    """What the parts of such a run have in common: they play no simulator."""

    eval_sim = None

    def close(self) -> None:
        """Nothing to stop."""


def start_model(config: Config, build: Build[Config], trainer: Callable[[Any, Path], AnyTrainer]) -> AnyTrainer:
    """Prepare a new run in `config.out / config.name`.

    Raises:
        UserError: The configuration cannot be built, or the folder is taken, lies elsewhere or cannot be written.
    """
    check_run_name(config.name)
    folder = Path(config.out) / config.name
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"Run {folder} exists; resume it with --resume {folder}, or choose another --name.")
    parts = build(config)
    try:
        (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
        (folder / "config.yaml").write_text(config_text(config), encoding="utf-8")
    except OSError as error:
        raise cannot_write(folder, error) from error
    run = trainer(parts, folder)
    run.fresh = True
    return run


def resume_model(
    folder: Path,
    config_class: type[Config],
    read: Callable[[Path], Listing],
    build: Build[Config],
    trainer: Callable[..., AnyTrainer],
) -> AnyTrainer:
    """Prepare to go on from the last resume point of a run.

    Args:
        folder: Of the run.
        config_class: Of its configuration.
        read: Reader of the manifests of its checkpoints.
        build: As in `start_model`.
        trainer: `trainer(parts, folder, resume_at=update)`.

    Raises:
        UserError: The folder is no such run, or it has ended.
    """
    file, last = config_file(folder), folder / "checkpoints" / "last"
    if (folder / "report.json").exists():
        raise UserError(f"Run {folder} has ended; start another one.")
    config = from_plain(config_class, config_content(file), str(file))
    recover(last)
    if not last.exists():
        return trainer(build(config), folder)
    state = load_training_state(last, read)
    resumed = trainer(build(config), folder, resume_at=int(state["update"]))
    restore(resumed, state)
    return resumed


def with_settings(config: Settings, settings: Sequence[str]) -> Settings:
    """`config` with settings `key=value`, keys with dots, values in YAML.

    Raises:
        UserError: A setting is unknown or does not fit.
    """
    plain = to_plain(config)
    for setting in settings:
        key, equals, text = setting.partition("=")
        *path, last = key.split(".")
        section: Any = plain
        for name in path:
            section = section.get(name) if isinstance(section, dict) else None
        if not equals:
            raise UserError(f"A setting is KEY=VALUE, got '{setting}'.")
        if not isinstance(section, dict) or last not in section:
            raise UserError(f"Unknown setting '{key}'.{_nearest(key, path, section, plain)}")
        try:
            value = parse_yaml(text)
        except ValueError as error:
            raise UserError(f"The value of '{key}' cannot be read: {error}.") from error
        with suppress(ValueError, TypeError):  # YAML takes 5e-4 for text
            value = float(value) if isinstance(value, str) else value
        section[last] = value
    return from_plain(type(config), plain, "settings")


def _nearest(key: str, path: Sequence[str], section: Any, plain: Mapping[str, Any]) -> str:
    """What may be meant by the unknown `key`: the nearest one, and all of its section, if there is such a section."""
    known = [f"{'.'.join(path)}.{name}" for name in section] if path and isinstance(section, Mapping) else list(plain)
    return f"{did_you_mean(key, leaves(plain))} Known: {', '.join(sorted(known))}."
