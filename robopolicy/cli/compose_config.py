"""Configuration of `compose`: operator, settings and additional networks."""

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
from robopolicy.data.compatibility import check_dataset_for_policy
from robopolicy.data.formats import read_dataset
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
from robopolicy.training.checkpoint import load_policy
from robopolicy.training.fit_selector import fit_selector

SECTIONS: dict[str, type[Any]] = {"corrector": Langevin, "guidance": ValueGuidance, "selection": Selection}


@dataclass(frozen=True)
class CompositionConfig:
    """Settings of a composition, with the names used by `--override`."""

    operator: dict[str, Any]  # name and settings
    unconditioned: tuple[int, ...] = ()  # parents (from 0) that are also used without embeddings, as further parents
    steps: int | None = None  # equal denoising steps; None: the maximum of the parents
    action_horizon: int | None = None  # actions executed per chunk; None: the minimum of the parents
    corrector: Langevin | None = None  # Langevin steps at every noise level
    guidance: ValueGuidance | None = None  # guidance of the samples by the critic
    candidates: int = 1  # sampled chunks per decision; the one with the highest value is executed
    selection: Selection | None = None  # selection of policies by the observation
    then: dict[str, Any] = field(default_factory=dict[str, Any])  # name in POST_COMPOSITION -> its settings

    def __post_init__(self) -> None:
        if self.candidates < 1:
            raise UserError(f"candidates must be at least 1, got {self.candidates}.")

    @property
    def needs_critic(self) -> bool:
        """Whether the composition requires a critic."""
        return self.guidance is not None or self.candidates > 1

    def build_operator(self) -> Operator:
        """Build the operator with its own weights."""
        return make_operator(self.operator)

    def operands(self, parents: Sequence[str]) -> list[str]:
        """Return the names of the weighted policies: the parents, and the unconditioned ones again."""
        unknown = [index for index in self.unconditioned if not 0 <= index < len(parents)]
        if unknown:
            raise UserError(f"unconditioned names parents from 0 to {len(parents) - 1}, got {unknown[0]}.")
        return [*parents, *(f"{parents[index]} without embeddings" for index in self.unconditioned)]


def read_composition_config(operator: str, settings: Sequence[str]) -> CompositionConfig:
    """Parse `--operator` and `--override KEY=VALUE ...`; an unknown key or invalid value raises a UserError."""
    if operator not in OPERATORS:
        raise unknown_name("operator", operator, OPERATORS)
    overrides = _tree(settings)
    for name in {"operator", *SECTIONS} & overrides.keys():
        if not isinstance(overrides[name], dict):
            raise UserError(f"'{name}' is a section; write --override {name}.KEY=VALUE.")
        if name in SECTIONS:
            overrides[name] = to_dict(SECTIONS[name]()) | overrides[name]
    then = overrides.get("then", {})
    if not isinstance(then, dict) or not all(isinstance(item, dict) for item in then.values()):
        raise UserError("Steps of --then have settings by name; write --override then.NAME.KEY=VALUE.")
    own = overrides.pop("operator", {})
    if {"name", "weights"} & own.keys():
        raise UserError(
            "Pass --operator NAME and --weights W ...; --override operator.KEY=VALUE is for other settings."
        )
    chosen = describe_operator(make_operator({"name": operator, **own}))
    return from_dict(CompositionConfig, to_dict(CompositionConfig(chosen)) | overrides, "--override")


@dataclass(frozen=True, eq=False)
class CompositionParts:
    """Loaded components of a composition."""

    composition: CompositionConfig
    policies: Sequence[Policy]  # parents
    critic: QEnsemble | None
    then: Mapping[str, Policy]  # name in POST_COMPOSITION -> checkpoint, in order
    names: Sequence[str]  # of the parents, in messages
    selector: Selector | None = None
    gate_accuracy: float | None = None  # fraction of the last chunks for which the selector ranks the better one first

    def policy(self, weights: Sequence[float] | None) -> Policy:
        """Build the composition with `weights` (None: of the operator); incompatible parts raise a UserError."""
        composition = self.composition
        composed = compose(
            self.policies,
            composition.build_operator(),
            weights,
            action_horizon=composition.action_horizon,
            critic=self.critic if composition.guidance is not None else None,
            unconditioned=composition.unconditioned,
            steps=composition.steps,
            guidance=composition.guidance,
            corrector=composition.corrector,
            names=self.names,
        )
        policy: Policy = composed
        if composition.selection is not None and self.selector is not None:
            policy = make_learned_gate(composed, composition.selection, self.selector)
        if self.critic is not None and composition.candidates > 1:
            policy = make_best_of_n(policy, check_critic(self.critic, policy), candidates=composition.candidates)
        for name, checkpoint in self.then.items():
            policy = POST_COMPOSITION[name](policy, checkpoint, composition.then.get(name, {}))
        return policy


def load_composition_parts(
    composition: CompositionConfig,
    parents: Sequence[Path],
    critic: Path | None,
    then: Mapping[str, Path],
    names: Sequence[str],
    device: str,
    gate_data: str = "",
) -> CompositionParts:
    """Load the components of `composition`, and train its selector on the dataset `gate_data` if it has one.

    Parents have `names` in messages.

    Raises:
        UserError: A checkpoint cannot be loaded, or has no critic.
    """
    policies = [load_policy(path, device)[0] for path in parents]
    parts = CompositionParts(
        composition,
        policies,
        None if critic is None else _critic(critic, device),
        {name: load_policy(path, device)[0] for name, path in then.items()},
        names,
    )
    if composition.selection is None:
        return parts
    selector, accuracy = _selector(parts, composition.selection, gate_data)
    return replace(parts, selector=selector, gate_accuracy=accuracy)


def _selector(parts: CompositionParts, selection: Selection, dataset: str) -> tuple[Selector, float]:
    """Train the selector on the dataset and return its accuracy; it does not depend on the weights."""
    operator, unconditioned = parts.composition.build_operator(), parts.composition.unconditioned
    plain = compose(parts.policies, operator, unconditioned=unconditioned, names=parts.names)
    torch.manual_seed(0)
    policy = make_learned_gate(plain, selection).to(plain.device)
    episodes = read_dataset(dataset).without_closing_frames()
    check_dataset_for_policy(episodes, policy.spec, f"dataset {dataset}")
    with progress_bars() as add_bar:
        ranked = fit_selector(policy, episodes, progress=add_bar("select", selection.updates))
    print(f"gate: ranks the better policy first for {100 * ranked:.0f} % of the chunks of {dataset}", file=sys.stderr)
    return policy.selector, ranked


def _critic(path: Path, device: str) -> QEnsemble:
    policy = load_policy(path, device)[0]
    for part in policy.modules():
        if isinstance(part, QEnsemble):
            return part
    raise UserError(
        f"{path} is a policy '{policy.name}', which has no critic; pass a checkpoint of idql, qc, dqc, pa_rl or expo."
    )


def _tree(settings: Sequence[str]) -> dict[str, Any]:
    for setting in settings:
        if not setting.partition("=")[0] or "=" not in setting:
            raise UserError(f"--override takes KEY=VALUE, got '{setting}'.")
    try:
        return OmegaConf.to_container(OmegaConf.from_dotlist(list(settings)), resolve=True)  # type: ignore[return-value]
    except (OmegaConfBaseException, YAMLError) as error:
        raise UserError(f"--override {' '.join(settings)} cannot be read: {str(error).splitlines()[0]}") from error
