"""Search path of Hydra in addition to the folder `configs`.

It contains the presets of the contrib themes and the schemas of runs, policies and algorithms, which are created on
demand.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import MISSING, OmegaConf

from robopolicy.resources import presets
from robopolicy.schema import open_schema
from robopolicy.training.config import TrainConfig
from robopolicy.training.names import REGISTRIES


class Schemas(ConfigSource):
    """Config source `registry://`: `schema`, the schema of a run, and one option per policy and algorithm."""

    @staticmethod
    def scheme() -> str:
        """Return the prefix of the address."""
        return "registry"

    def available(self) -> bool:
        """Whether the source can be read."""
        return True

    def is_group(self, config_path: str) -> bool:
        """Whether `config_path` contains configs."""
        return config_path == "" or config_path in REGISTRIES

    def is_config(self, config_path: str) -> bool:
        """Whether `config_path` is a config."""
        group, name = _parts(config_path)
        return name in self.list(group, ObjectType.CONFIG)

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        """Return the names in a group."""
        if config_path == "":
            return ["schema"] if results_filter is ObjectType.CONFIG else [*REGISTRIES]
        return [] if results_filter is ObjectType.GROUP else [*REGISTRIES.get(config_path, ())]

    def load_config(self, config_path: str) -> ConfigResult:
        """Return the config with its defaults."""
        group, name = _parts(config_path)
        schema = _named(REGISTRIES[group][name].config_class, name) if group else _run()
        address = f"{self.scheme()}://{self.path}"
        return ConfigResult(self.provider, address, OmegaConf.structured(schema), header={"package": None})


class SearchPath(SearchPathPlugin):
    """Presets of contrib and schemas, after the folder `configs`."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Append the presets of contrib and the schemas."""
        for place in presets()[1:]:
            search_path.append(provider="contrib", path=f"file://{place}")
        search_path.append(provider="robopolicy", path="registry://")


def register_plugins() -> None:
    """Register the schemas and the presets of contrib with Hydra."""
    Plugins.instance().register(Schemas)
    Plugins.instance().register(SearchPath)


def _parts(path: str) -> tuple[str, str]:
    group, _, name = path.removesuffix(".yaml").rpartition("/")
    return group, name


@cache
def _run() -> type[Any]:
    return open_schema(TrainConfig, policy=MISSING, algorithm=MISSING)


@cache
def _named(config_class: type[Any], name: str) -> type[Any]:
    return open_schema(config_class, name=name)
