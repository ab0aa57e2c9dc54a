"""Instructions for a Panda: the policy writes a program of commands for an instruction, and controllers execute it.

`text/panda` is `put the cube 7 cm left of the pad:` -> `grasp;carry pad left 7;release`, scored by the final position
of the cube. `text/panda_turns` takes one command per turn and returns the state of the hand; its first grasp
fails in one of three episodes. An invalid program (`commands.py`) fails.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from robopolicy.sim.backends.mujoco.task import Array
from robopolicy.text.task import TextEpisode, TextTask, Turn
from robopolicy_tasks.text.commands import (
    COMMAND,
    DIRECTIONS,
    MAX_COMMANDS,
    PROGRAM,
    Place,
    ProgramError,
    RobotCommand,
    parse,
)
from robopolicy_tasks.text.workcell import CommandRequest, Snapshot, Workcell

NEAREST, FARTHEST = 5, 9  # [cm] distances in instructions
RADIUS = 0.008  # [m] from the goal for success; an error of a centimetre fails
MISS = 0.08  # [m] error of a failed grasp
MAX_SNAPSHOTS = 8192  # cached snapshots
_STREAM = 0x7A5C  # separates the random stream of the instruction from the scene
_RELATIONS = {"left": "left of", "right": "right of", "forward": "beyond", "back": "before"}
_WORDINGS = {
    "lift": ("lift the cube", "pick the cube up"),
    "pad": ("put the cube on the pad", "bring the cube to the pad"),
    "relative": ("put the cube {n} cm {relation} the pad", "set the cube down {n} cm {relation} the pad"),
    "shift": ("move the cube {n} cm {way}", "shift the cube {way} by {n} cm"),
}
Program = tuple[RobotCommand, ...]
Key = tuple[int, Program]  # episode seed, commands so far


@dataclass(frozen=True)
class Instruction:
    """Instruction of an episode."""

    instruction: str
    place: Place | None  # goal of the cube; None: lift it
    grasp_error: tuple[float, float] | None  # [m] error of the first grasp

    @classmethod
    def draw(cls, seed: int, grasp_failure_rate: float) -> Instruction:
        """Draw the instruction of an episode, and with probability `grasp_failure_rate` an error of its first grasp."""
        draw = np.random.default_rng([_STREAM, seed])
        kind, number = str(draw.choice(list(_WORDINGS))), int(draw.integers(NEAREST, FARTHEST + 1))
        way = str(draw.choice(list(DIRECTIONS)))
        text = str(draw.choice(_WORDINGS[kind])).format(n=number, way=way, relation=_RELATIONS[way])
        angle = draw.uniform(0.0, 2 * np.pi)
        grasp_error = (MISS * np.cos(angle), MISS * np.sin(angle)) if draw.random() < grasp_failure_rate else None
        places = {"lift": None, "pad": Place("pad"), "relative": Place("pad", way, number)}
        return cls(text, places[kind] if kind in places else Place("start", way, number), grasp_error)

    @property
    def solution(self) -> Program:
        """Program that fulfils the instruction."""
        commands = (
            (RobotCommand("lift"),)
            if self.place is None
            else (RobotCommand("carry", self.place), RobotCommand("release"))
        )
        return (RobotCommand("grasp"),) * (2 if self.grasp_error else 1) + commands


class Panda(TextTask):
    """One program per instruction."""

    name = "text/panda"
    prompt_bytes, completion_bytes = 48, 48
    response_pattern = PROGRAM
    reward_timeout = 10.0
    hidden_state: ClassVar[bool] = True  # the scene: problems with equal instructions differ
    grasp_failure_rate: ClassVar[float] = 0.0  # probability that the first grasp fails

    def __init__(self) -> None:
        self._workcell: Workcell | None = None
        self._lock = threading.Lock()  # one simulator for all threads
        self._snapshots: OrderedDict[Key, Snapshot] = OrderedDict()

    def episode(self, seed: int) -> PandaEpisode:
        """Draw an instruction in a scene."""
        return PandaEpisode(self, seed)

    def prepare(self, episodes: Sequence[TextEpisode], completions: Sequence[str]) -> None:
        """Simulate all programs together."""
        requests: list[Key] = []
        for episode, completion in zip(episodes, completions, strict=True):
            assert isinstance(episode, PandaEpisode)
            try:
                requests.append((episode.seed, (*episode.done, *parse(completion, episode.max_commands))))
            except ProgramError:
                continue
        self.after(requests)

    def after(self, requests: Sequence[Key]) -> list[Snapshot]:
        """Return the snapshot after each program in its episode; duplicates are simulated once."""
        with self._lock:
            snapshots = {
                key: self._snapshots[key]
                for seed, program in requests
                for key in _prefixes(seed, program)
                if key in self._snapshots
            }
            for length in range(1 + max((len(program) for _, program in requests), default=0)):
                keys = {(seed, program[:length]) for seed, program in requests if len(program) >= length}
                missing = sorted((key for key in keys if key not in snapshots), key=str)
                snapshots |= zip(missing, self._simulated(missing, snapshots), strict=True)
            for key, snapshot in snapshots.items():
                self._snapshots[key] = snapshot
                self._snapshots.move_to_end(key)
            while len(self._snapshots) > MAX_SNAPSHOTS:
                self._snapshots.popitem(last=False)
            return [snapshots[key] for key in requests]

    def goal(self, seed: int, place: Place) -> Array:
        """Return the coordinates `(2,)` [m] of a position in an episode."""
        (start,) = self.after([(seed, ())])
        return (start.pad if place.anchor == "pad" else start.cube[:2]) + place.offset

    def close(self) -> None:
        """Free the simulator; the next program creates another."""
        with self._lock:
            if self._workcell is not None:
                self._workcell.close()
            self._workcell = None

    def _simulated(self, missing: Sequence[Key], snapshots: Mapping[Key, Snapshot]) -> list[Snapshot]:
        if not missing:
            return []
        self._workcell = self._workcell or Workcell()
        if not missing[0][1]:
            return self._workcell.start([seed for seed, _ in missing])
        commands: list[CommandRequest] = []
        for seed, program in missing:
            start, command = snapshots[seed, ()], program[-1]
            anchor = start.pad if command.place is None or command.place.anchor == "pad" else start.cube[:2]
            target = anchor + (np.zeros(2) if command.place is None else command.place.offset)
            grasp_error = Instruction.draw(seed, self.grasp_failure_rate).grasp_error
            first = all(earlier.verb != "grasp" for earlier in program[:-1])
            error = np.array(grasp_error) if grasp_error and first else np.zeros(2)
            commands.append(CommandRequest(snapshots[seed, program[:-1]], command, target, error))
        return self._workcell.run(commands)


class PandaEpisode(TextEpisode):
    """Episode of one instruction."""

    max_commands: ClassVar[int] = MAX_COMMANDS  # of a message

    def __init__(self, task: Panda, seed: int) -> None:
        self.task, self.seed = task, seed
        self.instruction = Instruction.draw(seed, task.grasp_failure_rate)
        self.prompt = f"{self.instruction.instruction}:"
        self.done: Program = ()

    def step(self, completion: str) -> Turn:
        """Execute the program."""
        try:
            self.done = (*self.done, *parse(completion, self.max_commands))
        except ProgramError as error:
            return Turn(0.0, reply=f"{error}.")
        (snapshot,) = self.task.after([(self.seed, self.done)])
        return self.outcome(snapshot)

    def outcome(self, snapshot: Snapshot) -> Turn:
        """Return the result: success if the cube is at its goal."""
        success = self.is_success(snapshot)
        return Turn(float(success), success=success)

    def is_success(self, snapshot: Snapshot) -> bool:
        """Whether the instruction is fulfilled."""
        place = self.instruction.place
        return snapshot.lifted if place is None else snapshot.rests_at(self.task.goal(self.seed, place), RADIUS)

    def demonstration(self) -> list[str]:
        """Return the program."""
        return [";".join(map(str, self.instruction.solution))]


class StepwiseEpisode(PandaEpisode):
    """Episode with one command per turn."""

    max_commands = 1

    def outcome(self, snapshot: Snapshot) -> Turn:
        """Return the state of the hand unless the instruction is fulfilled."""
        if self.is_success(snapshot):
            return Turn(1.0, success=True)
        return Turn(0.0, done=False, reply=" held:" if snapshot.held else " empty:")

    def demonstration(self) -> list[str]:
        """Return one command per turn, with a second grasp if the first one fails."""
        return [str(command) for command in self.instruction.solution[len(self.done) :]]


class PandaTurns(Panda):
    """Up to six turns with one command each."""

    name = "text/panda_turns"
    prompt_bytes, completion_bytes, max_turns = 240, 24, 6
    response_pattern = COMMAND
    grasp_failure_rate = 1 / 3

    def episode(self, seed: int) -> StepwiseEpisode:
        """Draw an instruction in a scene."""
        return StepwiseEpisode(self, seed)


def _prefixes(seed: int, program: Program) -> list[Key]:
    return [(seed, program[:length]) for length in range(len(program) + 1)]
