"""Optional packages, imported on first use."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from robopolicy.errors import UserError


def require(package: str, extra: str) -> Any:
    """Import `package`; raises a UserError that names the `extra` of robopolicy to install if it is missing."""
    try:
        return import_module(package)
    except ImportError as error:
        raise missing(package, extra) from error


def missing(package: str, extra: str) -> UserError:
    """Build the error for a package that is not installed."""
    return UserError(f"This needs the package '{package.split('.')[0]}'; run: pip install 'robopolicy[{extra}]'.")
