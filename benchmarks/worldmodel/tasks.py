"""Tasks of the benchmark: recordings, world model, and the ranked policies, which the recordings do not contain."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial

from benchmarks.worldmodel.policies import Clone, Composed, FineTuned, Recipe
from robopolicy.schema import to_dict
from robopolicy.worldmodel.latent import PRESETS


@dataclass(frozen=True)
class BenchTask:
    """One world model and the policies ranked in it."""

    name: str
    task: str  # registered task id
    camera: str
    size: int  # pixels
    policies: dict[str, Recipe]
    behaviours: tuple[str, ...]  # recorded policies, with noise after a plus
    films: int  # recorded episodes of all behaviours together
    preset: str  # of the world model
    settings: tuple[str, ...]  # of its training
    after_success: int = 10  # recorded steps after success
    episodes: int = 100  # per policy, in the simulator and in the world model
    replays: int = 50  # of those in the simulator, replayed in the world model
    calibrated: bool = True  # whether the success head keeps its calibration
    base: str = ""  # of an ablation: the task whose policies it ranks
    recorders: dict[str, Recipe] = field(default_factory=dict[str, Recipe])  # recorded clones, which are not ranked

    def facts(self) -> dict[str, object]:
        """Recordings and training of the world model; cells with others are out of date."""
        recordings = {"behaviours": list(self.behaviours), "films": self.films, "after_success": self.after_success}
        return {**recordings, "model": to_dict(PRESETS[self.preset]), "training": [self.preset, *self.settings]}


CHAIN = ("policy.hidden=[128,128,128]", "policy.steps=10")
TOKENS = ("policy.transformer_width=64", "policy.transformer_layers=2")  # a fifth of the cost of the default
DSRL = ("algorithm=dsrl_na", "budget.updates=0", "budget.env_steps=20000")
REINFLOW = ("sim.num_envs=64", "algorithm.num_steps=8", "algorithm.epochs=10", "budget.updates=0")


def _clone(obs_keys: str, head: str, demonstrations: int, updates: int, *settings: str) -> Clone:
    return Clone(head, demonstrations, updates, (f"task.obs_keys={obs_keys}", *settings))


def _recorders(obs_keys: str) -> dict[str, Recipe]:
    """Clones that are recorded for their near misses; they learn from other demonstrations than the ranked policies."""
    return {"flow-4": _clone(obs_keys, "flow", 4, 2000), "gaussian-12": _clone(obs_keys, "gaussian", 12, 1000)}


def _policies(obs_keys: str, pixels: dict[str, Recipe]) -> dict[str, Recipe]:
    """Policies of the state `obs_keys`, and of `pixels`. Names end with the number of demonstrations."""
    clone = partial(_clone, obs_keys)
    return {
        "flow-6": clone("flow", 6, 2000),
        "flow-25": clone("flow", 25, 2000),
        "flow-200": clone("flow", 200, 4000),
        "flow-200-short": clone("flow", 200, 200),
        "gaussian-6": clone("gaussian", 6, 1000),
        "gaussian-200": clone("gaussian", 200, 1000),
        "diffusion-6": clone("diffusion", 6, 2000, *CHAIN),
        "diffusion-25": clone("diffusion", 25, 2000, *CHAIN),
        "meanflow-25": clone("meanflow", 25, 2000, "policy.steps=1"),
        "autoregressive-25": clone("autoregressive", 25, 2000, *TOKENS),
        **pixels,
        "reinflow": FineTuned("fine_tune", "flow-6", (*REINFLOW, "budget.env_steps=100000")),
        "dsrl": FineTuned("offline_to_online", "flow-6", DSRL),
        "composed": Composed(("flow-6", "diffusion-6")),
    }


NOISY = ("expert", "expert+0.2", "expert+0.5", "random")
CLONES = ("flow-4", "flow-4+0.2", "gaussian-12", "gaussian-12+0.2")
REPLAYS = ("replay", "replay+0.2")
RECORDED = (*NOISY, *CLONES, *REPLAYS)
LIGHT = (  # a denoiser of a third of the cost of the preset
    "model.width=64",
    "model.blocks=4",
    "learner.autoencoder_updates=2500",
    "learner.updates=5000",
    "evaluation.every=3750",
)
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
VIEW = ("task.cameras=[top]", "task.image_size=64", "task.obs_keys=[image.top,gripper]")
PIXELS = (*VIEW, "algorithm.batch_size=32")

TASKS = {
    task.name: task
    for task in (
        BenchTask(
            name="lift",
            task="manipulation/lift",
            camera="front",
            size=64,
            policies=_policies("[state]", {}),
            behaviours=RECORDED,
            films=1200,
            preset="tiny",
            settings=LIGHT,
            recorders=_recorders("[state]"),
        ),
        BenchTask(
            name="push",
            task="toy/push",
            camera="top",
            size=64,
            policies=_policies(
                "[gripper,block]",
                {
                    "flow-pixels-200": Clone("flow", 200, 1500, PIXELS),
                    "gaussian-pixels-200": Clone("gaussian", 200, 800, PIXELS),
                },
            ),
            behaviours=RECORDED,
            films=1200,
            preset="tiny",
            settings=LIGHT,
            recorders=_recorders("[gripper,block]"),
        ),
    )
}
LIFT = TASKS["lift"]
ABLATIONS = {
    task.name: task
    for task in (
        replace(LIFT, name="lift-few", base="lift", films=300),
        replace(LIFT, name="lift-no-clones", base="lift", behaviours=(*NOISY, *REPLAYS)),
        replace(LIFT, name="lift-no-replays", base="lift", behaviours=(*NOISY, *CLONES)),
        replace(LIFT, name="lift-to-success", base="lift", after_success=0),
        replace(LIFT, name="lift-exact-past", base="lift", settings=(*LIGHT, "learner.history_noise=0")),
        replace(LIFT, name="lift-one-step", base="lift", settings=(*LIGHT, "learner.state_horizon=1")),
        replace(LIFT, name="lift-uncalibrated", base="lift", calibrated=False),
    )
}
SMALL = BenchTask(
    name="quick",
    task="toy/push",
    camera="top",
    size=32,
    policies={name: TASKS["push"].policies[name] for name in ("flow-6", "flow-200-short", "gaussian-200")},
    behaviours=("expert", "expert+0.5", "expert+1", "random"),
    films=80,
    preset="smoke",
    settings=QUICK,
    episodes=24,
    replays=12,
)
EVERY_TASK = {SMALL.name: SMALL, **TASKS, **ABLATIONS}
