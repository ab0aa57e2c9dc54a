"""Cloned bases, their demonstrations, and their success on held-out seeds.

A clone of a few demonstrations succeeds in 20 % of the episodes or in 80 %, depending on which demonstrations it saw.
Every base of the table therefore gets the number of demonstrations with which it has room to improve and success to
learn from.
"""

from __future__ import annotations

import hashlib
import json
from contextlib import closing
from pathlib import Path
from typing import Any

from benchmarks.finetune.methods import DIFFUSION, FLOW, Base
from benchmarks.finetune.tasks import BenchTask
from benchmarks.study import run_command, shared, train_once
from robopolicy.atomic import write_text
from robopolicy.evaluation.harness import evaluate
from robopolicy.evaluation.result import EvalResult
from robopolicy.sim.registry import SimOptions, make_sim, observation_options
from robopolicy.training.checkpoint import MODEL, load_policy
from robopolicy.training.manifest import read_manifest

WORK = Path("runs/finetune")
EPISODES = 200
HELD_OUT = 50_000  # first held-out seed; training evaluates from seed 10000 and collects from seed 1000000
CALIBRATION = 40_000  # first seed of the 100 episodes that choose the number of demonstrations
LOW, HIGH = 0.4, 0.7  # success of a base
CLONES = 5  # numbers of demonstrations that are tried


def demonstrations(task: BenchTask, seed: int, kind: str = FLOW.kind) -> Path:
    """The dataset of a task and seed for a kind of head, collected once."""
    return _collected(task, seed, demonstration_count(task, seed, kind))


def demonstration_count(task: BenchTask, seed: int, kind: str) -> int:
    """Episodes from which the clone of this seed succeeds in 40 to 70 % of episodes, or in nearly so many.

    The search starts at the task's number and goes up below the range, down above it. All heads of a kind share the
    number. Tasks without success use the task's number.
    """
    count = task.demonstrations[kind]
    if task.source_steps:
        return count
    reference = next(base for base in (FLOW, DIFFUSION) if base.kind == kind)
    kept = WORK / "counts" / f"{task.name}-{kind}-{seed}.json"
    with shared(kept):
        if not kept.exists():
            success: dict[int, float] = {}
            while len(success) < CLONES and count > 0 and count not in success:
                cloned = clone(reference, task, seed, count)
                found = held_out(cloned, task.task, episodes=100, first=CALIBRATION).success
                assert found is not None
                success[count] = float(found.mean())
                step = max(1, count // 5)
                count += step if success[count] < LOW else -step if success[count] > HIGH else 0
            write_text(kept, json.dumps(success))
        success = {int(episodes): each for episodes, each in json.loads(kept.read_text(encoding="utf-8")).items()}
    return min(success, key=lambda episodes: abs(success[episodes] - (LOW + HIGH) / 2))


def base_policy(base: Base, task: BenchTask, seed: int) -> Path:
    """The cloned base, trained once for all methods that start from it."""
    return clone(base, task, seed, demonstration_count(task, seed, base.kind))


def judge(checkpoint: Path | None, task: str) -> dict[str, Any] | None:
    """Summary on the held-out seeds."""
    return None if checkpoint is None else held_out(checkpoint, task).summary()


def held_out(checkpoint: Path, task: str, *, episodes: int = 0, first: int = HELD_OUT) -> EvalResult:
    """Evaluation on 200 held-out seeds, run once per policy: the best checkpoint is often the base or the last."""
    kept = WORK / "held_out" / f"{task.replace('/', '_')}-{first}-{_fingerprint(checkpoint)}.json"
    if not kept.exists():
        policy, _ = load_policy(checkpoint)
        options = SimOptions(num_envs=32, **observation_options([policy.spec.observation]))
        with closing(make_sim(task, options)) as sim:
            result = evaluate(policy, sim, episodes=episodes or EPISODES, seed=first)
        write_text(kept, json.dumps(result.to_dict()))
    return EvalResult.from_dict(json.loads(kept.read_text(encoding="utf-8")))


def _fingerprint(checkpoint: Path) -> str:
    """A hash that is equal for checkpoints of the same policy."""
    manifest = read_manifest(checkpoint)
    what = [manifest.policy, manifest.config, manifest.spec, manifest.files[MODEL]]
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:32]


def _collected(task: BenchTask, seed: int, episodes: int) -> Path:
    folder = WORK / "data" / f"{task.name}-{episodes}-{seed}"
    with shared(folder):
        if not folder.exists():
            size = ["--episodes", str(episodes), "--seed", str(100_000 + 1_000 * seed)]
            policy = (
                ["--policy", str(_half_trained(task, seed)), "--keep-failures", "--stochastic"]
                if task.source_steps
                else []
            )
            run_command("collect", task.task, *size, *policy, "--out", str(folder))
    return folder


def clone(base: Base, task: BenchTask, seed: int, episodes: int) -> Path:
    """The cloned base from a number of demonstrations, trained once."""
    data = _collected(task, seed, episodes)
    return train_once(
        WORK / "base" / f"{base.name}-{task.name}-{episodes}-{seed}",
        *(f"task={task.task}", "algorithm=bc", f"dataset={data}", *base.settings, *task.chunk),
        *(f"budget.updates={base.updates}", "evaluation.episodes=0", f"seed={seed}"),
    )


def _half_trained(task: BenchTask, seed: int) -> Path:
    return train_once(
        WORK / "source" / f"sac-{task.name}-{seed}",
        *(f"task={task.task}", "policy=squashed_gaussian", "algorithm=sac", *task.chunk, "sim.num_envs=8"),
        *(
            f"budget.env_steps={task.source_steps}",
            "evaluation.episodes=10",
            "evaluation.max_fraction=0",
            f"seed={seed}",
        ),
    )
