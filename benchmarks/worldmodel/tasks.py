"""Tasks of the benchmark: recordings, world model, and the ranked policies, which the recordings do not contain."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from robopolicy.critics.q import CriticConfig
from robopolicy.evaluation.ope.fqe import FQEConfig
from robopolicy.nets.vision import VisionConfig


@dataclass(frozen=True)
class BenchTask:
    """One world model and the policies ranked in it."""

    name: str
    task: str  # registered task id
    camera: str
    size: int  # pixels
    behaviours: tuple[str, ...]  # recorded behaviour policies
    films: int  # recorded episodes of all behaviours together
    preset: str  # of the world model
    settings: tuple[str, ...]  # of its training
    cloned: tuple[tuple[str, int], ...] = ()  # head and updates of each; empty: the scripted expert
    noises: tuple[float, ...] = (0.0, 0.3, 0.6)  # action noise; every policy is ranked with each
    demonstrations: int = 200  # cloned episodes
    policy: tuple[str, ...] = ()  # settings of the cloning
    episodes: int = 100  # per policy, in the simulator and in the world model
    fqe: FQEConfig = field(default_factory=FQEConfig)
    drawn: int = 4  # actions of the policy at every recorded frame, for FQE
    base: str = ""  # of an ablation: the task whose policies it ranks

    @property
    def players(self) -> list[str]:
        """Names of the ranked policies."""
        who = [f"{head}-{updates}" for head, updates in self.cloned] or ["expert"]
        return [name + (f"+{noise:g}" if noise else "") for name in who for noise in self.noises]


SEEING = VisionConfig(widths=(16, 32, 64))  # of the critics of FQE
FILMED = ("expert", "expert+0.2", "expert+0.5", "expert+1", "random", "random+0.5")
FULL = ("learner.autoencoder_updates=4000", "learner.updates=7000")
QUICK = (
    "learner.autoencoder_updates=600",
    "learner.autoencoder_batch=8",
    "learner.autoencoder_lr=6e-3",
    "learner.updates=1500",
    "learner.batch_size=32",
    "learner.lr=3e-3",
    "learner.history_noise=0.05",
    "evaluation.every=10000",
)

TASKS = {
    task.name: task
    for task in (
        BenchTask(
            name="push",
            task="toy/push",
            camera="top",
            size=64,
            behaviours=FILMED,
            films=2400,
            preset="tiny",
            settings=FULL,
            cloned=(("flow", 50), ("flow", 200), ("gaussian", 800), ("diffusion", 2500)),
            policy=("task.obs_keys=[image.top,gripper]", "algorithm.batch_size=32"),
            drawn=1,
            fqe=FQEConfig(  # it also learns from images
                steps=1500, batch_size=32, critic=CriticConfig(members=8, hidden=(128, 128), vision=SEEING)
            ),
        ),
        BenchTask(
            name="lift",
            task="manipulation/lift",
            camera="front",
            size=64,
            behaviours=FILMED,
            films=2400,
            preset="tiny",
            settings=FULL,
            cloned=(("flow", 100), ("flow", 300), ("gaussian", 1000), ("diffusion", 3000)),
            noises=(0.0, 0.1, 0.2),
            policy=("task.obs_keys=[state]",),
        ),
    )
}
ABLATIONS = {
    task.name: task
    for task in (  # ablations of the source: data diversity, and pretrained weights
        replace(TASKS["push"], name="push-few", base="push", films=300),
        replace(TASKS["push"], name="push-narrow", base="push", behaviours=("expert", "random")),
        replace(TASKS["push"], name="push-pretrained", base="push", settings=("pretrained.source=models/wan",)),
    )
}
SMALL = BenchTask(
    name="quick",
    task="toy/push",
    camera="top",
    size=32,
    behaviours=("expert", "expert+0.5", "expert+1", "random"),
    films=80,
    preset="smoke",
    settings=QUICK,
    noises=(0.0, 0.3, 0.6, 0.9, 1.2, 2.0),
    episodes=24,
)
