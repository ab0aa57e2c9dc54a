"""Many runs from one command line: `key=a,b,c` is one run per value, started by one of Hydra's launchers.

All configurations are composed and checked before the first run begins, by the same code as that of a single run. What
Hydra sweeps over is their number alone, so that any of its launchers can start them, here or on a cluster.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from robopolicy.errors import UserError, unknown_name
from robopolicy.extras import missing
from robopolicy.resources import folder
from robopolicy.training.bench import run_to_end
from robopolicy.training.build import complete
from robopolicy.training.compose import compose_config, config_text
from robopolicy.training.config import TrainConfig
from robopolicy.training.rehearsal import rehearse
from robopolicy.training.resuming import Interrupted

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
        configs.append(complete(replace(config, name="_".join(filter(None, (config.name, varied))))))
        text = config_text(replace(configs[-1], seed=0, name=""))
        if text not in rehearsed:
            rehearse(configs[-1])
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
    """What a launcher calls, in whatever process: the folder of a run, or why it failed, so that the others go on."""
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
