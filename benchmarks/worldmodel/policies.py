"""Ranked policies: clones of the scripted expert, fine-tuned clones, and compositions. Each is made once and stored."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from benchmarks.study import run_command, shared, train_once
from robopolicy.policies.base import Policy
from robopolicy.policies.wrappers.composed import compose
from robopolicy.training.checkpoint import load_policy

CHUNK = ("chunk.horizon=4", "chunk.action_horizon=4")


@dataclass(frozen=True)
class Clone:
    """Behavior cloning."""

    head: str
    demonstrations: int  # episodes of the scripted expert
    updates: int
    settings: tuple[str, ...] = ()  # of `robopolicy train`


@dataclass(frozen=True)
class FineTuned:
    """Reinforcement learning from a clone."""

    experiment: str
    base: str  # name of the clone
    settings: tuple[str, ...]  # of `robopolicy train`


@dataclass(frozen=True)
class Composed:
    """Convex composition of policies with equal weights."""

    parents: tuple[str, ...]  # names


Recipe = Clone | FineTuned | Composed


@dataclass(frozen=True)
class PolicyStore:
    """Folder with the policies of one task and seed."""

    folder: Path
    task: str  # registered task id
    camera: str
    size: int  # pixels
    recipes: dict[str, Recipe]
    seed: int

    def policy(self, name: str) -> Policy:
        """Load the policy `name`, which is made first if necessary."""
        recipe = self.recipes[name]
        if isinstance(recipe, Composed):
            return compose([self.policy(parent) for parent in recipe.parents])
        return load_policy(self.checkpoint(name))[0]

    def checkpoint(self, name: str) -> Path:
        """Checkpoint of a clone or a fine-tuned clone, which is made first if necessary."""
        recipe, run = self.recipes[name], (f"seed={self.seed}", "evaluation.episodes=0")
        if isinstance(recipe, Clone):
            data = f"dataset={self._demonstrations(recipe.demonstrations)}"
            start = (f"task={self.task}", "algorithm=bc", f"policy={recipe.head}", data, *CHUNK)
            run = (*run, f"budget.updates={recipe.updates}")
        else:
            assert isinstance(recipe, FineTuned)
            start = (
                f"experiment={recipe.experiment}",
                f"task={self.task}",
                f"init_from={self.checkpoint(recipe.base)}",
            )
        return train_once(self.folder / name, *start, *run, *recipe.settings)

    def _demonstrations(self, episodes: int) -> Path:
        """Successful episodes of the scripted expert."""
        folder = self.folder / f"demonstrations-{episodes}"
        with shared(folder):
            if not folder.exists():
                size = ["--episodes", str(episodes), "--seed", str(100_000 + 1_000 * self.seed)]
                views = ["--cameras", self.camera, "--image-size", str(self.size)]
                run_command("collect", self.task, *size, *views, "--out", str(folder))
        return folder
