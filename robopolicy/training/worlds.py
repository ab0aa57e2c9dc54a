"""Runs that train a world model, and the checkpoints of world models; the loop is that of every other run.

A checkpoint is a folder like that of a policy: `model.safetensors`, `manifest.json`, `training_state/`. Its manifest
says what the model achieved in the tests of `robopolicy.worldmodel.diagnostics`, and so whether it may judge policies.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from robopolicy.data.lerobot import read_lerobot
from robopolicy.device import usable_device
from robopolicy.errors import UserError, cannot_write, unknown_name
from robopolicy.files import atomic_folder, recover, refuse_foreign, write_text
from robopolicy.schema import from_plain, to_plain
from robopolicy.training.build import seed_everything
from robopolicy.training.checkpoint import MODEL, STATE, load_training_state
from robopolicy.training.compose import config_content, config_text
from robopolicy.training.config import GuardConfig, LoggingConfig
from robopolicy.training.guards import Summary
from robopolicy.training.loop import Trainer
from robopolicy.training.manifest import MANIFEST, check_files, git_commit, manifest_content, sha256, versions
from robopolicy.training.statetree import portable, save_tree
from robopolicy.worldmodel.contract import WorldSpec
from robopolicy.worldmodel.diagnostics import GateConfig, Verdict, failure_share, follow, judge
from robopolicy.worldmodel.films import Films, spec_of, split
from robopolicy.worldmodel.latent import PRESETS, LatentConfig, LatentWorldModel
from robopolicy.worldmodel.learner import FilmSource, LearnerConfig, WorldLearner

SCHEMA = 1
WORLD_MODELS = {LatentWorldModel.name: (LatentConfig, LatentWorldModel)}


@dataclass(frozen=True)
class WorldEvaluationConfig:
    """Periodic tests on the films held back."""

    every: int = 0  # updates between tests; 0 is a tenth of the budget
    windows: int = 64  # films to continue
    horizon: int = 20  # frames to predict


@dataclass(frozen=True)
class WorldTrainConfig:
    """One run that trains a world model."""

    dataset: str = ""  # folder of films (`robopolicy collect --render`)
    model: LatentConfig = field(default_factory=LatentConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    cameras: tuple[str, ...] = ()  # views to predict; empty: all
    proprio: tuple[str, ...] | None = None  # vector observations to predict beside them; null: all
    context: int = 4  # frames to look back
    validation: float = 0.1  # share of the episodes of every behaviour that is held back
    held_out: tuple[str, ...] = ()  # behaviours that are held back entirely
    evaluation: WorldEvaluationConfig = field(default_factory=WorldEvaluationConfig)
    gate: GateConfig = field(default_factory=GateConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    guards: GuardConfig = field(default_factory=GuardConfig)
    checkpoint_every: int = 0  # updates between resume points; 0 is a tenth of the budget
    seed: int = 0  # of weights, batches, noise and the split
    device: str = "cpu"
    threads: int = 1  # torch threads
    out: str = "runs"  # parent folder
    name: str = ""  # run folder; empty composes it from dataset and seed
    init_from: str = ""  # world models start afresh


@dataclass(frozen=True)
class WorldManifest:
    """Everything but the numbers of a world model."""

    schema: int  # version of this layout
    worldmodel: str  # key in `WORLD_MODELS`
    config: dict[str, Any]  # fields of its config
    spec: dict[str, Any]  # `WorldSpec`
    task: str  # registered task id that it was filmed in
    ends_on_success: bool  # whether the task ends when it succeeds
    max_episode_steps: int  # of the longest film
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
    folder: Path, model: LatentWorldModel, manifest: WorldManifest, training_state: Mapping[str, Any] | None = None
) -> None:
    """Write a checkpoint folder atomically, replacing an older one of the same name.

    Raises:
        UserError: The weights are not finite, the place holds something else, or writing failed.
    """
    refuse_foreign(folder, MANIFEST, "a checkpoint")
    weights = {key: portable(value) for key, value in model.state_dict().items()}
    for key, value in weights.items():
        if not bool(value.isfinite().all()):
            raise UserError(f"The world model to save has non-finite numbers in '{key}'; lower the learning rate.")
    with atomic_folder(folder) as temporary:
        save_file(weights, temporary / MODEL)
        if training_state is not None:
            (temporary / STATE).mkdir()
            save_tree(temporary / STATE, training_state)
        names = sorted(file.relative_to(temporary).as_posix() for file in temporary.rglob("*") if file.is_file())
        complete = replace(manifest, files={name: sha256(temporary / name) for name in names})
        write_text(temporary / MANIFEST, json.dumps(to_plain(complete), indent=2) + "\n")


def read_world_manifest(folder: Path) -> WorldManifest:
    """Read `manifest.json` of a world model.

    Raises:
        UserError: Not a world model, unreadable, or written by a newer schema.
    """
    data = manifest_content(folder, SCHEMA)
    if "worldmodel" not in data:
        raise UserError(f"{folder} holds a policy, not a world model; pass e.g. runs/NAME/checkpoints/best of one.")
    return from_plain(WorldManifest, data, str(folder / MANIFEST))


def load_world(path: str | Path, device: str | torch.device = "cpu") -> tuple[LatentWorldModel, WorldManifest]:
    """Load a world model strictly, in evaluation mode.

    Raises:
        UserError: One sentence that says what is wrong with the checkpoint.
    """
    folder, device = Path(path), usable_device(device)
    recover(folder)
    manifest = read_world_manifest(folder)
    check_files(folder, manifest, MODEL)
    if manifest.worldmodel not in WORLD_MODELS:
        raise unknown_name("world model", manifest.worldmodel, WORLD_MODELS, f"in {folder}")
    config_class, model_class = WORLD_MODELS[manifest.worldmodel]
    config = from_plain(config_class, manifest.config, f"model config of {folder}")
    model = model_class(config, from_plain(WorldSpec, manifest.spec, f"spec of {folder}"))
    try:
        model.load_state_dict(load_file(folder / MODEL), strict=True)
    except (OSError, SafetensorError, RuntimeError) as error:
        raise UserError(f"{folder / MODEL} does not fit its manifest; copy the checkpoint again.") from error
    return model.to(device).eval(), manifest


@dataclass
class WorldParts:
    """Everything a run consists of."""

    config: WorldTrainConfig
    algorithm: WorldLearner
    source: FilmSource
    validation: Films
    task: str

    eval_sim = None

    @property
    def total_updates(self) -> int:
        """Budget."""
        return self.algorithm.total_updates

    def close(self) -> None:
        """Nothing to stop."""


def complete(config: WorldTrainConfig) -> WorldTrainConfig:
    """Fill in the name.

    Raises:
        UserError: There is no dataset.
    """
    if not config.dataset:
        raise UserError("No films are given; pass a dataset of 'robopolicy collect --render'.")
    name = config.name or f"{Path(config.dataset).name}_world_seed{config.seed}"
    return replace(config, name=name)


def preset(name: str) -> LatentConfig:
    """Sizes by name.

    Raises:
        UserError: The name is unknown.
    """
    if name not in PRESETS:
        raise unknown_name("preset", name, PRESETS)
    return PRESETS[name]


def build(config: WorldTrainConfig) -> WorldParts:
    """Read the films and build what learns from them.

    Raises:
        UserError: The films cannot be learnt from.
    """
    seed_everything(cast(Any, config))
    device = usable_device(config.device)
    episodes = read_lerobot(config.dataset)
    spec = spec_of(episodes, cameras=config.cameras, proprio=config.proprio, context=config.context)
    train, validation = split(episodes, share=config.validation, held_out=config.held_out, seed=config.seed)
    films = Films(spec, train, config.dataset)
    with torch.device(device):
        learner = WorldLearner(config.learner, LatentWorldModel(config.model, spec), config.seed)
    source = FilmSource(films, device, config.seed)
    return WorldParts(config, learner, source, Films(spec, validation, config.dataset), episodes.tasks[0])


def start_world(config: WorldTrainConfig) -> WorldTrainer:
    """Prepare a new run in `config.out / config.name`.

    Raises:
        UserError: The configuration cannot be built, or the folder is taken or cannot be written.
    """
    config = complete(config)
    folder = Path(config.out) / config.name
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"Run {folder} exists; resume it with --resume {folder}, or choose another --name.")
    parts = build(config)
    try:
        (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
        (folder / "config.yaml").write_text(config_text(config), encoding="utf-8")
    except OSError as error:
        raise cannot_write(folder, error) from error
    return WorldTrainer(parts, folder)


def resume_world(folder: Path) -> WorldTrainer:
    """Prepare to go on from the last resume point of a run.

    Raises:
        UserError: The folder is no run of a world model, or it has ended.
    """
    if not (folder / "config.yaml").is_file():
        raise UserError(f"{folder} is not a run: it has no config.yaml; pass a folder such as runs/NAME.")
    if (folder / "report.json").exists():
        raise UserError(f"Run {folder} has ended; start another one.")
    file = folder / "config.yaml"
    config = from_plain(WorldTrainConfig, config_content(file), str(file))
    last = folder / "checkpoints" / "last"
    recover(last)
    if not last.exists():
        return WorldTrainer(build(config), folder)
    state = load_training_state(last, read_world_manifest)
    trainer = WorldTrainer(build(config), folder, resume_at=int(state["update"]))
    trainer.load_state_dict(state)
    return trainer


class WorldTrainer(Trainer):
    """The training loop, with tests of the model in place of played episodes."""

    def __init__(self, parts: WorldParts, folder: Path, resume_at: int = 0) -> None:
        self.world = parts
        super().__init__(cast(Any, parts), folder, resume_at)  # a learner and a source of its own, the same verbs

    def _evaluate(self) -> Summary | None:
        """Test the model on the films held back; keep the one with the best prediction a few frames ahead."""
        learner, films, config = self.world.algorithm, self.world.validation, self.world.config
        if learner.stage == "autoencoder":
            return None
        tests = config.evaluation
        following = follow(learner.deployable(), films, horizon=tests.horizon, windows=tests.windows, seed=config.seed)
        verdict = judge(following, failures=failure_share(self.world.source.films), config=config.gate)
        self.latest = {"passed": verdict.passed, "reasons": list(verdict.reasons), **following.to_dict()}
        psnr = {f"eval/psnr_{mode}_{h}": value for mode, row in following.psnr.items() for h, value in row.items()}
        self._log({**psnr, **{f"eval/direction/{name}": share for name, share in following.directions.items()}})
        true = following.psnr["true"]
        self.console.note(
            f"{self.config.name}  update {self.update}/{self.total}  PSNR {true[1]:.1f} dB, shuffled actions cost "
            f"{following.gap():.1f} dB, {'passes' if verdict.passed else 'fails'} the gate"
        )
        score = true[max(h for h in true if h <= 5)]
        if self.best is None or score > self.best["score"]:
            self.best = {"score": score, "update": self.update, **self.latest}
            self._save("best", {})
        return self.latest

    def _save(self, name: str, state: Mapping[str, Any]) -> None:
        learner, films = self.world.algorithm, self.world.source.films
        model = learner.deployable()
        manifest = WorldManifest(
            schema=SCHEMA,
            worldmodel=model.name,
            config=to_plain(model.config),
            spec=to_plain(model.spec),
            task=self.world.task,
            ends_on_success=films.ends_on_success,
            max_episode_steps=films.longest,
            gate=self.latest or {},
            training={**self._summary(), "behaviours": sorted(set(films.episodes.behaviours))},
            versions=versions(),
            commit=git_commit(),
        )
        save_world(self._checkpoint(name), model, manifest, state or None)

    def _about(self) -> dict[str, Any]:
        return {"run": self.config.name, "task": self.world.task, "worldmodel": self.world.algorithm.model.name}
