"""Conversion between scheduler configurations of diffusers and configurations of policy heads.

A `scheduler_config.json` defines the noise levels of training and the meaning of the network output, but not the number
of sampler steps. Settings that our samplers cannot reproduce raise an error, except for the difference below.

diffusers counts time from data to noise: timestep 0 is clean, sigma 1 is noise, and a flow model predicts
noise - data. `network_time` and `model_output` translate for a network of ours that is driven by its schedulers:

    scheduler = DDIMScheduler.from_config(scheduler_config(policy.config))
    scheduler.set_timesteps(**grid_arguments(policy.config))
    for timestep in scheduler.timesteps:
        time = network_time(policy.config, timestep).expand(len(x))
        output = model_output(policy.config, policy.backbone(x, time, features))
        x = scheduler.step(output, timestep, x, **step_arguments(policy.config)).prev_sample

returns the chunk of our sampler. One difference remains: a DDIM step of diffusers always descends by T // K levels and
leaves the grid with spacing "linspace", and with "trailing" where K does not divide T; ours stays on it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from robopolicy.atomic import write_text
from robopolicy.errors import UserError, unknown_name
from robopolicy.files import parse_json
from robopolicy.policies.heads.diffusion import DiffusionConfig
from robopolicy.policies.heads.flow import FlowConfig
from robopolicy.policies.path import left_grid
from robopolicy.schema import from_dict, to_dict

FILE = "scheduler_config.json"
FLOW = "FlowMatchEulerDiscreteScheduler"
SAMPLERS = {"DDPMScheduler": "ddpm", "DDIMScheduler": "ddim"}
PREDICTIONS = {"epsilon": "noise", "sample": "data", "v_prediction": "v"}
SCHEDULES = {"squaredcos_cap_v2": "squared_cosine", "linear": "linear"}

# Settings with a single value that our samplers reproduce: diffusers' default unless stated otherwise.
_FIXED_DIFFUSION: dict[str, Any] = {
    "trained_betas": None,
    "thresholding": False,
    "steps_offset": 0,
    "rescale_betas_zero_snr": False,
    "set_alpha_to_one": True,
    "variance_type": "fixed_small",
}
_FIXED_FLOW: dict[str, Any] = {
    "shift": 1.0,
    "use_dynamic_shifting": False,
    "invert_sigmas": False,
    "shift_terminal": None,
    "use_karras_sigmas": False,
    "use_exponential_sigmas": False,
    "use_beta_sigmas": False,
    "stochastic_sampling": False,
}
# Settings that only matter together with an unsupported one.
_IDLE = {
    "dynamic_thresholding_ratio",
    "sample_max_value",
    "base_shift",
    "max_shift",
    "base_image_seq_len",
    "max_image_seq_len",
    "time_shift_type",
}

Config = TypeVar("Config", DiffusionConfig, FlowConfig)


def read_scheduler(
    source: Mapping[str, Any] | str | Path, *, steps: int, base: DiffusionConfig | FlowConfig | None = None
) -> DiffusionConfig | FlowConfig:
    """Return the configuration of the head that samples like a diffusers scheduler.

    `source` is the scheduler's configuration, its JSON file or its folder; `steps` is the number K of sampler steps;
    `base` has the settings outside of the scheduler (architecture, normalisers), None for our defaults. A UserError is
    raised for other schedulers than DDPM, DDIM and flow-matching Euler, and for unsupported settings.
    """
    settings, where = (source, "scheduler") if isinstance(source, Mapping) else _read(Path(source))
    kind = str(settings.get("_class_name", ""))
    if kind != FLOW and kind not in SAMPLERS:
        raise unknown_name("scheduler", kind, [FLOW, *SAMPLERS], f"in {where}")
    if kind == FLOW:
        _check(settings, _FIXED_FLOW, {"num_train_timesteps"}, where)
        return _filled(FlowConfig, base, {"steps": steps, "action_clip": 0.0}, where)
    known = {"num_train_timesteps", "beta_schedule", "beta_start", "beta_end", "prediction_type", "timestep_spacing"}
    _check(settings, _FIXED_DIFFUSION, known | {"clip_sample", "clip_sample_range"}, where)
    clipped = settings.get("clip_sample", True)
    fields = {
        "steps": steps,
        "train_steps": settings.get("num_train_timesteps", 1000),
        "sampler": SAMPLERS[kind],
        "prediction": _translated(settings, "prediction_type", "epsilon", PREDICTIONS, where),
        "schedule": _translated(settings, "beta_schedule", "linear", SCHEDULES, where),
        "beta_start": settings.get("beta_start", 1e-4),
        "beta_end": settings.get("beta_end", 0.02),
        "spacing": settings.get("timestep_spacing", "leading"),
        "action_clip": settings.get("clip_sample_range", 1.0) if clipped else 0.0,
    }
    return _filled(DiffusionConfig, base, fields, where)


def scheduler_config(config: DiffusionConfig | FlowConfig) -> dict[str, Any]:
    """Return the configuration for `from_config` of the diffusers scheduler `_class_name`.

    A flow scheduler does not bound its samples, so `action_clip` of a flow head is left out. A UserError is raised for
    heads without a scheduler in diffusers, such as shortcut or MeanFlow.
    """
    if type(config) not in (DiffusionConfig, FlowConfig):
        raise UserError(f"No scheduler of diffusers supports the head of a {type(config).__name__}.")
    if isinstance(config, FlowConfig):
        return {"_class_name": FLOW, "num_train_timesteps": 1000, "shift": 1.0}
    named = {value: key for key, value in SAMPLERS.items()}[config.sampler]
    last = {"set_alpha_to_one": True} if config.sampler == "ddim" else {"variance_type": "fixed_small"}
    return {
        "_class_name": named,
        "num_train_timesteps": config.train_steps,
        "beta_schedule": {value: key for key, value in SCHEDULES.items()}[config.schedule],
        "beta_start": config.beta_start,
        "beta_end": config.beta_end,
        "prediction_type": {value: key for key, value in PREDICTIONS.items()}[config.prediction],
        "timestep_spacing": config.spacing,
        "steps_offset": 0,
        "clip_sample": config.action_clip > 0,
        "clip_sample_range": config.action_clip or 1.0,
        **last,
    }


def write_scheduler(config: DiffusionConfig | FlowConfig, folder: str | Path) -> Path:
    """Write the scheduler's file into `folder` for `from_pretrained` of diffusers; returns its path."""
    file = Path(folder) / FILE
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text(file, json.dumps(scheduler_config(config), indent=2) + "\n")
    return file


def grid_arguments(config: DiffusionConfig | FlowConfig) -> dict[str, Any]:
    """Return the arguments of the scheduler's `set_timesteps` for our grid.

    Flow times are given as sigmas `{1, (K-1)/K, ..., 1/K}`; diffusers' own default ends elsewhere.
    """
    if isinstance(config, FlowConfig):
        return {"sigmas": (1 - left_grid(config.steps).double()).tolist()}
    return {"num_inference_steps": config.steps}


def step_arguments(config: DiffusionConfig | FlowConfig) -> dict[str, Any]:
    """Return the arguments of the scheduler's `step` in addition to output, timestep and sample."""
    if isinstance(config, DiffusionConfig) and config.sampler == "ddim":
        return {"eta": 0.0, "use_clipped_model_output": True}
    return {}


def network_time(config: DiffusionConfig | FlowConfig, timestep: Tensor, train_steps: int = 1000) -> Tensor:
    """Return the time input of our network at an element `timestep` of the scheduler's `timesteps`.

    `train_steps` is `num_train_timesteps` of a flow scheduler, which only scales its timesteps.
    """
    if isinstance(config, FlowConfig):
        return 1 - timestep / train_steps
    return 1 - (timestep + 1) / config.train_steps


def model_output(config: DiffusionConfig | FlowConfig, prediction: Tensor) -> Tensor:
    """Convert the prediction of our network to the output for a scheduler, the negative for velocities."""
    return -prediction if isinstance(config, FlowConfig) else prediction


def _read(path: Path) -> tuple[Mapping[str, Any], str]:
    file = path / FILE if path.is_dir() else path
    try:
        settings = parse_json(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read as JSON: {str(error).splitlines()[0]}.") from error
    if not isinstance(settings, Mapping):
        raise UserError(f"{file} must hold a mapping, found {type(settings).__name__}.")
    return settings, str(file)


def _check(settings: Mapping[str, Any], fixed: Mapping[str, Any], known: set[str], where: str) -> None:
    """Raise an error for settings that are unknown or that our samplers do not reproduce."""
    for key, value in settings.items():
        if key in fixed and value != fixed[key]:
            raise UserError(f"'{key}' of {where} is {value!r}, but our samplers only reproduce {fixed[key]!r}.")
        if key not in {*fixed, *known, *_IDLE} and not key.startswith("_"):
            raise unknown_name("setting", key, {*fixed, *known}, f"in {where}")


def _translated(settings: Mapping[str, Any], key: str, default: str, names: Mapping[str, str], where: str) -> str:
    value = str(settings.get(key, default))
    if value not in names:
        raise unknown_name(key, value, names, f"in {where}")
    return names[value]


def _filled(cls: type[Config], base: Any, fields: Mapping[str, Any], where: str) -> Config:
    if base is not None and type(base) is not cls:
        raise UserError(f"{where} belongs to a {cls.__name__}, got a {type(base).__name__} as base.")
    return from_dict(cls, {**to_dict(base or cls()), **fields}, where)
