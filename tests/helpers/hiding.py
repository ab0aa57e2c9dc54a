"""Hides contrib themes from the process, as if their folders were deleted."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

from robopolicy import plugins
from robopolicy.recipe_files import recipe_files

THEMES = tuple(sorted(file.parent.name for file in plugins.CONTRIB.glob("*/theme.toml")))
"""All themes, hidden or not."""


class Refusal(MetaPathFinder):
    """Refuses to import the modules of some themes."""

    def __init__(self, themes: tuple[str, ...]) -> None:
        self.packages = tuple(f"robopolicy.contrib.{theme}" for theme in themes)

    def covers(self, module: str) -> bool:
        """Whether a module belongs to one of the themes."""
        return any(module == package or module.startswith(f"{package}.") for package in self.packages)

    def find_spec(self, fullname, path=None, target=None):
        """Raise for modules of the themes; leave all others to the next finder."""
        if self.covers(fullname):
            raise ModuleNotFoundError(f"{fullname} is hidden.", name=fullname)


@contextmanager
def hidden(*themes: str) -> Iterator[None]:
    """Hide themes within the context: their rows, presets and recipes are unknown, their modules missing."""
    refusal = Refusal(themes)
    loaded = {name: sys.modules.pop(name) for name in list(sys.modules) if refusal.covers(name)}
    with TemporaryDirectory() as folder:
        for theme in plugins.CONTRIB.iterdir():
            if (theme / "theme.toml").is_file() and theme.name not in themes:
                (Path(folder) / theme.name).symlink_to(theme)
        with patch.object(plugins, "CONTRIB", Path(folder)), patch.object(sys, "meta_path", [refusal, *sys.meta_path]):
            _forget()
            try:
                yield
            finally:
                sys.modules.update(loaded)
    _forget()


def _forget() -> None:
    """Clear the caches of themes and recipes."""
    plugins.themes.cache_clear()
    recipe_files.cache_clear()
