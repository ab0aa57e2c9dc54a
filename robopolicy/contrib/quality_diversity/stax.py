"""STAX: search for rewards that are hardly ever paid, in a space of behaviours learned on the way (Paolo et al. 2021).

Nobody says which behaviours there are: an autoencoder learns to compress what policies see at a few moments of an
episode, and its code is the behaviour. Two processes take turns, a chunk of episodes each.

* *Exploration* mutates a population of policies and keeps those whose behaviour is unlike that of others (novelty: mean
  distance to the nearest) or badly reconstructed (surprise); which of the two counts is drawn anew every generation, or
  with `selection=pareto` both do. Some policies of every generation go into an archive, on which the autoencoder is
  trained, every time a chunk later than the time before.
* *Exploitation* climbs from every policy that was paid, in a small population of its own, an emitter. One gets a trial
  of six generations first, those that promise unlike behaviour before others; of those that improved one goes on, drawn
  from the best by improvement and novelty.

Policies that were paid are kept apart, and the run deploys the one that earned most. All policies play the same
`starts` episodes, so that behaviour tells policies apart and not starts.

Use it from scratch where reward is sparse or deceptive, nobody can say which behaviour leads to it, and simulation is
fast. Not where rewards are dense (every policy is paid: ppo, sac), for starts that differ much (raise `starts`), and
not for networks of many thousand weights, which nothing but mutation changes.

Deviations from the public code: policies are neural networks of any size, so that the step of an emitter, a third of
the distance to the nearest other policy, is per weight (root mean square) and emitters end after `patience` generations
without progress (there: 120 + 20 D / 6, for a few tens of weights). Views are vectors and small images, standardised,
where the code reconstructs images of 64 x 64 by convolutions. `together` emitters may step at once.
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
from robopolicy.contrib.quality_diversity.individuals import Individuals, view_dim
from robopolicy.contrib.quality_diversity.novelty import front_numbers, novelty, spread_out
from robopolicy.contrib.quality_diversity.stacked_policies import Population
from robopolicy.errors import UserError, unknown_name
from robopolicy.policies.base import Policy
from robopolicy.policies.heads.gaussian import GaussianPolicy

SELECTIONS = ("alternate", "pareto")
NEAR = 3.0  # steps of an emitter to the nearest other policy


@dataclass(frozen=True)
class STAXConfig(Validated):
    """Settings of STAX; defaults are the public code's."""

    population: PositiveInt = 100  # policies that are varied in exploration
    offspring: PositiveInt = 2  # of each of them per generation
    sigma: Positive = 0.05  # standard deviation of the mutation of every weight
    limit: Positive = 5.0  # largest absolute weight
    neighbours: PositiveInt = 15  # nearest behaviours that novelty looks at
    selection: str = "alternate"  # novelty or surprise, drawn every generation; pareto: both
    archived: NonNegativeInt = 5  # policies of a generation that go into the archive
    chunk: PositiveInt = 1000  # policies played in one turn of exploration or exploitation
    emitter: PositiveInt = 6  # members of an emitter
    together: PositiveInt = 1  # emitters that step at once; more fill simulators of many environments
    patience: NonNegativeInt = 120  # generations without progress after which an emitter ends
    floor: Finite = 0.0  # return above which a policy counts as paid
    starts: PositiveInt = 1  # episodes that every policy plays, the same for all
    views: PositiveInt = 5  # moments of an episode that are looked at, evenly spaced, the last included
    code: PositiveInt = 10  # numbers per moment that the autoencoder makes of them
    hidden: tuple[PositiveInt, ...] = (64, 32)  # layers of its encoder
    epochs: NonNegativeInt = 100  # of its training, at most
    autoencoder_lr: Positive = 1e-3  # its learning rate
    batch_size: PositiveInt = 128  # its batches
    seed: NonNegativeInt = 0  # of all that is drawn

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.selection not in SELECTIONS:
            raise unknown_name("selection", self.selection, SELECTIONS)


class STAX(Algorithm):
    """Novelty search in a learned space, and emitters where something was paid."""

    name = "stax"
    config_class = STAXConfig
    data_source = "individuals"
    heads = ("gaussian", "squashed_gaussian")
    reference = "paolo2021stax"
    may_regress: ClassVar[bool] = True  # who earns most on its own starts is not always best on others

    def __init__(self, config: STAXConfig, policy: Policy, *, total_updates: int) -> None:
        """Prepare to search with the architecture of a Gaussian `policy`, whose weights take part."""
        super().__init__(policy, total_updates=total_updates, seed=config.seed)
        if not isinstance(policy, GaussianPolicy):
            raise UserError(f"stax varies the weights of a gaussian policy, got '{policy.name}'; pass policy=gaussian.")
        if policy.encoder.normalizer.mode == "running":
            raise UserError("What is kept must go on seeing what it saw; pass policy.normalization=identity.")
        if DESCRIPTOR in policy.spec.observation:
            raise UserError("stax learns behaviours itself; leave the wrapper 'descriptor' out.")
        self.config = config
        self.policy: GaussianPolicy = policy
        self.population = Population(policy)
        with torch.random.fork_rng(), torch.device("cpu"):  # individuals are kept there
            torch.manual_seed(config.seed)
            views = view_dim(policy.spec.observation)
            self.autoencoder = Autoencoder(views, config.code, config.hidden)
            nobody = Individuals.none(self.population.weight_dim, config.starts * config.views, views)
            self.sown = torch.zeros(0, dtype=torch.bool)  # which parents have an emitter already
        self.parents = self.children = self.archive = self.paid = nobody
        self.emitters: list[Emitter] = []
        self.playing: list[int] = []  # places of the emitters whose members are asked for
        self.exploring, self.left = True, config.chunk
        self.chunks, self.interval = 0, 1  # of exploration since the autoencoder was trained, and until it is again
        self.candidates = self.population.fresh(config.population, config.seed).cpu()  # (P, D) weights to play

    def update(self, batch: Individuals) -> Metrics:
        """Selection by what became of the candidates, and the next ones."""
        self.left -= len(batch)
        metrics = self._explored(batch) if self.exploring else self._exploited(batch)
        if self.left <= 0:
            metrics |= self._turned()
        self.candidates = self._asked()
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
    def behaviours(self, individuals: Individuals) -> Tensor:
        """Codes `(K, S * code)` of what they saw."""
        return self.autoencoder.encode(individuals.views).flatten(1)

    # Exploration.

    def _explored(self, found: Individuals) -> Metrics:
        """Keep of parents and children those that are least like others."""
        config = self.config
        if not len(self.parents):
            self.parents, self.sown = found, torch.zeros(len(found), dtype=torch.bool)
            return {}
        self.children = found
        everyone = self.parents + found
        sown = self._sow(everyone, torch.cat([self.sown, torch.zeros(len(found), dtype=torch.bool)]))
        unlike = novelty(self.behaviours(everyone), self.behaviours(self._others()), config.neighbours)
        with torch.no_grad():
            surprise = self.autoencoder.error(everyone.views).sum(1)
        drawn = torch.randperm(len(found), generator=self.generator)[: config.archived]
        self.archive = self.archive + found[drawn]
        if config.selection == "pareto":
            kept = spread_out(unlike, surprise, config.population)
        else:
            by_novelty = bool(torch.randint(2, (), generator=self.generator))
            kept = (unlike if by_novelty else surprise).argsort(descending=True, stable=True)[: config.population]
        self.parents, self.sown = everyone[kept], sown[kept]
        return {"search/novelty": float(unlike.mean()), "search/surprise": float(surprise.mean())}

    def _others(self) -> Individuals:
        """Everybody that behaviours are compared with."""
        return self.parents + self.children + self.archive + self.paid

    def _sow(self, everyone: Individuals, sown: Tensor) -> Tensor:
        """An emitter for each of those that were paid and have none."""
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

    def _exploited(self, found: Individuals) -> Metrics:
        """Tell emitters what became of their members."""
        config = self.config
        unlike = novelty(self.behaviours(found), self.behaviours(self._others()), config.neighbours, within=False)
        start, ended = 0, list[int]()
        for place in self.playing:
            emitter = self.emitters[place]
            rows = slice(start, start + emitter.count)
            start += emitter.count
            emitter.tell(found[rows])
            emitter.note(found[rows], unlike[rows])
            self.paid = self.paid + emitter.fresh(config.floor)
            emitter.rate()
            if emitter.tried and (emitter.improvement <= 0 or emitter.stale(config.patience)):
                drawn = torch.randperm(len(emitter.novel), generator=self.generator)[: config.archived]
                self.archive = self.archive + emitter.novel[drawn]
                ended.append(place)
        moved = {place: number for number, place in enumerate(p for p in range(len(self.emitters)) if p not in ended)}
        self.emitters = [self.emitters[place] for place in moved]
        going = [moved[place] for place in self.playing if place in moved]
        self.playing = [place for place in going if not self.emitters[place].just_tried]
        return {}

    def _chosen(self) -> list[int]:
        """Emitters to go on with beside those that play: first untried ones, then the most promising ones."""
        idle = [place for place in range(len(self.emitters)) if place not in self.playing]
        room = self.config.together - len(self.playing)
        places: list[int] = []
        while idle and len(places) < room:
            untried = [place for place in idle if not self.emitters[place].tried]
            if self.left <= self.config.chunk / 3:  # what is left of a turn is for those that have shown promise
                untried = []
            able = untried or [place for place in idle if self.emitters[place].tried]
            if not able:
                break
            unlike = self._apart(able)
            if untried:
                place = able[int(unlike.argmax())]
            else:
                gains = torch.tensor([self.emitters[place].improvement for place in able])
                front = (front_numbers(unlike, gains) == 0).nonzero().flatten()
                place = able[int(front[torch.randint(len(front), (), generator=self.generator)])]
            places.append(place)
            idle.remove(place)
        return places

    def _apart(self, places: Sequence[int]) -> Tensor:
        """Novelty `(K,)` of the ancestors of emitters among all that were paid."""
        ancestors = torch.cat([self.behaviours(self.emitters[place].ancestor) for place in places])
        return novelty(ancestors, self.behaviours(self.paid), self.config.neighbours)

    # Turns.

    def _turned(self) -> Metrics:
        """The other process begins; after enough chunks of exploration the autoencoder is trained."""
        metrics: Metrics = {}
        self.chunks += self.exploring
        if self.exploring and self.chunks == self.interval:
            views = self._others().views.flatten(0, 1)
            settings = {"epochs": self.config.epochs, "batch_size": self.config.batch_size}
            lr = self.config.autoencoder_lr
            error = self.autoencoder.fit(views, lr=lr, generator=self.generator, **settings)
            metrics["autoencoder/error"] = error
            self.chunks, self.interval = 0, self.interval + 1
        self.exploring, self.left, self.playing = not self.exploring, self.config.chunk, []
        return metrics

    def _asked(self) -> Tensor:
        """Weights `(P, D)` of the next candidates."""
        if not self.exploring:
            self.playing += self._chosen()
            if self.playing:
                return torch.cat([self.emitters[place].ask(self.generator) for place in self.playing])
            self._turned()  # nobody has been paid yet
        parents = self.parents.weights.repeat_interleave(self.config.offspring, 0)
        return mutated(parents, self.config.sigma, self.config.limit, self.generator)

    # What a run leaves behind.

    def _deploy(self) -> None:
        """Give the policy the weights that earned most; before anybody was paid it stays as it was."""
        if len(self.paid):
            self.population.put(self.paid.weights[self.paid.fitness.argmax()].to(self.policy.device), self.policy)

    def elites(self) -> Elites:
        """Policies that were paid, with their behaviours, best first."""
        order = self.paid.fitness.argsort(descending=True, stable=True)
        paid = self.paid[order]
        return Elites(paid.weights, paid.fitness, self.behaviours(paid).double())

    def extract_policy(self, member: Tensor) -> GaussianPolicy:
        """A policy of its own with the weights `(D,)`."""
        policy = copy.deepcopy(self.policy)
        self.population.put(member.to(policy.device), policy)
        return policy

    def checkpoint_items(self) -> Mapping[str, Checkpointable]:
        """The autoencoder."""
        return {"autoencoder": self.autoencoder}

    def state_dict(self) -> dict[str, Any]:
        """Everybody who is kept, and whose turn it is."""
        people = {name: getattr(self, name).state_dict() for name in PEOPLE}
        plain = {name: getattr(self, name) for name in PLAIN}
        emitters = [emitter.state_dict() for emitter in self.emitters]
        return {**super().state_dict(), **plain, "people": people, "emitters": emitters}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`."""
        super().load_state_dict(state)
        for name in PEOPLE:
            setattr(self, name, Individuals.load(state["people"][name]))
        for name in PLAIN:
            value = state[name]
            setattr(self, name, value.clone() if isinstance(value, Tensor) else value)
        self.playing = list(self.playing)
        self.emitters = [Emitter.load(found) for found in state["emitters"]]
        self._deploy()


PEOPLE = ("parents", "children", "archive", "paid")
PLAIN = ("sown", "playing", "exploring", "left", "chunks", "interval", "candidates")
