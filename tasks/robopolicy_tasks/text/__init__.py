"""Text tasks with verifiable rewards, from this package, reasoning-gym (`reasoning_gym/ID`) or `prompts/FILE`."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING

from robopolicy.sim.registry import Expert, SimOptions, TaskEntry, TaskFamily, register_family
from robopolicy.sim.registry import register as register_entry

if TYPE_CHECKING:
    from robopolicy.sim.contract import VectorSim

BUILT_IN = {
    "arithmetic": (
        "Arithmetic",
        "Add five or six digits: dense success after little supervised fine-tuning.",
    ),
    "arithmetic_hard": ("ArithmeticHard", "Add and subtract three to six numbers below 100."),
    "calculator": ("Calculator", "Add with a calculator tool, whose calls are counted."),
    "countdown": ("Countdown", "Add and subtract three numbers, each used once, to reach another."),
    "countdown_hard": ("CountdownHard", "Reach a number with four digits, each used once: sparse success."),
    "grid": ("Grid", "Move to the goal of a small grid, one move per turn."),
    "panda": ("Panda", "Write a program of commands for a simulated Panda from an instruction."),
    "panda_turns": ("PandaTurns", "The same with one command per turn and a report of the hand after each."),
    "pits": ("Pits", "A larger grid with two pits to avoid and a near goal."),
    "waypoints": ("Waypoints", "The grid with waypoints announced before they are visited."),
}

MODULES = {
    "arithmetic_hard": "arithmetic",
    "countdown_hard": "countdown",
    "panda_turns": "panda",
    "pits": "grid",
    "waypoints": "grid",
}  # modules of tasks with another name


def _expert() -> Expert:
    from robopolicy.text.sim import DemonstrationExpert

    return DemonstrationExpert()


def _maker(module: str, name: str) -> Callable[[SimOptions], VectorSim]:
    def make(options: SimOptions) -> VectorSim:
        from robopolicy.text.sim import TextSim

        return TextSim(getattr(import_module(f"robopolicy_tasks.text.{module}"), name)(), options)

    return make


def _gym_entry(name: str) -> TaskEntry:
    def make(options: SimOptions) -> VectorSim:
        from robopolicy.text.sim import TextSim
        from robopolicy_tasks.text.gym import GymTask

        return TextSim(GymTask(name), options)

    return TaskEntry(
        name=f"reasoning_gym/{name}",
        make=make,
        description="A generated problem of reasoning-gym.",
        make_expert=_expert,
        backends=("text",),
        requires="text",
        module="reasoning_gym",
    )


def _prompts_entry(name: str) -> TaskEntry:
    from robopolicy.text.datasets import PromptTask

    task = PromptTask(name)

    def make(options: SimOptions) -> VectorSim:
        from robopolicy.text.sim import TextSim

        return TextSim(task, options)

    return TaskEntry(
        name=task.name, make=make, description="The prompts of a file.", make_expert=_expert, backends=("text",)
    )


def register() -> None:
    """Register the text family."""
    for task, (name, description) in BUILT_IN.items():
        register_entry(
            TaskEntry(
                name=f"text/{task}",
                make=_maker(MODULES.get(task, task), name),
                description=description,
                make_expert=_expert,
                backends=("text",),
            )
        )
    generators = "Any generator of reasoning-gym by its own id."
    register_family("reasoning_gym", TaskFamily(_gym_entry, generators, requires="text", module="reasoning_gym"))
    register_family("prompts", TaskFamily(_prompts_entry, "The prompts of a .jsonl or .parquet file."))
