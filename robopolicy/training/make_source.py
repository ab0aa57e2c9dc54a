"""Registry of the sources of training data, and construction of the source of an algorithm."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from robopolicy.errors import UserError
from robopolicy.plugins import Registry

if TYPE_CHECKING:
    import torch

    from robopolicy.algorithms.common.algorithm import Algorithm
    from robopolicy.data.episodes import Episodes
    from robopolicy.policies.base import Observation, PolicySpec
    from robopolicy.sim.chunk import ChunkedSim
    from robopolicy.sim.contract import VectorSim
    from robopolicy.training.config import TrainConfig
    from robopolicy.training.overlap import CollectingSource

FIRST_EPISODE = 1_000_000  # episode seeds of training start here, far above the seeds of demonstrations and evaluation
SEEDS_PER_RANK = 10_000_000  # between the first episodes of two processes


class DataSource(Protocol):
    """Infinite stream of batches for `Algorithm.update`."""

    @property
    def env_steps(self) -> int:
        """Number of control steps so far."""
        ...

    def next(self, algorithm: Algorithm) -> Any:
        """Return the next batch."""
        ...

    def metrics(self) -> dict[str, float]:
        """Return and reset the metrics since the last call."""
        ...

    def observations(self) -> Observation:
        """Return a few observations `{key: (B, To, ...)}` as the policy receives them."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the full state of the stream."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Restore `state_dict`; return False if the next batches nevertheless differ."""
        ...

    def close(self) -> None:
        """Release threads and files."""
        ...


@dataclass(frozen=True)
class SourceContext:
    """Inputs for the construction of a source."""

    config: TrainConfig
    spec: PolicySpec  # of the trained policy
    algorithm: Algorithm
    settings: Any  # section `algorithm` of `config`
    episodes: Episodes | None  # dataset, if any
    train_sim: VectorSim | None  # training simulator, if any
    device: torch.device  # device of the batches
    seed: int  # first episode seed, and seed of exploration and sampling

    def sim(self) -> VectorSim:
        """Return the simulator, which exists for every algorithm that collects data."""
        assert self.train_sim is not None
        return self.train_sim

    def chunked_sim(self) -> ChunkedSim:
        """Return the simulator with the chunk size of the policy."""
        from robopolicy.sim.chunk import ChunkedSim

        spec, gamma = self.spec, self.algorithm.step_discount
        return ChunkedSim(self.sim(), action_horizon=spec.action_horizon, obs_horizon=spec.obs_horizon, gamma=gamma)

    def overlapped(self, source: CollectingSource) -> DataSource:
        """Return `source`, which collects during the updates if `sim.overlap` is set."""
        from robopolicy.training.overlap import OverlapSource

        return OverlapSource(source, self.device) if self.config.sim.overlap else source

    def dataset(self) -> Episodes:
        """Return the dataset, which exists for every algorithm that requires one."""
        if self.episodes is None:
            raise UserError(f"The algorithm '{self.algorithm.name}' learns from a dataset; set dataset=FOLDER.")
        return self.episodes


class SourceKind(Protocol):
    """Interface of source classes; `robopolicy list` prints the first line of the docstring."""

    whole_episodes: bool  # batches are episodes of any length, so a budget of steps implies no number of updates
    uses_replay: bool  # reads the settings replay.*; true for classes that do not state it

    def build(self, context: SourceContext, /) -> DataSource:
        """Build the source of a run; a UserError is raised if settings, task or dataset are unsuitable."""
        ...


SOURCES: Registry[SourceKind] = Registry(
    "data_sources",
    {
        "corrections": "robopolicy.training.correction_source:CorrectionSource",
        "dataset": "robopolicy.training.sources:DatasetSource",
        "group": "robopolicy.training.sources:GroupSource",
        "replay": "robopolicy.training.replay_source:ReplaySource",
        "rollout": "robopolicy.training.sources:RolloutSource",
        "text_demonstrations": "robopolicy.training.text_file_source:DemonstrationSource",
        "text_rollout": "robopolicy.training.text_file_source:RecipeSource",
    },
)
"""`Algorithm.data_source` -> class."""


def make_source(
    config: TrainConfig,
    spec: PolicySpec,
    algorithm: Algorithm,
    settings: Any,
    episodes: Episodes | None,
    train_sim: VectorSim | None,
    device: torch.device,
) -> DataSource:
    """Build the source that `algorithm` names, from a dataset, a simulator or both."""
    from robopolicy.core.distributed import rank, world_size
    from robopolicy.training.distributed import DistributedSource

    seed = FIRST_EPISODE * (1 + config.seed) + SEEDS_PER_RANK * rank()
    context = SourceContext(config, spec, algorithm, settings, episodes, train_sim, device, seed)
    source = SOURCES[algorithm.data_source].build(context)
    return source if world_size() == 1 else DistributedSource(source)
