"""Messages of any type with random content, for the codec tests."""

import string
from typing import Any

import numpy as np

from robopolicy_robots.codecs.definitions import FieldType, describe
from robopolicy_robots.message import Message

LETTERS = string.ascii_letters + string.digits + ' _/"\\ä€机😀'
RANGES = {"int8": 7, "uint8": 8, "byte": 7, "char": 8, "int16": 15, "uint16": 16, "int32": 31, "uint32": 32}


def random_message(kind: type[Message], generator: np.random.Generator, finite: bool = False) -> Message:
    """Return a random message with some empty arrays and extreme numbers, including NaN unless `finite`."""
    return kind(*(_value(each, generator, finite) for each in describe(kind)))


def _value(each: FieldType, generator: np.random.Generator, finite: bool) -> Any:
    if not each.many:
        return _one(each.base, generator, finite)
    size = int(generator.choice([0, 0, 1, 2, 7])) if each.size is None else each.size
    values = [_one(each.base, generator, finite) for _ in range(size)]
    return tuple(values) if each.dtype is None else np.array(values, each.dtype)


def _one(base: str | type[Message], generator: np.random.Generator, finite: bool) -> Any:
    if isinstance(base, type):
        return random_message(base, generator, finite)
    if base == "string":
        return "".join(generator.choice(list(LETTERS), generator.integers(0, 12)))
    if base == "bool":
        return bool(generator.integers(2))
    if base in ("float32", "float64"):
        special = [0.0, -0.0, 1.7976931348623157e308, 5e-324] + ([] if finite else [np.nan, np.inf, -np.inf])
        value = generator.choice(special) if generator.random() < 0.2 and base == "float64" else generator.normal()
        return float(np.dtype(base).type(value))
    bits = RANGES[base]
    low = -(2**bits) if base.startswith("int") else 0
    choices = (low, 2**bits - 1, int(generator.integers(low, 2**bits)), int(generator.integers(0, 100)))
    return choices[generator.integers(len(choices))]
