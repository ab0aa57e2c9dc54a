"""Configurations of LeRobot by name, such as robots, cameras and teleoperators."""

from __future__ import annotations

import contextlib
import importlib
import pkgutil
from collections.abc import Mapping
from typing import Any


def config_choices(base: Any, package: str, kind: str) -> Mapping[str, Any]:
    """Return the configurations registered under `base`; imports modules of `package` until `kind` is registered.

    Modules register their configurations on import, and may need the package of a driver.
    """
    for module in pkgutil.iter_modules(importlib.import_module(package).__path__, f"{package}."):
        if kind in base.get_known_choices():
            break
        if module.ispkg:
            with contextlib.suppress(ImportError):
                importlib.import_module(module.name)
    return base.get_known_choices()
