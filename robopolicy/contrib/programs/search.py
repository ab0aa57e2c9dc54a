"""Search over programs, by `ask` and `tell`: readable policies improved by an evaluate-and-refine loop.

Sources: Aravindan et al. 2025, IPP, and Xu et al. 2025, PORTAL.

    propose -> run on common instances -> feedback -> keep the best -> propose ...

A program is a text: a behaviour tree as JSON, or Python that answers the prompts of a text task. Who proposes is a
`Proposer`: random changes of good trees here, a language model in `robopolicy.contrib.programs.refine`. What a program
scores on which instances is the caller's matter; only `tell` hears of it. The best score never falls, a program is
never tried twice, and of programs that score the same the shorter one is better. With the same scores a search of
random changes is a function of its seed; its state is plain JSON, so that one that was killed goes on where it was.

Use it for policies that people should read and approve, and where one run is cheap. Scores of the best are optimistic,
as on any instances that choose: report on others.

Reconstructed from the abstracts: archive, ties and random changes are ours.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from robopolicy.contrib.programs.trees.mutation import changed
from robopolicy.contrib.programs.trees.nodes import parse_tree
from robopolicy.errors import UserError
from robopolicy.files import parse_json, write_text
from robopolicy.text.rollouts.protocols import Part

VERSION = 1
WORST = float("-inf")


@dataclass(frozen=True)
class Trial:
    """A program and what became of it."""

    program: str
    score: float = WORST  # higher is better
    feedback: str = ""  # what its author should know: failures, errors
    round: int = 0  # in which it was tried, 0: at the start

    @property
    def rank(self) -> tuple[float, int]:
        """Sorts the best first: by score, then the shorter."""
        return -self.score, len(self.program)


class Proposer(Protocol):
    """Writes programs."""

    def propose(self, best: Sequence[Trial], rng: np.random.Generator) -> str | None:
        """A program that is to be better than `best`, best first; None: no idea this time."""
        ...


class TreeChanges:
    """Random changes of the best behaviour trees: genetic programming without a model."""

    def __init__(self, accept: Callable[[str], object], skills: Sequence[str] = (), most: int = 3) -> None:
        """Get ready.

        Args:
            accept: Raises `UserError` where a tree cannot be played.
            skills: Names that an action may call.
            most: Largest number of changes at once.
        """
        self.accept, self.skills, self.most = accept, tuple(skills), most

    def propose(self, best: Sequence[Trial], rng: np.random.Generator) -> str | None:
        """A changed tree; better ones are changed more often."""
        weight = 0.5 ** np.arange(len(best))
        parent = int(rng.choice(len(best), p=weight / weight.sum()))
        plain = [json.loads(trial.program) for trial in best]
        made = plain[parent]
        for _ in range(int(rng.integers(1, self.most + 1))):
            made = changed(made, plain, self.skills, rng)
        text = json.dumps(made)
        try:
            parse_tree(text)
            self.accept(text)
        except UserError:
            return None
        return text


class ProgramSearch(Part):
    """The loop's memory: what was tried, and what it scored."""

    def __init__(
        self,
        start: Sequence[str],
        proposer: Proposer,
        *,
        population: int = 8,
        parents: int = 4,
        refusals: int = 50,
        seed: int = 0,
    ) -> None:
        """Get ready.

        Args:
            start: Programs of the first round; may be empty where the proposer needs no example.
            proposer: Who writes the others.
            population: Programs per round.
            parents: Best programs that the proposer is shown.
            refusals: Proposals that may be old or unplayable before a round is left smaller.
            seed: Of random changes.

        Raises:
            UserError: A number makes no sense.
        """
        if population < 1 or parents < 1:
            raise UserError(f"A search needs population and parents of at least 1, got {population} and {parents}.")
        self.proposer, self.population, self.parents, self.refusals = proposer, population, parents, refusals
        self.trials: list[Trial] = []
        self.curve: list[float] = []  # best score after every round
        self._rng = np.random.default_rng(seed)
        self._asked = list(dict.fromkeys(start))

    def ask(self) -> list[str]:
        """Programs to try, none of them tried before; fewer than `population` where new ones are hard to find."""
        if not self._asked:
            known = {trial.program for trial in self.trials}
            best = sorted(self.trials, key=lambda trial: trial.rank)[: self.parents]
            for _ in range(self.population + self.refusals):
                if len(self._asked) == self.population:
                    break
                program = self.proposer.propose(best, self._rng)
                if program is not None and program not in known:
                    known.add(program)
                    self._asked.append(program)
        return list(self._asked)

    def tell(self, scores: Sequence[float], feedback: Sequence[str] = ()) -> None:
        """Hear what the programs asked for last scored; a NaN counts as the worst.

        Raises:
            ValueError: There are not as many scores as programs.
        """
        texts = feedback or [""] * len(scores)
        for program, score, text in zip(self._asked, scores, texts, strict=True):
            value = WORST if np.isnan(score) else float(score)
            self.trials.append(Trial(program, value, text, len(self.curve)))
        self._asked = []
        self.curve.append(self.best.score if self.trials else WORST)

    @property
    def best(self) -> Trial:
        """The best program so far.

        Raises:
            UserError: None has been tried.
        """
        if not self.trials:
            raise UserError("No program has been tried yet; begin with one, or with a proposer that needs no example.")
        return min(self.trials, key=lambda trial: trial.rank)

    def state_dict(self) -> dict[str, Any]:
        """Trials, programs that are being tried, and the random generator, as plain JSON values."""
        return {
            "trials": [{**asdict(trial), "score": _jsonable(trial.score)} for trial in self.trials],
            "curve": [_jsonable(score) for score in self.curve],
            "asked": list(self._asked),
            "random": self._rng.bit_generator.state,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`."""
        self.trials = [Trial(**{**trial, "score": _number(trial["score"])}) for trial in state["trials"]]
        self.curve = [_number(score) for score in state["curve"]]
        self._asked = list(state["asked"])
        self._rng.bit_generator.state = state["random"]


Judge = Callable[[Sequence[str]], Sequence[tuple[float, str]]]
"""Scores and feedback of programs, on instances that are the same for all of them."""


def refine(
    search: ProgramSearch,
    judge: Judge,
    rounds: int,
    record: Path | None = None,
    request: Mapping[str, Any] | None = None,
) -> Trial:
    """Run the loop until `rounds` rounds are done in all, and return the best.

    Args:
        search: May have come some way already.
        judge: Runs the programs.
        rounds: Of proposals, those done before included; the start is no round.
        record: JSON file in which the search is kept after every step; read first where it exists.
        request: What decides scores and proposals, as plain JSON values; a record of another request is refused.

    Raises:
        UserError: The record is damaged, of another version or of another request.
    """
    asked = dict(request or {})
    if record is not None and record.is_file():
        search.load_state_dict(read_record(record, asked))

    def keep() -> None:
        if record is not None:
            content = {"version": VERSION, "request": asked, "search": search.state_dict()}
            write_text(record, json.dumps(content) + "\n")

    while len(search.curve) <= rounds:
        programs = search.ask()
        keep()  # so that texts of a language model are not lost with a run that is killed
        judged = judge(programs) if programs else []
        search.tell([score for score, _ in judged], [text for _, text in judged])
        keep()
    return search.best


def read_record(record: Path, request: Mapping[str, Any]) -> dict[str, Any]:
    """The state of a search from its file.

    Raises:
        UserError: It is damaged, of another version, or was made under another request.
    """
    try:
        content = parse_json(record.read_text(encoding="utf-8"))
        version, known, state = content["version"], content["request"], content["search"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{record} is damaged ({type(error).__name__}: {error}); search anew.") from error
    if version != VERSION:
        raise UserError(f"{record} has version {version!r}, this robopolicy reads {VERSION}; search anew.")
    other = [key for key in request if known.get(key) != request[key]]
    if other:
        raise UserError(
            f"{record} was begun with {other[0]} {known.get(other[0])!r}, now it is {request[other[0]]!r}, and scores "
            "would not compare; go on as it was begun, or choose another folder."
        )
    return state


def _jsonable(score: float) -> float | None:
    return score if np.isfinite(score) else None


def _number(score: float | None) -> float:
    return WORST if score is None else float(score)
