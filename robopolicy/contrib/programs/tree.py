"""A behaviour tree whose leaves are policies: readable rules decide which skill plays (PORTAL, Xu et al. 2025).

    tree = read_tree({"kind": "selector", "children": [
        {"kind": "action", "skill": "reach", "until": "norm(state[0:2] - state[4:6]) < 0.1"},
        {"kind": "action", "control": ["-2 * state[2:4]"]}]})
    policy = grow(tree, {"reach": reach})

At every decision the tree is ticked once (`policies/trees/nodes.py`); the action that runs plays, else the one that was
ticked last, else `rest`. Skills keep their own observations, histories, normalisers and heads; actions of the tree and
of all its skills are those of the robot. The tree plans as many actions as the shortest chunk of its skills and plays
as many as the most cautious of them; a plain controller holds its action meanwhile.

All skills are asked for all rows at every decision, whoever plays: so an episode does not depend on its neighbours, and
the tree can be exported as one graph. The tree remembers only where a node says `resume` or `limit` or a skill is
recurrent; then it is a recurrent policy for everything that plays it. A skill's memory begins anew with its turn.

Use it where a task falls into stages that are told apart easily and each has its policy. Skills are frozen: train them
by themselves, and improve the tree by `robopolicy program --rounds` (`samplers/programs.py`).

Reconstructed from the abstract: the language, the memory, and what plays when nothing runs are ours. The chooser among
several trees is a selector above them; review by a vision-language model is the business of the search.
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
    """What a `TreePolicy` consists of; `grow` fills it in."""

    tree: dict[str, Any] = field(default_factory=dict[str, Any])  # nodes as plain JSON values, see `trees/nodes.py`
    skills: dict[str, Any] = field(default_factory=dict[str, Any])  # name -> description of the policy (`nested`)
    rest: tuple[Finite, ...] = ()  # action where no action node was ticked, in action units; empty: zeros


class TreePolicy(Policy):
    """A behaviour tree; verbs `act`, `sample` and, where it remembers, `next_hidden`."""

    name: ClassVar[str] = "tree"
    config_class = TreeConfig
    config: TreeConfig
    rest: Tensor  # (A,)

    def __init__(
        self, config: TreeConfig, spec: PolicySpec | None = None, *, skills: Mapping[str, Policy] | None = None
    ) -> None:
        """Build the policy.

        Args:
            config: Settings; its descriptions are used where no skills are given.
            spec: What to observe and play; taken from the skills where it is not given.
            skills: Policies by the names that the tree calls them, shared with the caller.

        Raises:
            UserError: Tree, skills and specification do not fit each other.
        """
        super().__init__()
        if not config.tree:
            raise UserError("A behaviour tree needs nodes; write it as JSON and run 'robopolicy program'.")
        self.config = config
        self.tree = read_tree(config.tree)
        known = {name: rebuild(entry) for name, entry in config.skills.items()} if skills is None else skills
        missing = [name for name in self.tree.skills if name not in known]
        if missing:
            raise UserError(
                f"The tree calls the skill '{missing[0]}', but has {', '.join(sorted(known)) or 'none'}; pass it."
            )
        self.skills = nn.ModuleDict({name: known[name] for name in self.tree.skills})
        self._memories = self._places_in_memory()
        self.spec = self._joint_spec(spec)
        vectors = {key: shape[0] for key, shape in self.spec.observation.items() if _is_vector(key, shape)}
        self.tree.check(vectors, self.spec.action_dim)
        self._read = tuple(sorted(self.tree.reads))
        if config.rest and len(config.rest) != self.spec.action_dim:
            raise UserError(f"rest has {len(config.rest)} numbers, but there are {self.spec.action_dim} actions.")
        rest = torch.tensor(config.rest or [0.0] * self.spec.action_dim, device=self.device)
        self.register_buffer("rest", rest, persistent=False)
        self.eval()

    def _places_in_memory(self) -> dict[int, slice]:
        """Index of an action with a recurrent skill -> where in the memory that of the skill lies."""
        end = len(self.tree.slots)
        found: dict[int, slice] = {}
        for node in self.tree.actions:
            size = self._skill(node.skill).spec.hidden_dim if node.skill else 0
            if size:
                found[node.index] = slice(end, end + size)
                end += size
        self._memory_dim = end
        return found

    def _joint_spec(self, given: PolicySpec | None) -> PolicySpec:
        """What the tree sees and plays: all that its skills need, the shortest chunk, the fewest actions of it."""
        specs = [self._skill(name).spec for name in self.skills]
        if not specs and given is None:
            raise UserError("A tree without skills takes its observations and actions from a task; pass the spec.")
        observation: dict[str, tuple[int, ...]] = {}
        wanted = self.tree.reads.union(*(spec.observation for spec in specs))
        for spec in [*specs, *([given] if given is not None else [])]:
            shown = {key: tuple(shape) for key, shape in spec.observation.items() if key != HIDDEN_STATE}
            shown = {key: shape for key, shape in shown.items() if key in wanted} or shown  # something to count rows
            differing = [key for key in shown if observation.setdefault(key, shown[key]) != shown[key]]
            if differing or spec.action_dim != (specs or [spec])[0].action_dim:
                what = f"'{differing[0]}'" if differing else "the number of actions"
                raise UserError(f"The skills of a tree must agree about {what}; take policies of one task.")
        if self._memory_dim:
            observation[HIDDEN_STATE] = (self._memory_dim,)
        last = given if given is not None else specs[0]
        horizon = min([spec.horizon for spec in specs] or [last.horizon])
        cautious = min([horizon, *(spec.action_horizon for spec in specs)])
        action_horizon = cautious if given is None else min(given.action_horizon, horizon)
        history = max([spec.obs_horizon for spec in specs] or [1])
        return PolicySpec(observation, last.action_dim, horizon, action_horizon, history)

    def _skill(self, name: str) -> Policy:
        return cast(Policy, self.skills[name])

    # What the tree decides.

    def tick(self, obs: Observation) -> TreeTick:
        """Tick the tree for observations `{key: (B, To, ...)}`, of which it reads the newest."""
        reference = next(iter(obs.values()))
        slots = len(self.tree.slots)
        if self._memory_dim and HIDDEN_STATE not in obs:
            raise UserError(f"This tree remembers: hand it '{HIDDEN_STATE}', as rollouts and evaluation do.")
        memory = obs[HIDDEN_STATE][:, -1, :slots] if self._memory_dim else self.rest.new_zeros(len(reference), 0)
        return self.tree.tick({key: obs[key][:, -1].float() for key in self._read}, memory.to(self.rest))

    @torch.no_grad()
    def act(self, obs: Observation, *, deterministic: bool = False, generator: Randomness = None) -> Tensor:
        """The chunk of the action that plays."""
        found = self.tick(obs)
        rows, horizon = len(found.action), self.spec.horizon
        one = torch.ones_like(found.action, dtype=self.rest.dtype)[:, None]
        values = {key: obs[key][:, -1].float() for key in self._read}
        chunk = (one * self.rest)[:, None].expand(rows, horizon, -1)
        played: dict[int | str, Tensor] = {}
        for place, node in enumerate(self.tree.actions):
            key = node.skill if node.skill and node.index not in self._memories else node.index
            if key in played:  # one skill in several places is asked once
                pass
            elif node.skill:
                seen = self._seen(node, obs)
                full = self._skill(node.skill).act(seen, deterministic=deterministic, generator=generator)
                played[key] = full[:, :horizon]
            else:
                parts = [formula(values, one) for formula in node.control]
                played[key] = torch.cat(parts, -1)[:, None].expand(rows, horizon, -1)
            chunk = torch.where((found.action == place)[:, None, None], played[key], chunk)
        return chunk

    @torch.no_grad()
    def next_hidden(self, obs: Observation) -> Tensor:
        """Memory `(B, 1, M)` after `obs`: the nodes' own, then those of recurrent skills, 0 where they do not run."""
        if not self._memory_dim:
            raise self._lacks("next_hidden")
        found = self.tick(obs)
        parts = [found.memory]
        for node in self.tree.actions:
            if node.index in self._memories:
                after = self._skill(node.skill).next_hidden(self._seen(node, obs))[:, -1]
                runs = (found.action == self.tree.places[node.index]) & found.running
                parts.append(torch.where(runs[:, None], after, torch.zeros_like(after)))
        return torch.cat(parts, 1)[:, None]

    def _seen(self, node: Node, obs: Observation) -> Observation:
        """What the skill of an action sees of `obs`, its own memory included."""
        spec = self._skill(node.skill).spec
        if node.index in self._memories:
            obs = {**obs, HIDDEN_STATE: obs[HIDDEN_STATE][..., self._memories[node.index]]}
        return parent_observation(obs, spec)

    def sample(self, obs: Observation, *, generator: Randomness = None) -> Sample:
        """The chunk of the action that plays, with its exploration noise; it has no density."""
        return Sample.unscored(self.act(obs, generator=generator))

    def update_stats(self, obs: Observation) -> None:
        """Nothing: skills keep the statistics they were trained with."""

    @property
    def nfe(self) -> int:
        """Those of all skills, as all are asked."""
        return sum(self._skill(name).nfe for name in self.skills)

    def with_skill(self, name: str, skill: Policy) -> TreePolicy:
        """The same tree with another policy behind the name of a skill.

        Raises:
            UserError: The tree has no such skill, or the policy does not fit.
        """
        if name not in self.skills:
            raise UserError(f"The tree has no skill '{name}', only {', '.join(self.skills) or 'none'}.")
        skills = {known: self._skill(known) for known in self.skills} | {name: skill}
        shown = {key: shape for key, shape in self.spec.observation.items() if key != HIDDEN_STATE}
        return grow(self.tree, skills, replace(self.spec, observation=shown), rest=self.config.rest)

    def train(self, mode: bool = True) -> TreePolicy:
        """Skills stay in evaluation mode."""
        super().train(False)
        return self


def grow(
    tree: BehaviorTree, skills: Mapping[str, Policy], spec: PolicySpec | None = None, *, rest: tuple[float, ...] = ()
) -> TreePolicy:
    """A policy of `tree` with `skills`, shared; those it does not call are left out.

    Args:
        tree: The rules.
        skills: Policies by the names that the tree calls them.
        spec: Observations and actions where skills do not settle them; its horizon serves trees without skills.
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
