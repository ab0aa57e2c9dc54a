"""World models as simulators: loading, success detectors, uncertainty limits and initial states."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from robopolicy.data.formats import read_dataset
from robopolicy.data.ood_detector import load_ood_detector
from robopolicy.errors import UserError, unknown_name
from robopolicy.plurals import counted
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

SCHEMA = 1  # increased with every change that older readers would misinterpret
AnyWorldModel = LatentWorldModel | PretrainedWorldModel
WORLD_MODELS: dict[str, tuple[type[Any], type[AnyWorldModel]]] = {
    LatentWorldModel.name: (LatentWorldModelConfig, LatentWorldModel),
    PretrainedWorldModel.name: (PretrainedConfig, PretrainedWorldModel),
}


@dataclass(frozen=True)
class WorldManifest:
    """Metadata of a world model checkpoint."""

    schema: int  # version of this layout
    worldmodel: str  # key in `WORLD_MODELS`
    config: dict[str, Any]  # fields of the model's config
    spec: dict[str, Any]  # `WorldSpec`
    task: str  # registered task id of the videos
    ends_on_success: bool  # whether the task ends when it succeeds
    gate: dict[str, Any]  # test results: `passed`, `reasons` and measurements; empty before the first test
    training: dict[str, Any]  # free summary
    versions: dict[str, str]
    commit: str | None
    files: dict[str, str] = field(default_factory=dict[str, str])  # relative path -> sha256

    def require(self, folder: str | Path) -> None:
        """Raise a UserError if the world model in `folder` has failed its tests or was not tested."""
        if not self.gate:
            raise UserError(f"World model {folder} was not tested; train it to the end: worldmodel train --resume RUN.")
        Verdict(self.gate["passed"], tuple(self.gate["reasons"])).require(f"World model {folder}")

    def require_success(self, *, judge: bool) -> None:
        """Raise a UserError if rollouts would predict neither success nor return; `judge`: another detector is used."""
        entry = get_task(self.task)
        if entry.success == "none":
            raise UserError(
                f"{entry.name} has no success, only returns, and a world model predicts neither rewards nor returns; "
                "use the simulator ('worldmodel eval' tests the predicted frames)."
            )
        if not judge and self.training.get("failures", 0.0) is None:
            raise UserError(
                "The videos of the world model record no success, so that it predicts neither success nor return; "
                "choose a judge, or train it on videos with success."
            )

    def refusal(self, folder: str | Path) -> str:
        """Return the message of `require`; empty if the world model has passed its tests."""
        try:
            self.require(folder)
        except UserError as error:
            return str(error)
        return ""


def save_world(
    folder: Path, model: AnyWorldModel, manifest: WorldManifest, training_state: Mapping[str, Any] | None = None
) -> None:
    """Write a checkpoint folder atomically, replacing an older one of the same name; errors as in `save_model`."""
    save_model(folder, model, manifest, training_state, "world model")


def read_world_manifest(folder: Path) -> WorldManifest:
    """Read `manifest.json` of a world model; an invalid manifest raises a UserError."""
    data = manifest_content(folder, SCHEMA, "worldmodel")
    return from_dict(WorldManifest, data, str(folder / MANIFEST))


def load_world(path: str | Path, device: str | torch.device = "cpu") -> tuple[AnyWorldModel, WorldManifest]:
    """Load a world model strictly, in evaluation mode; an invalid checkpoint raises a UserError."""
    return load_model(path, device, read_world_manifest, _build_model)


def _build_model(manifest: WorldManifest, folder: Path) -> AnyWorldModel:
    if manifest.worldmodel not in WORLD_MODELS:
        raise unknown_name("world model", manifest.worldmodel, WORLD_MODELS, f"in {folder}")
    config_class, model_class = WORLD_MODELS[manifest.worldmodel]
    config = from_dict(config_class, manifest.config, f"model config of {folder}")
    return model_class(config, from_dict(WorldSpec, manifest.spec, f"spec of {folder}"))


BACKEND = "worldmodel:"  # prefix of backends that are world models: worldmodel:FOLDER[,FOLDER...]
VLM = "vlm:"  # prefix of a vision-language model as judge
VLM_EVERY = 20  # control steps between queries of a vision-language model, as in WorldGym


@dataclass(frozen=True)
class _JudgeOptions:
    """Success detector and its options."""

    judge: SuccessDetector
    success: float = 0.5  # probability threshold of success
    clip: int = 1  # number of last frames in a query
    every: int = 1  # control steps between queries
    rows: int | None = None  # clips per call; None: as many as the model predicts at once


def make_env(name: str, options: SimOptions, *, tested: bool = True) -> VectorSim:
    """Create the simulator of a task, or a world model if the backend is `worldmodel:FOLDER[,FOLDER...]`.

    If `tested`, a world model must have passed its tests.

    Raises:
        UserError: As in `make_sim`, or the world model belongs to another task or failed its tests.
    """
    if not is_world(options.backend):
        return make_sim(name, options)
    model, manifest = load_worlds(
        options.backend.removeprefix(BACKEND), options.device, options.world.samples, tested=tested
    )
    return world_sim(name, options, model, manifest)


def is_world(backend: str) -> bool:
    """Whether a backend is a world model."""
    return backend.startswith(BACKEND)


def load_worlds(
    folders: str, device: str | torch.device = "cpu", samples: int = 0, *, tested: bool = True
) -> tuple[AnyWorldModel | EnsembleWorldModel, WorldManifest]:
    """Load one world model, or an ensemble from comma-separated folders.

    `samples` is the number of sampled futures per step; 0 uses the setting of each checkpoint. If `tested`, all must
    have passed their tests.

    Raises:
        UserError: A checkpoint is invalid, failed its tests, or belongs to another task than the first.
    """
    members: list[AnyWorldModel] = []
    manifests: list[WorldManifest] = []
    for folder in folders.split(","):
        model, manifest = load_world(folder, device)
        if tested:
            manifest.require(folder)
        if samples:
            _set_samples(model, samples)
        members.append(model)
        manifests.append(manifest)
    if any(manifest.task != manifests[0].task for manifest in manifests):
        raise UserError(f"World models of an ensemble must have the same task, got {[m.task for m in manifests]}.")
    return members[0] if len(members) == 1 else EnsembleWorldModel(members), manifests[0]


def abstention_notes(label: str, sim: VectorSim) -> list[str]:
    """Return a note if the judge of a world model abstained in the last rollout of the policy `label`."""
    if not isinstance(sim, WorldSim) or not sim.num_abstained:
        return []
    frames = f"{sim.num_abstained} of {counted(sim.num_scored, 'frame')}"
    return [f"{label}: the judge abstained from {frames}, none of which counts as success."]


def world_sim(
    name: str, options: SimOptions, model: AnyWorldModel | EnsembleWorldModel, manifest: WorldManifest
) -> WorldSim:
    """Create the simulator of the task `name` from a world model, with the initial states of the real task.

    Raises:
        UserError: The model belongs to another task, predicts neither success nor return, or does not support
            `options.world`.
    """
    entry, spec, world = get_task(name), model.spec, options.world
    if manifest.task != entry.name:
        raise UserError(f"The world model was trained on {manifest.task}; it cannot simulate {entry.name}.")
    manifest.require_success(judge=bool(world.judge))
    several = len(model.members) if isinstance(model, EnsembleWorldModel) else _samples(model)
    if (world.penalty or world.max_uncertainty) and several < 2:
        raise UserError(
            "Uncertainty requires several predictions; set worldmodel.samples=3, or pass several models, "
            "worldmodel:FOLDER,FOLDER."
        )
    real = make_sim(entry.name, SimOptions(num_envs=1, cameras=spec.cameras, image_size=spec.size))
    steps = world.steps or real.spec.max_episode_steps
    detector = _judge_options(world.judge, model, entry, options.device, steps)
    config = WorldSimConfig(
        max_episode_steps=steps,
        ends_on_success=manifest.ends_on_success,
        success=detector.success,
        penalty=world.penalty,
        max_uncertainty=world.max_uncertainty or float("inf"),
        reward=options.reward,
        clip=detector.clip,
        every=world.every or detector.every,
    )
    starts: InitialStates = SimInitialStates(real, spec)
    if world.films:
        starts.close()
        starts = LoggedInitialStates(read_dataset(world.films), spec, anywhere=True)
    guard = None
    if world.support:
        guard = OODTermination(load_ood_detector(world.support, spec.proprio), world.support_penalty)
    first: Any = model.members[0] if isinstance(model, EnsembleWorldModel) else model
    rows = detector.rows or (first.config.rows if model.device.type == "cpu" else None)
    size = {"num_envs": options.num_envs, "rows": rows}
    spec = replace(real.spec, success_step=options.success_step)
    return WorldSim(model, detector.judge, starts, spec, config=config, guard=guard, **size)


def _samples(model: AnyWorldModel) -> int:
    """Return the number of sampled futures per call."""
    return (model.config if isinstance(model, LatentWorldModel) else model.config.adapter).samples


def _set_samples(model: AnyWorldModel, samples: int) -> None:
    """Set the number of sampled futures per call."""
    if isinstance(model, LatentWorldModel):
        model.config = replace(model.config, samples=samples)
    else:
        model.config = replace(model.config, adapter=replace(model.config.adapter, samples=samples))


def _judge_options(
    name: str, model: AnyWorldModel | EnsembleWorldModel, entry: TaskEntry, device: str, steps: int
) -> _JudgeOptions:
    """Return the judge `name` for episodes of `steps` control steps; the model's own if `name` is empty."""
    if not name:
        return _JudgeOptions(model.judge)
    if name.startswith(VLM):
        path = name.removeprefix(VLM)
        served, at, url = path.partition("@")
        backend = ServedVLM(url, served) if at else LocalVLM(path, device=device)
        return _JudgeOptions(VLMJudge(backend, entry.description), clip=steps + 1, every=VLM_EVERY, rows=1)
    judge = load_judge(Path(name), entry.success_fn, device)
    threshold = judge.threshold if isinstance(judge, SuccessClassifier) else 0.5
    return _JudgeOptions(judge, threshold, clip=judge.ensemble.config.frames)
