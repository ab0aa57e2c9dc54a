"""One cell: a policy on fixed starts, in the simulator and the world model, and its FQE value on the recordings."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from benchmarks.parallel import run_cells
from benchmarks.worldmodel.tasks import ABLATIONS, SMALL, TASKS, BenchTask
from robopolicy.cli.main import main as robopolicy
from robopolicy.cli.policy_args import noisy_policy_entries, parse_noise
from robopolicy.data.formats.lerobot import read_lerobot
from robopolicy.evaluation.harness import evaluate
from robopolicy.evaluation.ope.fqe import FQE
from robopolicy.evaluation.ope.logs import Logs
from robopolicy.sim.registry import SimOptions, make_sim
from robopolicy.training.checkpoint import load_policy
from robopolicy.training.world_sims import load_world, world_sim

WORK = Path("runs/worldmodel")
HELD_OUT = 50_000  # first seed of the starts; recordings and demonstrations use other seeds
GAMMA = 0.99  # discount of FQE, whose values are discounted returns

Key = tuple[str, str, int]  # task, player, seed


class Failed(RuntimeError):
    """A step of a cell failed."""


def run_all(keys: Sequence[Key], *, jobs: int, keep: bool) -> list[dict[str, Any]]:
    """Run the missing cells: first recordings, world models and policies in sequence, then the cells."""
    return run_cells(keys, _run, name=cell_name, progress=_progress, jobs=jobs, keep=keep, prepare=_prepare)


def cell_name(key: Key) -> str:
    """Place of a cell under `benchmarks/results/cells`."""
    return f"worldmodel/{key[0]}-{key[1]}-{key[2]}"


def run_cell(task: BenchTask, player: str, seed: int) -> dict[str, Any]:
    """Outcomes of one policy per start, in the simulator and in the world model."""
    folder = world(task, seed)
    model, manifest = load_world(folder)
    manifest.require(folder)
    options = SimOptions(num_envs=min(32, task.episodes), cameras=(task.camera,), image_size=task.size)
    name, noise = parse_noise(player)
    checkpoint = None if name == "expert" else cloned(task, name, seed)
    who = name if checkpoint is None else str(checkpoint)
    (chosen,) = noisy_policy_entries([f"{who}+{noise:g}"], task.task, "cpu")
    sides: dict[str, Any] = {}
    for kind in ("real", "predicted"):
        real = kind == "real"
        with closing(make_sim(task.task, options) if real else world_sim(task.task, options, model, manifest)) as sim:
            sides[kind] = evaluate(chosen.make(), sim, episodes=task.episodes, seed=HELD_OUT).to_dict()
    value = None if checkpoint is None else fitted(task, checkpoint, noise, seed)
    return {"task": task.name, "player": player, "seed": seed, **sides, "fqe": value, "gate": manifest.gate}


def films(task: BenchTask, seed: int) -> Path:
    """Recorded episodes that train the world model."""
    folder = WORK / f"{task.name}-{seed}" / "films"
    if not folder.exists():
        views = ["--render", "--cameras", task.camera, "--image-size", str(task.size)]
        size = ["--episodes", str(task.films), "--seed", str(1_000_000 * (1 + seed))]
        _run_command("collect", task.task, *views, *size, "--policies", *task.behaviours, "--out", str(folder))
    return folder


def world(task: BenchTask, seed: int) -> Path:
    """The world model, trained once."""
    folder = WORK / f"{task.name}-{seed}" / "world"
    if (folder / "report.json").exists():
        return folder / "checkpoints" / "best"
    if (folder / "checkpoints" / "last").exists():  # an interrupted run
        _run_command("worldmodel", "train", "--resume", str(folder))
    else:
        shutil.rmtree(folder, ignore_errors=True)
        settings = ["--preset", task.preset, "--seed", str(seed), "--override", *task.settings]
        place = ["--out", str(folder.parent), "--name", folder.name]
        _run_command("worldmodel", "train", str(films(task, seed)), *place, *settings)
    return folder / "checkpoints" / "best"


def cloned(task: BenchTask, name: str, seed: int) -> Path:
    """Policy `HEAD-UPDATES`, cloned from the expert."""
    head, _, updates = name.partition("-")
    place = WORK / f"{task.base or task.name}-{seed}"
    data, folder = place / "demonstrations", place / name
    if not data.exists():
        size = ["--episodes", str(task.demonstrations), "--seed", str(100_000 + 1_000 * seed)]
        views = ["--cameras", task.camera, "--image-size", str(task.size)]
        _run_command("collect", task.task, *size, *views, "--out", str(data))
    if not (folder / "report.json").exists():
        shutil.rmtree(folder, ignore_errors=True)
        views = [f"task.cameras=[{task.camera}]", f"task.image_size={task.size}", "evaluation.episodes=0"]
        run = [f"budget.updates={updates}", f"seed={seed}", f"out={place}", f"name={folder.name}"]
        what = [f"task.name={task.task}", "algorithm=bc", f"policy={head}", f"dataset={data}"]
        _run_command("train", *what, *task.policy, *views, *run)
    return folder / "checkpoints" / "last"


def fitted(task: BenchTask, checkpoint: Path, noise: float, seed: int) -> float:
    """Discounted return by fitted Q-evaluation on the recordings."""
    policy, _ = load_policy(checkpoint)
    episodes = read_lerobot(films(task, seed)).without_closing_frames()
    logs = Logs(episodes, policy.spec, GAMMA)
    decided = logs.decide(policy, samples=task.drawn, deterministic=True, seed=seed)
    with closing(make_sim(task.task, SimOptions(num_envs=1))) as sim:
        low, high = sim.spec.action_low, sim.spec.action_high
    drawn = torch.randn(decided.shape, generator=torch.Generator().manual_seed(seed))
    decided = (decided + noise * (high - low) / 2 * drawn).clamp(low, high)
    return FQE(task.fqe, logs, decided, seed=seed).interval().estimate


def _run(key: Key) -> dict[str, Any]:
    torch.set_num_threads(1)
    name, player, seed = key
    return run_cell(_task(name), player, seed)


def _prepare(keys: Sequence[Key]) -> None:
    torch.set_num_threads(1)
    for name, seed in dict.fromkeys((key[0], key[2]) for key in keys):
        world(_task(name), seed)
        for head, updates in _task(name).cloned:
            cloned(_task(name), f"{head}-{updates}", seed)


def _task(name: str) -> BenchTask:
    return {SMALL.name: SMALL, **TASKS, **ABLATIONS}[name]


def _progress(cell: dict[str, Any]) -> str:
    rates = {kind: cell[kind]["summary"]["success"] for kind in ("real", "predicted")}
    return f"real {rates['real']:.2f}, predicted {rates['predicted']:.2f}"


def _run_command(*words: str) -> None:
    if robopolicy(list(words)) != 0:
        raise Failed(f"robopolicy {' '.join(words)}")
