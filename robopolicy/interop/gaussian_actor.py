"""Conversion of Gaussian actors of other libraries to `GaussianPolicy`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from robopolicy.archives import open_zip
from robopolicy.errors import UserError, unknown_name
from robopolicy.nets.mlp import ACTIVATIONS
from robopolicy.nets.normalizer import RunningNormalizer
from robopolicy.policies.base import PolicySpec
from robopolicy.policies.heads.gaussian import GaussianConfig, GaussianPolicy

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.int64)
Layer = tuple[Tensor, Tensor]
"""Weight `(out, in)` and bias `(out,)`."""


@dataclass(frozen=True)
class Statistics:
    """Statistics for normalised observations, `(x - offset) / scale`."""

    offset: Tensor  # (D,)
    scale: Tensor  # (D,)
    count: float = 0.0  # number of observations; with a count the statistics keep updating and are clipped to +-10


def gaussian_policy(
    observation: Mapping[str, tuple[int, ...]],
    layers: Sequence[Layer],
    *,
    activation: str,
    log_std: Tensor | None = None,
    log_std_range: tuple[float, float] = (-5.0, 2.0),
    statistics: Statistics | None = None,
    bounds: tuple[Tensor, Tensor] | None = None,
    where: str,
) -> GaussianPolicy:
    """Create a policy with given weights, which maps one observation to one action.

    Args:
        observation: Shapes by key; keys are concatenated in sorted order.
        layers: Layers, the output last: means `(A,)`, or means and log standard deviations `(2 A,)`.
        activation: Our name of the activation between the layers.
        log_std: `(A,)`; None where the network predicts it.
        log_std_range: Bounds of a predicted log standard deviation.
        statistics: Statistics of the observations; None for no normalisation.
        bounds: Lowest and highest action `(A,)` of an actor with tanh; None without tanh.
        where: Name of the source, for messages.

    Raises:
        UserError: Sizes do not match.
    """
    outputs = len(layers[-1][1])
    action_dim = outputs // 2 if log_std is None else outputs
    for (weight, _), (following, _) in pairwise(layers):
        if following.shape[1] != len(weight):
            raise UserError(f"A layer of {where} has {following.shape[1]} inputs after one of {len(weight)} outputs.")
    config = GaussianConfig(
        hidden=tuple(len(bias) for _, bias in layers[:-1]),
        activation=activation,
        state_dependent_std=log_std is None,
        log_std_min=log_std_range[0],
        log_std_max=log_std_range[1],
        squash=bounds is not None,
        normalization="identity" if statistics is None else ("running" if statistics.count else "meanstd"),
        action_normalization="identity" if bounds is None else "minmax",
    )
    spec = PolicySpec.read({"observation": observation, "action_dim": action_dim}, f"The actor of {where}")
    policy = GaussianPolicy(config, spec)
    found, expected = layers[0][0].shape[1], policy.encoder.feature_dim
    if found != expected:
        keys = ", ".join(f"{key} {tuple(shape)}" for key, shape in sorted(observation.items()))
        raise UserError(f"The actor of {where} has {found} inputs, but {keys} has {expected}; choose its own task.")
    weights = {f"actor.{2 * i}.weight": weight for i, (weight, _) in enumerate(layers)}
    weights |= {f"actor.{2 * i}.bias": bias for i, (_, bias) in enumerate(layers)}
    if log_std is not None:
        weights["log_std"] = log_std.reshape(1, -1)
    state = policy.state_dict()
    for key, value in weights.items():
        if state[key].shape != value.shape:
            raise UserError(f"'{key}' of {where} has shape {tuple(value.shape)}, expected {tuple(state[key].shape)}.")
        if not bool(value.isfinite().all()):
            raise UserError(f"'{key}' of {where} is not finite; use an earlier checkpoint.")
    policy.load_state_dict({**state, **weights})
    if statistics is not None:
        for value in (statistics.offset, statistics.scale):
            if value.shape != (expected,) or not bool(value.isfinite().all()):
                raise UserError(f"The statistics of {where} must be {expected} finite numbers; use its own task.")
        if not bool((statistics.scale > 0).all()):
            raise UserError(f"The statistics of {where} have a standard deviation that is not positive.")
        _set_statistics(policy, statistics)
    if bounds is not None:
        policy.action_normalizer.fit({"min": bounds[0], "max": bounds[1]})
    return policy.eval()


def tensors_of(state: Any, where: str) -> dict[str, Tensor]:
    """Check that a state dict maps names to tensors of real numbers; a UserError is raised for other content."""
    if not isinstance(state, Mapping):
        raise UserError(f"The weights of {where} must be a mapping of names to tensors, found {type(state).__name__}.")
    for name, value in state.items():
        if not isinstance(name, str) or not isinstance(value, Tensor) or value.dtype not in _DTYPES:
            found = value.dtype if isinstance(value, Tensor) else type(value).__name__
            raise UserError(f"'{str(name)[:60]}' of {where} must be a tensor of numbers with a name, found {found}.")
    return dict(state)


def layer_of(state: Mapping[str, Tensor], name: str, where: str) -> Layer:
    """Return one linear layer of a state dict; a UserError is raised unless it has a fitting weight and bias."""
    weight, bias = (state.get(f"{name}.{part}") for part in ("weight", "bias"))
    if weight is None or bias is None:
        raise UserError(f"'{name}' of {where} has no {'weight' if weight is None else 'bias'}.")
    if weight.dim() != 2 or not weight.numel() or bias.shape != weight.shape[:1]:
        shapes = f"weight {tuple(weight.shape)} and bias {tuple(bias.shape)}"
        raise UserError(f"'{name}' of {where} is no linear layer, it has {shapes}.")
    return weight, bias


def layers_of(state: Mapping[str, Tensor], prefix: str, where: str) -> list[Layer]:
    """Return the linear layers `prefix.0`, `prefix.2`, ... of a state dict, in order."""
    pattern = re.compile(rf"{re.escape(prefix)}\.(\d+)\.weight")
    numbers = sorted((match[1] for key in state if (match := pattern.fullmatch(key))), key=int)
    return [layer_of(state, f"{prefix}.{number}", where) for number in numbers]


def activation_name(name: str, where: str) -> str:
    """Translate the name of an activation in torch or rsl_rl to ours."""
    ours = {"swish": "silu"}.get(name.lower(), name.lower())
    if ours not in ACTIVATIONS:
        raise unknown_name("activation", name, ACTIVATIONS, f"of {where}")
    return ours


def read_weights(file: Path | bytes, where: str) -> dict[str, Any]:
    """Read a `torch.save` file without unpickling; a UserError is raised for other content than tensors and values."""
    try:
        source = BytesIO(file if isinstance(file, bytes) else file.read_bytes())
        open_zip(source).close()  # refuses archives that expand
        source.seek(0)
        content = torch.load(source, map_location="cpu", weights_only=True)
        if isinstance(content, dict):
            check_tensors(content)
    except OSError as error:
        raise UserError(f"{where} cannot be read: {error.strerror or error}.") from error
    except Exception as error:  # the reader raises many kinds
        reason = str(error).splitlines()[0].rstrip(".")
        raise UserError(f"{where} holds more than tensors and plain values, or is damaged ({reason}).") from error
    if not isinstance(content, dict):
        raise UserError(f"{where} must hold a mapping, found {type(content).__name__}.")
    return content


def check_tensors(content: Mapping[Any, Any]) -> None:
    """Raise a `ValueError` for a tensor, nested or not, that is complex or claims more numbers than are stored."""
    for name, value in content.items():
        if isinstance(value, Mapping):
            check_tensors(value)
        elif isinstance(value, Tensor):
            if value.is_complex():
                raise ValueError(f"'{str(name)[:60]}' holds complex numbers")
            if value.layout is not torch.strided or value.nbytes > value.untyped_storage().nbytes():
                raise ValueError(f"'{str(name)[:60]}' claims more numbers than are stored")


def _set_statistics(policy: GaussianPolicy, statistics: Statistics) -> None:
    normalizer = policy.encoder.normalizer
    normalizer.set_transform(statistics.offset, statistics.scale)
    normalizer.fitted.fill_(True)
    if isinstance(normalizer, RunningNormalizer):
        normalizer.mean.copy_(statistics.offset)
        normalizer.squares.copy_(statistics.scale.double().square() * statistics.count)
        normalizer.count.fill_(statistics.count)
