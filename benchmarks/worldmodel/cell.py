"""One cell: a policy on fixed starts in the simulator and in the world model, and replays of its real episodes."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from benchmarks.finetune.cell import run_command
from benchmarks.parallel import run_cells
from benchmarks.worldmodel.policies import PolicyStore
from benchmarks.worldmodel.tasks import ABLATIONS, SMALL, TASKS, BenchTask
from robopolicy.data.collect import collect
from robopolicy.data.episodes import Episode, Episodes
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

Key = tuple[str, str, int]  # task, policy, seed


def run_all(keys: Sequence[Key], *, jobs: int, keep: bool) -> list[dict[str, Any]]:
    """Run the missing cells, by seed and task: first recordings, world model and policies, then the cells."""
    groups: dict[tuple[int, str], list[Key]] = {}
    for key in keys:
        groups.setdefault((key[2], key[0]), []).append(key)
    options: dict[str, Any] = {"name": cell_name, "progress": _progress, "jobs": jobs, "keep": keep}
    return [cell for group in groups.values() for cell in run_cells(group, _run, prepare=_prepare, **options)]


def cell_name(key: Key) -> str:
    """Place of a cell under `benchmarks/results/cells`."""
    return f"worldmodel/{key[0]}-{key[1]}-{key[2]}"


def run_cell(task: BenchTask, name: str, seed: int) -> dict[str, Any]:
    """Outcomes of one policy per start in the simulator and in the world model, and replays of its episodes."""
    folder = world(task, seed)
    model, manifest = load_world(folder)
    if not task.calibrated:
        model.success_bias.zero_()
    options = SimOptions(num_envs=min(32, task.episodes), cameras=(task.camera,), image_size=task.size)
    policy = store(task, seed).policy(name)
    with closing(make_sim(task.task, options)) as sim:
        sides = {"real": evaluate(policy, sim, episodes=task.episodes, seed=HELD_OUT).to_dict()}
        replays = replay(model, recorded(policy, sim, model, task.replays), task.replays)
    with closing(world_sim(task.task, options, model, manifest)) as sim:
        sides["predicted"] = evaluate(policy, sim, episodes=task.episodes, seed=HELD_OUT).to_dict()
    facts = {"task": task.name, "policy": name, "seed": seed}
    return {**facts, **sides, "replays": replays.to_dict(), "gate": manifest.gate}


def recorded(policy: Policy, sim: VectorSim, model: LatentVideoModel, episodes: int) -> VideoDataset:
    """Videos of the first real episodes of a policy."""
    found = _Recordings()
    size = {"episodes": episodes, "seed": HELD_OUT, "only_success": False}
    collect(sim, PolicyExpert(policy), found, **size, behaviour="ranked")
    return VideoDataset(model.spec, Episodes.from_list(found, sim.spec.control_dt))


class _Recordings(list[Episode]):
    """Episode writer that keeps the episodes in memory."""

    def add(self, episode: Episode) -> None:
        """Keep one episode."""
        self.append(episode)


def films(task: BenchTask, seed: int) -> Path:
    """Recorded episodes that train the world model."""
    folder = WORK / f"{task.name}-{seed}" / "films"
    if not folder.exists():
        views = ["--render", "--cameras", task.camera, "--image-size", str(task.size)]
        size = ["--episodes", str(task.films), "--seed", str(1_000_000 * (1 + seed))]
        run_command("collect", task.task, *views, *size, "--policies", *task.behaviours, "--out", str(folder))
    return folder


def world(task: BenchTask, seed: int) -> Path:
    """The world model, trained once."""
    if not task.calibrated:
        task = _task(task.base)
    folder = WORK / f"{task.name}-{seed}" / "world"
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
    """The ranked policies; ablations rank those of their base."""
    folder = WORK / f"{task.base or task.name}-{seed}"
    return PolicyStore(folder, task.task, task.camera, task.size, task.policies, seed)


def _run(key: Key) -> dict[str, Any]:
    torch.set_num_threads(1)
    name, policy, seed = key
    return run_cell(_task(name), policy, seed)


def _prepare(keys: Sequence[Key]) -> None:
    torch.set_num_threads(1)
    for name, policy, seed in keys:
        world(_task(name), seed)
        store(_task(name), seed).policy(policy)


def _task(name: str) -> BenchTask:
    return {SMALL.name: SMALL, **TASKS, **ABLATIONS}[name]


def _progress(cell: dict[str, Any]) -> str:
    rates = {kind: cell[kind]["summary"]["success"] for kind in ("real", "predicted")}
    found = cell["replays"]
    detail = f"replays {found['recorded']:.2f}, {found['detected']:.2f} detected, {found['replayed']:.2f} replayed"
    return f"real {rates['real']:.2f}, predicted {rates['predicted']:.2f} ({detail})"
