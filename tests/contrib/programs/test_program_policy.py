"""Tests of Python programs as policies: sandbox limits, failures, proposers, and the command."""

from __future__ import annotations

import copy
import json

import numpy as np
import pytest
import torch

from robopolicy.cli.main import main
from robopolicy.contrib.programs.program import ProgramConfig, ProgramPolicy
from robopolicy.contrib.programs.refine import PythonMutation, TextProposer, last_block, python_briefing, written_by
from robopolicy.contrib.programs.sandbox.runner import Sandbox, SandboxError
from robopolicy.contrib.programs.search import ProgramSearch, ScoredProgram, refine
from robopolicy.errors import UserError
from robopolicy.evaluation.actors import ExpertActor
from robopolicy.evaluation.harness import evaluate
from robopolicy.permissions import code_permissions
from robopolicy.policies.base import PolicySpec
from robopolicy.sim.registry import SimOptions, get_task, make_sim
from robopolicy.text.policy import TextConfig, TextPolicy
from robopolicy.text.task import TURN, pack, unpack

SPEC = PolicySpec({"state": (2,)}, 2)
WALK = """
def act(messages):
    goal, at = messages[0][5:7], messages[-1].split("at ")[1][:2]
    if int(goal[0]) > int(at[0]): return "{east}"
    if int(goal[0]) < int(at[0]): return "{west}"
    return "n" if int(goal[1]) > int(at[1]) else "s"
"""
WRITTEN = "def act(messages):\n    try: open('ran', 'w')\n    except PermissionError: pass\n    return 'n'"
RIGHT, WRONG = WALK.format(east="e", west="w"), WALK.format(east="w", west="e")
GRID = PolicySpec({"text": (96,)}, 3)


def robot(source, **settings):
    return ProgramPolicy(ProgramConfig(source=source, **settings), SPEC)


def acted(source, rows=2, **settings):
    policy = robot(source, **settings)
    state = torch.arange(2.0 * rows).view(rows, 1, 2)
    return policy.act({"state": state})[:, 0].tolist(), policy.take_errors()


def test_a_program_acts_on_the_newest_observation():
    actions, faults = acted("import math\ndef act(obs):\n    x, y = obs['state']\n    return [x + y, math.floor(-0.5)]")
    assert actions == [[1.0, -1.0], [5.0, -1.0]] and faults == []


def test_a_program_has_no_state_between_calls():
    source = "seen = []\ndef act(obs):\n    seen.append(1)\n    return [len(seen), 0]"
    policy = robot(source)
    obs = {"state": torch.zeros(3, 1, 2)}
    assert policy.act(obs)[:, 0, 0].tolist() == policy.act(obs)[:, 0, 0].tolist() == [1.0, 1.0, 1.0]
    assert torch.equal(copy.deepcopy(policy).act(obs), policy.act(obs))


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        ("open('/etc/hostname').read()", "open is not allowed"),
        ("__import__('os')", "import of os is not allowed"),
        ("import collections; collections._sys.modules['os'].system('true')", "os.system is not allowed"),
        ("return [1 / 0, 0]", "ZeroDivisionError"),
        ("return [1]", "act did not return a list of 2 finite numbers"),
        ("return [float('nan'), 0]", "act did not return a list of 2 finite numbers"),
        ("return [object(), 0]", "not JSON serializable"),
        ("print('[]'); return 'left'", "act did not return a list of 2 finite numbers"),
        ("while True: pass", "timed out"),
        ("return [0] * 10**9", "MemoryError"),
    ],
)
def test_forbidden_or_failing_code_returns_a_zero_action_and_a_fault(body, fault):
    actions, faults = acted(f"def act(obs):\n    {body}", seconds=1.0)
    assert actions == [[0.0, 0.0]] * 2
    assert fault in faults[0]


def test_a_failing_row_does_not_affect_other_rows():
    actions, faults = acted("def act(obs):\n    return [1 / obs['state'][0], 0]")
    assert actions == [[0.0, 0.0], [0.5, 0.0]] and faults == ["ZeroDivisionError: float division by zero"]


def test_notes_report_the_failure_count_of_a_program():
    policy = robot("def act(obs):\n    return [1 / obs['state'][0], 0]")
    assert policy.notes() == []
    policy.act({"state": torch.zeros(3, 1, 2)})
    policy.act({"state": torch.ones(2, 1, 2)})
    assert policy.notes() == [
        "the program failed in 3 of 5 decisions, first with: ZeroDivisionError: float division by zero."
    ]
    assert policy.notes() == []


def test_a_program_is_not_called_again_after_three_timeouts():
    policy = robot("def act(obs):\n    while True: pass", seconds=0.3)
    for _ in range(5):
        policy.act({"state": torch.zeros(1, 1, 2)})
    assert policy.errors == ["timed out"] * 3


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("x = 1\ndef act(", r"is not valid Python: line 2: '\(' was never closed"),
        ("def act(obs): pass\nreturn 1", "is not valid Python: line 2: 'return' outside function"),
        ("def act(obs):\n    import os", r"may not import os \(line 2\); it may import math, "),
        ("from . import x\ndef act(obs): pass", r"may not import \. \(line 1\)"),
        ("x = 1", "needs a function 'act'"),
        ("def act(): pass", "needs a function 'act'"),
    ],
)
def test_invalid_programs_are_refused(source, complaint):
    with pytest.raises(UserError, match=complaint):
        robot(source)


def test_a_worker_restarts_after_a_timeout():
    program = "def f(x):\n    while x:\n        pass\n    return [1]"
    with Sandbox(seconds=0.5) as sandbox:
        with pytest.raises(SandboxError, match="timed out"):
            sandbox.call(program, "f", [True])
        assert sandbox.call(program, "f", [False, False]) == [([1], ""), ([1], "")]
    sandbox.close()


def test_a_program_maps_messages_to_messages():
    policy = ProgramPolicy(ProgramConfig(source=RIGHT), GRID)
    messages = ["goal 22 at 12:", f"goal 22 at 12:{TURN}e{TURN} at 21:"]
    assert unpack(policy.act({"text": pack(messages, 96)[:, None]})[:, 0]) == ["e", "n"]


def test_a_program_can_be_evaluated_like_other_policies():
    sim = make_sim("text/grid", SimOptions(num_envs=8))
    scores = [evaluate(ProgramPolicy(ProgramConfig(source=s), GRID), sim, episodes=16).outcomes for s in (RIGHT, WRONG)]
    sim.close()
    assert scores[0].all() and not scores[1].all()


def test_random_mutation_repairs_two_swapped_strings():
    def score_programs(programs):
        found = []
        for program in programs:
            space: dict = {}
            exec(program, space)
            cases = [("goal 30 at 00:", "e"), ("goal 00 at 30:", "w"), ("goal 03 at 00:", "n"), ("goal 00 at 02:", "s")]
            try:
                found.append((float(sum(space["act"]([messages]) == answer for messages, answer in cases)), ""))
            except Exception as error:
                found.append((0.0, str(error)))
        return found

    search = ProgramSearch([WRONG], PythonMutation(robot), population=8, seed=1)
    assert refine(search, score_programs, 12).score == 4.0 and search.curve[0] == 2.0


def test_text_proposer_prompts_contain_scores_feedback_and_refusals():
    asked: list[str] = []

    def write(prompt, seed):
        asked.append(prompt)
        return ["No idea.", f"Better:\n```python\n{RIGHT}\n```"][len(asked) > 1]

    briefing = python_briefing("text/grid", {}, (), text=True)
    proposer = TextProposer(write, briefing, lambda text: ProgramPolicy(ProgramConfig(source=text), GRID))
    best, rng = [ScoredProgram(WRONG, 0.25, "success in 4 of 16 episodes")], np.random.default_rng(0)
    assert proposer.propose(best, rng) is None
    assert proposer.propose(best, rng) == RIGHT.strip()
    assert "scored 0.25; success in 4 of 16 episodes" in asked[0] and WRONG.strip() in asked[0]
    assert "could not be run: The program is not valid Python" in asked[1]


def test_the_pseudocode_strategy_requests_a_plan_before_the_program():
    asked: list[str] = []
    proposer = TextProposer(lambda prompt, seed: asked.append(prompt) or "walk", "Brief.", str, strategy="pseudocode")
    assert proposer.propose([], np.random.default_rng(0)) == "walk"
    assert "pseudocode" in asked[0] and "Follow this plan:\nwalk" in asked[1]
    with pytest.raises(UserError, match="strategy must be one of direct, pseudocode"):
        TextProposer(str, "", str, strategy="magic")  # type: ignore[arg-type]


def test_the_last_fenced_block_is_the_program():
    assert last_block("a\n```python\nx\n```\nor\n```\ny = 1\n```") == "y = 1" and last_block(" z ") == "z"


def test_a_text_policy_can_write_programs():
    torch.manual_seed(0)
    policy = TextPolicy(TextConfig(width=16, layers=1, heads=2), GRID)
    write = written_by(policy, tokens=8)
    assert isinstance(write("Write.", 1), str) and write("Write.", 1) == write("Write.", 1)


BRAKE = {
    "kind": "selector",
    "children": [
        {"kind": "action", "control": ["3 * (state[4:6] - state[0:2])"], "until": "norm(state[4:6] - state[0:2]) < .3"},
        {"kind": "action", "control": ["clip(-2 * state[2:4], -1, 1)"]},
    ],
}


def run(capsys, *words):
    code = main(["program", *words])
    captured = capsys.readouterr()
    return code, captured.out, captured.err.splitlines()[-1] if captured.err else ""


@pytest.mark.parametrize(
    "words",
    [
        ["verify", "out"],
        ["eval", "out", "--episodes", "1", "--out", "seen"],
        ["play", "out", "--out", "seen.gif"],
        ["serve", "out", "--port", "0"],
        ["export", "out", "--out", "bundle"],
        ["compose", "out", "out", "--out", "both"],
        ["collect", "text/grid", "--policy", "out", "--episodes", "1", "--out", "seen"],
        ["program", "tree.json", "--skills", "walk=out", "--out", "more"],
    ],
    ids=lambda words: words[0],
)
def test_checkpoints_with_programs_are_refused_without_permission(words, capsys, tmp_path, monkeypatch, refused):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "act.py").write_text(WRITTEN)
    (tmp_path / "tree.json").write_text(json.dumps({"kind": "action", "skill": "walk"}))
    assert run(capsys, "act.py", "--task", "text/grid", "--out", "out")[0] == 0
    before = sorted(tmp_path.iterdir())
    assert refused(*words).endswith(
        "Checkpoint out contains a Python program, which runs when the policy acts; pass --allow-code if you trust "
        "its author."
    )
    assert sorted(tmp_path.iterdir()) == before and not (tmp_path / "ran").exists()


def test_a_checkpoint_with_a_program_is_verified_with_permission(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "act.py").write_text(WRITTEN)
    assert run(capsys, "act.py", "--task", "text/grid", "--out", "out")[0] == 0
    assert main(["verify", "out", "--allow-code"]) == 0
    assert not (tmp_path / "ran").exists()


def test_programs_are_refused_where_they_cannot_be_confined(monkeypatch):
    monkeypatch.setattr("robopolicy.contrib.programs.sandbox.runner.compute_only_filter", lambda: None)
    with pytest.raises(UserError, match=r"cannot be confined .*missing: seccomp.*--unsafe-code"):
        acted("def act(obs):\n    return [1, 0]")
    with pytest.raises(UserError, match=r"cannot be confined"):
        make_sim("text/program", SimOptions(num_envs=1))
    with code_permissions(unsafe=True):
        assert acted("def act(obs):\n    return [1, 0]") == ([[1.0, 0.0]] * 2, [])


def test_evaluation_reports_program_failures(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "act.py").write_text("def act(messages):\n    return missing")
    code, printed, _ = run(capsys, "act.py", "--task", "text/grid", "--out", "out")
    assert code == 0 and "note: The program fails on the first observation: NameError" in printed
    assert main(["eval", "out", "--episodes", "2", "--out", "seen", "--allow-code"]) == 0
    assert "decisions, first with: NameError: name 'missing' is not defined." in capsys.readouterr().out


def test_command_line_improves_a_tree_and_resumes_the_search(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "brake.json").write_text(json.dumps(BRAKE))
    words = ["brake.json", "--task", "toy/point_mass", "--out", "out", "--episodes", "8", "--population", "3"]
    words += ["--report-episodes", "8", "--json"]
    code, printed, _ = run(capsys, *words, "--rounds", "1")
    found = json.loads(printed)
    assert code == 0 and found["results"].keys() == {"as written", "improved"}
    assert json.loads((tmp_path / "out/tree.json").read_text()) == json.loads(found["program"])
    record = json.loads((tmp_path / "out/search.json").read_text())["search"]
    assert len(record["curve"]) == 2 and record["curve"][1] >= record["curve"][0]
    assert run(capsys, *words, "--rounds", "2", "--resume")[0] == 0
    longer = json.loads((tmp_path / "out/search.json").read_text())["search"]
    assert longer["trials"][: len(record["trials"])] == record["trials"] and len(longer["curve"]) == 3
    assert "has seed 20000, but 7 is given" in run(capsys, *words, "--rounds", "3", "--resume", "--seed", "7")[2]
    assert main(["verify", "out"]) == 0


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["tree.json"], "The task is ambiguous: the program names none"),
        (["tree.txt", "--task", "toy/point_mass"], "A program must be a behavior tree (.json) or Python (.py)"),
        (["gone.json", "--task", "toy/point_mass"], "gone.json cannot be read"),
        (["tree.json", "--task", "toy/point_mass", "--skills", "a"], "--skills takes NAME=CKPT"),
        (
            ["act.py", "--task", "toy/point_mass", "--default-action", "1"],
            "--skills and --default-action are for behavior trees",
        ),
        (["tree.json", "--task", "toy/point_mass", "--resume"], "There is no search to resume"),
        (["tree.json", "--task", "toy/point_mass", "--seed", "30000"], "must not overlap"),
        (["tree.json", "--task", "toy/point_mass", "--out", "."], "exists and is not a checkpoint"),
        (["act.py", "--task", "text/grid", "--rounds", "1", "--llm", "tree.json"], "tree.json"),
    ],
)
def test_invalid_options_are_refused_in_one_line(words, complaint, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tree.json").write_text(json.dumps(BRAKE))
    (tmp_path / "tree.txt").write_text("")
    (tmp_path / "act.py").write_text(RIGHT)
    out = [] if "--out" in words else ["--out", "out"]
    code, _, error = run(capsys, *words, *out)
    assert code == 2 and complaint in error


def test_the_expert_of_the_program_task_succeeds() -> None:
    entry, sim = get_task("text/program"), make_sim("text/program", SimOptions(num_envs=4))
    assert evaluate(ExpertActor(entry.require_expert()()), sim, episodes=12).success.all()
