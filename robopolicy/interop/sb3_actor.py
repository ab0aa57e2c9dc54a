"""Conversion of PPO, A2C, SAC, TD3 and DDPG actors of Stable-Baselines3 to `GaussianPolicy`.

The result has the same actions and densities, and supports checkpoints, fine-tuning and evaluation. TD3 and DDPG have
no density and get the standard deviation `SPREAD`.

Only the weights of a zip (`policy.pth`, tensors only) and the JSON part of `data` are read, never its pickles. It lacks
the statistics of a `VecNormalize`, so a model that was trained with one is converted in memory by `from_model`. Only
MLP actors with one observation vector are supported; `stable_baselines3.wrap_model` wraps any other model.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from robopolicy.archives import open_zip, zip_errors
from robopolicy.errors import UserError
from robopolicy.files import parse_json
from robopolicy.interop.gaussian_actor import (
    Layer,
    Statistics,
    activation_name,
    gaussian_policy,
    layer_of,
    layers_of,
    read_weights,
    tensors_of,
)
from robopolicy.nets.normalizer import RUNNING_CLIP
from robopolicy.policies.heads.gaussian import GaussianPolicy

LOG_STD_RANGE = (-20.0, 2.0)  # clipping of SAC
SPREAD = 0.1  # standard deviation before tanh of a deterministic actor, the exploration noise of TD3
_ELSEWHERE = "wrap the model by robopolicy.interop.stable_baselines3.wrap_model"


@dataclass(frozen=True)
class _Layout:
    """Names of weights in a family of algorithms."""

    body: str  # hidden layers
    head: str  # output layer; "" where it is the last of the body
    log_std: str  # vector, or second output layer; "" where there is none
    squashed: bool
    activation: str  # default
    known: tuple[str, ...]  # other allowed name prefixes


_CRITICS = ("critic.", "critic_target.")
_LAYOUTS = {
    "action_net.weight": _Layout(
        "mlp_extractor.policy_net", "action_net", "log_std", False, "tanh", ("mlp_extractor.value_net.", "value_net.")
    ),
    "actor.mu.weight": _Layout("actor.latent_pi", "actor.mu", "actor.log_std", True, "relu", _CRITICS),
    "actor.mu.0.weight": _Layout("actor.mu", "", "", True, "relu", ("actor_target.mu.", *_CRITICS)),
}
"""Layouts of PPO and A2C, of SAC, and of TD3 and DDPG, by a weight name that only each of them has."""


def read_model(path: str | Path, key: str = "state") -> GaussianPolicy:
    """Read the actor in a zip of SB3; `key` is our name of its observations."""
    path = Path(path)
    try:
        with open_zip(path) as archive, zip_errors():
            data = parse_json(archive.read("data").decode("utf-8"))
            weights = archive.read("policy.pth")
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}.") from error
    except ValueError as error:
        raise UserError(f"{path} is not a model of Stable-Baselines3: {str(error).splitlines()[0]}.") from error
    if not isinstance(data, dict):
        raise UserError(f"{path} is not a model of Stable-Baselines3: its 'data' must be an object.")
    for name in ("observation_space", "action_space"):
        kind = _field(data, name, ":type:")
        if "Box" not in str(kind):
            raise UserError(f"The {name} of {path} is {kind}, expected a Box; {_ELSEWHERE}.")
    if data.get("_last_original_obs") is not None:
        raise UserError(
            f"{path} was trained behind a VecNormalize, whose statistics are missing in it; load the model together "
            "with its VecNormalize in SB3 and pass it to robopolicy.interop.sb3_actor.from_model."
        )
    activation = re.search(r"(\w+)'>$", str(_field(data, "policy_kwargs", "activation_fn")))
    return _actor(
        read_weights(weights, f"'policy.pth' of {path}"),
        activation=activation[1] if activation else None,
        bounds=lambda: (_bound(data, "low", path), _bound(data, "high", path)),
        statistics=None,
        key=key,
        where=str(path),
    )


def from_model(model: Any, key: str = "state") -> GaussianPolicy:
    """Convert the actor of a model in this process, with the statistics of its `VecNormalize`, if any."""
    where = f"the {type(model).__name__} model"
    for name in ("observation_space", "action_space"):
        if type(getattr(model, name)).__name__ != "Box":
            raise UserError(f"The {name} of {where} is {getattr(model, name)}, expected a Box; {_ELSEWHERE}.")
    space = model.action_space
    return _actor(
        {name: value.detach().cpu() for name, value in model.policy.state_dict().items()},
        activation=model.policy.activation_fn.__name__,
        bounds=lambda: (torch.tensor(space.low).flatten(), torch.tensor(space.high).flatten()),
        statistics=_statistics(model, where),
        key=key,
        where=where,
    )


def _actor(
    state: Mapping[str, Tensor],
    *,
    activation: str | None,
    bounds: Callable[[], tuple[Tensor, Tensor]],
    statistics: Statistics | None,
    key: str,
    where: str,
) -> GaussianPolicy:
    """Assign the weights by their names."""
    state = tensors_of(state, where)
    layout = next((layout for name, layout in _LAYOUTS.items() if name in state), None)
    if layout is None:
        raise UserError(f"{where} holds no plain actor of PPO, A2C, SAC, TD3 or DDPG; {_ELSEWHERE}.")
    known = (f"{layout.body}.", f"{layout.head or layout.body}.", layout.log_std or layout.body, *layout.known)
    for name in state:
        if not name.startswith(known):
            raise UserError(f"'{name}' of {where} belongs to no plain actor; {_ELSEWHERE}.")
    layers, log_std = _layers(state, layout, where)
    return gaussian_policy(
        {key: (layers[0][0].shape[1],)},
        layers,
        activation=activation_name(activation or layout.activation, where),
        log_std=log_std,
        log_std_range=LOG_STD_RANGE,
        statistics=statistics,
        bounds=bounds() if layout.squashed else None,
        where=where,
    )


def _layers(state: Mapping[str, Tensor], layout: _Layout, where: str) -> tuple[list[Layer], Tensor | None]:
    """Return the layers, the output last, and the log standard deviation `(A,)`, or None where the output has it."""
    layers = layers_of(state, layout.body, where)
    if not layout.head:
        return layers, torch.full_like(layers[-1][1], math.log(SPREAD))
    mean = layer_of(state, layout.head, where)
    if not layout.squashed:
        log_std = state.get(layout.log_std)
        if log_std is None:
            raise UserError(f"'{layout.log_std}' is missing in {where}, so it is no Gaussian actor; {_ELSEWHERE}.")
        if log_std.dim() == 1:
            return [*layers, mean], log_std
    elif f"{layout.log_std}.weight" in state:
        spread = layer_of(state, layout.log_std, where)
        if spread[0].shape != mean[0].shape:
            raise UserError(f"'{layout.head}' and '{layout.log_std}' of {where} have different shapes.")
        return [*layers, (torch.cat([mean[0], spread[0]]), torch.cat([mean[1], spread[1]]))], None
    raise UserError(f"{where} uses state-dependent exploration (gSDE), which is not supported; {_ELSEWHERE}.")


def _statistics(model: Any, where: str) -> Statistics | None:
    normalize = model.get_vec_normalize_env()
    if normalize is None or not normalize.norm_obs:
        return None
    if normalize.clip_obs != RUNNING_CLIP:
        raise UserError(
            f"The VecNormalize of {where} has clip_obs={normalize.clip_obs}, but ours clips to {RUNNING_CLIP}; "
            f"{_ELSEWHERE}."
        )
    seen = normalize.obs_rms
    mean, variance = (torch.from_numpy(value).flatten() for value in (seen.mean, seen.var))
    return Statistics(mean, (variance + normalize.epsilon).sqrt(), float(seen.count))


def _field(data: Mapping[str, Any], name: str, entry: str) -> Any:
    described = data.get(name)
    return described.get(entry) if isinstance(described, Mapping) else None


def _bound(data: Mapping[str, Any], name: str, path: Path) -> Tensor:
    """Parse an action bound from its text form, `[-1. -1.]`."""
    text = _field(data, "action_space", name)
    try:
        return torch.tensor([float(number) for number in str(text).strip("[]").split()])
    except ValueError as error:
        raise UserError(
            f"The action bound '{name}' of {path} is not readable, found {text}; load the model with SB3 and pass it "
            "to from_model."
        ) from error
