"""Text recipes on rollouts of a denoising chain: methods for text policies, applied to robots.

A recipe (a name or a file) is a method as plain data. A denoising step corresponds to a token, a chunk to a turn, an
episode to a completion, and a start state to a prompt. Several episodes run from each start state. Flows are sampled by
the stochastic differential equation with their marginals (`sde_chain`), diffusion by its own noisy steps
(`diffusion_chain`); every step is a decision with the log-density summed over its dimensions, which the ratio bounds of
the recipes assume.

Use it to try a group comparison, ratio bound or row selection that no other algorithm offers. Prefer flow_grpo,
reinflow and dppo, which use more of the chain (exact KL, noise schedules, a critic). Recipes that need a critic, hidden
states or other data that a simulator does not record raise an error with the name of the missing field.

Deviations: the `rollout` section of a recipe (rewards, curricula, interventions) is ignored with a warning; minibatches
have whole groups and at least `batch_size` chunks, so the recipe's number of minibatches is not used.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from robopolicy.algorithms.common.algorithm import Algorithm, Checkpointable, Metrics, frozen_copy, make_metrics
from robopolicy.algorithms.common.fine_tuning import (
    PolicyGradientConfig,
    actor_adam,
    clipped_step,
    cosine_rate,
)
from robopolicy.algorithms.common.rollout_batch import Epochs
from robopolicy.constraints import Positive, PositiveInt
from robopolicy.core.decisions import Decisions, MissingField
from robopolicy.core.recipe import Recipe
from robopolicy.data.batches import GroupRollout
from robopolicy.device import random_order
from robopolicy.errors import UserError
from robopolicy.policies.base import Info, Policy
from robopolicy.policies.exploration.chain import StochasticSampler, require_family
from robopolicy.policies.exploration.diffusion_chain import DiffusionChain
from robopolicy.policies.exploration.flow_chains import SDEChain
from robopolicy.policies.heads.diffusion import DiffusionPolicy
from robopolicy.policies.heads.generative import GenerativePolicy
from robopolicy.policies.wrappers.staged import make_staged
from robopolicy.recipe_files import read_recipe

SCORING_BATCH = 4096  # chunks scored at once before the update


@dataclass(frozen=True)
class RecipeFineTunerConfig(PolicyGradientConfig):
    """Settings of recipes on denoising chains."""

    recipe: str = "grpo"  # name of a recipe, or the path of a .yaml file
    group_size: PositiveInt = 8  # G, episodes per start state; must divide sim.num_envs
    noise_level: Positive = 0.3  # c of a flow's noise c sqrt((1 - t) / t)
    std_min: Positive = 0.1  # smallest standard deviation of a diffusion step, normalised action units
    epochs: PositiveInt | None = None  # passes over each rollout; null: as in the recipe
    lr: Positive = 1e-4  # peak learning rate
    target_kl: Positive | None = None  # stop the epochs when the approximate KL exceeds this


@dataclass(frozen=True)
class ScoredBatch:
    """Rows of a rollout with their advantages."""

    decisions: Decisions
    advantage: Tensor  # (B, 1) or (B, K)


def decisions_of(batch: GroupRollout, scale: float, version: int) -> Decisions:
    """The B executed chunks as rows of K decisions, in order of time; the last step of a chunk has its reward.

    `scale` is a factor on the log-probabilities, `version` identifies the weights of the rollout.
    """
    valid = batch.valid  # (T, N)
    logp = batch.logp[valid] * scale
    reward = torch.zeros_like(logp)
    reward[:, -1] = batch.reward[valid]
    number, episode = valid.nonzero(as_tuple=True)  # time step and episode of each row
    zeros = torch.zeros(len(logp), dtype=torch.int64, device=valid.device)
    obs = {f"obs.{key}": value[valid] for key, value in batch.obs.items()}
    record = {f"record.{key}": value[valid] for key, value in batch.record.items()}
    return Decisions(
        logp,
        logp_behaviour=logp,
        reward=reward,
        unit=number[:, None].expand_as(logp),
        group=(batch.group + version * valid.shape[1])[episode],  # every rollout has new start states
        trajectory=episode,
        domain=zeros,
        source=zeros,
        version=zeros + version,
        extra=obs | record,
    )


def subtree(prefix: str, tree: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Entries whose key starts with `prefix.`, without the prefix."""
    return {key.removeprefix(f"{prefix}."): value for key, value in tree.items() if key.startswith(f"{prefix}.")}


def group_minibatches(group: Tensor, size: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Yield the row indices of whole groups `(B,)` in random order, at least `size` at a time except the last."""
    _, index, counts = group.unique(return_inverse=True, return_counts=True)
    order = random_order(len(counts), generator)
    rows = order.argsort()[index].argsort(stable=True)  # (B,) the rows of the first group, of the second, ...
    start = end = 0
    for count in counts[order].tolist():
        end += count
        if end - start >= size or end == len(rows):
            yield rows[start:end]
            start = end


class RecipeFineTuner(Algorithm):
    """Fine-tuning of a flow or diffusion policy by a recipe."""

    name = "recipe"
    config_class = RecipeFineTunerConfig
    data_source = "group"
    heads = ("flow", "shortcut", "meanflow", "diffusion")
    reference = "shao2024grpo"
    config: RecipeFineTunerConfig
    policy: StochasticSampler

    def __init__(self, config: RecipeFineTunerConfig, policy: Policy, *, total_updates: int) -> None:
        """Prepare to fine-tune `policy` (it is changed in place) for `total_updates` rollouts."""
        instead = "use ppo for a Gaussian"
        head = require_family(policy, ("flow", "diffusion"), "A recipe scores denoising steps and", instead)
        super().__init__(_chain(config, head).eval(), total_updates=total_updates, seed=config.seed)
        self.config = config
        self.base: GenerativePolicy = frozen_copy(head)
        self.actor_optimizer = actor_adam(self.policy, config)
        self.reference_policy = _chain(config, self.base)
        self.recipe = _recipe(config.recipe)
        if config.target_kl is not None and self.recipe.estimator is None:
            raise UserError(f"Recipe '{config.recipe}' has no ratios; set algorithm.target_kl=null.")
        self.epochs = config.epochs or self.recipe.epochs
        scored = head.spec.action_horizon if isinstance(head, DiffusionPolicy) else head.spec.horizon
        self.dimensions = scored * head.spec.action_dim  # over which the chain averages

    def inference_policy(self) -> Policy:
        """The fine-tuned head with its own sampler."""
        return self.policy.head

    def loss(self, rows: ScoredBatch) -> tuple[Tensor, Info]:
        """Loss of the recipe on a minibatch, and metrics."""
        extra = rows.decisions.extra
        out = self.policy.decisions(subtree("obs", extra), subtree("record", extra))
        scale = self.dimensions
        return self.recipe.loss(rows.decisions, rows.advantage, out.logp * scale, out.entropy * scale)

    def update(self, batch: GroupRollout) -> Metrics:
        """Select rows, compute advantages, and run several epochs of the recipe's loss on a group rollout."""
        every = self._scored(decisions_of(batch, self.dimensions, self.updates))
        rate = cosine_rate(self.actor_optimizer, self.config, self.updates, self.total_updates)
        stats: dict[str, Any] = {"actor/epochs": 0, "actor/nonzero_advantage_fraction": 0.0}
        info: Info = {}
        try:
            decisions = every.select(self.recipe.select(every, self.generator))
            if len(decisions):  # a selector may drop all rows
                rows = ScoredBatch(decisions, self.recipe.advantage(decisions))
                stats["actor/nonzero_advantage_fraction"] = (rows.advantage != 0).any(1).float().mean()
                info, summary = self._train(rows)
                stats |= summary
        except MissingField as error:
            raise UserError(f"Recipe '{self.config.recipe}' needs a field that is not recorded: {error}") from error
        self.recipe.observe(every, {key.removeprefix("actor/"): value for key, value in info.items()})
        self.policy.update_stats(subtree("obs", every.extra))
        self.updates += 1
        stats = info | stats | {"actor/row_fraction": len(decisions) / len(every), "actor/lr": rate}
        return make_metrics(stats)

    def _train(self, rows: ScoredBatch) -> tuple[Info, dict[str, Any]]:
        """Run the epochs; returns metrics of the last step and of the epochs."""
        config, info = self.config, dict[str, Tensor]()
        group = rows.decisions.require("group")
        epochs = Epochs(
            partial(group_minibatches, group, config.batch_size, self.generator), self.epochs, self.actor_optimizer
        )
        for index in epochs:
            loss, found = self.loss(ScoredBatch(rows.decisions.select(index), rows.advantage[index]))
            if epochs.stop(found, config.target_kl):
                break
            info |= clipped_step(self.actor_optimizer, loss, found, config.grad_clip)
        return info, epochs.stats()

    @torch.no_grad()
    def _scored(self, decisions: Decisions) -> Decisions:
        """Add entropies under the current policy and log-probabilities under the frozen base."""
        obs, record = subtree("obs", decisions.extra), subtree("record", decisions.extra)
        entropy, reference = [], []
        for start in range(0, len(decisions), SCORING_BATCH):
            part = slice(start, start + SCORING_BATCH)
            inputs = [{key: value[part] for key, value in tree.items()} for tree in (obs, record)]
            entropy.append(self.policy.decisions(*inputs).entropy)
            reference.append(self.reference_policy.decisions(*inputs).logp)
        scale = self.dimensions
        return decisions.with_fields(entropy=torch.cat(entropy) * scale, logp_ref=torch.cat(reference) * scale)

    def checkpoint_items(self) -> Mapping[str, Checkpointable]:
        """Policy, frozen base, optimiser and recipe."""
        own = {"policy": self.policy, "base": self.base, "actor_optimizer": self.actor_optimizer}
        return {**own, "recipe": self.recipe}


def _recipe(name: str) -> Recipe:
    try:
        recipe = Recipe.from_dict(read_recipe(name))
    except ValueError as error:
        raise UserError(f"Recipe '{name}': {error}") from error
    if recipe.data != "rollout":
        raise UserError(f"Recipe '{name}' has data: {recipe.data}; algorithm=recipe needs data: rollout.")
    if recipe.rollout:
        warnings.warn(
            f"algorithm=recipe ignores the section 'rollout' ({', '.join(recipe.rollout)}) of recipe '{name}'; "
            "it compares groups of episodes with the task's rewards (docs/text/recipes.md).",
            UserWarning,
            stacklevel=3,
        )
    return recipe


def _chain(config: RecipeFineTunerConfig, head: GenerativePolicy) -> StochasticSampler:
    if not isinstance(head, DiffusionPolicy):
        return SDEChain(head, config.noise_level)
    return DiffusionChain(head, make_staged((0,), [head]), std_min=config.std_min)
