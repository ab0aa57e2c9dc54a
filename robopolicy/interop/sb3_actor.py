"""Actors of Stable-Baselines3's PPO, A2C and SAC as our `GaussianPolicy`, from a model or from its saved zip.

The result has the same actions and densities, and everything else that our policies have: checkpoints, fine-tuning,
evaluation. Of a zip only the weights (`policy.pth`, tensors alone) and the readable part of `data` are used; the
pickles in it are never opened. Whether observations were normalised (`VecNormalize`) is in neither, so pass the model
itself where they were.

Plain actors on one vector of observations are read. Any other model plays through `stable_baselines3.wrap_model`.
"""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from robopolicy.errors import UserError
from robopolicy.interop.gaussian_actor import Statistics, gaussian_policy, layers_of, our_activation, read_weights
from robopolicy.nets.normalizer import RUNNING_CLIP
from robopolicy.policies.heads.gaussian import GaussianPolicy

LOG_STD_RANGE = (-20.0, 2.0)  # of SAC
_ELSEWHERE = "play the model itself by robopolicy.interop.stable_baselines3.wrap_model"
_ON_POLICY = ("log_std", "mlp_extractor.policy_net.", "mlp_extractor.value_net.", "action_net.", "value_net.")
_SAC = ("actor.latent_pi.", "actor.mu.", "actor.log_std.", "critic.", "critic_target.")


def read_model(path: str | Path, key: str = "state") -> GaussianPolicy:
    """The actor in a zip that SB3 saved.

    Args:
        path: The zip.
        key: Our name of its observations.

    Raises:
        UserError: It is no such zip, or holds an actor of another kind.
    """
    path = Path(path)
    try:
        with zipfile.ZipFile(path) as archive:
            data = json.loads(archive.read("data"))
            weights = archive.read("policy.pth")
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}.") from error
    except (zipfile.BadZipFile, KeyError, ValueError) as error:
        raise UserError(f"{path} is no model of Stable-Baselines3: {str(error).splitlines()[0]}.") from error
    if not isinstance(data, dict):
        raise UserError(f"{path} is no model of Stable-Baselines3: its 'data' must be an object.")
    for name in ("observation_space", "action_space"):
        kind = _field(data, name, ":type:")
        if "Box" not in str(kind):
            raise UserError(f"The {name} of {path} is {kind}, expected a Box; {_ELSEWHERE}.")
    arguments = data.get("policy_kwargs") or {}
    activation = re.search(r"(\w+)'>$", str(arguments.get("activation_fn", "")))
    return _actor(
        read_weights(weights, f"'policy.pth' of {path}"),
        activation=activation[1] if activation else None,
        bounds=lambda: (_bound(data, "low", path), _bound(data, "high", path)),
        statistics=None,
        key=key,
        where=str(path),
    )


def from_model(model: Any, key: str = "state") -> GaussianPolicy:
    """The actor of a model in this process, with the statistics of its `VecNormalize`, where it has one.

    Raises:
        UserError: It is of another kind.
    """
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
    bounds: Any,
    statistics: Statistics | None,
    key: str,
    where: str,
) -> GaussianPolicy:
    """Sort the weights by the layout of their names."""
    squashed = any(name.startswith("actor.latent_pi.") for name in state)
    known = _SAC if squashed else _ON_POLICY
    for name in state:
        if not name.startswith(known):
            raise UserError(f"'{name}' of {where} belongs to no plain actor of PPO, A2C or SAC; {_ELSEWHERE}.")
    body, head = ("actor.latent_pi", "actor.mu") if squashed else ("mlp_extractor.policy_net", "action_net")
    layers = layers_of(state, body)
    wanted = [f"{head}.weight", f"{head}.bias"] + (["actor.log_std.weight"] if squashed else ["log_std"])
    absent = [name for name in wanted if name not in state]
    if absent:
        raise UserError(f"'{absent[0]}' is missing in {where}, so it is no plain Gaussian actor; {_ELSEWHERE}.")
    output = (state[f"{head}.weight"], state[f"{head}.bias"])
    log_std = None
    if squashed:
        heads = [("actor.mu.weight", "actor.log_std.weight"), ("actor.mu.bias", "actor.log_std.bias")]
        output = tuple(torch.cat([state[name] for name in pair]) for pair in heads)
    else:
        log_std = state["log_std"]
        if log_std.dim() != 1:
            raise UserError(f"{where} explores by state-dependent noise (gSDE), which we lack; {_ELSEWHERE}.")
    layers.append((output[0], output[1]))
    return gaussian_policy(
        {key: (layers[0][0].shape[1],)},
        layers,
        activation=our_activation(activation or ("relu" if squashed else "tanh"), where),
        log_std=log_std,
        log_std_range=LOG_STD_RANGE,
        statistics=statistics,
        bounds=bounds() if squashed else None,
        where=where,
    )


def _statistics(model: Any, where: str) -> Statistics | None:
    normalize = model.get_vec_normalize_env()
    if normalize is None or not normalize.norm_obs:
        return None
    if normalize.clip_obs != RUNNING_CLIP:
        raise UserError(
            f"The VecNormalize of {where} has clip_obs={normalize.clip_obs}, but ours bounds to {RUNNING_CLIP}; "
            f"{_ELSEWHERE}."
        )
    seen = normalize.obs_rms
    mean, variance = (torch.from_numpy(value).flatten() for value in (seen.mean, seen.var))
    return Statistics(mean, (variance + normalize.epsilon).sqrt(), float(seen.count))


def _field(data: Mapping[str, Any], name: str, entry: str) -> Any:
    space = data.get(name)
    return space.get(entry) if isinstance(space, Mapping) else None


def _bound(data: Mapping[str, Any], name: str, path: Path) -> Tensor:
    """A bound of the actions from its readable form, `[-1. -1.]`."""
    text = _field(data, "action_space", name)
    try:
        return torch.tensor([float(number) for number in str(text).strip("[]").split()])
    except ValueError as error:
        raise UserError(
            f"The action bound '{name}' of {path} is not readable, found {text}; load the model with SB3 and pass it "
            "to from_model."
        ) from error
