"""Simulators made of world models: who judges them, how sure they must be, and where their episodes start."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from robopolicy.data.formats.lerobot import read_lerobot
from robopolicy.data.ood_detector import load_ood_detector
from robopolicy.errors import UserError, unknown_name
from robopolicy.schema import from_dict
from robopolicy.sim.contract import VectorSim
from robopolicy.sim.registry import SimOptions, TaskEntry, get_task, make_sim
from robopolicy.training.checkpoint import load_model, save_model
from robopolicy.training.manifest import MANIFEST, manifest_content
from robopolicy.worldmodel.action_following import Verdict
from robopolicy.worldmodel.backend import (
    InitialStates,
    LoggedInitialStates,
    OODTermination,
    SimInitialStates,
    WorldSim,
    WorldSimConfig,
)
from robopolicy.worldmodel.contract import SuccessDetector, WorldSpec
from robopolicy.worldmodel.latent import EnsembleWorldModel, LatentWorldModel, LatentWorldModelConfig
from robopolicy.worldmodel.pretrained.model import PretrainedConfig, PretrainedWorldModel
from robopolicy.worldmodel.success_detectors.classifier import SuccessClassifier
from robopolicy.worldmodel.success_detectors.store import load_judge
from robopolicy.worldmodel.success_detectors.vlm import LocalVLM, ServedVLM, VLMJudge

SCHEMA = 1  # raise it with every change that an older reader would misunderstand


AnyWorldModel = LatentWorldModel | PretrainedWorldModel


WORLD_MODELS: dict[str, tuple[type[Any], type[AnyWorldModel]]] = {
    LatentWorldModel.name: (LatentWorldModelConfig, LatentWorldModel),
    PretrainedWorldModel.name: (PretrainedConfig, PretrainedWorldModel),
}


@dataclass(frozen=True)
class WorldManifest:
    """Everything but the numbers of a world model."""

    schema: int  # version of this layout
    worldmodel: str  # key in `WORLD_MODELS`
    config: dict[str, Any]  # fields of its config
    spec: dict[str, Any]  # `WorldSpec`
    task: str  # registered task id that it was filmed in
    ends_on_success: bool  # whether the task ends when it succeeds
    gate: dict[str, Any]  # tests: `passed`, `reasons`, and what was measured; empty before the first one
    training: dict[str, Any]  # free summary
    versions: dict[str, str]
    commit: str | None
    files: dict[str, str] = field(default_factory=dict[str, str])  # relative path -> sha256

    def require(self, folder: str | Path) -> None:
        """Refuse the world model in `folder` where it has failed its tests, or not taken them.

        Raises:
            UserError: Says which test it failed.
        """
        if not self.gate:
            raise UserError(f"World model {folder} was not tested; train it to the end or run 'worldmodel eval'.")
        Verdict(self.gate["passed"], tuple(self.gate["reasons"])).require(f"World model {folder}")


def save_world(
    folder: Path, model: AnyWorldModel, manifest: WorldManifest, training_state: Mapping[str, Any] | None = None
) -> None:
    """Write a checkpoint folder atomically, replacing an older one of the same name.

    Raises:
        UserError: The weights are not finite, the place holds something else, or writing failed.
    """
    save_model(folder, model, manifest, training_state, "world model")


def read_world_manifest(folder: Path) -> WorldManifest:
    """Read `manifest.json` of a world model.

    Raises:
        UserError: Not a world model, unreadable, or written by a newer schema.
    """
    data = manifest_content(folder, SCHEMA, "worldmodel")
    return from_dict(WorldManifest, data, str(folder / MANIFEST))


def load_world(path: str | Path, device: str | torch.device = "cpu") -> tuple[AnyWorldModel, WorldManifest]:
    """Load a world model strictly, in evaluation mode.

    Raises:
        UserError: One sentence that says what is wrong with the checkpoint.
    """
    return load_model(path, device, read_world_manifest, _described)


def _described(manifest: WorldManifest, folder: Path) -> AnyWorldModel:
    if manifest.worldmodel not in WORLD_MODELS:
        raise unknown_name("world model", manifest.worldmodel, WORLD_MODELS, f"in {folder}")
    config_class, model_class = WORLD_MODELS[manifest.worldmodel]
    config = from_dict(config_class, manifest.config, f"model config of {folder}")
    return model_class(config, from_dict(WorldSpec, manifest.spec, f"spec of {folder}"))


BACKEND = "worldmodel:"  # what a backend's name begins with that is a world model, or several: FOLDER[,FOLDER...]
VLM = "vlm:"  # what a judge's name begins with that is a vision-language model
VLM_EVERY = 20  # control steps between the questions to one, as in WorldGym
JUDGE_TOKEN = "ROBOPOLICY_JUDGE_TOKEN"  # environment variable that holds the token of a served judge


@dataclass(frozen=True)
class _JudgeOptions:
    """A judge and how it wants to be asked."""

    judge: SuccessDetector
    success: float = 0.5  # probability from which it sees success
    clip: int = 1  # last frames that it looks at
    every: int = 1  # control steps between questions
    rows: int | None = None  # clips per call; None is as many as the model predicts at once


def make_env(name: str, options: SimOptions) -> VectorSim:
    """The simulator of a task, or a world model of it where the backend is `worldmodel:FOLDER[,FOLDER...]`.

    Raises:
        UserError: As in `make_sim`, or the world model shows another task or failed its tests.
    """
    if not is_world(options.backend):
        return make_sim(name, options)
    model, manifest = load_worlds(options.backend.removeprefix(BACKEND), options.device, options.world.samples)
    return world_sim(name, options, model, manifest)


def is_world(backend: str) -> bool:
    """Whether a backend is a world model."""
    return backend.startswith(BACKEND)


def load_worlds(
    folders: str, device: str | torch.device = "cpu", samples: int = 0
) -> tuple[AnyWorldModel | EnsembleWorldModel, WorldManifest]:
    """One world model, or an ensemble of those whose folders are separated by commas; all must have passed their tests.

    Args:
        folders: Checkpoints.
        device: Where they compute.
        samples: Futures drawn per step; 0 is as the checkpoints say.

    Raises:
        UserError: A checkpoint is bad, failed its tests, or shows another world than the first.
    """
    members: list[AnyWorldModel] = []
    manifests: list[WorldManifest] = []
    for folder in folders.split(","):
        model, manifest = load_world(folder, device)
        manifest.require(folder)
        if samples:
            _draw(model, samples)
        members.append(model)
        manifests.append(manifest)
    if any(manifest.task != manifests[0].task for manifest in manifests):
        raise UserError(f"World models of one ensemble must show one task, got {[m.task for m in manifests]}.")
    return members[0] if len(members) == 1 else EnsembleWorldModel(members), manifests[0]


def abstention_notes(who: str, sim: VectorSim) -> list[str]:
    """What to tell the reader where the judge of a world model abstained from what `who` played last."""
    if not isinstance(sim, WorldSim) or not sim.num_abstained:
        return []
    frames = f"{sim.num_abstained} of {sim.num_scored} frames"
    return [f"{who}: the judge abstained from {frames}, none of which counts as success."]


def world_sim(
    name: str, options: SimOptions, model: AnyWorldModel | EnsembleWorldModel, manifest: WorldManifest
) -> WorldSim:
    """A world model as simulator of the task `name`, whose episodes start where those of the real one do.

    Raises:
        UserError: It shows another task, or `options.world` asks for what there is not.
    """
    entry, spec, world = get_task(name), model.spec, options.world
    if manifest.task != entry.name:
        raise UserError(f"The world model was filmed in {manifest.task}; it cannot stand in for {entry.name}.")
    several = len(model.members) if isinstance(model, EnsembleWorldModel) else _samples(model)
    if (world.penalty or world.max_uncertainty) and several < 2:
        raise UserError(
            "One future of one world model is never uncertain; set worldmodel.samples=3, or name several models, "
            "worldmodel:FOLDER,FOLDER."
        )
    real = make_sim(entry.name, SimOptions(num_envs=1, cameras=spec.cameras, image_size=spec.size))
    steps = world.steps or real.spec.max_episode_steps
    judging = _judging(world.judge, model, entry, options.device, steps)
    rules = WorldSimConfig(
        max_episode_steps=steps,
        ends_on_success=manifest.ends_on_success,
        success=judging.success,
        penalty=world.penalty,
        max_uncertainty=world.max_uncertainty or float("inf"),
        reward=options.reward,
        clip=judging.clip,
        every=world.every or judging.every,
    )
    starts: InitialStates = SimInitialStates(real, spec)
    if world.films:
        starts.close()
        starts = LoggedInitialStates(read_lerobot(world.films), spec, anywhere=True)
    guard = (
        OODTermination(load_ood_detector(world.support, spec.proprio), world.support_penalty) if world.support else None
    )
    first: Any = model.members[0] if isinstance(model, EnsembleWorldModel) else model
    size = {"num_envs": options.num_envs, "rows": judging.rows or first.config.rows}
    return WorldSim(model, judging.judge, starts, real.spec, config=rules, guard=guard, **size)


def _samples(model: AnyWorldModel) -> int:
    """Futures that it draws per call."""
    return (model.config if isinstance(model, LatentWorldModel) else model.config.adapter).samples


def _draw(model: AnyWorldModel, samples: int) -> None:
    """Let it draw so many."""
    if isinstance(model, LatentWorldModel):
        model.config = replace(model.config, samples=samples)
    else:
        model.config = replace(model.config, adapter=replace(model.config.adapter, samples=samples))


def _judging(
    name: str, model: AnyWorldModel | EnsembleWorldModel, entry: TaskEntry, device: str, steps: int
) -> _JudgeOptions:
    """The judge called `name`, empty for the model's own, of episodes of `steps` control steps."""
    if not name:
        return _JudgeOptions(model.judge)
    if name.startswith(VLM):
        where = name.removeprefix(VLM)
        who, at, url = where.partition("@")
        backend = ServedVLM(url, who, token=os.environ.get(JUDGE_TOKEN, "")) if at else LocalVLM(where, device=device)
        return _JudgeOptions(VLMJudge(backend, entry.description), clip=steps + 1, every=VLM_EVERY, rows=1)
    judge = load_judge(Path(name), entry.success_fn, device)
    threshold = judge.threshold if isinstance(judge, SuccessClassifier) else 0.5
    return _JudgeOptions(judge, threshold, clip=judge.ensemble.config.frames)
