"""Tests of Panda programs: the language, the results of programs, and independence of the batch."""

import numpy as np
import pytest
import torch

from robopolicy.sim.registry import SimOptions, make_sim
from robopolicy.spec import PolicySpec
from robopolicy.text.policy import TextConfig, TextPolicy
from robopolicy.text.rollouts.protocols import Task
from robopolicy.text.task import pack
from robopolicy.text.text_env import TextEnv
from robopolicy.training.text_file_source import conversations
from robopolicy_tasks.text.commands import Place, ProgramError, RobotCommand, parse
from robopolicy_tasks.text.panda import Panda, PandaTurns

PROGRAMS = ("lift", "grasp", "grasp;carry pad left 7;release", "carry start; release ;grasp")


@pytest.fixture(scope="module")
def task():
    task = Panda()
    yield task
    task.close()


@pytest.mark.parametrize("program", PROGRAMS)
def test_programs_round_trip_through_text(program):
    assert parse(";".join(map(str, parse(program)))) == parse(program)


def test_places_are_relative_to_an_anchor():
    (carry,) = parse("carry pad back 12")
    assert carry == RobotCommand("carry", Place("pad", "back", 12))
    assert carry.place is not None
    np.testing.assert_allclose(carry.place.offset, [-0.12, 0.0])


@pytest.mark.parametrize(
    "program", ["", "grasp;", "jump", "carry", "carry cup", "carry pad left", "carry pad up 5", "lift 3", "lift;" * 9]
)
def test_invalid_programs_fail_their_episode(task, program):
    with pytest.raises(ProgramError):
        parse(program)
    turn = task.episode(3).step(program)
    assert turn.done and not turn.success and turn.reward == 0.0


def test_solutions_succeed(task):
    episodes = [task.episode(seed) for seed in range(24)]
    solutions = [episode.demonstration()[0] for episode in episodes]
    task.prepare(episodes, solutions)
    assert all(episode.step(solution).success for episode, solution in zip(episodes, solutions, strict=True))
    kinds = {episode.instruction.place and episode.instruction.place.anchor for episode in episodes}
    assert kinds == {None, "pad", "start"}
    assert max(len(solution) for solution in solutions) <= task.completion_bytes
    assert max(len(episode.prompt) for episode in episodes) <= task.prompt_bytes


def test_wrong_programs_fail(task):
    chosen = next(seed for seed in range(50) if (place := task.episode(seed).instruction.place) and place.centimetres)
    place = task.episode(chosen).instruction.place
    off = Place(place.anchor, place.direction, place.centimetres + 1)
    wrong = ["grasp", "grasp;lift", f"grasp;carry {off};release", f"grasp;carry {place}", f"carry {place};release"]
    episodes = [task.episode(chosen) for _ in wrong]
    task.prepare(episodes, wrong)
    assert not any(episode.step(program).success for episode, program in zip(episodes, wrong, strict=True))


def test_results_do_not_depend_on_the_batch(task):
    """A program leads to the same result alone, in a batch, and one command at a time."""
    wanted = [(seed, tuple(parse(program))) for seed in (1, 2) for program in PROGRAMS[:3]]
    together = task.after(wanted)
    alone = Panda()
    for key, moment in zip(wanted[3:], together[3:], strict=True):
        (again,) = alone.after([key])
        np.testing.assert_array_equal(again.cube, moment.cube)
        assert again.width == moment.width
    alone.close()


def test_failed_grasp_is_reported_and_can_be_repeated():
    task = PandaTurns()
    seed = next(seed for seed in range(50) if task.episode(seed).instruction.grasp_error)
    episode = task.episode(seed)
    assert episode.step("grasp").reply == " empty:"
    assert episode.step("grasp").reply == " held:"
    rest = episode.demonstration()
    turns = [episode.step(command) for command in rest]
    assert len(rest) >= 1 and turns[-1].success and turns[-1].done
    assert task.episode(seed).step("grab").done
    responses = conversations(task, [seed])[0]
    assert responses[1:5] == ["grasp", " empty:", "grasp", " held:"]
    task.close()


def test_more_than_one_command_per_turn_is_refused(task):
    turns = PandaTurns()
    for message in ("grasp;carry pad;release", "grasp;lift"):
        turn = turns.episode(3).step(message)
        assert turn.done and turn.reward == 0.0 and turn.reply.endswith(" commands, at most 1.")
    turns.prepare([turns.episode(3)], ["grasp;lift"])
    assert not turns._snapshots  # nothing is simulated
    turns.close()


def test_panda_turns_run_in_the_simulator_and_in_the_env():
    sim = make_sim("text/panda_turns", SimOptions(num_envs=3))
    sim.reset(0)
    step = sim.step(pack(["grasp", "jump", "grasp"], sim.spec.action_dim))
    assert step.terminated.tolist() == [False, True, False] and not step.info["success"].any()
    policy = TextPolicy(
        TextConfig(width=16, layers=1, heads=2), PolicySpec({"text": (sim.task.prompt_bytes,)}, sim.spec.action_dim)
    )
    env = TextEnv(policy, sim.task, torch.Generator().manual_seed(0))
    conversation = env.start_conversation(Task(0, payload=0))
    for message in conversation.episode.demonstration():
        env.append_message(conversation, message, own=True)
    taught = env.trajectory_of(conversation)
    assert taught.success and taught.reward == 1.0
    sim.close()
