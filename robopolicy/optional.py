"""Optional packages, imported on first use; the error message names the extra to install."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from robopolicy.errors import UserError


def require(package: str, extra: str) -> Any:
    """Import `package`.

    Raises:
        UserError: It is not installed; `extra` is the extra of robopolicy that brings it.
    """
    try:
        return import_module(package)
    except ImportError as error:
        raise missing(package, extra) from error


def missing(package: str, extra: str) -> UserError:
    """The error for a package that is not installed."""
    return UserError(f"This needs the package '{package.split('.')[0]}'; run: pip install 'robopolicy[{extra}]'.")
