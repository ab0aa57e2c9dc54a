"""A Panda told what to do: the policy reads an instruction and writes a program of commands, which controllers play.

`text/panda` is `put the cube 7 cm left of the pad:` -> `grasp;carry pad left 7;release`, judged by where the cube is in
the end. `text/panda_turns` takes one command a turn and answers with what the hand feels; there the first grasp misses
in one of three episodes. A program that is not in the language (`commands.py`) fails.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from robopolicy.sim.backends.mujoco.task import Array
from robopolicy.text.task import Episode, TextTask, Turn
from robopolicy_tasks.text.commands import COMMAND, DIRECTIONS, PROGRAM, Command, Place, ProgramError, parse
from robopolicy_tasks.text.workcell import Moment, Order, Workcell

NEAREST, FARTHEST = 5, 9  # [cm] distances in instructions
RADIUS = 0.008  # [m] from the goal at which the cube may come to rest: a centimetre less or more is wrong
MISS = 0.08  # [m] by which a grasp misses
KEPT = 8192  # moments that are remembered
_STREAM = 0x7A5C  # keeps the errand's randomness apart from that of the scene
_BESIDE = {"left": "left of", "right": "right of", "forward": "beyond", "back": "before"}
_WORDINGS = {
    "lift": ("lift the cube", "pick the cube up"),
    "pad": ("put the cube on the pad", "bring the cube to the pad"),
    "beside": ("put the cube {n} cm {beside} the pad", "set the cube down {n} cm {beside} the pad"),
    "shift": ("move the cube {n} cm {way}", "shift the cube {way} by {n} cm"),
}
Program = tuple[Command, ...]
Key = tuple[int, Program]  # episode seed, commands so far


@dataclass(frozen=True)
class Errand:
    """What an episode asks for."""

    instruction: str
    place: Place | None  # where the cube is to lie; None: it is to be lifted
    misses: tuple[float, float] | None  # [m] error of the first grasp

    @classmethod
    def draw(cls, seed: int, slips: float) -> Errand:
        """The errand of an episode, whose first grasp misses with chance `slips`."""
        draw = np.random.default_rng([_STREAM, seed])
        kind, number = str(draw.choice(list(_WORDINGS))), int(draw.integers(NEAREST, FARTHEST + 1))
        way = str(draw.choice(list(DIRECTIONS)))
        text = str(draw.choice(_WORDINGS[kind])).format(n=number, way=way, beside=_BESIDE[way])
        angle = draw.uniform(0.0, 2 * np.pi)
        misses = (MISS * np.cos(angle), MISS * np.sin(angle)) if draw.random() < slips else None
        places = {"lift": None, "pad": Place("pad"), "beside": Place("pad", way, number)}
        return cls(text, places[kind] if kind in places else Place("start", way, number), misses)

    @property
    def solution(self) -> Program:
        """Commands that do it."""
        rest = (Command("lift"),) if self.place is None else (Command("carry", self.place), Command("release"))
        return (Command("grasp"),) * (2 if self.misses else 1) + rest


class Panda(TextTask):
    """One program per instruction."""

    name = "text/panda"
    prompt_bytes, completion_bytes = 48, 48
    form = PROGRAM
    seconds = 10.0
    slips: ClassVar[float] = 0.0  # chance that the first grasp misses

    def __init__(self) -> None:
        self._workcell: Workcell | None = None
        self._lock = threading.Lock()  # one simulator for all who play
        self._moments: OrderedDict[Key, Moment] = OrderedDict()

    def episode(self, seed: int) -> Job:
        """An instruction in a scene."""
        return Job(self, seed)

    def prepare(self, episodes: Sequence[Episode], completions: Sequence[str]) -> None:
        """Simulate all programs at once."""
        wanted: list[Key] = []
        for episode, completion in zip(episodes, completions, strict=True):
            assert isinstance(episode, Job)
            try:
                wanted.append((episode.seed, (*episode.done, *parse(completion))))
            except ProgramError:
                continue
        self.after(wanted)

    def after(self, wanted: Sequence[Key]) -> list[Moment]:
        """The moment after each program, in its episode; equal ones are simulated once."""
        with self._lock:
            known = {
                key: self._moments[key]
                for seed, program in wanted
                for key in _prefixes(seed, program)
                if key in self._moments
            }
            for length in range(1 + max((len(program) for _, program in wanted), default=0)):
                asked = {(seed, program[:length]) for seed, program in wanted if len(program) >= length}
                missing = sorted((key for key in asked if key not in known), key=str)
                known |= zip(missing, self._simulated(missing, known), strict=True)
            for key, moment in known.items():
                self._moments[key] = moment
                self._moments.move_to_end(key)
            while len(self._moments) > KEPT:
                self._moments.popitem(last=False)
            return [known[key] for key in wanted]

    def goal(self, seed: int, place: Place) -> Array:
        """(2,) [m] of a place in an episode."""
        (start,) = self.after([(seed, ())])
        return (start.pad if place.anchor == "pad" else start.cube[:2]) + place.offset

    def close(self) -> None:
        """Free the simulator; the next program makes another."""
        with self._lock:
            if self._workcell is not None:
                self._workcell.close()
            self._workcell = None

    def _simulated(self, missing: Sequence[Key], known: Mapping[Key, Moment]) -> list[Moment]:
        if not missing:
            return []
        self._workcell = self._workcell or Workcell()
        if not missing[0][1]:
            return self._workcell.start([seed for seed, _ in missing])
        orders: list[Order] = []
        for seed, program in missing:
            start, command = known[seed, ()], program[-1]
            anchor = start.pad if command.place is None or command.place.anchor == "pad" else start.cube[:2]
            target = anchor + (np.zeros(2) if command.place is None else command.place.offset)
            misses = Errand.draw(seed, self.slips).misses
            first = all(earlier.verb != "grasp" for earlier in program[:-1])
            error = np.array(misses) if misses and first else np.zeros(2)
            orders.append(Order(known[seed, program[:-1]], command, target, error))
        return self._workcell.play(orders)


class Job(Episode):
    """An instruction and what has been done about it."""

    def __init__(self, task: Panda, seed: int) -> None:
        self.task, self.seed = task, seed
        self.errand = Errand.draw(seed, task.slips)
        self.prompt = f"{self.errand.instruction}:"
        self.done: Program = ()

    def step(self, completion: str) -> Turn:
        """Play the program."""
        try:
            self.done = (*self.done, *parse(completion))
        except ProgramError as error:
            return Turn(0.0, reply=f"{error}.")
        (moment,) = self.task.after([(self.seed, self.done)])
        return self.judged(moment)

    def judged(self, moment: Moment) -> Turn:
        """Success if the cube is where it should be; the program has ended."""
        success = self.achieved(moment)
        return Turn(float(success), success=success)

    def achieved(self, moment: Moment) -> bool:
        """Whether the errand is done."""
        place = self.errand.place
        return moment.lifted if place is None else moment.rests_at(self.task.goal(self.seed, place), RADIUS)

    def demonstration(self) -> list[str]:
        """The whole program."""
        return [";".join(map(str, self.errand.solution))]


class StepwiseJob(Job):
    """One command a turn."""

    def judged(self, moment: Moment) -> Turn:
        """What the hand feels, unless the errand is done."""
        if self.achieved(moment):
            return Turn(1.0, success=True)
        return Turn(0.0, done=False, reply=" held:" if moment.held else " empty:")

    def demonstration(self) -> list[str]:
        """A command a turn, the grasp twice where the first one misses."""
        return [str(command) for command in self.errand.solution[len(self.done) :]]


class PandaTurns(Panda):
    """Up to six turns of a command each."""

    name = "text/panda_turns"
    prompt_bytes, completion_bytes, max_turns = 240, 24, 6
    form = COMMAND
    slips = 1 / 3

    def episode(self, seed: int) -> StepwiseJob:
        """An instruction in a scene."""
        return StepwiseJob(self, seed)


def _prefixes(seed: int, program: Program) -> list[Key]:
    return [(seed, program[:length]) for length in range(len(program) + 1)]
