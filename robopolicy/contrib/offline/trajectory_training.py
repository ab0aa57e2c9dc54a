"""Training runs of trajectory models (`trajectory_diffusion.py`), their checkpoints and their synthetic datasets."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from robopolicy.algorithms.bc import BC, BCConfig
from robopolicy.constraints import NonNegativeInt, PositiveInt, Validated
from robopolicy.contrib.offline.segments import SegmentSampler, TransitionLayout
from robopolicy.contrib.offline.trajectory_diffusion import Pull, TrajectoryConfig, TrajectoryModel
from robopolicy.data.episodes import Episode, Episodes
from robopolicy.data.formats import read_dataset
from robopolicy.device import move, usable_device
from robopolicy.errors import UserError
from robopolicy.policies.migration import migrate
from robopolicy.schema import from_dict, to_dict
from robopolicy.training.build import seed_everything
from robopolicy.training.checkpoint import load_model, save_model
from robopolicy.training.guards import Summary
from robopolicy.training.loop import Trainer
from robopolicy.training.manifest import MANIFEST, ModelKind, git_commit, manifest_content, versions
from robopolicy.training.model_runs import ModelRunComponents, ModelRunConfig, resume_model, start_model
from robopolicy.training.sources import DatasetSource
from robopolicy.worldmodel.videos import split_episodes

SCHEMA = 1  # increase it with every change that breaks older readers
KIND = ModelKind("trajectory model", "synthesize")
SYNTHETIC = "synthetic"  # behaviour of generated episodes


@dataclass(frozen=True)
class TrajectoryEvaluationConfig(Validated):
    """Periodic evaluation on held-out episodes."""

    every: NonNegativeInt = 0  # updates between evaluations; 0 is a tenth of the budget
    segments: PositiveInt = 512  # segments of the evaluation


@dataclass(frozen=True)
class TrajectoryTrainConfig(ModelRunConfig):
    """A run that trains a trajectory model on a folder of episodes with rewards."""

    model: TrajectoryConfig = field(default_factory=TrajectoryConfig)
    learner: BCConfig = field(default_factory=BCConfig)
    updates: PositiveInt = 20_000  # gradient steps
    evaluation: TrajectoryEvaluationConfig = field(default_factory=TrajectoryEvaluationConfig)


@dataclass(frozen=True)
class TrajectoryManifest:
    """Metadata of a trajectory model."""

    schema: int  # version of this layout
    trajectories: dict[str, Any]  # `TransitionLayout`
    config: dict[str, Any]  # `TrajectoryConfig`
    task: str  # registered task id of the dataset
    control_dt: float  # seconds between two frames
    names: dict[str, tuple[str, ...]]  # of entries, where known
    training: dict[str, Any]  # free summary
    versions: dict[str, str]
    commit: str | None
    files: dict[str, str] = field(default_factory=dict[str, str])  # relative path -> sha256


def save_trajectories(
    folder: Path, model: TrajectoryModel, manifest: TrajectoryManifest, state: Mapping[str, Any] | None = None
) -> None:
    """Write a checkpoint folder atomically, with the training state if given.

    Raises:
        UserError: The weights are not finite, the folder contains something else, or writing failed.
    """
    save_model(folder, model, manifest, state, "model")


def read_trajectory_manifest(folder: Path) -> TrajectoryManifest:
    """Read `manifest.json` of a trajectory model.

    Raises:
        UserError: Not a trajectory model, unreadable, or written by a newer schema.
    """
    data = manifest_content(folder, SCHEMA, "trajectories")
    manifest = from_dict(TrajectoryManifest, data, str(folder / MANIFEST))
    return replace(manifest, config=migrate(manifest.config))


def load_trajectories(
    path: str | Path, device: str | torch.device = "cpu"
) -> tuple[TrajectoryModel, TrajectoryManifest]:
    """Load a trajectory model strictly, in evaluation mode.

    Raises:
        UserError: The checkpoint is invalid.
    """
    return load_model(path, device, read_trajectory_manifest, _described)


def _described(manifest: TrajectoryManifest, folder: Path) -> TrajectoryModel:
    config = from_dict(TrajectoryConfig, manifest.config, f"model config of {folder}")
    return TrajectoryModel(config, from_dict(TransitionLayout, manifest.trajectories, f"layout of {folder}"))


@dataclass
class TrajectoryRunComponents(ModelRunComponents):
    """Components of a run."""

    config: TrajectoryTrainConfig
    model: TrajectoryModel
    algorithm: BC
    source: DatasetSource
    validation: SegmentSampler
    episodes: Episodes

    @property
    def total_updates(self) -> int:
        """Budget of updates."""
        return self.config.updates


def build(config: TrajectoryTrainConfig) -> TrajectoryRunComponents:
    """Read the dataset and build model and algorithm.

    Raises:
        UserError: The dataset is not suitable for training.
    """
    seed_everything(cast(Any, config))
    device = usable_device(config.device)
    episodes = read_dataset(config.dataset).without_closing_frames()
    layout = TransitionLayout.of(episodes)
    train, validation = split_episodes(episodes, share=config.validation, seed=config.seed)
    length = config.model.length
    sampler = SegmentSampler(train, layout, length=length, batch_size=config.learner.batch_size, seed=config.seed)
    tests = SegmentSampler(validation, layout, length=length, batch_size=config.evaluation.segments, seed=config.seed)
    with torch.device(device):
        model = TrajectoryModel(config.model, layout)
        model.fit(torch.from_numpy(layout.rows(train)).to(device))
        algorithm = BC(config.learner, model.head, total_updates=config.updates)
    return TrajectoryRunComponents(config, model, algorithm, DatasetSource(sampler, device), tests, episodes)


def start_trajectories(config: TrajectoryTrainConfig) -> TrajectoryTrainer:
    """Prepare a new run in `config.out / config.name`.

    Raises:
        UserError: The configuration is invalid, or the folder exists or cannot be written.
    """
    if not config.dataset:
        raise UserError("No dataset is given; pass a folder with rewards, e.g. one of 'robopolicy collect'.")
    config = replace(config, name=config.name or f"{Path(config.dataset).name}_trajectories_seed{config.seed}")
    return start_model(config, build, TrajectoryTrainer)


def resume_trajectories(folder: Path) -> TrajectoryTrainer:
    """Prepare to resume a run from its last resume point.

    Raises:
        UserError: The folder is no run of a trajectory model, or it has ended.
    """
    return resume_model(folder, TrajectoryTrainConfig, read_trajectory_manifest, build, TrajectoryTrainer)


class TrajectoryTrainer(Trainer):
    """Training loop that evaluates the loss on held-out segments instead of episodes."""

    def __init__(self, parts: TrajectoryRunComponents, folder: Path, resume_at: int = 0) -> None:
        self.trajectories = parts
        super().__init__(cast(Any, parts), folder, resume_at)

    def _evaluate(self) -> Summary | None:
        """Evaluate the averaged network with fixed noise; the lowest loss is kept as the best checkpoint."""
        head, parts = self.algorithm.inference_policy(), self.trajectories
        batch = move(parts.validation.first(parts.config.evaluation.segments), parts.source.device)
        generator = torch.Generator().manual_seed(parts.config.seed)
        with torch.no_grad():
            loss = head.imitation_loss(batch.obs, batch.chunk, generator=generator)[0].mean().item()
        self.latest = {"loss": loss}
        self._log({"eval/loss": loss})
        self.console.note(f"{self.config.name}  update {self.update}/{self.total}  held-back loss {loss:.4f}")
        if self.best is None or loss < self.best["loss"]:
            self.best = {"loss": loss, "update": self.update}
            self._save("best", {})
        return self.latest

    def _save(self, name: str, state: Mapping[str, Any], policy: Any = None) -> None:
        parts = self.trajectories
        model = copy.deepcopy(parts.model)  # a new one would draw weights and change the random state of the run
        model.head.load_state_dict(self.algorithm.inference_policy().state_dict())
        manifest = TrajectoryManifest(
            schema=SCHEMA,
            trajectories=to_dict(model.layout),
            config=to_dict(model.config),
            task=parts.episodes.tasks[0],
            control_dt=parts.episodes.control_dt,
            names={key: tuple(names) for key, names in parts.episodes.names.items()},
            training={**self._summary(), "loss": None if self.latest is None else self.latest["loss"]},
            versions=versions(),
            commit=git_commit(),
        )
        save_trajectories(self._checkpoint(name), model, manifest, state or None)

    def _run_facts(self) -> dict[str, Any]:
        return {"run": self.config.name, "task": self.trajectories.episodes.tasks[0], "trajectories": "edm"}


def synthetic_segments(
    model: TrajectoryModel, count: int, *, pull: Pull | None = None, seed: int = 0, batch: int = 64
) -> Iterator[Tensor]:
    """Generate `count` segments, up to `batch` `(B, L, D)` at a time, with noise of `seed`, guided by `pull`."""
    generator = torch.Generator().manual_seed(seed)
    for start in range(0, count, batch):
        yield model.generate(min(batch, count - start), pull=pull, generator=generator)


def kept_episodes(folder: str, layout: TransitionLayout, manifest: TrajectoryManifest) -> list[Episode]:
    """Episodes of a dataset, with the keys of synthetic ones.

    Raises:
        UserError: The dataset does not match the trajectory model.
    """
    episodes = read_dataset(folder).without_closing_frames()
    if TransitionLayout.of(episodes) != layout or episodes.control_dt != manifest.control_dt:
        raise UserError(f"{folder} does not match the trajectory model's observations, actions or control step.")
    keys = (*layout.keys, "action", "reward", "terminated")
    found = [episodes.episode(index) for index in range(episodes.num_episodes)]
    return [replace(episode, arrays={key: episode.arrays[key] for key in keys}) for episode in found]
