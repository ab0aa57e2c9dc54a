"""A small environment of both layouts for checks by hand: guess the secret sequence of each key.

The policy is a table of logits per key and position; a hint adds 6 nats to the correct symbol. As "tokens" a rollout is
one row of T decisions in units (turns) of two; as "chain" every unit is a row of two decisions (denoising steps).
The reward is 1 if all symbols are correct; "share" is the fraction of correct symbols.
"""

from dataclasses import replace

import torch

from robopolicy.core.decisions import Decisions
from robopolicy.text.rollouts.protocols import TEACHER, Task, Trajectory
from robopolicy.text.rollouts.trajectories import stack

STEP = 2  # decisions per unit
METRICS = (  # metrics that recipes read; here all are the fraction of correct symbols
    "advantage brevity brief concise consistency correct cost criterion efficiency first format grounded "
    "grounding judge legal analysis open progress refined role safe success verdict"
)


class SecretSequenceEnv:
    """Implements every environment protocol that recipe parts need."""

    def __init__(self, layout: str = "tokens", keys: int = 4, length: int = 6, symbols: int = 3, seed: int = 0) -> None:
        self.layout, self.length, self.symbols = layout, length, symbols
        self.generator = torch.Generator().manual_seed(seed)
        self.secret = torch.randint(symbols, (keys, length), generator=self.generator)
        self.logits = torch.zeros(keys, length, symbols, dtype=torch.float64, requires_grad=True)
        self.version = 0
        self.completed: list[Task] = []

    def tasks(self, budget: int = 4) -> list[Task]:
        return [Task(key, budget=budget) for key in range(len(self.secret))]

    def know(self, key: int, nats: float = 30.0) -> None:
        """Make the policy solve a key, or fail at it if `nats` is negative."""
        with torch.no_grad():
            self.logits[key] = 0.0
            self.logits[key].scatter_(1, self.secret[key][:, None], nats)

    def logp(self, task: Task) -> torch.Tensor:
        """Differentiable log-probabilities (T, symbols) given a task."""
        told = int(self.length * task.context.get("share", 0.0)) if task.context else 0
        bonus = torch.zeros(self.length, self.symbols, dtype=torch.float64)
        bonus[:told].scatter_(1, self.secret[task.key][:told, None], 6.0)
        return torch.log_softmax((self.logits[task.key] + bonus) / task.temperature, dim=-1)

    def rollout(self, tasks, *, units=None) -> list[Trajectory]:
        self.completed += tasks
        return [self._rollout(task, units) for task in tasks]

    def _rollout(self, task: Task, units: int | None) -> Trajectory:
        table = self.logp(task).detach()
        symbols = torch.multinomial(table.exp(), 1, generator=self.generator).squeeze(1)
        logp = table.gather(1, symbols[:, None]).squeeze(1)
        own = torch.ones(self.length, dtype=torch.bool)
        given = task.prefix or {"symbols": [], "own": [], "logp": []}
        start = len(given["symbols"])
        if start:
            symbols[:start] = torch.as_tensor(given["symbols"])
            own[:start] = torch.as_tensor(given["own"])
            logp[:start] = torch.as_tensor(given["logp"], dtype=torch.float64)
        if "fixed" in given:  # inpainted symbols: (T,) bool
            own &= ~given["fixed"]
        end = self.length if units is None else min(self.length, start + STEP * units)
        entropy = -(table.exp() * table).sum(1)
        return self.trajectory(task, symbols[:end], logp[:end], own[:end], entropy[:end])

    def trajectory(self, task, symbols, logp, own, entropy) -> Trajectory:
        end = len(symbols)
        right = symbols == self.secret[task.key][:end]
        unit = torch.arange(end) // STEP

        def rows(value):
            return value.view(-1, STEP) if self.layout == "chain" else value.view(1, -1)

        given = torch.zeros_like(own)
        extra = {"symbols": rows(symbols), "position": rows(torch.arange(end))}
        extra |= {"injected": rows(given), "structural": rows(torch.arange(end) == 0)}
        decisions = Decisions(rows(logp), mask=rows(own), entropy=rows(entropy), unit=rows(unit), extra=extra)
        finished = end == self.length
        share = float(right.double().mean())
        return Trajectory(
            task,
            decisions,
            reward=float(finished and bool(right.all())),
            metrics={"share": share, "length": float(end), "calls": end / STEP, "malformed": 0.0}
            | dict.fromkeys(METRICS.split(), share),
            version=self.version,
            finished=finished,
            record={"symbols": symbols, "logp": logp, "own": own},
        )

    def score(self, trajectory: Trajectory, task: Task | None = None) -> torch.Tensor:
        """Log-probabilities of a rollout under the current logits, in the shape of its rows."""
        extra = trajectory.decisions.extra
        return self.logp(task or trajectory.task)[extra["position"]].gather(2, extra["symbols"][:, :, None]).squeeze(2)

    def scored(self, trajectories) -> torch.Tensor:
        """Log-probabilities (N, T) of all rows of `batch`."""
        longest = max(trajectory.decisions.shape[1] for trajectory in trajectories)
        rows = [self.score(trajectory) for trajectory in trajectories]
        return torch.cat([torch.nn.functional.pad(row, (0, longest - row.shape[1])) for row in rows])

    def batch(self, trajectories) -> Decisions:
        return stack(trajectories)

    def branch(self, trajectory: Trajectory, unit: int) -> Task:
        end = unit * STEP
        prefix = {name: trajectory.record[name][:end] for name in ("symbols", "own", "logp")}
        return replace(trajectory.task, prefix=prefix)

    def rescore(self, trajectories, tasks) -> list[Trajectory]:
        result = []
        for trajectory, task in zip(trajectories, tasks, strict=True):
            logp = self.score(trajectory, task).detach()
            decisions = trajectory.decisions.with_fields(logp_old=logp, logp_behaviour=trajectory.decisions.logp_old)
            result.append(replace(trajectory, task=task, decisions=decisions))
        return result

    def hint(self, task: Task, kind: str, share: float) -> Task | None:
        return replace(task, context={"kind": kind, "share": share})

    def start_from_solution(self, task: Task, share: float) -> Task | None:
        end = STEP * round(share * self.length / STEP)
        told = self.secret[task.key][:end]
        return replace(task, prefix={"symbols": told, "own": [False] * end, "logp": [0.0] * end})

    def inpaint(self, task: Task, share: float) -> Task | None:
        count = round(share * self.length)
        fixed = torch.zeros(self.length, dtype=torch.bool)
        fixed[torch.randperm(self.length, generator=self.generator)[:count]] = True
        return replace(task, context={"share": 1.0}, prefix={"symbols": [], "own": [], "logp": [], "fixed": fixed})

    def teach(self, task: Task, count: int) -> list[Trajectory]:
        symbols, zeros = self.secret[task.key], torch.zeros(self.length, dtype=torch.float64)
        told = self.trajectory(task, symbols, zeros, torch.ones(self.length, dtype=torch.bool), zeros)
        return [replace(told, source=TEACHER)][:count]

    def repair(self, trajectory: Trajectory) -> Task:
        return replace(trajectory.task, prefix=None, context={"kind": "repair", "share": 1.0})

    def rewrite(self, task: Task, how: str) -> Task:
        return replace(task, context={"kind": how, "share": 0.5 if how == "simpler" else 0.0})

    def summarize(self, trajectories) -> list[tuple[Trajectory, Task]]:
        """Use each chosen rollout as its own summary."""
        told = [trajectory.record["symbols"] for trajectory in trajectories]
        given = [{"symbols": seen, "own": [False] * len(seen), "logp": [0.0] * len(seen)} for seen in told]
        return [(one, replace(one.task, prefix=prefix)) for one, prefix in zip(trajectories, given, strict=True)]
