"""Many runs from one command line: `key=a,b,c` is one run per value, started by one of Hydra's launchers.

All configurations are composed and checked before the first run begins, by the same code as that of a single run. What
Hydra sweeps over is their number alone, so that any of its launchers can start them, here or on a cluster.
"""

from __future__ import annotations

import json
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
from robopolicy.device import usable_device
from robopolicy.errors import UserError, unknown_name
from robopolicy.evaluation.intervals import stratified_iqm
from robopolicy.evaluation.plots import learning_curves
from robopolicy.nets.encoder import CLOUD_PREFIX, IMAGE_PREFIX
from robopolicy.optional import missing
from robopolicy.resources import folder
from robopolicy.sim.contract import SimSpec, TensorSpec
from robopolicy.sim.wrappers.registry import wrapped_spec
from robopolicy.text.sft import TextLearner
from robopolicy.training.build import build, episodes_of, resolve_config
from robopolicy.training.compose import compose_config, config_text, read_config
from robopolicy.training.config import TaskConfig, TrainConfig
from robopolicy.training.learner import build_learner
from robopolicy.training.loggers import read_jsonl
from robopolicy.training.loop import resume_run, start_run
from robopolicy.training.resume import Interrupted
from robopolicy.training.workers import parallel_map
from robopolicy.versions import versions

DUMMY_SIZE = 32  # of stand-in vectors


def dry_run(config: TrainConfig) -> None:
    """Build policy and algorithm of a resolved configuration on a dummy specification of its task.

    The stand-in may lack what the task shows. So where it is refused the run itself is built, and has the last word.
    Runs that train language models are not rehearsed.

    Raises:
        UserError: The run cannot be built.
    """
    device = usable_device(config.device)
    if issubclass(ALGORITHMS[str(config.algorithm["name"])], TextLearner):
        return
    episodes = episodes_of(config.dataset) if config.dataset else None
    sim = None if config.init_from or episodes is not None else dummy_spec(config.task)
    try:
        with torch.random.fork_rng(devices=[]):
            build_learner(config, episodes, sim, device)
    except Exception:  # whatever parts raise that see what they do not expect
        build(config).close()


def dummy_spec(task: TaskConfig) -> SimSpec:
    """Dummy specification of a task: a vector observation and the configured cameras."""
    size = task.image_size
    shown: dict[str, tuple[int, ...]] = dict.fromkeys(("state", *task.obs_keys), (DUMMY_SIZE,))
    shown |= {f"{IMAGE_PREFIX}{name}": (3, size, size) for name in task.cameras}
    shown |= {f"{CLOUD_PREFIX}{name}": (task.points, 3) for name in task.point_clouds}
    observation = {key: TensorSpec(shape) for key, shape in shown.items()}
    spec = SimSpec(task.name, observation, -torch.ones(2), torch.ones(2), control_dt=0.1, max_episode_steps=100)
    return wrapped_spec(spec, task.wrappers)


STAGES = ("base", "best", "final")


MEASURES = ("success", "return_mean")


MIN_SEEDS = 5  # seeds, below which an interval over seeds is rough


def run_to_end(config: TrainConfig) -> Path:
    """Train a run, or what is missing of it; returns its folder.

    Raises:
        UserError: The configuration cannot be built, or its folder holds a run with other settings.
    """
    config = resolve_config(config)
    folder = Path(config.out) / config.name
    if not (folder / "config.yaml").exists():
        start_run(config).train()
    elif read_config(folder / "config.yaml") != config:
        raise UserError(f"Run {folder} has other settings; choose another folder, or delete it.")
    elif not (folder / "report.json").exists():
        resume_run(folder).train()
    return folder


def run_seeds(config: TrainConfig, folder: Path, *, seeds: int, jobs: int) -> list[Path]:
    """Train `config` with consecutive seeds, those that are not there yet; returns their folders.

    Args:
        config: With the first of the seeds.
        folder: Where the runs lie.
        seeds: How many.
        jobs: Runs at a time, in processes of their own where there are several.
    """
    wanted = range(config.seed, config.seed + seeds)
    configs = [replace(config, seed=seed, out=str(folder), name=f"seed{seed}") for seed in wanted]
    if jobs == 1:
        return [run_to_end(each) for each in configs]
    resolve_config(configs[0])  # what is wrong with it is said once, and here
    ended = dict.fromkeys(wanted, Path())
    for each, future in parallel_map(run_to_end, configs, jobs=jobs):
        ended[each.seed] = future.result()
    return list(ended.values())


def summarise(folders: Sequence[Path]) -> dict[str, Any]:
    """What finished runs say together: every score by seed, its interquartile mean and the interval over seeds."""
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
    """Draw the evaluations of the runs over their updates; None where nothing was evaluated."""
    runs = [read_jsonl(folder / "metrics.jsonl") for folder in folders]
    keys = {key for rows in runs for row in rows for key in row}
    for measure in MEASURES:
        if f"eval/{measure}" in keys:
            ends = ("eval/low", "eval/high") if measure == "success" else ("eval/return_low", "eval/return_high")
            return learning_curves(
                {label: runs},
                path,
                y=f"eval/{measure}",
                low=ends[0],
                high=ends[1],
                title=label,
                ylabel=measure.removesuffix("_mean"),
                percent=measure == "success",
            )
    return None


def _scores(summaries: Sequence[dict[str, Any] | None]) -> dict[str, Any] | None:
    """Scores at one stage of all runs, where they were evaluated."""
    found: dict[str, Any] = {}
    for measure in MEASURES:
        values = [summary[measure] for summary in summaries if summary is not None and summary[measure] is not None]
        if len(values) == len(summaries):
            score = stratified_iqm([values])
            found[measure] = {"value": score.estimate, "low": score.low, "high": score.high, "by_seed": values}
    return found or None


LAUNCHERS = {  # name -> plugin that brings it, and the extra of robopolicy that installs the plugin
    "basic": None,
    "joblib": ("hydra_plugins.hydra_joblib_launcher", "joblib"),
    "submitit_local": ("hydra_plugins.hydra_submitit_launcher", "submitit"),
    "submitit_slurm": ("hydra_plugins.hydra_submitit_launcher", "submitit"),
    "ray": ("hydra_plugins.hydra_ray_launcher", "ray"),
    "ray_aws": ("hydra_plugins.hydra_ray_launcher", "ray"),
}


def combinations(settings: Sequence[str]) -> tuple[list[TrainConfig], list[str]]:
    """Every run of a sweep, completed and named after what differs, and the settings of Hydra itself.

    Args:
        settings: As on the command line; values may be lists `a,b,c` or `range(0,5)`, keys `hydra/...` and `hydra....`
            choose and set the launcher.

    Raises:
        UserError: Any of the runs cannot be composed or built, as far as that shows without playing.
    """
    launcher = [text for text in settings if text.startswith(("hydra/", "hydra."))]
    axes = [_values(text) for text in settings if text not in launcher]
    configs: list[TrainConfig] = []
    rehearsed: set[str] = set()
    for choice in product(*axes):
        config = compose_config(choice)
        varied = ",".join(text for text, axis in zip(choice, axes, strict=True) if len(axis) > 1).replace("/", "-")
        configs.append(resolve_config(replace(config, name="_".join(filter(None, (config.name, varied))))))
        text = config_text(replace(configs[-1], seed=0, name=""))
        if text not in rehearsed:
            dry_run(configs[-1])
            rehearsed.add(text)
    return configs, launcher


def launch(configs: Sequence[TrainConfig], launcher: Sequence[str]) -> list[Path]:
    """Train the runs through Hydra; returns their folders.

    Raises:
        UserError: The launcher is unknown, not installed or set wrongly, or runs failed; the others have ended.
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
    failed = [
        (config.name, outcome) for config, outcome in zip(configs, outcomes, strict=True) if isinstance(outcome, str)
    ]
    if failed:
        raise UserError(f"{len(failed)} of {len(outcomes)} runs failed, first {failed[0][0]}: {failed[0][1]}")
    return [outcome for outcome in outcomes if isinstance(outcome, Path)]


def _run(configs: Sequence[TrainConfig], job: Any) -> Path | str:
    """Run a job of a launcher; return the folder of the run, or why it failed, so that the others continue."""
    try:
        return run_to_end(configs[job.job])
    except UserError as error:
        return str(error)
    except Interrupted as stop:  # the sweep stops, too
        raise KeyboardInterrupt(str(stop)) from stop


def _values(text: str) -> list[str]:
    """`key=value` for every value of a setting."""
    try:
        override = OverridesParser.create().parse_override(text)
    except HydraException:  # a text that only we can read, such as a path
        return [text]
    if not override.is_sweep_override():
        return [text]
    values = list(override.sweep_string_iterator()) if override.is_discrete_sweep() else []
    if not values:
        raise UserError(f"'{text}' is no list of values; write e.g. key=1,2,3 or key=range(0,5).")
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
