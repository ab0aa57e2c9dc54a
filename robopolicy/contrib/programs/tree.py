"""Behavior tree whose leaves are policies: readable rules select the active skill (PORTAL, Xu et al. 2025).

    tree = read_tree({"kind": "selector", "children": [
        {"kind": "action", "skill": "reach", "until": "norm(state[0:2] - state[4:6]) < 0.1"},
        {"kind": "action", "control": ["-2 * state[2:4]"]}]})
    policy = make_tree_policy(tree, {"reach": reach})

At every decision the tree is ticked once (`trees/nodes.py`). The running action determines the chunk, otherwise the
last ticked one, otherwise `rest`. Skills keep their own observations, histories, normalisers and heads; the tree and
all its skills have the robot's actions. The horizon of the tree is the shortest of its skills, and its action horizon
the smallest of theirs; a plain controller holds its action for the whole chunk.

All skills are evaluated for all rows at every decision: so rows do not depend on each other, and the tree can be
exported as one graph. The tree is recurrent only if a node has `resume` or `limit` or a skill is recurrent. The hidden
state of a skill is reset when it starts.

Use it where a task has clearly distinct stages with a policy for each. Skills are frozen: train them separately, and
improve the tree with `robopolicy program --rounds` (`search.py`).

Reconstructed from the abstract: the language, the hidden state and the default action are ours. To choose among several
trees, put a selector above them. The review by a vision-language model is left to the search.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from robopolicy.constraints import Finite, Validated
from robopolicy.contrib.programs.trees.nodes import BehaviorTree, Node, TreeTick, read_tree
from robopolicy.errors import UserError
from robopolicy.policies.base import Observation, Policy, PolicySpec, Sample
from robopolicy.policies.composition.alignment import parent_observation
from robopolicy.policies.noise import Randomness
from robopolicy.policies.wrappers.nested import describe, rebuild
from robopolicy.spec import HIDDEN_STATE, IMAGE_PREFIX


@dataclass(frozen=True)
class TreeConfig(Validated):
    """Components of a `TreePolicy`; `make_tree_policy` fills it in."""

    tree: dict[str, Any] = field(default_factory=dict[str, Any])  # nodes as plain JSON values, see `trees/nodes.py`
    skills: dict[str, Any] = field(default_factory=dict[str, Any])  # name -> description of the policy (`nested`)
    rest: tuple[Finite, ...] = ()  # action where no action node was ticked, in action units; empty: zeros


class TreePolicy(Policy):
    """A behavior tree; methods `act`, `sample` and, if it is recurrent, `next_hidden`."""

    name: ClassVar[str] = "tree"
    config_class = TreeConfig
    config: TreeConfig
    rest: Tensor  # (A,)

    def __init__(
        self, config: TreeConfig, spec: PolicySpec | None = None, *, skills: Mapping[str, Policy] | None = None
    ) -> None:
        """Build the policy.

        Args:
            config: Settings; its descriptions are used if no skills are given.
            spec: Observations and actions; by default from the skills.
            skills: Policies by the names that the tree uses, shared with the caller.

        Raises:
            UserError: Tree, skills and specification do not fit each other.
        """
        super().__init__()
        if not config.tree:
            raise UserError("A behavior tree needs nodes; write it as JSON and run 'robopolicy program'.")
        self.config = config
        self.tree = read_tree(config.tree)
        known = {name: rebuild(entry) for name, entry in config.skills.items()} if skills is None else skills
        missing = [name for name in self.tree.skills if name not in known]
        if missing:
            raise UserError(
                f"The tree calls the skill '{missing[0]}', but has {', '.join(sorted(known)) or 'none'}; add it."
            )
        self.skills = nn.ModuleDict({name: known[name] for name in self.tree.skills})
        self._hidden_slices = self._find_hidden_slices()
        self.spec = self._joint_spec(spec)
        vectors = {key: shape[0] for key, shape in self.spec.observation.items() if _is_vector(key, shape)}
        self.tree.check(vectors, self.spec.action_dim)
        self._read = tuple(sorted(self.tree.reads))
        if config.rest and len(config.rest) != self.spec.action_dim:
            raise UserError(f"rest has {len(config.rest)} numbers, but there are {self.spec.action_dim} actions.")
        rest = torch.tensor(config.rest or [0.0] * self.spec.action_dim, device=self.device)
        self.register_buffer("rest", rest, persistent=False)
        self.eval()

    def _find_hidden_slices(self) -> dict[int, slice]:
        """Index of an action with a recurrent skill -> slice of the skill's hidden state in the tree's."""
        end = len(self.tree.slots)
        found: dict[int, slice] = {}
        for node in self.tree.actions:
            size = self._skill(node.skill).spec.hidden_dim if node.skill else 0
            if size:
                found[node.index] = slice(end, end + size)
                end += size
        self._hidden_dim = end
        return found

    def _joint_spec(self, given: PolicySpec | None) -> PolicySpec:
        """Specification of the tree: all observations of its skills, the shortest horizon and action horizon."""
        specs = [self._skill(name).spec for name in self.skills]
        if not specs and given is None:
            raise UserError("A tree without skills takes its observations and actions from a task; pass the spec.")
        observation: dict[str, tuple[int, ...]] = {}
        needed = self.tree.reads.union(*(spec.observation for spec in specs))
        for spec in [*specs, *([given] if given is not None else [])]:
            shapes = {key: tuple(shape) for key, shape in spec.observation.items() if key != HIDDEN_STATE}
            shapes = {key: shape for key, shape in shapes.items() if key in needed} or shapes  # never empty
            differing = [key for key in shapes if observation.setdefault(key, shapes[key]) != shapes[key]]
            if differing or spec.action_dim != (specs or [spec])[0].action_dim:
                what = f"'{differing[0]}'" if differing else "the number of actions"
                raise UserError(f"The skills of a tree must agree on {what}; pass policies of one task.")
        if self._hidden_dim:
            observation[HIDDEN_STATE] = (self._hidden_dim,)
        last = given if given is not None else specs[0]
        horizon = min([spec.horizon for spec in specs] or [last.horizon])
        shortest = min([horizon, *(spec.action_horizon for spec in specs)])
        action_horizon = shortest if given is None else min(given.action_horizon, horizon)
        history = max([spec.obs_horizon for spec in specs] or [1])
        return PolicySpec(observation, last.action_dim, horizon, action_horizon, history)

    def _skill(self, name: str) -> Policy:
        return cast(Policy, self.skills[name])

    # Decisions.

    def tick(self, obs: Observation) -> TreeTick:
        """Tick the tree for observations `{key: (B, To, ...)}`, of which it reads the newest."""
        reference = next(iter(obs.values()))
        slots = len(self.tree.slots)
        if self._hidden_dim and HIDDEN_STATE not in obs:
            raise UserError(f"This tree is recurrent: pass '{HIDDEN_STATE}', as rollouts and evaluation do.")
        memory = obs[HIDDEN_STATE][:, -1, :slots] if self._hidden_dim else self.rest.new_zeros(len(reference), 0)
        return self.tree.tick({key: obs[key][:, -1].float() for key in self._read}, memory.to(self.rest))

    @torch.no_grad()
    def act(self, obs: Observation, *, deterministic: bool = False, generator: Randomness = None) -> Tensor:
        """The chunk of the active action."""
        found = self.tick(obs)
        rows, horizon = len(found.action), self.spec.horizon
        one = torch.ones_like(found.action, dtype=self.rest.dtype)[:, None]
        values = {key: obs[key][:, -1].float() for key in self._read}
        chunk = (one * self.rest)[:, None].expand(rows, horizon, -1)
        chunks: dict[int | str, Tensor] = {}
        for place, node in enumerate(self.tree.actions):
            key = node.skill if node.skill and node.index not in self._hidden_slices else node.index
            if key in chunks:  # a skill at several nodes is evaluated once
                pass
            elif node.skill:
                part = self._skill_obs(node, obs)
                full = self._skill(node.skill).act(part, deterministic=deterministic, generator=generator)
                chunks[key] = full[:, :horizon]
            else:
                parts = [formula(values, one) for formula in node.control]
                chunks[key] = torch.cat(parts, -1)[:, None].expand(rows, horizon, -1)
            chunk = torch.where((found.action == place)[:, None, None], chunks[key], chunk)
        return chunk

    @torch.no_grad()
    def next_hidden(self, obs: Observation) -> Tensor:
        """Hidden state `(B, 1, M)` after `obs`: of the nodes, then of recurrent skills, 0 if they do not run."""
        if not self._hidden_dim:
            raise self._lacks("next_hidden")
        found = self.tick(obs)
        parts = [found.memory]
        for node in self.tree.actions:
            if node.index in self._hidden_slices:
                after = self._skill(node.skill).next_hidden(self._skill_obs(node, obs))[:, -1]
                runs = (found.action == self.tree.places[node.index]) & found.running
                parts.append(torch.where(runs[:, None], after, torch.zeros_like(after)))
        return torch.cat(parts, 1)[:, None]

    def _skill_obs(self, node: Node, obs: Observation) -> Observation:
        """Part of `obs` that the skill of an action observes, including its hidden state."""
        spec = self._skill(node.skill).spec
        if node.index in self._hidden_slices:
            obs = {**obs, HIDDEN_STATE: obs[HIDDEN_STATE][..., self._hidden_slices[node.index]]}
        return parent_observation(obs, spec)

    def sample(self, obs: Observation, *, generator: Randomness = None) -> Sample:
        """The chunk of the active action, with its exploration noise; it has no density."""
        return Sample.unscored(self.act(obs, generator=generator))

    def update_stats(self, obs: Observation) -> None:
        """Do nothing: skills keep the statistics of their training."""

    @property
    def nfe(self) -> int:
        """Function evaluations of all skills."""
        return sum(self._skill(name).nfe for name in self.skills)

    def with_skill(self, name: str, skill: Policy) -> TreePolicy:
        """Copy the tree with another policy for the skill `name`.

        Raises:
            UserError: The tree has no such skill, or the policy does not fit.
        """
        if name not in self.skills:
            raise UserError(f"The tree has no skill '{name}', only {', '.join(self.skills) or 'none'}.")
        skills = {known: self._skill(known) for known in self.skills} | {name: skill}
        shapes = {key: shape for key, shape in self.spec.observation.items() if key != HIDDEN_STATE}
        return make_tree_policy(self.tree, skills, replace(self.spec, observation=shapes), rest=self.config.rest)

    def train(self, mode: bool = True) -> TreePolicy:
        """Keep the skills in evaluation mode."""
        super().train(False)
        return self


def make_tree_policy(
    tree: BehaviorTree, skills: Mapping[str, Policy], spec: PolicySpec | None = None, *, rest: tuple[float, ...] = ()
) -> TreePolicy:
    """Build a policy of `tree` with `skills`, which are shared; skills without a call are left out.

    Args:
        tree: The rules.
        skills: Policies by the names that the tree uses.
        spec: Observations and actions that the skills do not define; its horizon applies to trees without skills.
        rest: Action where no action node was ticked, in action units; empty: zeros.

    Raises:
        UserError: They do not fit each other.
    """
    called = {name: skill for name, skill in skills.items() if name in tree.skills}
    described = {name: describe(skill) for name, skill in called.items()}
    return TreePolicy(TreeConfig(dict(tree.plain), described, rest), spec, skills=called)


def _is_vector(key: str, shape: tuple[int, ...]) -> bool:
    """Whether formulas can read an observation: a plain vector whose name is a word."""
    return len(shape) == 1 and key != HIDDEN_STATE and key.isidentifier() and not key.startswith(IMAGE_PREFIX)
