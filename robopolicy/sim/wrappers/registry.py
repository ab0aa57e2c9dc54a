"""Simulator wrappers by name, their observations, and lists of wrappers with options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

from robopolicy.errors import UserError, unknown_name
from robopolicy.plugins import Registry
from robopolicy.schema import CustomSerialization, fill_defaults, from_dict, to_dict
from robopolicy.sim.contract import SimSpec, VectorSim
from robopolicy.sim.wrappers.base import SimWrapper

WRAPPERS: Registry[type[SimWrapper]] = Registry("wrappers", {})
WRAPPER_KEYS: Registry[type[SimWrapper]] = Registry("wrapper_keys", {})
"""Wrapper that adds an observation, by key or by prefix of keys with a dot at its end."""


@dataclass(frozen=True)
class WrapperSpec(CustomSerialization):
    """Name and options of a wrapper, checked and completed with defaults.

    The serialized form is `{name: NAME, OPTION: VALUE, ...}`, or the name if all options keep their defaults.
    """

    name: str  # key in `WRAPPERS`
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])  # fields of the wrapper's config

    def __post_init__(self) -> None:
        if self.name not in WRAPPERS:
            raise unknown_name("wrapper", self.name, WRAPPERS)
        object.__setattr__(self, "options", to_dict(self.config()))

    @property
    def wrapper(self) -> type[SimWrapper]:
        """Class of the wrapper."""
        return WRAPPERS[self.name]

    def config(self) -> Any:
        """Options as the config of the wrapper; unknown or invalid options raise a `UserError`."""
        with fill_defaults():
            return from_dict(self.wrapper.config_class, self.options, f"wrappers.{self.name}")

    @classmethod
    def from_dict(cls, value: Any, where: str) -> Self:
        """Read a name or a mapping with name and options; other values raise a `UserError`."""
        options: dict[str, Any] = {"name": value} if isinstance(value, str) else {}
        options |= value if isinstance(value, Mapping) else {}
        name = options.pop("name", None)
        if not isinstance(name, str):
            raise UserError(f"{where} must be a wrapper, NAME or {{name: NAME, OPTION: VALUE}}, found {value!r}.")
        return cls(name, options)

    def to_dict(self) -> dict[str, Any]:
        """Inverse of `from_dict`."""
        return {"name": self.name, **self.options}


def is_wrapper_key(key: str) -> bool:
    """Whether a wrapper adds the observation `key`; imports no wrapper."""
    return _owner(key) is not None


def wrappers_for(observations: Sequence[Mapping[str, tuple[int, ...]]]) -> tuple[WrapperSpec, ...]:
    """Wrappers for the observations of several policies `{key: shape per step}`.

    Raises:
        UserError: The policies need different options of one wrapper.
    """
    keys = {_owner(key) for observation in observations for key in observation}
    found: list[WrapperSpec] = []
    for wrapper in sorted({WRAPPER_KEYS[key] for key in keys if key is not None}, key=lambda each: each.name):
        options = [wrapper.options_for(observation) for observation in observations]
        needed = [WrapperSpec(wrapper.name, each) for each in options if each is not None]
        if other := next((each for each in needed if each != needed[0]), None):
            both = " and ".join(
                ", ".join(f"{key}={value}" for key, value in w.options.items()) for w in (needed[0], other)
            )
            raise UserError(
                f"The policies need the wrapper '{wrapper.name}' with different options, {both}; "
                "evaluate them separately."
            )
        found += needed[:1]
    return tuple(_sorted_inside_out(found))


def evaluation_wrappers(wrappers: Sequence[WrapperSpec]) -> tuple[WrapperSpec, ...]:
    """Wrappers for evaluation, given the wrappers for training."""
    configs = [(each.name, each.wrapper.evaluation_config(each.config())) for each in wrappers]
    return tuple(WrapperSpec(name, to_dict(config)) for name, config in configs if config is not None)


def wrapped_spec(spec: SimSpec, wrappers: Sequence[WrapperSpec]) -> SimSpec:
    """Add the observations of wrappers to `spec`; raise a `UserError` if one does not fit or is listed twice."""
    for each in _sorted_inside_out(wrappers):
        spec = replace(spec, observation={**spec.observation, **each.wrapper.observation(spec, each.config())})
    return spec


def wrap(sim: VectorSim, wrappers: Sequence[WrapperSpec]) -> VectorSim:
    """Put `wrappers` around `sim`; raise a `UserError` if one does not fit or is listed twice."""
    for each in _sorted_inside_out(wrappers):
        sim = each.wrapper(sim, each.config())
    return sim


def _owner(key: str) -> str | None:
    """Row of `WRAPPER_KEYS` for an observation key, or None."""
    return next((own for own in WRAPPER_KEYS if key == own or (own.endswith(".") and key.startswith(own))), None)


def _sorted_inside_out(wrappers: Sequence[WrapperSpec]) -> list[WrapperSpec]:
    """Wrappers in order of application, the innermost first."""
    names = [each.name for each in wrappers]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise UserError(f"The wrapper '{twice[0]}' is listed twice; list it once.")
    return sorted(wrappers, key=lambda each: (each.wrapper.order, each.name))
