"""Sweeps and runs with several seeds: `key=a,b,c` is one run per value, started by one of Hydra's launchers.

All configurations are composed and checked before the first run starts, as for a single run. Hydra sweeps only over
their index, so any of its launchers can start them, on this machine or on a cluster.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import torch
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from robopolicy.algorithms.registry import ALGORITHMS
from robopolicy.data.compatibility import recorded_spec
from robopolicy.device import usable_device
from robopolicy.errors import UserError, unknown_name
from robopolicy.evaluation.comparison import binary_outcomes, seed_interval
from robopolicy.evaluation.plots import learning_curves
from robopolicy.nets.encoder import CLOUD_PREFIX, IMAGE_PREFIX
from robopolicy.optional import missing
from robopolicy.plurals import counted
from robopolicy.resources import folder
from robopolicy.shutdown import Interrupted
from robopolicy.sim.contract import SimSpec, TensorSpec
from robopolicy.sim.wrappers.registry import wrapped_spec
from robopolicy.text.sft import TextLearner
from robopolicy.training.build import build, load_episodes, resolve_config
from robopolicy.training.compose import compose_config, config_text, read_config
from robopolicy.training.config import TaskConfig, TrainConfig
from robopolicy.training.learner import build_learner
from robopolicy.training.loggers import read_jsonl
from robopolicy.training.queue import Job, QueueReport, run_queue
from robopolicy.training.runs import resume_run, start_run
from robopolicy.versions import versions

DUMMY_SIZE = 32  # size of dummy vector observations


def dry_run(config: TrainConfig) -> None:
    """Build policy and algorithm of a resolved configuration on a dummy specification of its task.

    The dummy may lack observations of the task, so a failure is confirmed by building the run itself. Runs of language
    models are skipped. An invalid run raises a UserError.
    """
    device = usable_device(config.device)
    if issubclass(ALGORITHMS[str(config.algorithm["name"])], TextLearner):
        return
    episodes = load_episodes(config.dataset, config.task.name, config.task.reward) if config.dataset else None
    sim = dummy_spec(config.task) if episodes is None else recorded_spec(episodes)
    try:
        with torch.random.fork_rng(devices=[]):
            build_learner(config, episodes, None if config.init_from else sim, device)
    except Exception:  # components may raise any exception for unexpected inputs
        build(config).close()


def dummy_spec(task: TaskConfig) -> SimSpec:
    """Create a dummy specification of a task: vector observations and the configured cameras."""
    size = task.image_size
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(("state", *task.obs_keys), (DUMMY_SIZE,))
    shapes |= {f"{IMAGE_PREFIX}{name}": (3, size, size) for name in task.cameras}
    shapes |= {f"{CLOUD_PREFIX}{name}": (task.points, 3) for name in task.point_clouds}
    observation = {key: TensorSpec(shape) for key, shape in shapes.items()}
    spec = SimSpec(task.name, observation, -torch.ones(2), torch.ones(2), control_dt=0.1, max_episode_steps=100)
    return wrapped_spec(spec, task.wrappers)


STAGES = ("base", "best", "final")
MEASURES = {  # key of evaluations -> label, keys of its interval
    "success": ("success", "low", "high"),
    "return_mean": ("return", "return_low", "return_high"),
    "action_error": ("action error", "action_error_low", "action_error_high"),
}
BOUNDS = {"success": (0.0, 1.0), "action_error": (0.0, math.inf)}  # measure -> its possible values


def run_to_end(config: TrainConfig) -> Path:
    """Start, resume or skip a run as needed; return its folder.

    Raises:
        UserError: The configuration is invalid, or the folder contains a run with other settings.
    """
    config = resolve_config(config)
    folder = Path(config.out) / config.name
    if not check_settings(config):
        start_run(config).train()
    elif not (folder / "report.json").exists():
        resume_run(folder).train()
    return folder


def seed_jobs(config: TrainConfig, folder: Path, *, seeds: int) -> list[Job]:
    """Jobs that train `config` with `seeds` consecutive seeds in subfolders of `folder`, which have their names.

    Raises:
        UserError: The configuration is invalid, or a folder contains a run with other settings.
    """
    jobs: list[Job] = []
    for seed in range(config.seed, config.seed + seeds):
        each = resolve_config(replace(config, seed=seed, out=str(folder), name=f"seed{seed}"))
        check_settings(each)
        jobs.append(Job(each.name, partial(_train_in_queue, each), (folder / each.name / "report.json").exists))
    return jobs


def run_seeds(jobs: Sequence[Job], folder: Path, *, parallel: int) -> QueueReport:
    """Run the jobs of `seed_jobs`, `parallel` at a time; finished runs are skipped, failed ones run again."""
    return run_queue(jobs, folder / "queue", parallel=parallel, retry_failed=True)


def check_settings(config: TrainConfig) -> bool:
    """Whether the folder of a resolved configuration contains its run.

    Raises:
        UserError: The folder contains a run with other settings.
    """
    folder = Path(config.out) / config.name
    if not (folder / "config.yaml").exists():
        return False
    if read_config(folder / "config.yaml") != config:
        raise UserError(f"Run {folder} has other settings; choose another folder, or delete it.")
    return True


def _train_in_queue(config: TrainConfig, folder: Path) -> None:
    run_to_end(config)


def summarise(folders: Sequence[Path]) -> dict[str, Any]:
    """Summarise finished runs: every score by seed, and its mean with the interval over seeds."""
    reports = [json.loads((folder / "report.json").read_text(encoding="utf-8")) for folder in folders]
    first = reports[0]
    return {
        **{key: first[key] for key in ("task", "policy", "algorithm", "total_updates")},
        "seeds": [report["seed"] for report in reports],
        **{stage: _scores([report[stage] for report in reports]) for stage in STAGES},
        "env_steps": [report["env_steps"] for report in reports],
        "seconds": [report["seconds"] for report in reports],
        "versions": versions(),
    }


def draw_curves(folders: Sequence[Path], path: Path, *, label: str) -> Path | None:
    """Plot the evaluations of the runs over their updates; None without evaluations."""
    runs = [read_jsonl(folder / "metrics.jsonl") for folder in folders]
    keys = {key for rows in runs for row in rows for key in row}
    for measure, (name, low, high) in MEASURES.items():
        if f"eval/{measure}" in keys:
            return learning_curves(
                {label: runs},
                path,
                y=f"eval/{measure}",
                low=f"eval/{low}",
                high=f"eval/{high}",
                title=label,
                ylabel=name,
                percent=measure == "success",
            )
    return None


def _scores(summaries: Sequence[dict[str, Any] | None]) -> dict[str, Any] | None:
    """Summarise the scores of all runs at one stage; None without evaluations."""
    found: dict[str, Any] = {}
    for measure in MEASURES:
        known = [summary for summary in summaries if summary is not None and summary.get(measure) is not None]
        if len(known) == len(summaries):
            values = [summary[measure] for summary in known]
            episodes = [summary["n"] if measure == "success" else 0 for summary in known]
            runs = [binary_outcomes(v, n) if n else [v] for v, n in zip(values, episodes, strict=True)]
            interval = seed_interval(dict(enumerate(runs))).within(*BOUNDS.get(measure, (-math.inf, math.inf)))
            found[measure] = {**interval.to_dict(), "by_seed": values}
    return found or None


LAUNCHERS = {  # name -> Hydra plugin, and the extra of robopolicy that installs it
    "basic": None,
    "joblib": ("hydra_plugins.hydra_joblib_launcher", "joblib"),
    "submitit_local": ("hydra_plugins.hydra_submitit_launcher", "submitit"),
    "submitit_slurm": ("hydra_plugins.hydra_submitit_launcher", "submitit"),
    "ray": ("hydra_plugins.hydra_ray_launcher", "ray"),
    "ray_aws": ("hydra_plugins.hydra_ray_launcher", "ray"),
}


def combinations(settings: Sequence[str]) -> tuple[list[TrainConfig], list[str]]:
    """Expand a sweep into resolved configurations, named after the varied settings, and the settings of Hydra.

    Args:
        settings: As on the command line; values may be lists `a,b,c` or `range(0,5)`, keys `hydra/...` and `hydra....`
            choose and configure the launcher.

    Raises:
        UserError: A run is invalid, as far as `dry_run` can detect.
    """
    launcher = [text for text in settings if text.startswith(("hydra/", "hydra."))]
    axes = [_values(text) for text in settings if text not in launcher]
    configs: list[TrainConfig] = []
    validated: set[str] = set()
    for choice in product(*axes):
        config = compose_config(choice)
        varied = ",".join(text for text, axis in zip(choice, axes, strict=True) if len(axis) > 1).replace("/", "-")
        configs.append(resolve_config(replace(config, name="_".join(filter(None, (config.name, varied))))))
        text = config_text(replace(configs[-1], seed=0, name=""))
        if text not in validated:
            dry_run(configs[-1])
            validated.add(text)
    return configs, launcher


def launch(configs: Sequence[TrainConfig], launcher: Sequence[str]) -> list[Path]:
    """Train the runs through Hydra; return their folders.

    Raises:
        UserError: The launcher is unknown, not installed or misconfigured, or runs failed; the others have ended.
        KeyboardInterrupt: Ctrl-C; the resume point of the run has been saved.
    """
    _check_launcher(launcher)
    jobs = ",".join(str(number) for number in range(len(configs)))
    with initialize_config_dir(str(folder("configs")), version_base="1.3"):
        hydra = GlobalHydra.instance().hydra
        assert hydra is not None
        try:
            batches = hydra.multirun("multirun", partial(_run, configs), [*launcher, f"job={jobs}"])
        except HydraException as error:
            raise UserError(f"Hydra: {str(error).strip().splitlines()[0]}") from error
    outcomes: list[Path | str] = [job.return_value for batch in batches for job in batch]
    failed = [(config.name, item) for config, item in zip(configs, outcomes, strict=True) if isinstance(item, str)]
    if failed:
        name, reason = failed[0]
        raise UserError(f"{len(failed)} of {counted(len(outcomes), 'run')} failed, first {name}: {reason}")
    return [outcome for outcome in outcomes if isinstance(outcome, Path)]


def _run(configs: Sequence[TrainConfig], job: Any) -> Path | str:
    """Run a job of a launcher; return the folder of the run or an error message, so that the others continue."""
    try:
        return run_to_end(configs[job.job])
    except UserError as error:
        return str(error)
    except Interrupted as stop:  # also stops the sweep
        raise KeyboardInterrupt(str(stop)) from stop


def _values(text: str) -> list[str]:
    """Return `key=value` for every value of a setting."""
    try:
        override = OverridesParser.create().parse_override(text)
    except HydraException:  # a text such as a path, which Hydra cannot parse
        return [text]
    if not override.is_sweep_override():
        return [text]
    values = list(override.sweep_string_iterator()) if override.is_discrete_sweep() else []
    if not values:
        raise UserError(f"'{text}' is not a list of values; write e.g. key=1,2,3 or key=range(0,5).")
    return [f"{override.get_key_element()}={value}" for value in values]


def _check_launcher(settings: Sequence[str]) -> None:
    for key, _, name in (text.partition("=") for text in settings):
        if key != "hydra/launcher":
            continue
        if name not in LAUNCHERS:
            raise unknown_name("launcher", name, LAUNCHERS)
        plugin = LAUNCHERS[name]
        if plugin is not None and find_spec(plugin[0]) is None:
            raise missing(plugin[0].removeprefix("hydra_plugins."), plugin[1])
