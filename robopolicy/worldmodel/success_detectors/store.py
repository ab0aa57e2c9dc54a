"""Files of success detectors: `model.safetensors` and `judge.json`, written atomically and read without pickle."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from robopolicy.atomic import atomic_folder, restore_partial
from robopolicy.constraints import Finite, Fraction, NonNegative, Positive, PositiveInt
from robopolicy.errors import UserError
from robopolicy.files import check_owned, parse_json
from robopolicy.policies.migration import migrate
from robopolicy.schema import from_dict, to_dict
from robopolicy.worldmodel.success_detectors.classifier import Predicate, StateProbe, SuccessClassifier
from robopolicy.worldmodel.success_detectors.clips import ClipEnsemble, JudgeConfig

VERSION = 1
MODEL, FACTS = "model.safetensors", "judge.json"
AnyFacts = TypeVar("AnyFacts", bound="_Facts")


def save_judge(path: str | Path, judge: SuccessClassifier | StateProbe) -> None:
    """Write a detector; the predicates of a probe belong to the task and are not written."""
    folder = Path(path)
    check_owned(folder, FACTS, "a judge")
    facts: dict[str, Any] = {
        "version": VERSION,
        "kind": type(judge).__name__,
        "config": to_dict(judge.ensemble.config),
        "cameras": judge.ensemble.sizes,
        "spread": min(judge.spread, 1e30),  # JSON has no infinity
    }
    tensors = {f"ensemble.{key}": value.contiguous().cpu() for key, value in judge.ensemble.state_dict().items()}
    if isinstance(judge, SuccessClassifier):
        facts |= {name: getattr(judge, name) for name in ("offset", "temperature", "threshold")}
    else:
        facts["names"] = dict(judge.names)
        tensors |= {"mean": judge.mean, "std": judge.std}
    with atomic_folder(folder) as temporary:
        save_file(tensors, temporary / MODEL)
        (temporary / FACTS).write_text(json.dumps(facts, indent=2), encoding="utf-8")


def load_judge(path: str | Path, solved: Predicate | None, device: str = "cpu") -> SuccessClassifier | StateProbe:
    """Load a detector of either kind; a probe needs `solved`, the predicate of the task."""
    facts, _ = _read(Path(path), SuccessClassifier, StateProbe)
    if facts["kind"] == SuccessClassifier.__name__:
        return load_classifier(path, device)
    if solved is None:
        raise UserError(f"{path} needs a success predicate, which the task does not have; fit --kind classifier.")
    return load_probe(path, solved, device=device)


def load_classifier(path: str | Path, device: str = "cpu") -> SuccessClassifier:
    """Load a `SuccessClassifier`; a UserError is raised for other or damaged content."""
    content, tensors = _read(Path(path), SuccessClassifier)
    facts = _facts(_ClassifierFacts, content, path)
    judge = SuccessClassifier(_ensemble(facts, tensors, 2, path, device))
    return replace(judge, **{name: getattr(facts, name) for name in ("offset", "temperature", "threshold", "spread")})


def load_probe(
    path: str | Path, success: Predicate, *, progress: Predicate | None = None, device: str = "cpu"
) -> StateProbe:
    """Load a `StateProbe` with the predicates of the task; a UserError is raised for other or damaged content."""
    content, tensors = _read(Path(path), StateProbe)
    facts = _facts(_ProbeFacts, content, path)
    size = sum(facts.names.values())
    if any(name not in tensors or tensors[name].shape != (size,) for name in ("mean", "std")):
        raise _mismatch(path)
    ensemble = _ensemble(facts, tensors, size, path, device)
    return StateProbe(ensemble, facts.names, tensors["mean"], tensors["std"], success, progress, facts.spread)


@dataclass(frozen=True)
class _Facts:
    """Content of `judge.json`."""

    version: int
    kind: str
    config: JudgeConfig
    cameras: dict[str, PositiveInt]  # pixels a side
    spread: NonNegative


@dataclass(frozen=True)
class _ClassifierFacts(_Facts):
    offset: Finite
    temperature: Positive
    threshold: Fraction


@dataclass(frozen=True)
class _ProbeFacts(_Facts):
    names: dict[str, PositiveInt]  # sizes of the observations


def _read(folder: Path, *kinds: type) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    restore_partial(folder)
    try:
        facts = parse_json((folder / FACTS).read_text(encoding="utf-8"))
        tensors = load_file(folder / MODEL)
    except (OSError, ValueError, SafetensorError) as error:
        raise UserError(f"{folder} is not a complete judge: {error}") from error
    if not isinstance(facts, dict):
        raise UserError(f"{folder} is not a complete judge: {FACTS} is not a mapping.")
    names = [kind.__name__ for kind in kinds]
    if facts.get("version") != VERSION or facts.get("kind") not in names:
        found = f"{facts.get('kind')} of version {facts.get('version')}"
        raise UserError(f"{folder} holds a {found}, expected {' or '.join(names)} of version {VERSION}.")
    return facts, tensors


def _facts(cls: type[AnyFacts], content: dict[str, Any], path: str | Path) -> AnyFacts:
    config = content.get("config")
    current = {**content, "config": migrate(config)} if isinstance(config, dict) else content
    return from_dict(cls, current, str(Path(path) / FACTS))


def _ensemble(
    facts: _Facts, tensors: dict[str, torch.Tensor], outputs: int, path: str | Path, device: str
) -> ClipEnsemble:
    weights = {key.removeprefix("ensemble."): value for key, value in tensors.items() if key.startswith("ensemble.")}
    try:
        ensemble = ClipEnsemble(facts.config, facts.cameras, outputs)
        ensemble.load_state_dict(weights, strict=True)
    except (KeyError, RuntimeError) as error:  # KeyError: a camera has a name that no module can have
        raise _mismatch(path) from error
    return ensemble.to(device).eval()


def _mismatch(path: str | Path) -> UserError:
    return UserError(f"The weights of {path} do not match its configuration; copy the whole folder again.")
