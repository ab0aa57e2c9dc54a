"""Migration of configurations of earlier versions.

`config.yaml` of a run and `manifest.json` of a checkpoint may contain old names of settings. Every renamed setting has
a row in `MOVES`; rows are applied from top to bottom.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Move:
    """Old settings and the setting that replaces them."""

    old: tuple[str, ...]  # dotted keys, e.g. "policy.hidden"
    new: str  # dotted key; may be one of the old ones
    convert: Callable[[Mapping[str, Any]], Any] | None = None  # computes the new value from the old ones by key
    algorithm: str = ""  # algorithm to which the row applies; empty: all


def _wrappers(old: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Compute `task.wrappers` from the former settings of single wrappers."""
    rows: list[dict[str, Any]] = []
    if old.get("task.skills"):
        rows.append({"name": "skills", "count": old["task.skills"], "bonus": old.get("task.skill_bonus", 0.0)})
    if old.get("task.stock"):
        rows.append({"name": "stock", "discount": old["task.stock"]})
    if old.get("task.descriptor"):
        rows.append({"name": "descriptor"})
    if old.get("task.message"):
        rows.append({"name": "message", "kind": old["task.message"], "size": old.get("task.message_size", 2)})
    return rows


def _aux_rewards(old: Mapping[str, Any]) -> list[str]:
    """Rename the `algorithm.aux_rewards` of tscac."""
    names = {"energy": "control_cost", "stillness": "velocity_cost"}
    return [names.get(str(name), str(name)) for name in old["algorithm.signals"]]


def _engine(old: Mapping[str, Any]) -> Any:
    """Rename the `algorithm.engine` of text_recipe."""
    return "native" if old["algorithm.engine"] == "own" else old["algorithm.engine"]


MOVES: tuple[Move, ...] = (
    Move(("task.observe",), "task.obs_keys"),
    Move(("world",), "worldmodel"),
    Move(("chunk.execute",), "chunk.action_horizon"),
    Move(("replay.warmup_steps",), "replay.learning_starts"),
    Move(("replay.offline_share",), "replay.offline_fraction"),
    Move(
        ("task.stock", "task.descriptor", "task.message", "task.message_size", "task.skills", "task.skill_bonus"),
        "task.wrappers",
        _wrappers,
    ),
    Move(("algorithm.decisions",), "algorithm.num_steps"),
    Move(("algorithm.lam",), "algorithm.gae_lambda"),
    Move(("algorithm.pairs",), "algorithm.num_mc_samples"),
    Move(("algorithm.identity_start",), "algorithm.skip_first_decoder"),
    Move(("algorithm.clip_later",), "algorithm.decoder_stage.clip"),
    Move(("algorithm.grad_clip_later",), "algorithm.decoder_stage.grad_clip"),
    Move(("algorithm.penalty_later",), "algorithm.decoder_stage.penalty"),
    Move(("algorithm.kept",), "algorithm.num_kept_batches"),
    Move(("algorithm.forks",), "algorithm.branch_points"),
    Move(("algorithm.vines",), "algorithm.branches"),
    Move(("algorithm.members",), "algorithm.set_size"),
    Move(("algorithm.place.entries",), "algorithm.place.indices"),
    Move(("algorithm.actor_delay",), "algorithm.policy_delay"),
    Move(("algorithm.target_members",), "algorithm.num_min_qs"),
    Move(("algorithm.noise_max",), "algorithm.exploration_noise_max"),
    Move(("algorithm.critic_rule",), "algorithm.critic_objective"),
    Move(("algorithm.space",), "algorithm.noise_space"),
    Move(("algorithm.pull",), "algorithm.reg_coef", algorithm="a2pr"),
    Move(("algorithm.share",), "algorithm.mixture_rate", algorithm="ailboost"),
    Move(("algorithm.mutants",), "algorithm.ga_offspring"),
    Move(("algorithm.climbers",), "algorithm.pg_offspring"),
    Move(("algorithm.climb_steps",), "algorithm.pg_steps"),
    Move(("algorithm.climb_lr",), "algorithm.pg_lr"),
    Move(("algorithm.proximity",), "algorithm.kl_coef", algorithm="mdpo_off"),
    Move(("algorithm.copy_every",), "algorithm.target_update_interval"),
    Move(("algorithm.dwell",), "algorithm.min_switch_interval"),
    Move(("algorithm.slack",), "algorithm.switch_margin"),
    Move(("algorithm.reward_trust",), "algorithm.reward_trust_coef"),
    Move(("algorithm.edits",), "algorithm.augmentations", algorithm="stock_ac"),
    Move(("algorithm.swaddling",), "algorithm.action_penalty"),
    Move(("algorithm.fading",), "algorithm.age_weighting"),
    Move(("algorithm.signals",), "algorithm.aux_rewards", _aux_rewards),
    Move(("algorithm.first_stage",), "algorithm.stage1_fraction"),
    Move(("algorithm.nearness",), "algorithm.constraint_coef"),
    Move(("algorithm.prompts",), "algorithm.prompts_per_update", algorithm="text_recipe"),
    Move(("algorithm.problems",), "algorithm.num_prompts", algorithm="text_recipe"),
    Move(("algorithm.problems",), "algorithm.num_prompts", algorithm="text_sft"),
    Move(("algorithm.imitation",), "algorithm.sft_updates", algorithm="text_recipe"),
    Move(("algorithm.imitation_lr",), "algorithm.sft_lr", algorithm="text_recipe"),
    Move(("algorithm.players",), "algorithm.num_workers", algorithm="text_recipe"),
    Move(("algorithm.players_on",), "algorithm.worker_backend", algorithm="text_recipe"),
    Move(("algorithm.companion",), "algorithm.teacher", algorithm="text_recipe"),
    Move(("algorithm.engine",), "algorithm.engine", _engine, algorithm="text_recipe"),
)


def migrate_config(content: Any) -> Any:
    """Return the plain values of a `config.yaml` under their present keys; `content` is unchanged."""
    migrated = deepcopy(content)
    for move in MOVES:
        if move.algorithm and move.algorithm != _algorithm_name(migrated):
            continue
        found = {key: value for key in move.old for value in _take(migrated, key.split("."))}
        if found:
            value = next(iter(found.values())) if move.convert is None else move.convert(found)
            _put(migrated, move.new.split("."), value)
    return migrated


def migrate_manifest(content: Mapping[str, Any]) -> dict[str, Any]:
    """Migrate a policy's `manifest.json`; its `config` is the section `policy` of a configuration."""
    if "config" not in content:
        return dict(content)
    return {**content, "config": migrate_config({"policy": content["config"]})["policy"]}


def _algorithm_name(content: Any) -> Any:
    """Return the name of the algorithm of a configuration, or None."""
    section = content.get("algorithm") if isinstance(content, dict) else None
    return section.get("name") if isinstance(section, dict) else None


def _take(content: Any, path: Sequence[str]) -> list[Any]:
    """Remove the value at a path and return it in a list, which is empty if there is none."""
    for name in path[:-1]:
        content = content.get(name) if isinstance(content, dict) else None
    return [content.pop(path[-1])] if isinstance(content, dict) and path[-1] in content else []


def _put(content: dict[str, Any], path: Sequence[str], value: Any) -> None:
    for name in path[:-1]:
        content = content.setdefault(name, {})
    content[path[-1]] = value
