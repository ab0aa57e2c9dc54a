"""Episodes that a policy, an expert or random actions run in a simulator while they are watched."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

import torch
from torch import Tensor

from robopolicy.evaluation.actors import Actor, as_actor
from robopolicy.policies.base import Policy
from robopolicy.sim.chunk import ChunkedSim
from robopolicy.sim.contract import VectorSim
from robopolicy.sim.physics_state import PhysicsState
from robopolicy.viewer.frames import EpisodeFrame
from robopolicy.viewer.recording_sim import RecordingSim


class SimEpisodes:
    """Episodes of one environment from `seed` on; an episode is simulated chunk by chunk as its frames are read.

    Args:
        title: Name of policy and task.
        sim: Simulator with one environment.
        make: Makes the policy or actor, at the start of every episode.
        seed: Seed of the first episode.
        predictor: Second simulator of the task, in which chunks are simulated ahead; None, or a simulator that cannot
            save its state: the plan of a chunk is the states that its executed actions led to.
        deterministic: Act without exploration noise.
    """

    num_episodes = None

    def __init__(
        self,
        title: str,
        sim: VectorSim,
        make: Callable[[], Policy | Actor],
        *,
        seed: int = 0,
        predictor: VectorSim | None = None,
        deterministic: bool = True,
    ) -> None:
        self.title, self.seed = title, seed
        self.control_dt, self.max_steps = sim.spec.control_dt, sim.spec.max_episode_steps
        self.names: Mapping[str, tuple[str, ...]] = {key: entry.names for key, entry in sim.spec.observation.items()}
        self.names |= {"action": sim.spec.action_names}
        self.make_policy = make  # called at the start of every episode
        self._sim, self._deterministic = sim, deterministic
        self._predictor = _usable(sim, predictor)

    def label(self, episode: int) -> str:
        """Seed of an episode."""
        return f"seed {self.seed + episode}"

    def note(self) -> str:
        """Return nothing."""
        return ""

    def frames(self, episode: int) -> Iterator[EpisodeFrame]:
        """Yield the frames of an episode, which is simulated chunk by chunk."""
        seed, new = self.seed + episode, list[EpisodeFrame]()
        recording = RecordingSim(self._sim, lambda frame, found, _: new.append(frame) if found == seed else None)
        with as_actor(self.make_policy(), self._sim, deterministic=self._deterministic) as actor:
            chunked = ChunkedSim(recording, action_horizon=actor.action_horizon, obs_horizon=actor.obs_horizon)
            obs = chunked.reset([seed])
            last = new.pop()
            decision, ended = torch.zeros(1, dtype=torch.int64), False
            while not ended:
                chunk = actor(self._sim, obs, torch.zeros(1, dtype=torch.int64), self._sim.episode_seed, decision)
                predicted = self._predict(chunk)
                step = chunked.step(chunk)
                obs, decision, ended = step.obs, decision + 1, bool(step.done[0])
                plan = predicted or _states([last, *new] if len(new) > 1 else [])
                yield replace(last, plan=plan)
                yield from (replace(frame, plan=plan) for frame in new[:-1])
                last = new[-1]
                new.clear()
        yield last

    def close(self) -> None:
        """Close the simulators."""
        self._sim.close()
        if self._predictor is not None:
            self._predictor.close()

    def _predict(self, chunk: Tensor) -> tuple[PhysicsState, ...]:
        """States that all actions of `chunk` `(1, H, A)` lead to, the current state first; none for single actions."""
        if self._predictor is None or chunk.shape[1] == 1:
            return ()
        self._predictor.load_state_dict(self._sim.state_dict())
        states = [self._predictor.physics_state()]
        for action in chunk.unbind(1):
            if bool(self._predictor.step(action).done[0]):
                break
            states.append(self._predictor.physics_state())
        return tuple(state for state in states if state is not None)


def _usable(sim: VectorSim, predictor: VectorSim | None) -> VectorSim | None:
    """Return `predictor` if it can continue from the state of `sim`; else close it."""
    if predictor is None:
        return None
    with suppress(RuntimeError):  # of a backend that cannot save its state
        sim.reset(0)
        predictor.reset(0)
        predictor.load_state_dict(sim.state_dict())
        return predictor
    predictor.close()
    return None


def _states(frames: Sequence[EpisodeFrame]) -> tuple[PhysicsState, ...]:
    return tuple(frame.state for frame in frames if frame.state is not None)
