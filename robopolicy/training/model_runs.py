"""Runs of models other than policies: world models and trajectory models.

These runs share the training loop and the folder layout of policy runs; training data and tests differ.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar, cast

from robopolicy.atomic import restore_partial
from robopolicy.constraints import NonNegativeInt, OpenFraction, PositiveInt, Validated
from robopolicy.core.distributed import all_reduce_max, rank, world_size
from robopolicy.data.formats import read_dataset
from robopolicy.device import GPUConfig, usable_device
from robopolicy.errors import UserError, cannot_write, did_you_mean, unknown_name
from robopolicy.evaluation.predicted_outcomes import PredictedOutcomes
from robopolicy.files import parse_yaml
from robopolicy.schema import from_dict, to_dict
from robopolicy.training.build import seed_everything
from robopolicy.training.checkpoint import load_training_state
from robopolicy.training.compose import config_content, config_file, config_text, leaves
from robopolicy.training.config import GuardConfig, LoggingConfig, check_run_name
from robopolicy.training.distributed import check_divisible
from robopolicy.training.guards import Summary
from robopolicy.training.loop import Trainer
from robopolicy.training.make_source import SEEDS_PER_RANK
from robopolicy.training.manifest import Listing, git_commit, versions
from robopolicy.training.resume import check_resume_point, restore
from robopolicy.training.world_sims import SCHEMA, WorldManifest, read_world_manifest, save_world
from robopolicy.worldmodel.action_following import GateConfig, check_gates, failure_fraction, measure_action_following
from robopolicy.worldmodel.base import VideoSource
from robopolicy.worldmodel.latent import PRESETS, LatentWorldModel, LatentWorldModelConfig
from robopolicy.worldmodel.learner import LearnerConfig, StagedVideoSource, WorldLearner
from robopolicy.worldmodel.pretrained.learner import PretrainedLearner, PretrainedTrainConfig, build_pretrained
from robopolicy.worldmodel.replays import calibrate_success
from robopolicy.worldmodel.videos import VideoDataset, infer_spec, split_episodes

Config = TypeVar("Config", bound="ModelRunConfig")
Settings = TypeVar("Settings")
AnyTrainer = TypeVar("AnyTrainer", bound=Trainer)
Build = Callable[[Config], Any]
"""Reads the data of a run and builds its components."""


@dataclass(frozen=True)
class ModelRunConfig(Validated):
    """Common settings of these runs; subclasses add the model, its learner and its tests."""

    dataset: str = ""  # episodes in any format, or a mapping file
    validation: OpenFraction = 0.1  # fraction of the episodes of every behaviour held out for validation
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    guards: GuardConfig = field(default_factory=GuardConfig)
    checkpoint_every: NonNegativeInt = 0  # updates between resume points; 0 is a tenth of the budget
    seed: NonNegativeInt = 0  # seed of weights, batches, noise and the split
    device: str = "auto"
    gpu: GPUConfig = field(default_factory=GPUConfig)
    threads: PositiveInt = 1  # torch threads
    out: str = "runs"  # parent folder
    name: str = ""  # run folder; empty: composed of dataset and seed
    init_from: str = ""  # unused; these models train from scratch


class ModelRunComponents:
    """Common parts of the components of these runs, which use no simulator."""

    eval_sim = None
    held_out = None

    def close(self) -> None:
        """Do nothing."""


def start_model(config: Config, build: Build[Config], trainer: Callable[[Any, Path], AnyTrainer]) -> AnyTrainer:
    """Prepare a new run in `config.out / config.name`.

    Raises:
        UserError: The configuration or name is invalid, or the folder is not empty or cannot be written.
    """
    check_run_name(config.name)
    folder = Path(config.out) / config.name
    if rank() > 0:  # process 0 makes the folder
        return trainer(build(config), folder)
    if folder.exists() and any(folder.iterdir()):
        raise UserError(f"Run {folder} exists; resume it with --resume {folder}, or choose another --name.")
    parts = build(config)
    try:
        (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
        (folder / "config.yaml").write_text(config_text(config), encoding="utf-8")
    except OSError as error:
        raise cannot_write(folder, error) from error
    run = trainer(parts, folder)
    run.is_new = True
    return run


def resume_model(
    folder: Path,
    config_class: type[Config],
    read: Callable[[Path], Listing],
    build: Build[Config],
    trainer: Callable[..., AnyTrainer],
) -> AnyTrainer:
    """Prepare to resume a run of `config_class` from its last resume point.

    `read` reads the manifests of its checkpoints, `build` is as in `start_model`, and the trainer is created by
    `trainer(parts, folder, resume_at=update)`.

    Raises:
        UserError: The folder is not such a run, or the run has ended.
    """
    file, last = config_file(folder), folder / "checkpoints" / "last"
    if (folder / "report.json").exists():
        raise UserError(f"Run {folder} has ended; start a new one.")
    config = from_dict(config_class, config_content(file), str(file))
    if rank() == 0:
        restore_partial(last)
    all_reduce_max(0)  # the other processes read afterwards
    if not last.exists():
        return trainer(build(config), folder)
    state = load_training_state(last, read)
    check_resume_point(state, last)
    resumed = trainer(build(config), folder, resume_at=int(state["update"]))
    restore(resumed, state)
    return resumed


def with_settings(config: Settings, settings: Sequence[str]) -> Settings:
    """Return `config` with settings `key=value`, dotted keys and YAML values; invalid settings raise a UserError."""
    plain = to_dict(config)
    for setting in settings:
        key, equals, text = setting.partition("=")
        *path, last = key.split(".")
        section: Any = plain
        for name in path:
            section = section.get(name) if isinstance(section, dict) else None
        if not equals:
            raise UserError(f"Write a setting as KEY=VALUE, got '{setting}'.")
        if not isinstance(section, dict) or last not in section:
            raise UserError(f"Unknown setting '{key}'.{_suggestions(key, path, section, plain)}")
        try:
            value = parse_yaml(text)
        except ValueError as error:
            raise UserError(f"The value of '{key}' cannot be read: {error}.") from error
        with suppress(ValueError, TypeError):  # YAML parses 5e-4 as text
            value = float(value) if isinstance(value, str) else value
        section[last] = value
    return from_dict(type(config), plain, "settings")


def _suggestions(key: str, path: Sequence[str], section: Any, plain: Mapping[str, Any]) -> str:
    """Suggest the key nearest to the unknown `key`, and list the settings of its section if it exists."""
    known = [f"{'.'.join(path)}.{name}" for name in section] if path and isinstance(section, Mapping) else list(plain)
    return f"{did_you_mean(key, leaves(plain))} Known: {', '.join(sorted(known))}."


@dataclass(frozen=True)
class WorldEvaluationConfig(Validated):
    """Periodic tests on the validation videos."""

    every: NonNegativeInt = 0  # updates between tests; 0 is a tenth of the budget
    windows: PositiveInt = 64  # video windows to continue
    horizon: PositiveInt = 20  # frames to predict
    replays: PositiveInt = 128  # episodes replayed to calibrate the success head


@dataclass(frozen=True)
class WorldTrainConfig(ModelRunConfig):
    """Run that trains a world model on a folder of videos (`robopolicy collect --render`)."""

    model: LatentWorldModelConfig = field(default_factory=LatentWorldModelConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    pretrained: PretrainedTrainConfig = field(default_factory=PretrainedTrainConfig)  # replaces model and learner
    cameras: tuple[str, ...] = ()  # views to predict; empty: all
    proprio: tuple[str, ...] | None = None  # vector observations to predict in addition; null: all
    context: PositiveInt = 4  # context frames
    held_out: tuple[str, ...] = ()  # behaviours held out entirely
    evaluation: WorldEvaluationConfig = field(default_factory=WorldEvaluationConfig)
    gate: GateConfig = field(default_factory=GateConfig)


@dataclass
class WorldRunComponents(ModelRunComponents):
    """Components of a run."""

    config: WorldTrainConfig
    algorithm: WorldLearner | PretrainedLearner
    source: VideoSource
    validation: VideoDataset
    task: str

    @property
    def total_updates(self) -> int:
        """Number of updates."""
        return self.algorithm.total_updates


def resolve_config(config: WorldTrainConfig) -> WorldTrainConfig:
    """Fill in the name; a UserError is raised without a dataset."""
    if not config.dataset:
        raise UserError("No videos are given; pass a dataset of 'robopolicy collect --render'.")
    sizes = {f"learner.{name}": getattr(config.learner, name) for name in ("batch_size", "state_batch")}
    check_divisible(sizes | {"learner.autoencoder_batch": config.learner.autoencoder_batch})
    if config.pretrained.source and world_size() > 1:
        raise UserError("Pretrained world models train in one process; drop torchrun.")
    name = config.name or f"{Path(config.dataset).name}_world_seed{config.seed}"
    return replace(config, name=name)


def preset(name: str) -> LatentWorldModelConfig:
    """Return the model sizes of a preset; an unknown name raises a UserError."""
    if name not in PRESETS:
        raise unknown_name("preset", name, PRESETS)
    return PRESETS[name]


def build(config: WorldTrainConfig) -> WorldRunComponents:
    """Read the videos and build the learner; unsuitable videos raise a UserError."""
    seed_everything(cast(Any, config))
    device = usable_device(config.device)
    episodes = read_dataset(config.dataset)
    spec = infer_spec(episodes, cameras=config.cameras, proprio=config.proprio, context=config.context)
    train, validation = split_episodes(episodes, share=config.validation, held_out=config.held_out, seed=config.seed)
    videos = VideoDataset(spec, train, config.dataset)
    if config.pretrained.source:
        learner, source = build_pretrained(config.pretrained, videos, device, config.seed)
    else:
        seed = config.seed + SEEDS_PER_RANK * rank()  # of the noise
        learner = WorldLearner(config.learner, LatentWorldModel(config.model, spec).to(device), seed)
        source = StagedVideoSource(videos, device, config.seed)
    held_out = VideoDataset(spec, validation, config.dataset)
    return WorldRunComponents(config, learner, source, held_out, episodes.tasks[0])


def start_world(config: WorldTrainConfig) -> WorldTrainer:
    """Prepare a new world model run; errors are as in `start_model`."""
    return start_model(resolve_config(config), build, WorldTrainer)


def resume_world(folder: Path) -> WorldTrainer:
    """Prepare to resume a world model run; errors are as in `resume_model`."""
    return resume_model(folder, WorldTrainConfig, read_world_manifest, build, WorldTrainer)


class WorldTrainer(Trainer):
    """Training loop that tests a world model instead of evaluating a policy."""

    def __init__(self, parts: WorldRunComponents, folder: Path, resume_at: int = 0) -> None:
        self.world = parts
        super().__init__(cast(Any, parts), folder, resume_at)  # learner and source have the same interface

    def _evaluate(self) -> Summary | None:
        """Test the model on the validation videos; the best checkpoint has the highest PSNR a few frames ahead."""
        learner, videos, config = self.world.algorithm, self.world.validation, self.world.config
        if learner.stage == "autoencoder" or not self.writes:
            return None
        tests = config.evaluation
        model = learner.inference_policy()
        following = measure_action_following(
            model, videos, horizon=tests.horizon, windows=tests.windows, seed=config.seed
        )
        found, further = {}, ()
        if "success" in videos.episodes.arrays:
            replays = calibrate_success(model, videos, tests.replays)
            learner.model.success_bias.copy_(model.success_bias)
            found, further = {"replays": replays.to_dict()}, PredictedOutcomes.of(replays).reasons()
            self._log({f"eval/replays/{name}": rate for name, rate in replays.rates().items()})
        failures = failure_fraction(self.world.source.videos)
        verdict = check_gates(following, failures=failures, further=further, config=config.gate)
        self.latest = {"passed": verdict.passed, "reasons": list(verdict.reasons), **following.to_dict(), **found}
        psnr = {f"eval/psnr_{mode}_{h}": value for mode, row in following.psnr.items() for h, value in row.items()}
        self._log({**psnr, **{f"eval/direction/{name}": share for name, share in following.directions.items()}})
        true = following.psnr["true"]
        self.console.note(
            f"{self.config.name}  update {self.update}/{self.total}  PSNR {true[1]:.1f} dB, {following.gap():.1f} dB "
            f"lower with shuffled actions, {'passes' if verdict.passed else 'fails'} the gate"
        )
        score = true[max(h for h in true if h <= 5)]
        if self.best is None or score > self.best["score"]:
            self.best = {"score": score, "update": self.update, **self.latest}
            self._save("best", {})
        return self.latest

    def _save(self, name: str, state: Mapping[str, Any]) -> None:
        if not self.writes:
            return
        learner, videos = self.world.algorithm, self.world.source.videos
        model = learner.inference_policy()
        data = {"behaviours": sorted(set(videos.episodes.behaviours)), "failures": failure_fraction(videos)}
        manifest = WorldManifest(
            schema=SCHEMA,
            worldmodel=model.name,
            config=to_dict(model.config),
            spec=to_dict(model.spec),
            task=self.world.task,
            ends_on_success=videos.ends_on_success,
            gate=self.latest or {},
            training={**self._summary(), **data},
            versions=versions(),
            commit=git_commit(),
        )
        save_world(self._checkpoint(name), model, manifest, state or None)

    def _run_facts(self) -> dict[str, Any]:
        return {"run": self.config.name, "task": self.world.task, "worldmodel": self.world.algorithm.model.name}
