"""Source of demonstrations and of corrections that a demonstrator gives to the policy in training, for DAgger."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from robopolicy.algorithms.common.algorithm import Algorithm
from robopolicy.algorithms.dagger import DAggerConfig
from robopolicy.data.chunks import ChunkBatch, ChunkSampler
from robopolicy.data.collect import collect
from robopolicy.data.episodes import Episode, Episodes
from robopolicy.errors import UserError
from robopolicy.evaluation.actors import PolicyExpert
from robopolicy.nets.module_state import evaluation_mode
from robopolicy.policies.base import Policy
from robopolicy.sim.registry import get_task
from robopolicy.teleop.devices import open_device
from robopolicy.teleop.operator import HumanOperator
from robopolicy.teleop.session import SessionConfig, TeleopSession
from robopolicy.training.make_source import DataSource, SourceContext
from robopolicy.training.sources import DatasetSource

EXPERT = "expert"  # demonstrator that is no device


class CorrectionSource:
    """Shuffled chunks of a dataset and of corrections, which are collected with the policy in rounds."""

    whole_episodes: ClassVar[bool] = False
    uses_replay: ClassVar[bool] = False

    def __init__(self, context: SourceContext, settings: DAggerConfig) -> None:
        self._context, self._settings = context, settings
        self._period = max(context.algorithm.total_updates // settings.rounds, 1)  # updates between two rounds
        self._demonstrations = context.dataset()
        self._corrections: list[Episodes] = []  # of each round
        self._batches = self._attempts = 0
        self.env_steps = 0
        self._stats: dict[str, float] = {}
        self._source = self._make_source()

    @classmethod
    def build(cls, context: SourceContext) -> DataSource:
        """Create the source for a run; a UserError is raised if the demonstrator is unsuitable."""
        settings: DAggerConfig = context.settings
        if settings.demonstrator == EXPERT:
            get_task(context.config.task.name).require_expert()
        elif context.sim().num_envs > 1:
            raise UserError("A person corrects one environment; set sim.num_envs=1.")
        return cls(context, settings)

    def next(self, algorithm: Algorithm) -> ChunkBatch:
        """Return the next minibatch, after a round of corrections where one is due."""
        due = self._batches % self._period == 0 and len(self._corrections) < self._settings.rounds
        self._batches += 1
        if due:
            self._collect(algorithm.inference_policy())
            self._source = self._make_source()
        return self._source.next(algorithm)

    def metrics(self) -> dict[str, float]:
        """Return the number of passes over the data, and the size and success of the rounds so far."""
        return {**self._source.metrics(), **self._stats}

    def observations(self) -> Any:
        """Return observations spread over the dataset."""
        return self._source.observations()

    def state_dict(self) -> dict[str, Any]:
        """Return the corrections and the position in the stream."""
        rounds = [{**part.arrays, "ends": part.ends, "seeds": part.seeds} for part in self._corrections]
        counters = {"batches": self._batches, "attempts": self._attempts, "env_steps": self.env_steps}
        return {"rounds": rounds, "source": self._source.state_dict(), "stats": self._stats, **counters}

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Restore `state_dict`."""
        self._corrections = [self._read(part) for part in state["rounds"]]
        self._batches, self._attempts = int(state["batches"]), int(state["attempts"])
        self.env_steps, self._stats = int(state["env_steps"]), dict(state["stats"])
        self._source = self._make_source()
        return self._source.load_state_dict(state["source"])

    def close(self) -> None:
        """Stop the simulator."""
        self._context.sim().close()

    def _make_source(self) -> DatasetSource:
        """Make the stream of the demonstrations and corrections so far."""
        spec, config = self._context.spec, self._context.config
        used = (*spec.observation, "action", "executed", "intervention")
        parts = [
            replace(part, arrays={key: array for key, array in part.arrays.items() if key in used})
            for part in (self._demonstrations, *self._corrections)
        ]
        episodes = Episodes.concat(parts)
        sampler = ChunkSampler(
            episodes,
            horizon=spec.horizon,
            obs_horizon=spec.obs_horizon,
            batch_size=self._settings.batch_size,
            seed=config.seed + len(self._corrections),
            learned=episodes.demonstrated_frames(),
            device=self._context.device,
        )
        return DatasetSource(sampler, self._context.device)

    def _collect(self, policy: Policy) -> None:
        """Collect a round of corrections of `policy`."""
        sim, sink, episodes = self._context.sim(), _Sink(), self._settings.episodes_per_round
        seed = self._context.seed + self._attempts
        with evaluation_mode(policy):
            actor = PolicyExpert(policy)
            if self._settings.demonstrator == EXPERT:
                expert = get_task(self._context.config.task.name).require_expert()()
                report = collect(sim, expert, sink, episodes=episodes, seed=seed, only_success=False, acting=actor)
            else:
                with closing(open_device(self._settings.demonstrator)) as device:
                    person = HumanOperator.of_sim(device, sim.spec)
                    config = SessionConfig(episodes, seed, only_success=False)
                    report = TeleopSession(sim, person, sink, config, policy=actor).run()
        if not sink.episodes:
            raise UserError("The session ended before an episode was recorded; run it again.")
        self._corrections.append(Episodes.from_list(sink.episodes, sim.spec.control_dt))
        self._attempts += report.attempts
        self.env_steps += report.frames
        frames = np.concatenate([each.arrays.get("intervention", np.ones(len(each))) for each in sink.episodes])
        self._stats = {"dagger/rounds": float(len(self._corrections)), "dagger/corrected": float(frames.mean())}
        if report.successes is not None:
            self._stats["dagger/success"] = report.successes / report.attempts

    def _read(self, part: Mapping[str, Any]) -> Episodes:
        """Restore the corrections of a round."""
        arrays = {key: np.asarray(value) for key, value in part.items()}
        ends, seeds = arrays.pop("ends"), arrays.pop("seeds")
        task = self._context.sim().spec.task
        return Episodes(arrays, ends, (task,) * len(ends), seeds, self._demonstrations.control_dt)


class _Sink:
    """Episodes of a round."""

    def __init__(self) -> None:
        self.episodes: list[Episode] = []

    def add(self, episode: Episode) -> None:
        """Keep the episode."""
        self.episodes.append(episode)
