"""Tuning of the juggler's gains with one agent per group of gains and a shared score.

The scripted juggler of the volleyball drills has eight tunable settings. Gains of one control loop interact and share
an agent, the others have separate ones: six agents with 70 options, where all combinations would be 390,625. The score
is the mean return of some episodes with the same seeds for every trial. Afterwards the default and the tuned settings
are compared on held-out seeds. Starting from the ranges only, the agents reach nearly the default settings, but do not
exceed them. `robopolicy tune_juggler` is the command. Source: Krishnan et al. 2022.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from robopolicy.contrib.drone_volleyball.factored import FactoredAgents, Parameter
from robopolicy.contrib.drone_volleyball.flight import Gains
from robopolicy.contrib.drone_volleyball.juggler import Juggler, JugglingStyle
from robopolicy.plurals import counted
from robopolicy.sim.contract import VectorSim
from robopolicy.sim.registry import SimOptions, make_sim


@dataclass(frozen=True)
class Config:
    """Settings of the tuning."""

    task: str = "volley/pass"  # any volley drill
    rounds: int = 12  # of trials
    trials: int = 8  # per round
    episodes: int = 16  # per trial
    steps: int = 500  # maximum control steps of a trial's episodes
    seed: int = 0  # of the first episode, and of the agents
    held_out: int = 100  # episodes of the final comparison, without a step limit
    out: str = "runs/tune_juggler"  # folder for style.json


HELD_OUT = 10_000  # first held-out seed

AGENTS = [
    [Parameter("position", 4.0, 16.0, 5, log=True), Parameter("velocity", 2.5, 10.0, 5, log=True)],
    [Parameter("attitude", 50.0, 200.0, 5, log=True), Parameter("turning", 9.0, 36.0, 5, log=True)],
    [Parameter("swing", 0.6, 1.2, 5)],
    [Parameter("loosen", 0.2, 0.6, 5)],
    [Parameter("ahead", 0.0, 0.08, 5)],
    [Parameter("lead", 1.0, 2.0, 5)],
]
NAMES = [parameter.name for group in AGENTS for parameter in group]


def style_of(vector: Sequence[float]) -> JugglingStyle:
    """The juggler's style with the settings `vector`, in the order of `NAMES`."""
    settings = dict(zip(NAMES, vector, strict=True))
    loops = {name: settings.pop(name) for name in ("position", "velocity", "attitude", "turning")}
    return JugglingStyle(gains=replace(Gains(), **loops), **settings)


def returns(sim: VectorSim, style: JugglingStyle, seed: int, steps: int) -> torch.Tensor:
    """Returns (N,) of the episodes that start at `seed`, one per environment."""
    sim.reset(seed)
    juggler, active, total = Juggler(style), torch.ones(sim.num_envs, dtype=torch.bool), torch.zeros(sim.num_envs)
    for _ in range(steps):
        step = sim.step(juggler(sim, {}), active)
        total += step.reward
        active &= ~step.done
        if not active.any():
            break
    return total


def tune(config: Config, report: Callable[[str], None] = print) -> tuple[float, float]:
    """Tune and save; return the mean returns of the default and of the tuned settings on held-out seeds.

    Args:
        config: Settings.
        report: Called with a line per round and a final one.
    """
    sim = make_sim(config.task, SimOptions(num_envs=config.episodes))
    agents = FactoredAgents(AGENTS, population=config.trials, seed=config.seed)
    for number in range(config.rounds):
        scores = [
            float(returns(sim, style_of(vector), config.seed, config.steps).mean()) for vector in agents.ask().tolist()
        ]
        agents.tell(torch.tensor(scores))
        report(f"round {number + 1}: returns from {min(scores):.2f} to {max(scores):.2f}")

    best = agents.best().tolist()
    path = Path(config.out) / "style.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(dict(zip(NAMES, best, strict=True)), indent=2))
    sim = make_sim(config.task, SimOptions(num_envs=config.held_out))
    before, after = (
        float(returns(sim, style, HELD_OUT, sim.spec.max_episode_steps).mean())
        for style in (JugglingStyle(), style_of(best))
    )
    episodes = counted(config.held_out, "held-out episode")
    report(f"{episodes}: return {before:.2f} with default settings, {after:.2f} tuned; {path}")
    return before, after
