"""Rejection of settings of a run that differ from their defaults and that nothing reads."""

from __future__ import annotations

from collections.abc import Collection

from robopolicy.algorithms.registry import ALGORITHMS
from robopolicy.nets.backbone import BACKBONES, BackboneConfig
from robopolicy.nets.encoder import CLOUD_PREFIX, ENCODER_FIELDS
from robopolicy.schema import reject_unused
from robopolicy.sim.registry import NO_TASK
from robopolicy.spec import IMAGE_PREFIX
from robopolicy.training.config import TaskConfig, TrainConfig, section
from robopolicy.training.make_source import SOURCES


def check_unused(config: TrainConfig) -> None:
    """Raise a UserError for a setting that has no effect with the task, the policy and the algorithm of a run."""
    algorithm, sim, evaluation = str(config.algorithm["name"]), config.sim, config.evaluation
    if not getattr(SOURCES[ALGORITHMS[algorithm].data_source], "uses_replay", True):
        reject_unused(config.replay, "replay", f"with algorithm={algorithm}, which has no replay")
    if not config.replay.hindsight:
        reject_unused(config.replay.hindsight, "replay.hindsight", "with replay.hindsight.strategy=none", "fraction")
    if not sim.num_workers:
        reject_unused(sim, "sim", "with sim.num_workers=0", "worker_backend", "weights_every")
    if config.task.name != NO_TASK:
        why = f"with task={config.task.name}; episodes of the dataset are held out with task={NO_TASK} only"
        reject_unused(evaluation, "evaluation", why, "held_out")
    elif not evaluation.episodes:
        reject_unused(evaluation, "evaluation", "with evaluation.episodes=0", "held_out")
    if not config.init_from:  # a checkpoint sets the policy
        _check_backbone(config)


def _check_backbone(config: TrainConfig) -> None:
    """Raise a UserError for sizes of another backbone than the chosen one."""
    policy = section("policy", config.policy)[1]
    if isinstance(policy, BackboneConfig) and (names := vars(BACKBONES[policy.backbone]).get("unused", ())):
        reject_unused(policy, "policy", f"with policy.backbone={policy.backbone}", *names)


def check_unused_encoders(config: TrainConfig, observation: Collection[str]) -> None:
    """Raise a UserError for settings of an encoder of images, clouds or embeddings that a new policy does not observe.

    `observation` has the keys of its observations.
    """
    policy = section("policy", config.policy)[1]
    for prefix, name in ENCODER_FIELDS.items():
        if hasattr(policy, name) and not any(key.startswith(prefix) for key in observation):
            default = getattr(type(policy)(), name)
            why = f"with a policy that observes no '{prefix}*'"
            reject_unused(getattr(policy, name), f"policy.{name}", why, default=default)


def check_unused_sizes(task: TaskConfig, observation: Collection[str]) -> None:
    """Raise a UserError for sizes of images or clouds that a simulator with the `observation` keys does not have."""
    kinds = ((IMAGE_PREFIX, task.cameras, "image_size"), (CLOUD_PREFIX, task.point_clouds, "points"))
    for prefix, cameras, name in kinds:
        if not cameras and not any(key.startswith(prefix) for key in observation):
            option = "task.cameras" if name == "image_size" else "task.point_clouds"
            reject_unused(task, "task", f"without {option}", name)


def check_sizes_of_checkpoint(task: TaskConfig, found: TaskConfig) -> None:
    """Raise a UserError for sizes of images or clouds that differ from those `found` in the initial policy."""
    for name in ("image_size", "points"):
        if getattr(task, name) != getattr(found, name):
            reject_unused(task, "task", "with init_from, whose policy sets it", name)
