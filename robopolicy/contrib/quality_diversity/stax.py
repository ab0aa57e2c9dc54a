"""STAX: search for sparse rewards in a learned behavior space (Paolo et al. 2021).

An autoencoder compresses observations at a few steps of an episode, and its code is the behavior. Two processes
alternate, a chunk of episodes each.

* *Exploration* mutates a population of policies and keeps those with the highest novelty (mean distance to the nearest
  behaviors) or surprise (reconstruction error). One of the two is drawn every generation, or both count with
  `selection=pareto`. Some policies of every generation enter an archive, on which the autoencoder is trained, at
  intervals that grow by one chunk.
* *Exploitation* improves every rewarded policy in a small population of its own, an emitter. An emitter first has a
  trial of six generations, starting with the most novel ancestors. Of the emitters that improved, one continues, drawn
  from the best by improvement and novelty.

Rewarded policies are stored separately, and the run deploys the one with the highest return. All policies run the same
`starts` episodes, so that behavior depends on the policy and not on the start.

Use it from scratch where reward is sparse or deceptive, the relevant behavior is unknown, and simulation is fast. Do
not use it where rewards are dense (every policy gets one: ppo, sac), for very different starts (raise `starts`), or for
networks of many thousand weights, because it only mutates them.

Deviations from the public code: policies are neural networks of any size, so that the step of an emitter, a third of
the distance to the nearest other policy, is per weight (root mean square), and emitters end after `patience`
generations without progress (the code: 120 + 20 D / 6, for a few tens of weights). Views are vectors and small images,
standardised (the code reconstructs images of 64 x 64 by convolutions). `together` emitters may step in parallel.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from robopolicy.algorithms.common.algorithm import Algorithm, Checkpointable, Metrics
from robopolicy.constraints import Finite, NonNegativeInt, Positive, PositiveInt, Validated
from robopolicy.contrib.quality_diversity.autoencoder import Autoencoder
from robopolicy.contrib.quality_diversity.behavior import DESCRIPTOR
from robopolicy.contrib.quality_diversity.elites import Elites
from robopolicy.contrib.quality_diversity.emitters import Emitter, mutated
from robopolicy.contrib.quality_diversity.individuals import EvaluatedPolicies, view_dim
from robopolicy.contrib.quality_diversity.novelty import novelty, pareto_ranks, select_diverse
from robopolicy.contrib.quality_diversity.stacked_policies import Population
from robopolicy.errors import UserError, unknown_name
from robopolicy.policies.base import Policy
from robopolicy.policies.heads.gaussian import GaussianPolicy

SELECTIONS = ("alternate", "pareto")
NEAR = 3.0  # an emitter's step is this fraction of the distance to the nearest other policy


@dataclass(frozen=True)
class STAXConfig(Validated):
    """Settings of STAX; defaults are the public code's."""

    population: PositiveInt = 100  # policies of the exploration
    offspring: PositiveInt = 2  # of each of them per generation
    sigma: Positive = 0.05  # standard deviation of the mutation of every weight
    limit: Positive = 5.0  # maximum absolute weight
    neighbours: PositiveInt = 15  # neighbours of the novelty
    selection: str = "alternate"  # novelty or surprise, drawn every generation; pareto: both
    archived: NonNegativeInt = 5  # policies of a generation that enter the archive
    chunk: PositiveInt = 1000  # policies evaluated in one turn of exploration or exploitation
    emitter: PositiveInt = 6  # members of an emitter
    together: PositiveInt = 1  # emitters that step in parallel; more of them fill simulators of many environments
    patience: NonNegativeInt = 120  # generations without progress after which an emitter ends
    floor: Finite = 0.0  # return above which a policy counts as rewarded
    starts: PositiveInt = 1  # episodes of every policy, the same for all
    views: PositiveInt = 5  # stored observations of an episode, evenly spaced, including the last
    code: PositiveInt = 10  # code size per stored observation
    hidden: tuple[PositiveInt, ...] = (64, 32)  # layers of its encoder
    epochs: NonNegativeInt = 100  # maximum epochs of each training
    autoencoder_lr: Positive = 1e-3  # its learning rate
    batch_size: PositiveInt = 128  # its batch size
    seed: NonNegativeInt = 0  # of all random draws

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.selection not in SELECTIONS:
            raise unknown_name("selection", self.selection, SELECTIONS)


class STAX(Algorithm):
    """Novelty search in a learned space, with emitters around rewarded policies."""

    name = "stax"
    config_class = STAXConfig
    data_source = "individuals"
    heads = ("gaussian", "squashed_gaussian")
    reference = "paolo2021stax"
    may_regress: ClassVar[bool] = True  # the best policy on its starts is not always the best on others

    def __init__(self, config: STAXConfig, policy: Policy, *, total_updates: int) -> None:
        """Prepare to search with the architecture of a Gaussian `policy`, which is the first candidate."""
        super().__init__(policy, total_updates=total_updates, seed=config.seed)
        if not isinstance(policy, GaussianPolicy):
            raise UserError(f"stax varies the weights of a gaussian policy, got '{policy.name}'; pass policy=gaussian.")
        if policy.encoder.normalizer.mode == "running":
            raise UserError("stax needs fixed normalization of observations; pass policy.normalization=identity.")
        if DESCRIPTOR in policy.spec.observation:
            raise UserError("stax learns descriptors; remove the wrapper 'descriptor'.")
        self.config = config
        self.generator = torch.Generator().manual_seed(config.seed)  # individuals are stored on the CPU
        self.policy: GaussianPolicy = policy
        self.population = Population(policy)
        with torch.random.fork_rng(), torch.device("cpu"):  # individuals are stored on the CPU
            torch.manual_seed(config.seed)
            views = view_dim(policy.spec.observation)
            self.autoencoder = Autoencoder(views, config.code, config.hidden)
            empty = EvaluatedPolicies.none(self.population.weight_dim, config.starts * config.views, views)
            self.sown = torch.zeros(0, dtype=torch.bool)  # which parents already have an emitter
        self.parents = self.children = self.archive = self.paid = empty
        self.emitters: list[Emitter] = []
        self.playing: list[int] = []  # indices of the emitters whose members are evaluated
        self.exploring, self.left = True, config.chunk
        self.chunks, self.interval = (
            0,
            1,
        )  # chunks since the last training of the autoencoder, and between trainings
        self.candidates = self.population.fresh(config.population, config.seed).cpu()  # (P, D) weights to evaluate

    def update(self, batch: EvaluatedPolicies) -> Metrics:
        """Select by the results of the candidates, and create the next ones."""
        self.left -= len(batch)
        metrics = self._explore(batch) if self.exploring else self._exploit(batch)
        if self.left <= 0:
            metrics |= self._switch_phase()
        self.candidates = self._next_candidates()
        self._deploy()
        self.updates += 1
        best = float(torch.cat([self.paid.fitness, self.parents.fitness]).max())
        return metrics | {
            "archive/size": float(len(self.archive)),
            "archive/rewarded": float(len(self.paid)),
            "archive/max_fitness": best,
            "search/emitters": float(len(self.emitters)),
            "search/exploring": float(self.exploring),
        }

    @torch.no_grad()
    def behaviours(self, individuals: EvaluatedPolicies) -> Tensor:
        """Codes `(K, S * code)` of their views."""
        return self.autoencoder.encode(individuals.views).flatten(1)

    # Exploration.

    def _explore(self, found: EvaluatedPolicies) -> Metrics:
        """Keep the most novel or surprising of parents and children."""
        config = self.config
        if not len(self.parents):
            self.parents, self.sown = found, torch.zeros(len(found), dtype=torch.bool)
            return {}
        self.children = found
        everyone = self.parents + found
        sown = self._spawn_emitters(everyone, torch.cat([self.sown, torch.zeros(len(found), dtype=torch.bool)]))
        novel = novelty(self.behaviours(everyone), self.behaviours(self._reference()), config.neighbours)
        with torch.no_grad():
            surprise = self.autoencoder.error(everyone.views).sum(1)
        drawn = torch.randperm(len(found), generator=self.generator)[: config.archived]
        self.archive = self.archive + found[drawn]
        if config.selection == "pareto":
            kept = select_diverse(novel, surprise, config.population)
        else:
            by_novelty = bool(torch.randint(2, (), generator=self.generator))
            kept = (novel if by_novelty else surprise).argsort(descending=True, stable=True)[: config.population]
        self.parents, self.sown = everyone[kept], sown[kept]
        return {"search/novelty": float(novel.mean()), "search/surprise": float(surprise.mean())}

    def _reference(self) -> EvaluatedPolicies:
        """Policies that behaviours are compared with."""
        return self.parents + self.children + self.archive + self.paid

    def _spawn_emitters(self, everyone: EvaluatedPolicies, sown: Tensor) -> Tensor:
        """Create an emitter for each rewarded policy that has none."""
        rows = ((everyone.fitness > self.config.floor) & ~sown).nonzero().flatten()
        for row in rows.tolist():
            distance = (everyone.weights - everyone.weights[row]).square().mean(1).sqrt()
            distance[row] = float("inf")
            sigma = float(distance.min()) / NEAR
            settings = {"size": self.config.emitter, "limit": self.config.limit}
            ancestor = everyone[row : row + 1]
            self.emitters.append(Emitter(ancestor, sigma=sigma if sigma > 0 else self.config.sigma, **settings))
        self.paid = self.paid + everyone[rows]
        sown = sown.clone()
        sown[rows] = True
        return sown

    # Exploitation.

    def _exploit(self, found: EvaluatedPolicies) -> Metrics:
        """Pass the results of their members to the emitters."""
        config = self.config
        novel = novelty(self.behaviours(found), self.behaviours(self._reference()), config.neighbours, within=False)
        start, ended = 0, list[int]()
        for place in self.playing:
            emitter = self.emitters[place]
            rows = slice(start, start + emitter.count)
            start += emitter.count
            emitter.tell(found[rows])
            emitter.record_novel(found[rows], novel[rows])
            self.paid = self.paid + emitter.fresh(config.floor)
            emitter.rate()
            if emitter.is_evaluated and (emitter.improvement <= 0 or emitter.stale(config.patience)):
                drawn = torch.randperm(len(emitter.novel), generator=self.generator)[: config.archived]
                self.archive = self.archive + emitter.novel[drawn]
                ended.append(place)
        moved = {place: number for number, place in enumerate(p for p in range(len(self.emitters)) if p not in ended)}
        self.emitters = [self.emitters[place] for place in moved]
        continuing = [moved[place] for place in self.playing if place in moved]
        self.playing = [place for place in continuing if not self.emitters[place].just_evaluated]
        return {}

    def _select_emitters(self) -> list[int]:
        """Emitters to run in addition to the current ones: first those without a trial, then the best ones."""
        idle = [place for place in range(len(self.emitters)) if place not in self.playing]
        room = self.config.together - len(self.playing)
        places: list[int] = []
        while idle and len(places) < room:
            untried = [place for place in idle if not self.emitters[place].is_evaluated]
            if self.left <= self.config.chunk / 3:  # the rest of a turn is for promising emitters
                untried = []
            able = untried or [place for place in idle if self.emitters[place].is_evaluated]
            if not able:
                break
            distance = self._distance(able)
            if untried:
                place = able[int(distance.argmax())]
            else:
                gains = torch.tensor([self.emitters[place].improvement for place in able])
                front = (pareto_ranks(distance, gains) == 0).nonzero().flatten()
                place = able[int(front[torch.randint(len(front), (), generator=self.generator)])]
            places.append(place)
            idle.remove(place)
        return places

    def _distance(self, places: Sequence[int]) -> Tensor:
        """Novelty `(K,)` of the ancestors of emitters among all rewarded policies."""
        ancestors = torch.cat([self.behaviours(self.emitters[place].ancestor) for place in places])
        return novelty(ancestors, self.behaviours(self.paid), self.config.neighbours)

    # Phases.

    def _switch_phase(self) -> Metrics:
        """Switch between exploration and exploitation; after enough chunks of exploration train the autoencoder."""
        metrics: Metrics = {}
        self.chunks += self.exploring
        if self.exploring and self.chunks == self.interval:
            views = self._reference().views.flatten(0, 1)
            settings = {"epochs": self.config.epochs, "batch_size": self.config.batch_size}
            lr = self.config.autoencoder_lr
            error = self.autoencoder.fit(views, lr=lr, generator=self.generator, **settings)
            metrics["autoencoder/error"] = error
            self.chunks, self.interval = 0, self.interval + 1
        self.exploring, self.left, self.playing = not self.exploring, self.config.chunk, []
        return metrics

    def _next_candidates(self) -> Tensor:
        """Weights `(P, D)` of the next candidates."""
        if not self.exploring:
            self.playing += self._select_emitters()
            if self.playing:
                return torch.cat([self.emitters[place].ask(self.generator) for place in self.playing])
            self._switch_phase()  # no policy has a reward yet
        parents = self.parents.weights.repeat_interleave(self.config.offspring, 0)
        return mutated(parents, self.config.sigma, self.config.limit, self.generator)

    # Results of a run.

    def _deploy(self) -> None:
        """Copy the weights with the highest return to the policy; without rewarded policies it does not change."""
        if len(self.paid):
            self.population.put(self.paid.weights[self.paid.fitness.argmax()].to(self.policy.device), self.policy)

    def elites(self) -> Elites:
        """Rewarded policies with their behaviours, best first."""
        order = self.paid.fitness.argsort(descending=True, stable=True)
        paid = self.paid[order]
        return Elites(paid.weights, paid.fitness, self.behaviours(paid).double())

    def extract_policy(self, member: Tensor) -> GaussianPolicy:
        """Copy of the policy with the weights `(D,)`."""
        policy = copy.deepcopy(self.policy)
        self.population.put(member.to(policy.device), policy)
        return policy

    def checkpoint_items(self) -> Mapping[str, Checkpointable]:
        """The autoencoder."""
        return {"autoencoder": self.autoencoder}

    def state_dict(self) -> dict[str, Any]:
        """Stored policies and the state of the search."""
        people = {name: getattr(self, name).state_dict() for name in PEOPLE}
        plain = {name: getattr(self, name) for name in PLAIN}
        emitters = [emitter.state_dict() for emitter in self.emitters]
        return {**super().state_dict(), **plain, "people": people, "emitters": emitters}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`."""
        super().load_state_dict(state)
        for name in PEOPLE:
            setattr(self, name, EvaluatedPolicies.load(state["people"][name]))
        for name in PLAIN:
            value = state[name]
            setattr(self, name, value.clone() if isinstance(value, Tensor) else value)
        self.playing = list(self.playing)
        self.emitters = [Emitter.load(found) for found in state["emitters"]]
        self._deploy()


PEOPLE = ("parents", "children", "archive", "paid")
PLAIN = ("sown", "playing", "exploring", "left", "chunks", "interval", "candidates")
