"""What the options of parts may be: their type as the signature of the part says, their range by their name.

A range is that of `PART.OPTION` where the tables name it, else that of `OPTION`.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, cast

POSITIVE = frozenset(
    (
        *("age", "beam", "cap", "components", "count", "depth", "dims", "divisor", "eta", "factor", "failures"),
        *("half_life", "horizon", "importance_cap", "length", "levels", "log_ratio_limit", "norm", "queries"),
        *("score_temperatures", "size", "stages", "steps", "successes", "temperature", "trial", "units", "variance"),
        *("width", "window", "adaptive.target", "target_divergence.beta"),
        *(f"surrogate_options.{name}" for name in ("alpha", "beta", "down", "floor", "up")),
    )
)
"""Options that are above 0."""

NOT_NEGATIVE = frozenset(
    (
        *("alpha", "beta", "budget_down", "budget_up", "clip", "eps", "first", "floor", "gate", "high", "kl_coef"),
        *("last", "layer", "layer_updates", "least", "limit", "longest", "loss_weight", "low", "margin", "most"),
        *("noise", "penalty", "rate", "ratio_variance_coef", "refill", "regularization", "residual", "ridge", "seed"),
        *("shares", "source", "spread", "summaries", "warmup"),
    )
)
"""Options that are at least 0."""

SHARES = frozenset(
    (
        *("decay", "easy", "forgetting", "gamma", "hard", "initial", "inner_gamma", "inner_lam", "lam", "quantile"),
        *("rest", "rollout_weight", "share"),
    )
)
"""Options from 0 to 1."""

FREE = frozenset(("beta_scale.low", "beta_scale.high", "step_gain.penalty", "demonstration_switch.gate"))
"""Options that may be any number, unlike others of their name."""

LARGEST = 1e15
"""Numbers are no larger, so that single precision holds what is made of them."""

_RANGED = POSITIVE | NOT_NEGATIVE | SHARES | FREE
_TYPES: dict[str, tuple[Any, str]] = {
    "float": (int | float, "number"),
    "int": (int, "whole number"),
    "str": (str, "text"),
    "bool": (bool, "true or false"),
}
_LISTS = {"Sequence[float]": "float", "Sequence[str]": "str", "tuple[float, float]": "float"}
_MAPPINGS = {"Mapping[str, float]": "float", "Mapping[str, str]": "str"}


def is_plain(annotation: str) -> bool:
    """Whether an option of this type holds plain values, and no part."""
    return annotation.removesuffix(" | None") in (*_TYPES, *_LISTS, *_MAPPINGS)


def checked(what: str, option: str, annotation: str, plain: Any) -> Any:
    """A plain value that fits its option; lists become tuples.

    Args:
        what: How messages call it, e.g. "Option 'low' of bounds 'constant'".
        option: `OPTION` or `PART.OPTION`, which tells the range.
        annotation: Its type, one that `is_plain`.
        plain: The value.

    Raises:
        ValueError: It is of another type, out of range, empty or no finite number; one line.
    """
    if plain is None and annotation.endswith(" | None"):
        return None
    kind = annotation.removesuffix(" | None")
    if kind in _LISTS:
        if not isinstance(plain, list | tuple) or not plain:
            raise ValueError(f"{what} must be a list with entries, got {_shown(plain)}.")
        entries = cast(Sequence[Any], plain)
        if kind.startswith("tuple") and len(entries) != 2:
            raise ValueError(f"{what} must be two numbers, got {_shown(entries)}.")
        return tuple(_single(f"Every entry of {_lower(what)}", option, _LISTS[kind], value) for value in entries)
    if kind in _MAPPINGS:
        if not isinstance(plain, Mapping):
            raise ValueError(f"{what} must be a mapping, got {_shown(plain)}.")
        last, found = option.rpartition(".")[2], dict[str, Any]()
        for key, value in cast(Mapping[Any, Any], plain).items():
            named = last == "surrogate_options"  # whose keys are options themselves; those of others are metrics
            of = f"{last}.{key}" if named else option
            found[str(key)] = _single(f"'{key}' in {_lower(what)}", of, _MAPPINGS[kind], value)
        return found
    return _single(what, option, kind, plain)


def _single(what: str, option: str, kind: str, plain: Any) -> Any:
    """A value of one of `_TYPES`, within the range of its option."""
    wanted, name = _TYPES[kind]
    fits = isinstance(plain, wanted) and (kind == "bool" or not isinstance(plain, bool))
    if kind in ("float", "int"):
        key = next((key for key in (option, option.rpartition(".")[2]) if key in _RANGED), "")
        if key in POSITIVE:
            name, fits = f"{name} above 0", fits and plain > 0
        elif key in NOT_NEGATIVE:
            name, fits = f"{name} of at least 0", fits and plain >= 0
        elif key in SHARES:
            name, fits = f"{name} from 0 to 1", fits and 0 <= plain <= 1
        if fits and not abs(plain) <= LARGEST:  # or no number at all
            name, fits = f"{name}, at most {LARGEST:.0e} in size", False
    if not fits:
        article = "" if kind == "bool" else "a "
        raise ValueError(f"{what} must be {article}{name}, got {_shown(plain)}{_hint(kind, plain)}.")
    return plain


def _hint(kind: str, plain: Any) -> str:
    """Why a number is none: YAML wants a point in one with an exponent."""
    if kind == "float" and isinstance(plain, str):
        with suppress(ValueError):
            return f", a text to YAML; write it with a point, e.g. {float(plain):.1e}"
    return ""


def _lower(what: str) -> str:
    return what[0].lower() + what[1:]


def _shown(plain: Any) -> str:
    return reprlib.repr(plain)
