"""MuJoCo ships its bindings without type information."""

from typing import Any

def __getattr__(name: str) -> Any: ...
