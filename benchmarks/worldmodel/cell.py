"""One cell: a policy on fixed starts in the simulator and in the world model, and replays of its real episodes."""

from __future__ import annotations

import shutil
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.study import run_command, shared
from benchmarks.worldmodel.policies import PolicyStore
from benchmarks.worldmodel.tasks import EVERY_TASK, BenchTask
from robopolicy.data.collect import EpisodeList, collect
from robopolicy.data.episodes import Episodes
from robopolicy.evaluation.actors import PolicyExpert
from robopolicy.evaluation.harness import evaluate
from robopolicy.policies.base import Policy
from robopolicy.sim.contract import VectorSim
from robopolicy.sim.registry import SimOptions, make_sim
from robopolicy.training.world_sims import load_world, world_sim
from robopolicy.worldmodel.base import LatentVideoModel
from robopolicy.worldmodel.replays import replay
from robopolicy.worldmodel.videos import VideoDataset

WORK = Path("runs/worldmodel")
HELD_OUT = 50_000  # first seed of the starts; recordings and demonstrations use other seeds
RECORDERS = 500  # added to the seed of recorded clones


def run_cell(task: BenchTask, name: str, seed: int) -> dict[str, Any]:
    """Outcomes of one policy per start in the simulator and in the world model, and replays of its episodes."""
    start = time.perf_counter()
    folder = world(task, seed)
    model, manifest = load_world(folder)
    if not task.calibrated:
        model.success_bias.zero_()
    options = SimOptions(num_envs=min(32, task.episodes), cameras=(task.camera,), image_size=task.size)
    policy = store(task, seed).policy(name)
    with closing(make_sim(task.task, options)) as sim:
        sides = {"real": evaluate(policy, sim, episodes=task.episodes, seed=HELD_OUT).to_dict()}
    with closing(make_sim(task.task, replace(options, ends_on_success=False))) as sim:
        replays = replay(model, recorded(policy, sim, model, task), task.replays)
    with closing(world_sim(task.task, options, model, manifest)) as sim:
        sides["predicted"] = evaluate(policy, sim, episodes=task.episodes, seed=HELD_OUT).to_dict()
    facts = {"task": task.name, "policy": name, "seed": seed, **task.facts()}
    facts["seconds"] = round(time.perf_counter() - start, 1)
    return {**facts, **sides, "replays": replays.to_dict(), "gate": manifest.gate}


def recorded(policy: Policy, sim: VectorSim, model: LatentVideoModel, task: BenchTask) -> VideoDataset:
    """Videos of the first real episodes of a policy."""
    found = EpisodeList()
    size = {"episodes": task.replays, "seed": HELD_OUT, "only_success": False}
    collect(sim, PolicyExpert(policy), found, **size, behaviour="ranked", after_success=task.after_success)
    return VideoDataset(model.spec, Episodes.from_list(found, sim.spec.control_dt))


def films(task: BenchTask, seed: int) -> Path:
    """Recorded episodes that train the world model."""
    folder = WORK / f"{task.name}-{seed}" / "films"
    with shared(folder):
        if not folder.exists():
            views = ["--render", "--cameras", task.camera, "--image-size", str(task.size)]
            size = ["--episodes", str(task.films), "--after-success", str(task.after_success)]
            size += ["--seed", str(1_000_000 * (1 + seed))]
            policies = [recorded_policy(task, seed, behaviour) for behaviour in task.behaviours]
            run_command("collect", task.task, *views, *size, "--policies", *policies, "--out", str(folder))
    return folder


def recorded_policy(task: BenchTask, seed: int, behaviour: str) -> str:
    """A behaviour for the command line: clones by their checkpoints."""
    name, plus, noise = behaviour.partition("+")
    if name not in task.recorders:
        return behaviour
    folder = WORK / f"{task.base or task.name}-{seed}" / "recorders"
    made = PolicyStore(folder, task.task, task.camera, task.size, task.recorders, RECORDERS + seed)
    return f"{made.checkpoint(name)}{plus}{noise}"


def world(task: BenchTask, seed: int) -> Path:
    """The world model, trained once."""
    if not task.calibrated:
        task = EVERY_TASK[task.base]
    folder = WORK / f"{task.name}-{seed}" / "world"
    with shared(folder):
        if (folder / "report.json").exists():
            return folder / "checkpoints" / "best"
        if (folder / "checkpoints" / "last").exists():  # an interrupted run
            run_command("worldmodel", "train", "--resume", str(folder))
        else:
            shutil.rmtree(folder, ignore_errors=True)
            settings = ["--preset", task.preset, "--seed", str(seed), "--override", *task.settings]
            place = ["--out", str(folder.parent), "--name", folder.name]
            run_command("worldmodel", "train", str(films(task, seed)), *place, *settings)
    return folder / "checkpoints" / "best"


def store(task: BenchTask, seed: int) -> PolicyStore:
    """The ranked policies; ablations rank the policies of their base."""
    folder = WORK / f"{task.base or task.name}-{seed}"
    return PolicyStore(folder, task.task, task.camera, task.size, task.policies, seed)
