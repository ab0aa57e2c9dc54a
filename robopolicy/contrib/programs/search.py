"""Search over programs by `ask` and `tell`: readable policies improved in an evaluate-and-refine loop.

Sources: Aravindan et al. 2025, IPP, and Xu et al. 2025, PORTAL.

    propose -> run on common instances -> feedback -> keep the best -> propose ...

A program is a text: a behavior tree as JSON, or Python that answers the prompts of a text task. A `Proposer` writes
programs: random changes of good trees here, a language model in `robopolicy.contrib.programs.refine`. The caller scores
them on instances and passes the scores to `tell`. The best score never falls, a program is never evaluated twice, and
of programs with equal scores the shorter one is better. Given the scores, a search by random changes is determined by
its seed; its state is plain JSON, so that a killed search can resume.

Use it for policies that people should read and approve, and where one run is cheap. Scores of the best program are
optimistic, because they select it: report on other instances.

Reconstructed from the abstracts: archive, ties and random changes are ours.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from robopolicy.atomic import write_text
from robopolicy.contrib.programs.trees.mutation import mutate
from robopolicy.contrib.programs.trees.nodes import parse_tree
from robopolicy.errors import UserError
from robopolicy.files import parse_json
from robopolicy.text.rollouts.protocols import Part

VERSION = 1
WORST = float("-inf")


@dataclass(frozen=True)
class ScoredProgram:
    """A program with its score and feedback."""

    program: str
    score: float = WORST  # higher is better
    feedback: str = ""  # failures and errors for its author
    round: int = 0  # round of its evaluation, 0: at the start

    @property
    def rank(self) -> tuple[float, int]:
        """Sort key that puts the best first: by score, then by length."""
        return -self.score, len(self.program)


class Proposer(Protocol):
    """Writes programs."""

    def propose(self, best: Sequence[ScoredProgram], rng: np.random.Generator) -> str | None:
        """Propose a program that may be better than `best`, best first; None without a valid one."""
        ...


class TreeMutation:
    """Random changes of the best behavior trees: genetic programming without a model."""

    def __init__(self, accept: Callable[[str], object], skills: Sequence[str] = (), most: int = 3) -> None:
        """Create the proposer.

        Args:
            accept: Raises `UserError` for a tree that cannot run.
            skills: Names that an action may call.
            most: Maximum number of changes per proposal.
        """
        self.accept, self.skills, self.most = accept, tuple(skills), most

    def propose(self, best: Sequence[ScoredProgram], rng: np.random.Generator) -> str | None:
        """Change a tree at random; better ones are selected more often."""
        weight = 0.5 ** np.arange(len(best))
        parent = int(rng.choice(len(best), p=weight / weight.sum()))
        plain = [json.loads(trial.program) for trial in best]
        made = plain[parent]
        for _ in range(int(rng.integers(1, self.most + 1))):
            made = mutate(made, plain, self.skills, rng)
        text = json.dumps(made)
        try:
            parse_tree(text)
            self.accept(text)
        except UserError:
            return None
        return text


class ProgramSearch(Part):
    """State of a search: evaluated programs and their scores."""

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
        """Create the search.

        Args:
            start: Programs of the first round; may be empty if the proposer needs no example.
            proposer: Proposes the other programs.
            population: Programs per round.
            parents: Best programs that the proposer receives.
            refusals: Rejected proposals (duplicate or invalid) after which a round stays smaller.
            seed: Of random changes.

        Raises:
            UserError: A number is out of range.
        """
        if population < 1 or parents < 1:
            raise UserError(f"A search needs population and parents of at least 1, got {population} and {parents}.")
        self.proposer, self.population, self.parents, self.refusals = proposer, population, parents, refusals
        self.trials: list[ScoredProgram] = []
        self.curve: list[float] = []  # best score after every round
        self._rng = np.random.default_rng(seed)
        self._asked = list(dict.fromkeys(start))

    def ask(self) -> list[str]:
        """Return programs to evaluate, without repetitions; fewer than `population` if new ones are hard to find."""
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
        """Set the scores of the programs of the last `ask`; a NaN counts as the worst.

        Raises:
            ValueError: The number of scores is wrong.
        """
        texts = feedback or [""] * len(scores)
        for program, score, text in zip(self._asked, scores, texts, strict=True):
            value = WORST if np.isnan(score) else float(score)
            self.trials.append(ScoredProgram(program, value, text, len(self.curve)))
        self._asked = []
        self.curve.append(self.best.score if self.trials else WORST)

    @property
    def best(self) -> ScoredProgram:
        """The best program so far.

        Raises:
            UserError: No program has been evaluated.
        """
        if not self.trials:
            raise UserError("No program has been evaluated; pass a start program, or a proposer that needs no example.")
        return min(self.trials, key=lambda trial: trial.rank)

    def state_dict(self) -> dict[str, Any]:
        """Evaluated programs, pending programs and the random generator, as plain JSON values."""
        return {
            "trials": [{**asdict(trial), "score": _jsonable(trial.score)} for trial in self.trials],
            "curve": [_jsonable(score) for score in self.curve],
            "asked": list(self._asked),
            "random": self._rng.bit_generator.state,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`."""
        self.trials = [ScoredProgram(**{**trial, "score": _number(trial["score"])}) for trial in state["trials"]]
        self.curve = [_number(score) for score in state["curve"]]
        self._asked = list(state["asked"])
        if not all(isinstance(program, str) for program in (*self._asked, *(trial.program for trial in self.trials))):
            raise TypeError("a program is no text")
        self._rng.bit_generator.state = state["random"]


Evaluate = Callable[[Sequence[str]], Sequence[tuple[float, str]]]
"""Programs to scores and feedback, on the same instances for all of them."""


def refine(
    search: ProgramSearch,
    evaluate: Evaluate,
    rounds: int,
    record: Path | None = None,
    request: Mapping[str, Any] | None = None,
) -> ScoredProgram:
    """Run the loop until a total of `rounds` rounds are done, and return the best program.

    Args:
        search: New or resumed search.
        evaluate: Runs the programs.
        rounds: Total rounds of proposals, including finished ones; the start does not count.
        record: JSON file that stores the search after every step; an existing one is resumed.
        request: Everything that determines scores and proposals, as plain JSON values; must match an existing record.

    Raises:
        UserError: The record is damaged, or has another version or request.
    """
    given = dict(request or {})
    if record is not None and record.is_file():
        state = read_record(record, given)
        try:
            search.load_state_dict(state)
        except (KeyError, TypeError, ValueError) as error:
            raise _damaged(record, error) from error

    def save() -> None:
        if record is not None:
            content = {"version": VERSION, "request": given, "search": search.state_dict()}
            write_text(record, json.dumps(content) + "\n")

    while len(search.curve) <= rounds:
        programs = search.ask()
        save()  # keeps the answers of a language model if the run is killed
        results = evaluate(programs) if programs else []
        search.tell([score for score, _ in results], [text for _, text in results])
        save()
    return search.best


def read_record(record: Path, request: Mapping[str, Any]) -> dict[str, Any]:
    """Read the state of a search from its file.

    Raises:
        UserError: The file is damaged, or has another version or request.
    """
    try:
        content = parse_json(record.read_text(encoding="utf-8"))
        version, known, state = content["version"], dict(content["request"]), content["search"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _damaged(record, error) from error
    if version != VERSION:
        raise UserError(f"{record} has version {version!r}, expected {VERSION}; choose another --out.")
    other = [key for key in request if known.get(key) != request[key]]
    if other:
        raise UserError(
            f"{record} has {other[0]} {known.get(other[0])!r}, but {request[other[0]]!r} is given, so scores are not "
            "comparable; pass the original settings, or choose another folder."
        )
    return state


def _damaged(record: Path, error: Exception) -> UserError:
    return UserError(f"{record} is damaged ({type(error).__name__}: {error}); delete it or choose another --out.")


def _jsonable(score: float) -> float | None:
    return score if np.isfinite(score) else None


def _number(score: float | None) -> float:
    return WORST if score is None else float(score)
