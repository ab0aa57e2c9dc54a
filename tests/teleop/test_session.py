"""Tests of sessions with a simulator: who acts, what is recorded, and the events of the person."""

import numpy as np
import pytest
from scripted_device import FakeClock, ScriptedTeleop

from robopolicy.data.episodes import Episode, Episodes
from robopolicy.data.formats.lerobot import LeRobotWriter, layout, read_lerobot
from robopolicy.sim.registry import SimOptions, make_sim
from robopolicy.teleop.contract import DISCARD, STOP, SUCCESS, TeleopCommand
from robopolicy.teleop.operator import HumanOperator
from robopolicy.teleop.session import SessionConfig, TeleopSession
from robopolicy.training.build import build, resolve_config
from robopolicy.training.compose import compose_config

HELD = TeleopCommand(True)


class Sink(list):
    def add(self, episode: Episode) -> None:
        self.append(episode)


class HalfSpeed:
    """Policy that moves right at half speed, and counts its decisions."""

    def __init__(self) -> None:
        self.replans = 0

    def replan(self) -> None:
        self.replans += 1

    def __call__(self, sim, obs):
        return obs["gripper"].new_tensor([[0.5, 0.0]])


@pytest.fixture
def sim():
    with_task = make_sim("push", SimOptions(num_envs=1))
    yield with_task
    with_task.close()


def run(sim, command, sink=None, policy=None, on_step=None, **config):
    device = ScriptedTeleop(command)
    spec = sim.spec
    person = HumanOperator(
        device, spec.action_low.numpy(), spec.action_high.numpy(), spec.control_dt, spec.action_names
    )
    sink = Sink() if sink is None else sink
    config = SessionConfig(**{"episodes": 1, "only_success": False, **config})
    session = TeleopSession(sim, person, sink, config, policy=policy, clock=FakeClock())
    return session.run(on_step), sink, device


def test_time_passes_only_while_the_switch_is_held(sim):
    commands = [TeleopCommand()] * 5 + [HELD] * 3 + [TeleopCommand()] * 5 + [TeleopCommand(True, events=(SUCCESS,))]
    report, (episode,), device = run(sim, lambda k: commands[min(k, 13)])
    assert len(episode) == 3 and report.kept == 1 and report.frames == 3
    actors = [status.actor for status, _ in device.shown]
    assert actors[:13] == ["paused"] * 5 + ["you"] * 3 + ["paused"] * 5


def test_the_person_marks_success_at_the_last_frame(sim):
    commands = [HELD] * 3 + [TeleopCommand(True, events=(SUCCESS,))]
    report, (episode,), _ = run(sim, lambda k: commands[k], only_success=True)
    assert episode.arrays["success"].tolist() == [False, False, True] and report.successes == 1
    assert episode.arrays["intervention"].tolist() == [True] * 3 and episode.seed == 0


def test_a_discarded_episode_is_repeated_with_its_seed(sim):
    commands = [HELD, HELD, TeleopCommand(events=(DISCARD,)), HELD, TeleopCommand(events=(SUCCESS,)), HELD]
    commands.append(commands[4])
    report, episodes, _ = run(sim, lambda k: commands[k], episodes=2, seed=7)
    assert [(len(each), each.seed) for each in episodes] == [(1, 7), (1, 8)] and report.attempts == 2


def test_failed_episodes_are_not_kept_by_default(sim):
    limit, sink = sim.spec.max_episode_steps, Sink()
    report, _, _ = run(sim, lambda k: TeleopCommand(True, events=(STOP,) * (k > limit)), sink, only_success=True)
    assert report.attempts == 1 and report.kept == 0 and not sink


def test_the_session_ends_on_request_and_keeps_what_was_recorded(sim):
    commands = [HELD, TeleopCommand(events=(SUCCESS,)), HELD, TeleopCommand(events=(STOP,))]
    report, episodes, _ = run(sim, lambda k: commands[k], episodes=5)
    assert report.kept == len(episodes) == 1


def test_a_person_takes_over_and_hands_back(sim):
    left = np.array([-1.0, 0, 0, 0, 0, 0])
    commands = (
        [TeleopCommand()] * 2
        + [HELD]
        + [TeleopCommand(True, left)] * 4
        + [TeleopCommand()] * 6
        + [TeleopCommand(events=(SUCCESS,))]
    )
    policy = HalfSpeed()
    _, (episode,), device = run(sim, lambda k: commands[min(k, 13)], policy=policy)
    acted = episode.arrays["intervention"]
    assert acted[:7].tolist() == [False, False, *[True] * 5] and not acted[-2:].any()
    high = float(sim.spec.action_high[0])
    wanted = np.tile(np.float32([min(0.5, high), 0]), (len(acted), 1))
    np.testing.assert_array_equal(episode.arrays["policy_action"], wanted)
    np.testing.assert_array_equal(episode.arrays["action"][~acted], wanted[~acted])
    assert episode.arrays["action"][6, 0] < 0
    assert policy.replans == 1, "the policy replans when it gets control back"
    assert [status.actor for status, _ in device.shown][:4] == ["policy", "policy", "you", "you"]


def test_recordings_round_trip_with_the_columns_of_lerobot(sim, tmp_path):
    commands = [TeleopCommand(), HELD, TeleopCommand(), TeleopCommand(events=(SUCCESS,))]
    with LeRobotWriter(tmp_path / "data", control_dt=sim.spec.control_dt) as writer:
        run(sim, lambda k: commands[k], writer, policy=HalfSpeed())
    data = read_lerobot(tmp_path / "data")
    assert data.arrays["intervention"].dtype == np.bool_ and data.arrays["intervention"].ndim == 1
    assert data.arrays["policy_action"].shape == data.arrays["action"].shape
    assert "intervention" not in data.observation_keys and "policy_action" not in data.observation_keys


def takeover(*acted: bool, seed: int = 0) -> Episode:
    rows = np.arange(len(acted), dtype=np.float32)[:, None]
    flags = {"intervention": np.array(acted), "terminated": np.arange(len(acted)) == len(acted) - 1}
    return Episode({"state": rows, "action": rows, "policy_action": -rows, **flags}, "push", seed)


def test_only_frames_of_the_person_are_demonstrated():
    data = Episodes.from_list([takeover(0, 1, 1, 0, 1), takeover(0, 0, seed=1), takeover(1, 0, seed=2)], 0.1)
    found = data.demonstrated()
    assert found.arrays["action"][:, 0].tolist() == [1, 2, 4, 0] and found.ends.tolist() == [2, 3, 4]
    assert found.arrays["terminated"].tolist() == [False, False, True, False]
    assert found.seeds.tolist() == [0, 0, 2] and set(found.arrays) == {"state", "action", "terminated"}
    assert found.demonstrated() is found


def test_demonstrations_and_takeovers_are_aggregated():
    rows = np.ones((2, 1), np.float32)
    plain = Episodes.from_list([Episode({"state": rows, "action": rows, "terminated": np.zeros(2, bool)})], 0.1)
    both = Episodes.concat([plain, Episodes.from_list([takeover(0, 1)], 0.1)])
    assert both.arrays["intervention"].tolist() == [True, True, False, True] and "policy_action" not in both.arrays
    assert len(both.demonstrated()) == 3


def test_the_flag_of_hil_serl_is_read_as_an_intervention():
    assert layout.key_of("complementary_info.is_intervention", camera=False) == "intervention"
    assert layout.feature_of("intervention") == "intervention"


def test_replay_learners_use_the_frames_of_the_person_as_offline_data(tmp_path):
    settings = ["algorithm=rlpd", "policy=squashed_gaussian", "task.name=toy/point_mass", "budget.env_steps=200"]
    settings += ["sim.num_envs=2", "replay.learning_starts=50", "evaluation.episodes=0", f"dataset={tmp_path / 'data'}"]
    steps = np.arange(10)
    with LeRobotWriter(tmp_path / "data", control_dt=0.1) as writer:
        for acted in (steps > 5, steps < 0):
            rows = np.random.default_rng(0).normal(size=(10, 8)).astype(np.float32)
            arrays = {"state": rows[:, :6], "action": rows[:, 6:].clip(-1, 1), "policy_action": rows[:, 6:]}
            flags = {"intervention": acted, "reward": np.zeros(10, np.float32), "terminated": steps == 9}
            writer.add(Episode(arrays | flags, "toy/point_mass"))
    parts = build(resolve_config(compose_config(settings)))
    assert parts.source.offline.length <= 6, "four frames, and the slots after them"
    parts.close()
