"""Configuration of `compose`: operator, settings and further networks."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from robopolicy.cli.progress import progress_bars
from robopolicy.critics.q import QEnsemble
from robopolicy.data.formats.lerobot import read_lerobot
from robopolicy.errors import UserError, unknown_name
from robopolicy.policies.base import Policy
from robopolicy.policies.composition.guidance import Langevin, ValueGuidance, check_critic
from robopolicy.policies.composition.operators import OPERATORS, Operator, describe_operator, make_operator
from robopolicy.policies.composition.post import POST_COMPOSITION
from robopolicy.policies.composition.selection import Selection, Selector
from robopolicy.policies.wrappers.best_of_n import make_best_of_n
from robopolicy.policies.wrappers.composed import compose
from robopolicy.policies.wrappers.learned_gate import make_learned_gate
from robopolicy.schema import from_dict, to_dict
from robopolicy.training.build import check_dataset_for_policy
from robopolicy.training.checkpoint import load_policy
from robopolicy.training.fit_selector import fit_selector

SECTIONS: dict[str, type[Any]] = {
    "corrector": Langevin,
    "guidance": ValueGuidance,
    "selection": Selection,
}


@dataclass(frozen=True)
class CompositionConfig:
    """Settings of a composition; `--override` knows them by these names."""

    operator: dict[str, Any]  # name and settings
    unconditioned: tuple[int, ...] = ()  # parents (from 0) that are also read without embeddings, as further parents
    steps: int | None = None  # equal denoising steps; None takes those of the parent with most of them
    action_horizon: int | None = None  # actions played per chunk; None takes those of the most cautious parent
    corrector: Langevin | None = None  # Langevin steps at every noise level
    guidance: ValueGuidance | None = None  # pull of the critic on the samples
    candidates: int = 1  # chunks drawn per decision, of which the one is played that the critic likes best
    selection: Selection | None = None  # which policies take part, by the observation
    then: dict[str, Any] = field(default_factory=dict[str, Any])  # name in POST_COMPOSITION -> its settings

    def __post_init__(self) -> None:
        if self.candidates < 1:
            raise UserError(f"candidates must be at least 1, got {self.candidates}.")

    @property
    def needs_critic(self) -> bool:
        """Whether it needs a critic."""
        return self.guidance is not None or self.candidates > 1

    def build_operator(self) -> Operator:
        """The operator, with weights of its own."""
        return make_operator(self.operator)

    def operands(self, parents: Sequence[str]) -> list[str]:
        """Names of what is weighed: the parents, and those that are read without embeddings once more."""
        unknown = [index for index in self.unconditioned if not 0 <= index < len(parents)]
        if unknown:
            raise UserError(f"unconditioned names parents from 0 to {len(parents) - 1}, got {unknown[0]}.")
        return [*parents, *(f"{parents[index]} without embeddings" for index in self.unconditioned)]


def read_composition_config(operator: str, settings: Sequence[str]) -> CompositionConfig:
    """The recipe of `--operator` and `--override KEY=VALUE ...`.

    Raises:
        UserError: A key is unknown, or a value has the wrong type or makes no sense.
    """
    if operator not in OPERATORS:
        raise unknown_name("operator", operator, OPERATORS)
    given = _tree(settings)
    for name in {"operator", *SECTIONS} & given.keys():
        if not isinstance(given[name], dict):
            raise UserError(f"'{name}' has settings of its own; write --override {name}.KEY=VALUE.")
        if name in SECTIONS:
            given[name] = to_dict(SECTIONS[name]()) | given[name]
    then = given.get("then", {})
    if not isinstance(then, dict) or not all(isinstance(each, dict) for each in then.values()):
        raise UserError("Steps of --then have settings by name; write --override then.NAME.KEY=VALUE.")
    own = given.pop("operator", {})
    if {"name", "weights"} & own.keys():
        raise UserError(
            "Pass --operator NAME and --weights W ...; --override operator.KEY=VALUE is for other settings."
        )
    chosen = describe_operator(make_operator({"name": operator, **own}))
    return from_dict(CompositionConfig, to_dict(CompositionConfig(chosen)) | given, "--override")


@dataclass(frozen=True, eq=False)
class CompositionParts:
    """All that a composition needs besides weights, loaded."""

    recipe: CompositionConfig
    policies: Sequence[Policy]  # the parents
    critic: QEnsemble | None
    then: Mapping[str, Policy]  # name in POST_COMPOSITION -> the checkpoint that it takes, in order
    selector: Selector | None = None  # knows whom to ask where

    def policy(self, weights: Sequence[float] | None) -> Policy:
        """The composition with `weights`, or with those of the operator.

        Raises:
            UserError: Parents, critic, further checkpoints and settings do not fit each other.
        """
        recipe = self.recipe
        composed = compose(
            self.policies,
            recipe.build_operator(),
            weights,
            action_horizon=recipe.action_horizon,
            critic=self.critic if recipe.guidance is not None else None,
            unconditioned=recipe.unconditioned,
            steps=recipe.steps,
            guidance=recipe.guidance,
            corrector=recipe.corrector,
        )
        policy: Policy = composed
        if recipe.selection is not None and self.selector is not None:
            policy = make_learned_gate(composed, recipe.selection, self.selector)
        if self.critic is not None and recipe.candidates > 1:
            policy = make_best_of_n(policy, check_critic(self.critic, policy), candidates=recipe.candidates)
        for name, checkpoint in self.then.items():
            policy = POST_COMPOSITION[name](policy, checkpoint, recipe.then.get(name, {}))
        return policy


def load_composition_parts(
    recipe: CompositionConfig,
    parents: Sequence[Path],
    critic: Path | None,
    then: Mapping[str, Path],
    device: str,
    gate_data: str = "",
) -> CompositionParts:
    """Load what `recipe` needs, and teach a selector from the dataset `select` where it wants one.

    Raises:
        UserError: A checkpoint cannot be loaded, or has no critic.
    """
    policies = [load_policy(place, device)[0] for place in parents]
    found = CompositionParts(
        recipe,
        policies,
        None if critic is None else _critic(critic, device),
        {name: load_policy(place, device)[0] for name, place in then.items()},
    )
    return replace(found, selector=_selector(found, recipe.selection, gate_data)) if recipe.selection else found


def _selector(found: CompositionParts, selection: Selection, dataset: str) -> Selector:
    """What has learned from the dataset whom to ask where; the same for any weights of the composition."""
    plain = compose(found.policies, found.recipe.build_operator(), unconditioned=found.recipe.unconditioned)
    torch.manual_seed(0)
    policy = make_learned_gate(plain, selection).to(plain.device)
    episodes = read_lerobot(dataset).without_closing_frames()
    check_dataset_for_policy(episodes, policy.spec, f"dataset {dataset}")
    with progress_bars() as add_bar:
        ranked = fit_selector(policy, episodes, progress=add_bar("select", selection.updates))
    print(f"selector: ranks the better policy first for {ranked:.0%} of the chunks of {dataset}", file=sys.stderr)
    return policy.selector


def _critic(place: Path, device: str) -> QEnsemble:
    policy = load_policy(place, device)[0]
    for part in policy.modules():
        if isinstance(part, QEnsemble):
            return part
    raise UserError(
        f"{place} is a policy '{policy.name}', which has no critic; take a checkpoint of idql, qc, dqc, pa_rl or expo."
    )


def _tree(settings: Sequence[str]) -> dict[str, Any]:
    for setting in settings:
        if not setting.partition("=")[0] or "=" not in setting:
            raise UserError(f"--override takes KEY=VALUE, got '{setting}'.")
    try:
        return OmegaConf.to_container(OmegaConf.from_dotlist(list(settings)), resolve=True)  # type: ignore[return-value]
    except (OmegaConfBaseException, YAMLError) as error:
        raise UserError(f"--override {' '.join(settings)} cannot be read: {str(error).splitlines()[0]}") from error
