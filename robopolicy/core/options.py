"""What the options of parts may be: their type as the signature of the part says, their range by their name."""

from __future__ import annotations

import reprlib
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

POSITIVE = frozenset(
    (
        *("age", "beam", "cap", "components", "count", "depth", "dims", "divisor", "eps", "eta", "factor", "failures"),
        *("half_life", "horizon", "importance_cap", "length", "levels", "log_ratio_limit", "norm", "queries"),
        *("score_temperatures", "size", "stages", "steps", "successes", "temperature", "trial", "units", "variance"),
        *("width", "window"),
    )
)
"""Options that are above 0 wherever they are."""

NOT_NEGATIVE = frozenset(
    (
        *("alpha", "beta", "budget_down", "budget_up", "clip", "first", "floor", "gate", "high", "kl_coef", "last"),
        *("layer", "layer_updates", "least", "limit", "longest", "loss_weight", "low", "margin", "most", "noise"),
        *("penalty", "rate", "ratio_variance_coef", "refill", "regularization", "residual", "ridge", "seed", "shares"),
        *("source", "spread", "summaries", "warmup"),
    )
)
"""Options that are at least 0 wherever they are."""

SHARES = frozenset(
    (
        *("decay", "easy", "forgetting", "gamma", "hard", "initial", "inner_gamma", "inner_lam", "lam", "quantile"),
        *("rest", "rollout_weight", "share"),
    )
)
"""Options from 0 to 1 wherever they are."""

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
        option: Its name, which tells the range.
        annotation: Its type, one that `is_plain`.
        plain: The value.

    Raises:
        ValueError: It is of another type, out of range or no finite number; one line.
    """
    if plain is None and annotation.endswith(" | None"):
        return None
    kind = annotation.removesuffix(" | None")
    if kind in _LISTS:
        if not isinstance(plain, list | tuple):
            raise ValueError(f"{what} must be a list, got {_shown(plain)}.")
        if kind.startswith("tuple") and len(plain) != 2:
            raise ValueError(f"{what} must be two numbers, got {_shown(plain)}.")
        return tuple(_single(f"Every entry of {_lower(what)}", option, _LISTS[kind], value) for value in plain)
    if kind in _MAPPINGS:
        if not isinstance(plain, Mapping):
            raise ValueError(f"{what} must be a mapping, got {_shown(plain)}.")
        named = option == "surrogate_options"  # whose keys are options themselves; those of others are metrics
        return {
            str(key): _single(f"'{key}' in {_lower(what)}", str(key) if named else option, _MAPPINGS[kind], value)
            for key, value in plain.items()
        }
    return _single(what, option, kind, plain)


def _single(what: str, option: str, kind: str, plain: Any) -> Any:
    """A value of one of `_TYPES`, within the range of its option."""
    wanted, name = _TYPES[kind]
    fits = isinstance(plain, wanted) and (kind == "bool" or not isinstance(plain, bool))
    if kind in ("float", "int"):
        fits = fits and abs(plain) <= sys.float_info.max
        if option in POSITIVE:
            name, fits = f"{name} above 0", fits and plain > 0
        elif option in NOT_NEGATIVE:
            name, fits = f"{name} of at least 0", fits and plain >= 0
        elif option in SHARES:
            name, fits = f"{name} from 0 to 1", fits and 0 <= plain <= 1
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
