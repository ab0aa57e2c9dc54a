"""Sources of training data by name, and the one that an algorithm names as its `data_source`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from robopolicy.plugins import Registry

if TYPE_CHECKING:
    import torch

    from robopolicy.algorithms.common.algorithm import Algorithm
    from robopolicy.data.episodes import Episodes
    from robopolicy.policies.base import Observation, PolicySpec
    from robopolicy.sim.chunk import ChunkedSim
    from robopolicy.sim.contract import VectorSim
    from robopolicy.training.config import TrainConfig

FIRST_EPISODE = 1_000_000  # episode seeds of training start here, far above those of demonstrations and evaluation
SEEDS_PER_RANK = 10_000_000  # between the first episodes of two processes


class DataSource(Protocol):
    """An endless stream of batches for `Algorithm.update`."""

    @property
    def env_steps(self) -> int:
        """Control steps played so far."""
        ...

    def next(self, algorithm: Algorithm) -> Any:
        """The next batch."""
        ...

    def metrics(self) -> dict[str, float]:
        """What happened since the last call."""
        ...

    def observations(self) -> Observation:
        """A few observations `{key: (B, To, ...)}` as the policy sees them."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Everything that decides the coming batches."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Restore `state_dict`; False where the coming batches will nevertheless differ."""
        ...

    def close(self) -> None:
        """Free threads and files."""
        ...


@dataclass(frozen=True)
class SourceContext:
    """Everything that a source may be built from."""

    config: TrainConfig
    spec: PolicySpec  # of the policy that is trained
    algorithm: Algorithm
    settings: Any  # the algorithm's section of `config`
    episodes: Episodes | None  # the dataset, if there is one
    train_sim: VectorSim | None  # the simulator to play in, if there is one
    device: torch.device  # where batches go
    seed: int  # first episode seed, and seed of exploration and sampling

    def sim(self) -> VectorSim:
        """The simulator, which algorithms that play always have."""
        assert self.train_sim is not None
        return self.train_sim

    def chunked_sim(self) -> ChunkedSim:
        """The simulator, played in chunks as the policy decides."""
        spec, gamma = self.spec, self.algorithm.step_discount
        from robopolicy.sim.chunk import ChunkedSim

        return ChunkedSim(self.sim(), action_horizon=spec.action_horizon, obs_horizon=spec.obs_horizon, gamma=gamma)

    def dataset(self) -> Episodes:
        """The dataset, which algorithms that cannot do without always have."""
        assert self.episodes is not None
        return self.episodes


class SourceKind(Protocol):
    """A class of sources; the first line of its docstring is what `robopolicy list` says about its data."""

    whole_episodes: bool  # batches are whole episodes, of any length, so that a budget of steps counts no updates

    def build(self, context: SourceContext, /) -> DataSource:
        """A source for one run.

        Raises:
            UserError: The settings, the task or the dataset do not suit it.
        """
        ...


SOURCES: Registry[SourceKind] = Registry(
    "data_sources",
    {
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
    """The source that `algorithm` names, built from a dataset, a simulator or both."""
    from robopolicy.core.distributed import rank

    seed = FIRST_EPISODE * (1 + config.seed) + SEEDS_PER_RANK * rank()
    context = SourceContext(config, spec, algorithm, settings, episodes, train_sim, device, seed)
    return SOURCES[algorithm.data_source].build(context)
