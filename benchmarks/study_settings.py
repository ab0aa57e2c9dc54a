"""Algorithms and policies of a cell's trainings, with all defaults; a cell runs again where today's are others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cache
from typing import Any

from benchmarks.common import plain


def recorded(trainings: Mapping[str, Sequence[str]]) -> dict[str, dict[str, Any]]:
    """Complete sections `algorithm` and `policy` of trainings, by run, as a cell stores them."""
    return {
        run: dict(_sections(tuple(each for each in arguments if not each.startswith("seed="))))
        for run, arguments in trainings.items()
    }


def changed(configs: Mapping[str, Any], trainings: Mapping[str, Sequence[str]]) -> bool:
    """Whether recorded sections are not the ones of today."""
    return configs != recorded(trainings)


@cache
def _sections(arguments: tuple[str, ...]) -> dict[str, Any]:
    """Sections of one training; composing them takes half a second."""
    from robopolicy.training.compose import compose_config
    from robopolicy.training.config import section

    config = compose_config(list(arguments))
    found: dict[str, Any] = {}
    for kind, values in (("algorithm", config.algorithm), ("policy", config.policy)):
        name, settings = section(kind, values)
        found[kind] = plain({"name": name, **asdict(settings)})
    return found
