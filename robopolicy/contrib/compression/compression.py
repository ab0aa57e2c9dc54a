"""Small students of a policy: networks with fewer and narrower layers that imitate it.

Source: Ashok et al. 2017, N2N.

    data = record(teacher, sim, range(40_000, 40_050), noise=0.1)
    student = distil(student_of(teacher, (32, 32)), data, updates=2000)

The teacher runs with disturbed actions, so that the data also covers states off its usual path; the labels are its
undisturbed chunks. A student has the teacher's head, inputs, normalisers and chunk, and other widths in `hidden` of its
configuration. It learns by the head's imitation loss: likelihood of the teacher's mean for Gaussians, regression for
flow and diffusion, with one chunk per observation.

`architectures.py` chooses the widths; `robopolicy compress` combines both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from robopolicy.algorithms.bc import BC, BCConfig
from robopolicy.contrib.compression.architectures import Widths
from robopolicy.data.chunks import ChunkBatch
from robopolicy.errors import UserError
from robopolicy.evaluation.actors import NoisyActor, PolicyActor, RandomActor
from robopolicy.evaluation.harness import run_episodes
from robopolicy.nets.encoder import ObservationEncoder
from robopolicy.nets.module_state import evaluation_mode
from robopolicy.nets.normalizer import Normalizer
from robopolicy.policies.base import Observation, Policy
from robopolicy.policies.noise import Randomness
from robopolicy.policies.registry import make_policy
from robopolicy.sim.contract import VectorSim


@dataclass(frozen=True)
class TeacherData:
    """Observations and chunks of a teacher."""

    obs: Observation  # {key: (N, To, ...)}
    chunk: Tensor  # (N, H, A)

    def __len__(self) -> int:
        return len(self.chunk)


class TeacherRecorder(Policy):
    """A policy that records observations and chunks; method `act`."""

    name: ClassVar[str] = "recorder"

    def __init__(self, base: Policy) -> None:
        """Record `base`, shared with the caller."""
        super().__init__()
        self.base, self.spec = base, base.spec
        self._obs: list[Observation] = []
        self._chunks: list[Tensor] = []

    def act(self, obs: Observation, *, deterministic: bool = False, generator: Randomness = None) -> Tensor:
        """Record and return the chunk of the base."""
        chunk = self.base.act(obs, deterministic=deterministic, generator=generator)
        self._obs.append({key: value.detach().clone() for key, value in obs.items()})
        self._chunks.append(chunk.detach().clone())
        return chunk

    def data(self) -> TeacherData:
        """All records without duplicates, which simulators add to fill batches."""
        obs = {key: torch.cat([part[key] for part in self._obs]) for key in self._obs[0]}
        chunk = torch.cat(self._chunks)
        flat = torch.cat([*(value.flatten(1).double() for value in obs.values()), chunk.flatten(1).double()], 1)
        _, group = flat.unique(dim=0, return_inverse=True)
        first = torch.full((int(group.max()) + 1,), len(chunk), device=group.device)
        first = first.scatter_reduce(0, group, torch.arange(len(chunk), device=group.device), "amin").sort().values
        return TeacherData({key: value[first] for key, value in obs.items()}, chunk[first])


def record(
    teacher: Policy,
    sim: VectorSim,
    seeds: Sequence[int],
    *,
    noise: float = 0.1,
    progress: Callable[[int], None] | None = None,
) -> TeacherData:
    """Record observations and chunks of `teacher` in the episodes `seeds`, run with disturbed actions.

    Args:
        teacher: Policy to record.
        sim: Simulator of the episodes.
        seeds: Consecutive episode seeds.
        noise: Standard deviation of the disturbances, as a fraction of half the action range.
        progress: Called with the number of finished episodes.

    Raises:
        UserError: The teacher is recurrent.
    """
    if teacher.spec.hidden_dim:
        raise UserError(f"Policy '{teacher.name}' is recurrent, but students are not; pass a feed-forward policy.")
    recorder = TeacherRecorder(teacher)
    with evaluation_mode(teacher):
        run_episodes(NoisyActor(PolicyActor(recorder), noise), sim, seeds, progress=progress)
    return recorder.data()


def widths_of(policy: Policy) -> Widths:
    """Widths of the hidden layers of a policy.

    Raises:
        UserError: Its configuration has no `hidden`.
    """
    widths = getattr(getattr(policy, "config", None), "hidden", None)
    backbone = getattr(getattr(policy, "config", None), "backbone", "mlp")
    if not isinstance(widths, tuple) or not widths or backbone != "mlp":
        raise UserError(
            f"Policy '{policy.name}' has no plain hidden layers to remove or shrink; pass a policy with an MLP."
        )
    return widths


def parameters_of(policy: Policy) -> int:
    """Number of learned parameters."""
    return sum(parameter.numel() for parameter in policy.parameters())


def check_reachable(teacher: Policy, architectures: Sequence[Widths], limit: int) -> None:
    """Raise if all `architectures`, the smallest of a search, exceed a limit on the parameters; 0 is no limit.

    Raises:
        UserError: All exceed it; the message contains the smallest size.
    """
    sizes: list[int] = []
    for widths in architectures if limit else ():
        with suppress(UserError):  # invalid networks
            sizes.append(parameters_of(student_of(teacher, widths)))
    if sizes and min(sizes) > limit:
        raise UserError(f"No student has at most {limit} parameters: the smallest has {min(sizes)}; raise the limit.")


def student_of(teacher: Policy, widths: Widths, seed: int = 0) -> Policy:
    """An untrained policy like `teacher` with hidden layers of `widths` and its normalisers.

    Raises:
        UserError: The network is invalid.
    """
    config: Any = teacher.config  # type: ignore[attr-defined]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        student = make_policy(teacher.name, replace(config, hidden=tuple(widths)), teacher.spec)
    known: dict[str, Any] = dict(teacher.named_modules())
    for name, part in student.named_modules():
        if isinstance(part, ObservationEncoder):
            part.copy_stats(known[name])
        elif isinstance(part, Normalizer):
            part.load_state_dict(known[name].state_dict())
    return student.to(teacher.device)


def distil(
    student: Policy,
    data: TeacherData,
    *,
    updates: int,
    batch: int = 256,
    lr: float = 1e-3,
    seed: int = 0,
    progress: Callable[[int], None] | None = None,
) -> Policy:
    """Train the student for `updates` gradient steps on the teacher's data; return its average in evaluation mode."""
    trainer = BC(BCConfig(lr=lr, warmup=min(100, updates // 10), batch_size=batch), student, total_updates=updates)
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):  # noise and time of generative heads
        torch.manual_seed(seed)
        for step in range(updates):
            rows = torch.randint(len(data), (min(batch, len(data)),), generator=generator)
            chunk = data.chunk[rows]
            obs = {key: value[rows] for key, value in data.obs.items()}
            trainer.update(ChunkBatch(obs, chunk, chunk.new_ones(chunk.shape[:2])))
            if progress is not None:
                progress(step + 1)
    return trainer.inference_policy().eval()


class Scorer:
    """Score of policies on common episodes: success if the task defines it, else return above random actions."""

    def __init__(self, sim: VectorSim, seeds: Sequence[int]) -> None:
        self.sim, self.seeds = sim, seeds
        self._chance: float | None = None

    def __call__(self, policy: Policy) -> float:
        """The score, at least 0; a return is measured relative to random actions."""
        result = run_episodes(policy, self.sim, self.seeds)
        if result.success is not None:
            return float(result.success.mean())
        if self._chance is None:
            self._chance = float(run_episodes(RandomActor(), self.sim, self.seeds).returns.mean())
        return max(0.0, float(result.returns.mean()) - self._chance)
