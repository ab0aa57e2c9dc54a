"""Adapters for rsl_rl: simulators as environments, and conversion of actors and configurations.

    runner = OnPolicyRunner(RslVecEnv(sim), {**settings, **runner_config(policy.config, policy.spec)})
    policy = read_actor("logs/model_1500.pt", read_config("logs/params/agent.yaml"), {"state": (48,)})

Weights are only read as tensors, from files of rsl_rl 2 to 5; configurations are written for rsl_rl 5. The standard
deviation of a normaliser of rsl_rl is increased by 0.01 and has no bounds; ours keeps these numbers fixed. Networks
with memory or images and Beta distributions are not supported.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from robopolicy.atomic import atomic_file
from robopolicy.constraints import NonNegative, Positive, PositiveInt
from robopolicy.errors import UserError, unknown_name
from robopolicy.files import parse_yaml
from robopolicy.interop.gaussian_actor import (
    Statistics,
    activation_name,
    gaussian_policy,
    layers_of,
    read_weights,
    tensors_of,
)
from robopolicy.optional import require
from robopolicy.policies.base import PolicySpec
from robopolicy.policies.heads.gaussian import GaussianConfig, GaussianPolicy
from robopolicy.schema import with_defaults
from robopolicy.sim.contract import Observation, VectorSim

EPS = 1e-2  # added to the standard deviation by rsl_rl's EmpiricalNormalization
ACTIVATION_NAMES = {"silu": "swish"}  # our name -> name in rsl_rl, where they differ
_GAUSSIANS = {"GaussianDistribution": False, "HeteroscedasticGaussianDistribution": True}  # name -> std is predicted
_MODELS = ("MLPModel", "ActorCritic")


@dataclass(frozen=True)
class _Actor:
    """Settings of an actor in rsl_rl 2 to 5."""

    class_name: Any = "MLPModel"  # name or class
    hidden_dims: tuple[PositiveInt, ...] = ()
    actor_hidden_dims: tuple[PositiveInt, ...] = (256, 256, 256)  # without `hidden_dims`
    critic_hidden_dims: Any = None
    activation: str = "elu"
    stochastic: Any = None
    obs_normalization: bool | None = None
    actor_obs_normalization: bool | None = None
    critic_obs_normalization: Any = None
    distribution_cfg: Any = None
    init_noise_std: Positive | None = None  # 1.0
    noise_std_type: str | None = None  # scalar
    state_dependent_std: bool | None = None


@dataclass(frozen=True)
class _Distribution:
    """Settings of a distribution in rsl_rl 5."""

    class_name: Any = "GaussianDistribution"  # name or class
    init_std: Positive = 1.0
    std_range: tuple[NonNegative, ...] = (1e-6, 1e6)
    std_type: str = "scalar"
    learn_std: Any = None


class RslVecEnv:
    """A simulator as `rsl_rl.env.VecEnv`; each observation key is a separate group.

    `extras["time_outs"]` marks episodes that were truncated and not terminated. Episodes are functions of their seeds,
    so they cannot start in the middle: call `learn` with `init_at_random_ep_len=False`.
    """

    def __init__(self, sim: VectorSim, seed: int = 0) -> None:
        """Start the episodes `seed`, `seed + 1`, ..."""
        self.sim = sim
        self.num_envs = sim.num_envs
        self.num_actions = sim.spec.action_dim
        self.max_episode_length = sim.spec.max_episode_steps
        self.device = sim.device
        self.cfg = {"task": sim.spec.task, "num_envs": sim.num_envs, "seed": seed}
        self._tensordict = require("tensordict", "rslrl").TensorDict
        self._obs = sim.reset(seed)

    @property
    def episode_length_buf(self) -> Tensor:
        """Steps taken in each episode `(N,)`."""
        return self.sim.episode_step

    @episode_length_buf.setter
    def episode_length_buf(self, value: Tensor) -> None:
        if not torch.equal(value.to(self.sim.episode_step), self.sim.episode_step):
            raise UserError("Episodes start at their first step; call learn with init_at_random_ep_len=False.")

    def get_observations(self) -> Any:
        """Current observations as a TensorDict."""
        return self._groups(self._obs)

    def step(self, actions: Tensor) -> tuple[Any, Tensor, Tensor, dict[str, Any]]:
        """Apply `actions` `(N, A)`: observations, rewards `(N,)`, dones `(N,)` int64, extras."""
        step = self.sim.step(actions)
        self._obs = step.obs
        extras: dict[str, Any] = {"time_outs": step.truncated & ~step.terminated}
        if "success" in step.info and bool(step.done.any()):
            extras["log"] = {"/success": step.info["success"][step.done].float().mean()}
        return self._groups(step.obs), step.reward, step.done.long(), extras

    def close(self) -> None:
        """Close the simulator."""
        self.sim.close()

    def _groups(self, obs: Observation) -> Any:
        return self._tensordict(dict(obs), batch_size=[self.num_envs], device=self.device)


@dataclass(frozen=True)
class ActorConfig:
    """Actor section of a configuration of rsl_rl."""

    policy: GaussianConfig  # configuration of the same network
    groups: tuple[str, ...] = ()  # observation groups in the order of their concatenation; () is one group


def read_config(source: Mapping[str, Any] | str | Path) -> ActorConfig:
    """Read a runner's configuration, as a mapping or a YAML file such as Isaac Lab's `params/agent.yaml`.

    A UserError is raised for unknown settings and other actors than Gaussian MLPs.
    """
    settings, where = (source, "the runner configuration") if isinstance(source, Mapping) else _read(Path(source))
    name = "actor" if "actor" in settings else "policy"
    section = settings.get(name)
    if not isinstance(section, Mapping):
        raise UserError(f"{where} must have a section 'actor' (or 'policy', before rsl_rl 4), found {_keys(settings)}.")
    actor = with_defaults(_Actor, section, f"{where}.{name}")
    model = _last(actor.class_name)
    if model not in _MODELS:
        raise unknown_name("actor", model, _MODELS, f"in {where}")
    predicted, init, kind, limits = _distribution(actor, f"{where}.{name}.distribution_cfg")
    normalized = actor.obs_normalization or actor.actor_obs_normalization or settings.get("empirical_normalization")
    config = GaussianConfig(
        hidden=actor.hidden_dims if "hidden_dims" in section else actor.actor_hidden_dims,
        activation=activation_name(actor.activation, where),
        state_dependent_std=predicted,
        log_std_init=0.0 if predicted else math.log(init),
        log_std_min=math.log(max(limits[0], 1e-6)),
        log_std_max=math.log(limits[1]),
        normalization="meanstd" if normalized else "identity",
    )
    if predicted and kind != "log":
        raise UserError(f"The actor of {where} must predict the logarithm of its standard deviation (std_type: log).")
    groups = settings.get("obs_groups") or {}
    names = groups.get("actor", groups.get("policy", ())) if isinstance(groups, Mapping) else None
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise UserError(f"'obs_groups' of {where} must map 'actor' (or 'policy') to a list of names, found {groups}.")
    return ActorConfig(config, tuple(names))


def runner_config(config: GaussianConfig, spec: PolicySpec) -> dict[str, Any]:
    """Return the sections `actor`, `critic` and `obs_groups` of an rsl_rl 5 runner with the network of `config`.

    The critic has the layers of the actor. A UserError is raised for policies that rsl_rl does not support.
    """
    _check_plain(config, spec)
    network = {
        "class_name": "MLPModel",
        "hidden_dims": list(config.hidden),
        "activation": ACTIVATION_NAMES.get(config.activation, config.activation),
        "obs_normalization": config.normalization != "identity",
    }
    gaussian: dict[str, Any] = {"class_name": "GaussianDistribution", "std_type": "log"}
    if config.state_dependent_std:
        gaussian["class_name"] = "HeteroscedasticGaussianDistribution"
        gaussian["std_range"] = [math.exp(config.log_std_min), math.exp(config.log_std_max)]
    groups = sorted(spec.observation)
    return {
        "obs_groups": {"actor": groups, "critic": list(groups)},
        "actor": {**network, "distribution_cfg": {**gaussian, "init_std": math.exp(config.log_std_init)}},
        "critic": dict(network),
    }


def read_actor(
    path: str | Path,
    config: ActorConfig,
    observation: Mapping[str, tuple[int, ...]],
    *,
    rename: Mapping[str, str] | None = None,
) -> GaussianPolicy:
    """Read the actor in a model file of rsl_rl, e.g. `model_1500.pt`, with the configuration of its run.

    `observation` has shapes by our keys, of which unused ones are dropped; `rename` maps our key to an observation
    group where the names differ. A UserError is raised for other content than matching weights.
    """
    where = str(path)
    state = _actor_state(read_weights(Path(path), where), where)
    layers = layers_of(state, "mlp", where)
    normalizer = {key.removeprefix("obs_normalizer."): value for key, value in state.items() if "normalizer" in key}
    known = {f"mlp.{2 * i}.{name}" for i in range(len(layers)) for name in ("weight", "bias")}
    known |= {f"obs_normalizer.{name}" for name in ("_mean", "_var", "_std", "count")} | {"std", "log_std"}
    extra = sorted(state.keys() - known)
    if extra or not layers:
        found = f"'{extra[0]}'" if extra else "no layers"
        raise UserError(f"The actor of {where} has {found}, expected plain layers, a normaliser and a Gaussian.")
    _check_config(config.policy, layers, bool(normalizer), where)
    log_std = state["std"].log() if "std" in state else state.get("log_std")
    if (log_std is None) != config.policy.state_dependent_std:
        raise UserError(f"{where} and its configuration disagree on whether the standard deviation is predicted.")
    groups = _groups(config.groups, observation, dict(rename or {}), where)
    order = _sorted_columns(groups, layers[0][0].shape[1], where)
    layers[0] = (layers[0][0][:, order], layers[0][1])
    statistics = None
    if normalizer:
        mean, std = (normalizer.get(name, torch.empty(0)).flatten() for name in ("_mean", "_std"))
        if not len(mean) == len(std) == len(order):
            raise UserError(f"{where} has {len(mean)} means and {len(std)} deviations of {len(order)} observations.")
        statistics = Statistics(mean[order], std[order] + EPS)
    return gaussian_policy(
        groups,
        layers,
        activation=config.policy.activation,
        log_std=log_std,
        log_std_range=(config.policy.log_std_min, config.policy.log_std_max),
        statistics=statistics,
        where=where,
    )


def actor_state(policy: GaussianPolicy) -> dict[str, Tensor]:
    """Return the state dict of rsl_rl's `MLPModel` for `policy`; a UserError is raised if it has no match."""
    _check_plain(policy.config, policy.spec)
    state = {
        f"mlp.{key.removeprefix('actor.')}": v for key, v in policy.state_dict().items() if key.startswith("actor.")
    }
    if not policy.config.state_dependent_std:
        state["distribution.log_std_param"] = policy.log_std.detach()[0]
    normalizer = policy.encoder.normalizer
    if policy.config.normalization != "identity":
        if float(normalizer.scale.min()) < EPS:
            raise UserError(f"An observation varies by {float(normalizer.scale.min()):g}, less than rsl_rl's {EPS:g}.")
        std = (normalizer.scale - EPS)[None]
        count = torch.tensor(int(getattr(normalizer, "count", torch.ones(()))))
        norms = {"_mean": normalizer.offset[None], "_var": std.square(), "_std": std, "count": count}
        state |= {f"obs_normalizer.{key}": value for key, value in norms.items()}
    return {key: value.detach().clone() for key, value in state.items()}


def write_actor(policy: GaussianPolicy, path: str | Path) -> None:
    """Write a model file that `OnPolicyRunner.load(path, load_cfg={"actor": True})` reads."""
    with atomic_file(Path(path)) as temporary:
        torch.save({"actor_state_dict": actor_state(policy), "iter": 0, "infos": None}, temporary)


def _read(path: Path) -> tuple[Mapping[str, Any], str]:
    try:
        settings = parse_yaml(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read as YAML: {error}.") from error
    if not isinstance(settings, Mapping):
        raise UserError(f"{path} must hold a mapping, found {type(settings).__name__}.")
    return settings, str(path)


def _distribution(actor: _Actor, where: str) -> tuple[bool, float, str, tuple[float, ...]]:
    """Return whether the std is predicted, its initial value, parameterisation and range."""
    if actor.distribution_cfg is None:  # before rsl_rl 5
        kind, init = actor.noise_std_type or "scalar", actor.init_noise_std or 1.0
        return bool(actor.state_dependent_std), init, kind, (1e-6, 1e6)
    gaussian = with_defaults(_Distribution, actor.distribution_cfg, where)
    name = _last(gaussian.class_name)
    if name not in _GAUSSIANS:
        raise unknown_name("distribution", name, _GAUSSIANS, f"in {where}")
    limits = gaussian.std_range
    if len(limits) != 2 or not max(limits[0], 1e-6) < limits[1]:
        raise UserError(f"{where}.std_range must be two ascending numbers, found {list(limits)}.")
    return _GAUSSIANS[name], gaussian.init_std, gaussian.std_type, limits


def _actor_state(content: Mapping[str, Any], where: str) -> dict[str, Tensor]:
    """Return the actor's weights with the names of rsl_rl 4: `mlp`, `obs_normalizer`, `std` or `log_std`."""
    if "actor_state_dict" in content:
        renamed = {"distribution.std_param": "std", "distribution.log_std_param": "log_std"}
        return {renamed.get(key, key): value for key, value in tensors_of(content["actor_state_dict"], where).items()}
    if "model_state_dict" not in content:
        raise UserError(f"{where} is not a model of rsl_rl: it has {_keys(content)}, expected 'actor_state_dict'.")
    state: dict[str, Tensor] = {}
    for key, value in tensors_of(content["model_state_dict"], where).items():
        if not key.startswith("critic"):
            state[key.replace("actor_obs_normalizer.", "obs_normalizer.").replace("actor.", "mlp.")] = value
    statistics = content.get("obs_norm_state_dict")
    for key, value in tensors_of({} if statistics is None else statistics, where).items():
        state[f"obs_normalizer.{key}"] = value
    return state


def _check_config(
    config: GaussianConfig, layers: Sequence[tuple[Tensor, Tensor]], normalized: bool, where: str
) -> None:
    widths = tuple(len(bias) for _, bias in layers[:-1])
    if widths != config.hidden:
        raise UserError(f"The actor of {where} has hidden layers {widths}, its configuration {config.hidden}.")
    if normalized != (config.normalization != "identity"):
        raise UserError(f"{where} {'has' if normalized else 'lacks'} observation statistics, unlike its configuration.")


def _groups(
    names: tuple[str, ...], observation: Mapping[str, tuple[int, ...]], rename: Mapping[str, str], where: str
) -> dict[str, tuple[int, ...]]:
    """Return shapes by our keys, in the order of the inputs of the actor."""
    keys = {name: key for key, name in rename.items()}
    if not names:
        names = tuple(keys) or tuple(observation)
        if len(names) != 1:
            raise UserError(f"The configuration of {where} names no obs_groups, and there are {_keys(observation)}.")
    found = [keys.get(name, name) for name in names]
    for name, key in zip(names, found, strict=True):
        if key not in observation:
            raise unknown_name("observation", key, observation, f"for the group '{name}' of {where}")
    return {key: observation[key] for key in found}


def _sorted_columns(groups: Mapping[str, tuple[int, ...]], width: int, where: str) -> list[int]:
    """Return the input columns of the actor in our order of keys."""
    columns: dict[str, list[int]] = {}
    start = 0
    for key, shape in groups.items():
        columns[key] = list(range(start, start := start + math.prod(shape)))
    if start != width:
        sizes = ", ".join(f"{key} {math.prod(shape)}" for key, shape in groups.items())
        raise UserError(f"The actor of {where} has {width} inputs, but {sizes} makes {start}; choose its task.")
    return [column for key in sorted(columns) for column in columns[key]]


def _check_plain(config: GaussianConfig, spec: PolicySpec) -> None:
    """Raise an error for a policy that rsl_rl cannot represent as `MLPModel`."""
    plain = {"backbone": "mlp", "residual": False, "squash": False, "action_normalization": "identity"}
    for key, value in plain.items():
        if getattr(config, key) != value:
            raise UserError(f"rsl_rl has no actor with {key}={getattr(config, key)}, only with {value}.")
    single = spec.horizon == spec.obs_horizon == 1 and not spec.hidden_dim
    if not single or any("." in key for key in spec.observation):
        raise UserError("rsl_rl maps one vector to one action; this policy has chunks, a history or a hidden state.")


def _last(name: Any) -> str:
    """Return the class name in "rsl_rl.models:MLPModel" or of a class."""
    return str(getattr(name, "__name__", name)).replace(":", ".").rsplit(".", 1)[-1]


def _keys(mapping: Mapping[str, Any]) -> str:
    return ", ".join(sorted(map(str, mapping))) or "nothing"
