"""Replay data of a dataset, of environment steps, or of both, for off-policy algorithms."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch

from robopolicy.algorithms.common.algorithm import Algorithm
from robopolicy.algorithms.common.off_policy import OffPolicy
from robopolicy.data.batches import ReplaySampleSpec, Transitions
from robopolicy.data.episodes import Episodes
from robopolicy.data.goals import ACHIEVED, GoalReplay, HindsightReplay
from robopolicy.data.replay import MixedReplay, Replay
from robopolicy.data.return_scale import ReturnScale
from robopolicy.device import CPU, has_memory, move, restore_generator, usable_device
from robopolicy.errors import UserError
from robopolicy.policies.base import Observation
from robopolicy.rollout.off_policy import ReplaySampler, StepLog
from robopolicy.rollout.on_policy import Act
from robopolicy.sim.chunk import ChunkedSim
from robopolicy.sim.contract import VectorSim
from robopolicy.training.config import ReplayConfig, TrainConfig
from robopolicy.training.make_source import DataSource, SourceContext
from robopolicy.training.remote_replay import RemoteSampler, SimWorkers
from robopolicy.training.sources import on_device


class ReplaySource:
    """Windows from a replay buffer of a dataset, of environment steps, or of both.

    The first `offline_updates` batches come from the dataset only, with one gradient step each. Then `learning_starts`
    control steps are collected, and a few more before every batch, which mixes both buffers. Of a dataset in which a
    person took over from a policy, that half consists of the frames of the person (HIL-SERL, Luo et al. 2024); without
    a simulator, all frames are used.
    """

    whole_episodes: ClassVar[bool] = False
    uses_replay: ClassVar[bool] = True

    def __init__(
        self,
        sim: ChunkedSim | None,
        offline: Replay | None,
        device: torch.device,
        *,
        sample_spec: ReplaySampleSpec,
        settings: ReplayConfig,
        num_steps: int,
        utd: float,
        seed: int,
        memory_device: torch.device = CPU,
        updates: int = 0,
        workers: SimWorkers | None = None,
    ) -> None:
        """Create the source.

        Args:
            sim: Simulator; None learns from the dataset only.
            offline: Buffer of the dataset.
            device: Device of the batches.
            sample_spec: Windows that the algorithm learns from.
            settings: Sizes and schedule.
            num_steps: Chunk decisions per environment between updates.
            utd: Gradient steps per decision of one environment.
            seed: First episode seed, and seed of exploration and sampling.
            memory_device: Device of the buffers.
            updates: Gradient steps per batch in place of `utd`; 0: unused.
            workers: Processes with the environments; `sim` is then of their task.
        """
        if (sample_spec.age_quantile or sample_spec.weighting) and settings.prioritized:
            raise UserError("Age weighting does not support prioritised sampling; set replay.prioritized=0.")
        if sample_spec.chunk_starts_only and settings.prioritized:
            raise UserError("Sampling of whole decisions does not support priorities; set replay.prioritized=0.")
        if settings.hindsight and (settings.return_max or sample_spec.goals):
            raise UserError(
                "replay.hindsight chooses goals and rewards itself; set replay.return_max=0 and algorithm.goals to 0."
            )
        if settings.return_max and offline is not None:
            raise UserError("replay.return_max scales rewards of environment steps; set it to 0, or drop dataset=.")
        self.sample_spec, self.settings, self.device = sample_spec, settings, device
        self.offline, self.num_steps = offline, num_steps
        self._seed = seed
        self._generator = torch.Generator(memory_device).manual_seed(seed)
        self._offline_left = settings.offline_updates  # remaining batches from the dataset only
        # Buffer, batch and algorithm of the last batch; its errors become priorities after the update.
        self._pending: tuple[Replay | MixedReplay, Transitions, OffPolicy] | None = None
        self._log = StepLog()  # steps of the last `collect`
        self.sampler: ReplaySampler | RemoteSampler | None = None
        self._workers = workers
        if sim is not None:
            envs = sim.sim.num_envs if workers is None else workers.num_envs
            self.batches = updates or gradient_steps(utd, envs, num_steps)
            self._warmup = max(settings.learning_starts, envs * (sample_spec.steps + 1))  # at least one full window
            self._first = sim.reset(seed)  # the sampler resets to the same episodes
            replay = make_replay(settings, sample_spec, sim, memory_device, envs)
            make = partial(ReplaySampler, sim, replay, noise_repeat=settings.noise_repeat)
            self._make_sampler = make if workers is None else partial(RemoteSampler, sim, workers, replay)
            self.sampler = self._make_sampler(seed=seed)
        else:
            assert offline is not None
            self._first = offline.observations(sample_spec.obs_horizon)

    @classmethod
    def build(cls, context: SourceContext) -> DataSource:
        """Create the source for a run; the algorithm receives the whole dataset once."""
        algorithm, episodes = context.algorithm, context.episodes
        assert isinstance(algorithm, OffPolicy)
        sim = None if context.train_sim is None else context.chunked_sim()
        if episodes is not None:
            episodes = (episodes.demonstrated() if sim is not None else episodes).with_executed_actions()
            algorithm.attach_dataset(episodes)
        spec, exponent = algorithm.sample_spec, context.config.replay.prioritized
        if episodes is not None and (spec.goals or not algorithm.needs_reward):  # the buffer requires some
            zeros = np.zeros(len(episodes), np.float32)
            episodes = replace(episodes, arrays={**episodes.arrays, "reward": zeros})
        device, offline = memory_device(context.config.replay, context.device, sim, episodes), None
        if episodes is not None:
            kind = GoalReplay if spec.goals else HindsightReplay if context.config.replay.hindsight else Replay
            offline = kind.from_episodes(
                episodes, gamma=spec.gamma if spec.returns else None, prioritized=exponent, device=device
            )
            attach_goals(offline, context.config.replay, context.train_sim)
        source = cls(
            sim,
            offline,
            context.device,
            sample_spec=spec,
            settings=context.config.replay,
            num_steps=context.settings.num_steps,
            utd=context.settings.utd,
            updates=context.settings.gradient_steps,
            seed=context.seed,
            memory_device=device,
            workers=SimWorkers.start(context.config),
        )
        if sim is not None and context.config.budget.env_steps:
            source.check_warmup(context.config)
        return context.overlapped(source)

    def check_warmup(self, config: TrainConfig) -> None:
        """Raise a UserError if the warm-up is longer than `replay.learning_starts`, from which the budget follows."""
        if self._warmup > config.replay.learning_starts:
            raise UserError(
                f"replay.learning_starts={config.replay.learning_starts} is less than a window of every environment, "
                f"{self._warmup} steps; set it to at least that with budget.env_steps."
            )

    @property
    def env_steps(self) -> int:
        """Number of control steps so far."""
        return 0 if self.sampler is None else self.sampler.env_steps

    def collects_next(self) -> bool:
        """Whether the next batch has further steps of the algorithm, after offline updates and warm-up."""
        return not self._offline_left and self.sampler is not None and self.sampler.env_steps >= self._warmup

    def collect(self, act: Act) -> StepLog:
        """Run a few decisions; `next` or `state_dict` writes their steps to the buffer."""
        assert isinstance(self.sampler, ReplaySampler)
        self._log = StepLog()
        self.sampler.collect(self._acting(self.sampler.sim, act), self.num_steps, self._log)
        self._log.env_steps = self.sampler.env_steps
        return self._log

    def next(self, algorithm: Algorithm, collected: StepLog | None = None) -> Transitions:
        """Collect a few steps, or write the `collected` ones; then sample the windows of the next gradient steps."""
        assert isinstance(algorithm, OffPolicy)
        self._update_priorities()
        if self.sampler is None or self._offline_left:
            assert self.offline is not None
            self._offline_left = max(self._offline_left - 1, 0)
            memory, batches = self.offline, 1
        else:
            if collected is None:
                self._collect(algorithm, self.sampler)
            else:
                collected.write(self.sampler.replay)
            memory, batches = self.sampler.replay, self.batches
            if self.offline is not None:
                steps = self.env_steps if collected is None else collected.env_steps  # a rollout may be in progress
                memory = MixedReplay(self.offline, memory, self._offline_fraction(self.offline, steps))
        batch = memory.sample(self.sample_spec, self._generator, batches=batches)
        if self.settings.prioritized:
            self._pending = memory, batch, algorithm
        return move(batch, self.device)

    def _offline_fraction(self, offline: Replay, env_steps: int) -> float:
        """Fraction of the dataset in a batch, after control steps of the simulator."""
        if self.settings.offline_fraction is not None:
            return self.settings.offline_fraction
        return offline.length / (offline.length + min(env_steps, self.settings.capacity))

    def _collect(self, algorithm: OffPolicy, sampler: ReplaySampler | RemoteSampler) -> None:
        if isinstance(sampler, RemoteSampler):
            while sampler.env_steps < self._warmup:
                sampler.collect(algorithm, self.num_steps)
            return sampler.collect(algorithm, self.num_steps)
        draw = algorithm.act if algorithm.updates else algorithm.warmup_action
        while sampler.env_steps < self._warmup:
            sampler.collect(self._acting(sampler.sim, draw))
        sampler.collect(self._acting(sampler.sim, algorithm.act), self.num_steps)

    def _acting(self, sim: ChunkedSim, draw: Act) -> Act:
        """Wrap `draw` for the device; its records are kept only if all windows start at decisions."""
        act = on_device(sim, self.device, draw)
        if self.sample_spec.chunk_starts_only:
            return act
        return lambda obs, *, generator: replace(act(obs, generator=generator), record={})

    def _update_priorities(self) -> None:
        """Set priorities from the TD errors of the last batch."""
        if self._pending is None:
            return
        memory, batch, algorithm = self._pending
        self._pending = None
        if algorithm.td_errors is not None:
            memory.update_priorities(batch, algorithm.td_errors)

    def metrics(self) -> dict[str, float]:
        """Return means over the episodes that have ended since the last call."""
        return {} if self.sampler is None else self.sampler.episode_stats()

    def observations(self) -> Observation:
        """Return the first observations of training, or some of the dataset."""
        return move(self._first, self.device)

    def state_dict(self) -> dict[str, Any]:
        """Return simulator, buffer and generator; without the simulator if the backend cannot save its state."""
        self._update_priorities()
        if self.sampler is not None:
            self._log.write(self.sampler.replay)
        state: dict[str, Any] = {"left": self._offline_left, "generator": self._generator.get_state()}
        if self.offline is not None and self.offline.priorities is not None:
            state["offline"] = self.offline.priorities.state_dict()  # the other data are in the dataset
        if self.sampler is not None:
            try:
                state["sampler"] = self.sampler.state_dict()
            except RuntimeError:
                state |= {"replay": self.sampler.replay.state_dict(), "env_steps": self.env_steps}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Restore `state_dict`, or start new episodes with unused seeds."""
        self._offline_left = int(state["left"])
        restore_generator(self._generator, state["generator"])
        if self.offline is not None and self.offline.priorities is not None:
            self.offline.priorities.load_state_dict(state["offline"])
        if self.sampler is None:
            return True
        if "sampler" in state:
            self.sampler.load_state_dict(state["sampler"])
            return True
        steps = int(state["env_steps"])
        self.sampler.replay.load_state_dict(state["replay"])
        self.sampler = self._make_sampler(seed=self._seed + steps)
        self.sampler.env_steps = steps
        return False

    def close(self) -> None:
        """Stop the simulator."""
        if self._workers is not None:
            self._workers.close()
        if self.sampler is not None:
            self.sampler.sim.sim.close()


def gradient_steps(utd: float, num_envs: int, num_steps: int) -> int:
    """Return the gradient steps per update for `utd` per decision of one environment; not an integer: UserError."""
    steps = utd * num_envs * num_steps
    if round(steps) < 1 or abs(steps - round(steps)) > 1e-6:
        raise UserError(
            f"algorithm.utd={utd:g} with {num_envs} environments and {num_steps} decisions gives {steps:g} gradient "
            "steps per update; choose utd so that utd * sim.num_envs * algorithm.num_steps is an integer."
        )
    return round(steps)


def memory_device(
    settings: ReplayConfig, device: torch.device, sim: ChunkedSim | None, episodes: Episodes | None
) -> torch.device:
    """Return the device of the buffers of a run on `device`: the setting, or by default `device` if they fit there."""
    if settings.device != "auto":
        return usable_device(settings.device)
    size = 0 if episodes is None else sum(array.nbytes for array in episodes.arrays.values())
    if sim is not None:
        spec = sim.sim.spec
        slot = sum(math.prod(entry.shape) * entry.dtype.itemsize for entry in spec.observation.values())
        size += settings.capacity * (slot + 4 * spec.action_dim)
    return device if device.type == "cpu" or has_memory(device, size) else CPU


def make_replay(
    settings: ReplayConfig,
    sample_spec: ReplaySampleSpec,
    sim: ChunkedSim,
    device: torch.device = CPU,
    num_envs: int | None = None,
) -> Replay:
    """Create the replay buffer for `num_envs` environments; by default, for all environments of `sim`.

    A UserError is raised if it cannot hold a window per environment.
    """
    envs, steps, chunk = num_envs or sim.sim.num_envs, sample_spec.steps, sim.action_horizon
    window = steps + chunk if sample_spec.chunk_starts_only else max(steps, chunk)
    least = envs * (window + sample_spec.obs_horizon + 2)
    if settings.capacity < least:
        raise UserError(
            f"replay.capacity={settings.capacity} is too small for {envs} environments and windows of "
            f"{sample_spec.steps} steps; it must be at least {least}."
        )
    gamma = sample_spec.gamma if sample_spec.returns else None
    kind = HindsightReplay if settings.hindsight else Replay
    replay = kind(settings.capacity, envs, gamma=gamma, prioritized=settings.prioritized, device=device)
    attach_goals(replay, settings, sim.sim)
    if settings.return_max:
        replay.return_scale = ReturnScale(settings.return_max, sample_spec.gamma, envs, device)
    return replay


def attach_goals(replay: Replay, settings: ReplayConfig, sim: VectorSim | None) -> None:
    """Give a buffer with goals in hindsight its settings and the rewards of the task, which must have goals."""
    if not isinstance(replay, HindsightReplay):
        return
    if sim is None:
        raise UserError("replay.hindsight computes rewards by the simulator of the task, so it cannot learn offline.")
    if ACHIEVED not in sim.spec.observation:
        raise UserError(f"Task {sim.spec.task} has no '{ACHIEVED}'; set replay.hindsight.strategy=none.")
    zeros = torch.zeros(2, *sim.spec.observation[ACHIEVED].shape)
    sim.goal_reward(zeros, zeros)  # raises an error for a task that cannot compute rewards of rows
    replay.hindsight, replay.goal_reward = settings.hindsight, sim.goal_reward
