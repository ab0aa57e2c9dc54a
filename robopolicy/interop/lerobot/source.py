"""Files of a saved LeRobot policy, with checks that do not need the `lerobot` package.

config.json                   kind, architecture, features with their shapes, horizons
model.safetensors             weights
policy_preprocessor.json      steps from observations to network inputs, with separate files of statistics
policy_postprocessor.json     steps from the network's actions to robot actions

LeRobot leaves a feature unscaled if its statistics are missing, drops unknown weights and imports any class that a
processor step names. All three raise errors here.
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from robopolicy import versions
from robopolicy.data.formats.lerobot.layout import key_of
from robopolicy.errors import UserError, unknown_name
from robopolicy.files import parse_json
from robopolicy.optional import require
from robopolicy.spec import IMAGE_PREFIX

EXTRA = "lerobot"
OLDEST_PYTHON = (3, 12)


def lerobot_module(name: str) -> Any:
    """Import `lerobot.{name}`; a UserError is raised if it is not installed."""
    if sys.version_info < OLDEST_PYTHON:
        found = ".".join(map(str, sys.version_info[:2]))
        raise UserError(f"LeRobot needs Python 3.12, this is {found}; run: pip install 'robopolicy[{EXTRA}]' there.")
    return require(f"lerobot.{name}", EXTRA)


CONFIG, WEIGHTS = "config.json", "model.safetensors"
PREPROCESSOR, POSTPROCESSOR = "policy_preprocessor.json", "policy_postprocessor.json"
ACTION = "action"
STATISTICS = {  # statistics by normalization mode of LeRobot
    "MIN_MAX": ("min", "max"),
    "MEAN_STD": ("mean", "std"),
    "QUANTILES": ("q01", "q99"),
    "QUANTILE10": ("q10", "q90"),
}
_NORMALIZERS = {PREPROCESSOR: "normalizer_processor", POSTPROCESSOR: "unnormalizer_processor"}
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_PROVIDED: dict[str, Path] = {}  # folders by the hash of their content


@dataclass(frozen=True)
class Normalization:
    """Scaling of one feature in LeRobot."""

    mode: str  # key of `STATISTICS`, or IDENTITY
    statistics: Mapping[str, Tensor]  # by name; (D,) or (3, 1, 1)


@dataclass(frozen=True)
class SavedPolicy:
    """Files of a saved policy and their metadata."""

    name: str  # folder or hub id, as given
    folder: Path
    sha256: str  # hash of all files that determine the policy
    config: Mapping[str, Any]
    inputs: Mapping[str, str]  # our observation key -> LeRobot feature
    shapes: Mapping[str, tuple[int, ...]]  # our observation key -> shape of one step
    action_dim: int
    normalization: Mapping[str, Normalization]  # LeRobot feature -> scaling, of the inputs and of the action

    @property
    def kind(self) -> str:
        """LeRobot's name of the policy class: diffusion, smolvla, pi0, ..."""
        return str(self.config["type"])

    def number(self, name: str) -> int:
        """Return a positive integer of config.json."""
        value = self.config.get(name)
        if not isinstance(value, int) or value < 1:
            raise UserError(f"'{name}' in {self.folder / CONFIG} must be a positive number, found {value!r}.")
        return value


def register_folder(folder: str | Path) -> str:
    """Register `folder` for checkpoints of a policy with the same content; returns its hash."""
    digest = content_hash(Path(folder))
    _PROVIDED[digest] = Path(folder)
    return digest


def open_source(
    name: str, *, revision: str | None = None, keys: Mapping[str, str] | None = None, sha256: str = ""
) -> SavedPolicy:
    """Find a saved policy and check its files.

    Args:
        name: Folder, or id on the Hugging Face hub.
        revision: Commit, branch or tag on the hub; None is the newest.
        keys: Our observation key -> LeRobot feature, where it is not the usual one.
        sha256: Expected content; empty accepts any.

    Raises:
        UserError: The policy is missing, has changed, or would not act as in training.
    """
    folder = _PROVIDED[sha256] if sha256 in _PROVIDED else _locate(name, revision)
    found = content_hash(folder)
    if sha256 and found != sha256:
        raise UserError(
            f"The LeRobot policy in {folder} has changed: expected content {sha256[:12]}, found {found[:12]}; put the "
            "original there, or call robopolicy.interop.lerobot.source.register_folder(FOLDER)."
        )
    config = _read(folder / CONFIG)
    features = _features(config, "input_features", folder)
    actions = _features(config, "output_features", folder)
    if "type" not in config or set(actions) != {ACTION}:
        raise UserError(
            f"{folder / CONFIG} must have a 'type' and the one output 'action', found outputs {sorted(actions)}."
        )
    inputs = _named(features, keys or {}, folder)
    dim = actions[ACTION][1][-1]
    wanted = {feature: features[feature] for feature in inputs.values()} | actions
    return SavedPolicy(
        name=name,
        folder=folder,
        sha256=found,
        config=config,
        inputs=inputs,
        shapes={key: features[feature][1] for key, feature in inputs.items()},
        action_dim=dim,
        normalization={feature: _normalization(folder, config, feature, *entry) for feature, entry in wanted.items()},
    )


def content_hash(folder: Path) -> str:
    """SHA-256 over names and contents of all files of the policy in `folder`.

    All of them must exist. A tokenizer that its processors fetch from the hub is not among them.
    """
    names = [CONFIG, WEIGHTS, PREPROCESSOR, POSTPROCESSOR]
    for name in names:
        if not (folder / name).is_file():
            hint = (
                "it is older than LeRobot's processors: run lerobot's migrate_policy_normalization on it"
                if name in _NORMALIZERS
                else "check the path, or save the policy again with lerobot"
            )
            raise UserError(f"No complete LeRobot policy in {folder}: expected {name}, found none; {hint}.")
    names += sorted({str(step["state_file"]) for _, step in _steps(folder) if step.get("state_file")})
    digest = hashlib.sha256()
    for name in names:
        file = folder / name
        if not file.resolve().is_file() or Path(name).name != name:
            raise UserError(f"No complete LeRobot policy in {folder}: expected {name}, found none; copy it again.")
        digest.update(f"{name} {versions.sha256(file)}\n".encode())
    return digest.hexdigest()


@contextmanager
def one_line(what: str) -> Iterator[None]:
    """Suppress the output of libraries and convert their errors to a UserError of one line that starts with `what`."""
    try:
        with redirect_stdout(StringIO()):
            yield
    except UserError:
        raise
    except Exception as error:  # they have no common class
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        raise UserError(f"{what}: {' '.join(lines[:2]).rstrip('.')}.") from error


def _locate(name: str, revision: str | None) -> Path:
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists() or not _HUB_ID.fullmatch(name):
        raise UserError(
            f"No LeRobot policy at {name}: expected a folder with {CONFIG}, or an id on the Hugging Face hub such as "
            "'lerobot/diffusion_pusht'."
        )
    hub = require("huggingface_hub", EXTRA)
    with one_line(f"No folder {name}, and the hub does not give it"):
        wanted = ["*.json", "*.safetensors"]
        return Path(hub.snapshot_download(name, revision=revision, allow_patterns=wanted))


def _read(file: Path) -> dict[str, Any]:
    try:
        data = parse_json(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read as JSON: {str(error).splitlines()[0]}.") from error
    if not isinstance(data, dict):
        raise UserError(f"{file} must hold a mapping, found {type(data).__name__}.")
    return data


def _features(config: Mapping[str, Any], entry: str, folder: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Type and shape of every feature."""
    try:
        features = {
            str(name): (str(feature["type"]), tuple(int(size) for size in feature["shape"]))
            for name, feature in (config.get(entry) or {}).items()
        }
        if not all(shape and min(shape) > 0 for _, shape in features.values()):
            raise ValueError
        return features
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"'{entry}' of {folder / CONFIG} must give each feature a type and a shape of positive numbers."
        ) from error


def _named(
    features: Mapping[str, tuple[str, tuple[int, ...]]], keys: Mapping[str, str], folder: Path
) -> dict[str, str]:
    """Our observation key of every input that a robot must provide."""
    chosen = {feature: key for key, feature in keys.items()}
    names: dict[str, str] = {}
    for feature, (kind, _) in features.items():
        if kind == "LANGUAGE" or ".empty_camera_" in feature:
            continue  # made by the processors from the instruction, and padding
        key = chosen.pop(feature, None) or key_of(feature, camera=kind == "VISUAL")
        if key is None or (key.startswith(IMAGE_PREFIX) != (kind == "VISUAL")):
            raise UserError(f"Input '{feature}' of {folder} cannot be the observation '{key}'; choose another key.")
        if key in names:
            raise UserError(f"Inputs '{names[key]}' and '{feature}' of {folder} are both '{key}'; choose another key.")
        names[key] = feature
    if chosen:
        raise unknown_name("input", next(iter(chosen)), features, f"of {folder}")
    return names


def _steps(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Iterate over file and description of every processor step; classes from outside of lerobot are errors."""
    for name in _NORMALIZERS:
        steps = _read(folder / name).get("steps")
        if not isinstance(steps, list) or not all(isinstance(step, dict) for step in steps):
            raise UserError(f"{folder / name} must hold a list of steps; save the policy again with lerobot.")
        for step in steps:
            known = step.get("registry_name") or str(step.get("class", "")).startswith("lerobot.")
            if not known:
                raise UserError(
                    f"{folder / name} names the processor step '{step.get('class')}', which is not part of lerobot, "
                    "and is not imported; register the step with lerobot and save the policy again."
                )
            yield name, step


def _normalization(
    folder: Path, config: Mapping[str, Any], feature: str, kind: str, shape: tuple[int, ...]
) -> Normalization:
    """Return the scaling of a feature; a UserError is raised for missing, non-finite or misshapen statistics."""
    name = POSTPROCESSOR if feature == ACTION else PREPROCESSOR
    steps = [step for file, step in _steps(folder) if file == name and step.get("registry_name") == _NORMALIZERS[name]]
    declared = str((config.get("normalization_mapping") or {}).get(kind, "IDENTITY"))
    if len(steps) != 1:
        if declared == "IDENTITY":
            return Normalization("IDENTITY", {})
        raise UserError(
            f"{folder / name} must have one '{_NORMALIZERS[name]}' for {declared} of '{feature}', found {len(steps)}; "
            "save the policy with its processors."
        )
    mode = str((steps[0].get("config", {}).get("norm_map") or {}).get(kind, "IDENTITY"))
    if mode != declared:
        raise UserError(f"'{feature}' is scaled by {mode} in {folder / name}, but {CONFIG} has {declared}.")
    found = _statistics(folder, steps[0], feature)
    if mode == "IDENTITY":
        return Normalization(mode, found)
    if mode not in STATISTICS:
        raise unknown_name("normalisation", mode, STATISTICS, f"of '{feature}' in {folder / name}")
    for statistic in STATISTICS[mode]:
        if statistic not in found:
            raise UserError(
                f"{folder / name} has no statistics of '{feature}': {mode} expects {' and '.join(STATISTICS[mode])}, "
                f"found {', '.join(sorted(found)) or 'none'}; save the policy again with the statistics of its dataset."
            )
        value = found[statistic]
        if not bool(value.isfinite().all()):
            raise UserError(f"Statistic '{statistic}' of '{feature}' in {folder / name} is not finite.")
        expected = (shape[0],) if kind != "VISUAL" else (shape[0], 1, 1)
        if value.numel() != shape[0] or (kind != "VISUAL" and tuple(value.shape) != expected):
            raise UserError(
                f"Statistic '{statistic}' of '{feature}' in {folder / name} has shape {tuple(value.shape)}, expected "
                f"{expected}: the policy and its statistics belong to different data."
            )
    return Normalization(mode, found)


def _statistics(folder: Path, step: Mapping[str, Any], feature: str) -> dict[str, Tensor]:
    if not step.get("state_file"):
        return {}
    file = folder / str(step["state_file"])
    try:
        tensors = load_file(file)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{file} cannot be read ({error}); copy the policy again.") from error
    prefix = f"{feature}."
    return {key.removeprefix(prefix): value for key, value in tensors.items() if key.rsplit(".", 1)[0] == feature}
