"""Tests of behaviour trees: formulas, ticks against a plain interpreter, skills, memory, and refused input."""

from __future__ import annotations

import ast
import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from robopolicy.contrib.programs.tree import TreePolicy, make_tree_policy
from robopolicy.contrib.programs.trees.expressions import parse_formula
from robopolicy.contrib.programs.trees.mutation import mutate
from robopolicy.contrib.programs.trees.nodes import FAILURE, RUNNING, SUCCESS, parse_tree, read_tree
from robopolicy.contrib.programs.trees.outline import to_text
from robopolicy.errors import UserError
from robopolicy.nets.recurrent import RecurrentConfig
from robopolicy.policies.base import PolicySpec
from robopolicy.policies.heads.flow import FlowConfig, FlowPolicy
from robopolicy.policies.heads.gaussian import GaussianConfig, GaussianPolicy
from robopolicy.policies.noise import PerRowGenerator
from robopolicy.training.checkpoint import load_policy, save_checkpoint, verify_checkpoint

SPEC = PolicySpec({"state": (3,)}, 2)
GO = {"kind": "action", "control": ["1", "0"]}
STOP = {"kind": "action", "control": ["0", "1"]}


def value(text, state):
    """Value of a formula of `state` `(B, 3)`."""
    formula, state = parse_formula(text), torch.tensor(state)
    formula.kind({"state": 3})
    return formula({"state": state}, torch.ones(len(state), 1)).tolist()


def gaussian(seed=0, **spec):
    torch.manual_seed(seed)
    config = GaussianConfig(hidden=(8,), normalization="identity", action_normalization="identity")
    return GaussianPolicy(config, replace(SPEC, **spec)).eval()


def recurrent(seed=0):
    torch.manual_seed(seed)
    cell = RecurrentConfig(kind="gru", width=4)
    config = GaussianConfig(hidden=(8,), normalization="identity", action_normalization="identity", recurrent=cell)
    return GaussianPolicy(config, SPEC).eval()


def flow(seed=0):
    torch.manual_seed(seed)
    policy = FlowPolicy(FlowConfig(steps=2, hidden=(8,)), PolicySpec({"state": (3,)}, 2, horizon=4, action_horizon=2))
    policy.fit_normalizer({k: {"min": -torch.ones(n), "max": torch.ones(n)} for k, n in [("state", 3), ("action", 2)]})
    return policy.eval()


def states(rows=16, seed=0):
    return {"state": torch.rand(rows, 1, 3, generator=torch.Generator().manual_seed(seed)) * 2 - 1}


def actions_of(tree, steps):
    """Actions of a tree without skills along `steps` states of one row."""
    policy, memory, found = make_tree_policy(read_tree(tree), {}, SPEC), None, []
    for state in steps:
        obs = {"state": torch.tensor(state).view(1, 1, 3)}
        if policy.spec.hidden_dim:
            obs["memory"] = torch.zeros(1, 1, policy.spec.hidden_dim) if memory is None else memory
            memory = policy.next_hidden(obs)
        found.append(policy.act(obs)[0, 0].tolist())
    return found


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("state[0] + 2 * state[1] - 1", [[4.0], [-1.0]]),
        ("norm(state[1:3])", [[np.sqrt(13.0)], [0.0]]),
        ("[state[2], -state[0], 0.5]", [[3.0, -1.0, 0.5], [0.0, -0.0, 0.5]]),
        ("clip(state, 0, 1)", [[1.0, 1.0, 1.0], [0.0, 0.0, 0.0]]),
        ("state[-1] > 2 and not state[0] < 0", [[True], [False]]),
        ("max(sum(state), 1) / 2", [[3.0], [0.5]]),
    ],
)
def test_formulas_compute_expected_values(text, expected):
    found = value(text, [[1.0, 2.0, 3.0], [0.0, 0.0, 0.0]])
    assert np.allclose(found, expected)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("goal[0] > 1", "reads 'goal'"),
        ("state[3] > 1", "selects nothing"),
        ("state[0:2] > 1", "compares vectors"),
        ("state[0:2] + state", "combines 2 and 3 numbers"),
        ("state[0] and state[1]", "uses 'state[0]' as a boolean"),
        ("(state[0] > 1) + 1", "computes with"),
        ("__import__('os')", "not in the language"),
        ("state.mean()", "not in the language"),
        ("norm(state, state)", "calls norm with 2 arguments"),
        ("state[state[0]]", "index that is not an integer"),
        ("[]", "empty list"),
        ("state[0:3:2]", "has a slice with a step"),
        ("sum(state[::-1]) > 0", "has a slice with a step"),
        (f"state[0] < 1{'0' * 400}", "contains a constant above 3.4e+38"),
        ("state[0] < 1e999", "contains a constant above 3.4e+38"),
    ],
)
def test_invalid_formulas_are_refused(text, complaint):
    with pytest.raises(UserError, match="The formula") as refused:
        parse_formula(text).kind({"state": 3})
    assert complaint in str(refused.value)


@pytest.mark.parametrize(
    ("tree", "complaint"),
    [
        ({"kind": "loop"}, "needs a kind"),
        ({"kind": "sequence"}, "needs children"),
        ({"kind": "condition"}, "needs 'holds'"),
        ({"kind": "action"}, "either 'skill' or 'control'"),
        ({**GO, "skill": "go"}, "either 'skill' or 'control'"),
        ({**GO, "until": 3}, "A formula is a text"),
        ({**GO, "resume": True}, "it may have control, limit"),
        ({**GO, "limit": -1}, "set a number of decisions"),
        ({"kind": "sequence", "children": [GO] * 300}, "at most 256 nodes"),
        ({**GO, "control": ["1"]}, "has 1 numbers, but an action has 2"),
        ({**GO, "control": ["state[0] > 0", "1"]}, "needs numbers, got"),
        ({**GO, "until": "state[0]"}, "needs a comparison, got"),
        ({"kind": "action", "skill": "fly"}, "calls the skill 'fly'"),
    ],
)
def test_invalid_trees_are_refused(tree, complaint):
    with pytest.raises(UserError) as refused:
        make_tree_policy(read_tree(tree), {}, SPEC)
    assert complaint in str(refused.value) and "\n" not in str(refused.value)


def test_invalid_json_is_refused():
    with pytest.raises(UserError, match="is not valid JSON"):
        parse_tree("{")


def plain_tick(node, state, statuses, counter):
    """Reactive semantics for one row: its status and its last ticked action."""

    def holds(text):
        return bool(eval(text, {"state": state}))

    number = next(counter)
    if node["kind"] == "condition":
        status, action = (SUCCESS if holds(node["holds"]) else FAILURE), None
    elif node["kind"] == "action":
        status, action = (SUCCESS if "until" in node and holds(node["until"]) else RUNNING), node
    else:
        passed, action, status = (SUCCESS if node["kind"] == "sequence" else FAILURE), None, None
        for child in node["children"]:
            if status is not None:
                for _ in range(len(json.dumps(child).split('"kind"')) - 1):
                    next(counter)
                continue
            found, last = plain_tick(child, state, statuses, counter)
            action = last or action
            status = None if found == passed else found
        status = passed if status is None else status
    statuses[number] = status
    return status, action


def random_tree(rng, depth=0):
    kind = rng.choice(["sequence", "selector", "condition", "action"] if depth < 3 else ["condition", "action"])
    test = f"state[{rng.integers(3)}] > {rng.uniform(-0.5, 0.5):.2f}"
    if kind == "condition":
        return {"kind": kind, "holds": test}
    if kind == "action":
        numbers = [f"{rng.uniform(-1, 1):.2f}" for _ in range(2)]
        return {"kind": kind, "control": numbers, **({"until": test} if rng.random() < 0.6 else {})}
    return {"kind": str(kind), "children": [random_tree(rng, depth + 1) for _ in range(rng.integers(1, 4))]}


def test_batched_tick_equals_the_plain_interpreter_on_every_row():
    rng, obs = np.random.default_rng(0), states()
    for _ in range(25):
        plain = random_tree(rng)
        policy = make_tree_policy(read_tree(plain), {}, SPEC)
        tick, chunk = policy.tick(obs), policy.act(obs)
        for row, state in enumerate(obs["state"][:, 0].tolist()):
            statuses: dict[int, int] = {}
            status, action = plain_tick(plain, state, statuses, iter(range(300)))
            target = [0.0, 0.0] if action is None else [float(text) for text in action["control"]]
            assert tick.status[row] == status
            assert tick.statuses[row].tolist() == [statuses.get(i, -1) for i in range(len(policy.tree.nodes))]
            assert chunk[row, 0].tolist() == pytest.approx(target)


def test_ticks_are_repeatable_and_rows_are_independent():
    tree = {"kind": "selector", "children": [{"kind": "condition", "holds": "state[0] > 0"}, {**GO, "limit": 2}, STOP]}
    policy, obs = make_tree_policy(read_tree(tree), {}, SPEC), states()
    obs["memory"] = torch.randint(0, 4, (16, 1, 1), generator=torch.Generator().manual_seed(1)).float()
    chunk, memory = policy.act(obs), policy.next_hidden(obs)
    assert torch.equal(policy.act(obs), chunk) and torch.equal(policy.next_hidden(obs), memory)
    alone = {key: value[5:6] for key, value in obs.items()}
    assert torch.equal(policy.act(alone), chunk[5:6]) and torch.equal(policy.next_hidden(alone), memory[5:6])


def test_a_limit_counts_decisions_and_resets_after_a_pause():
    tree = {"kind": "selector", "children": [{**GO, "limit": 2, "unless": "state[0] < 0"}, STOP]}
    near, off = [1.0, 0.0, 0.0], [-1.0, 0.0, 0.0]
    go, stop = [1.0, 0.0], [0.0, 1.0]
    assert actions_of(tree, [near, near, near, near]) == [go, go, stop, go]
    assert actions_of(tree, [near, off, near, near, near]) == [go, stop, go, go, stop]


def test_resume_continues_the_running_child_and_reactive_nodes_restart():
    children = [{**GO, "until": "state[0] > 0"}, {**STOP, "until": "state[1] > 0"}]
    steps = [[-1.0, -1.0, 0.0], [1.0, -1.0, 0.0], [-1.0, -1.0, 0.0], [-1.0, 1.0, 0.0], [-1.0, -1.0, 0.0]]
    go, stop = [1.0, 0.0], [0.0, 1.0]
    assert actions_of({"kind": "sequence", "children": children}, steps) == [go, stop, go, go, go]
    resumed = actions_of({"kind": "sequence", "children": children, "resume": True}, steps)
    assert resumed == [go, stop, stop, stop, go]  # the last child completes the sequence at the fourth tick


def test_the_rest_action_is_used_if_no_action_is_ticked():
    tree = read_tree({"kind": "condition", "holds": "state[0] > 5"})
    assert make_tree_policy(tree, {}, SPEC).act(states(2))[:, 0].tolist() == [[0.0, 0.0]] * 2
    assert torch.allclose(
        make_tree_policy(tree, {}, SPEC, rest=(0.5, -1.0)).act(states(2))[0, 0], torch.tensor([0.5, -1.0])
    )
    with pytest.raises(UserError, match="rest has 1 numbers"):
        make_tree_policy(tree, {}, SPEC, rest=(0.5,))


@pytest.mark.parametrize("make", [gaussian, flow, recurrent])
def test_a_tree_with_one_leaf_equals_that_policy(make):
    skill = make()
    policy, obs = make_tree_policy(read_tree({"kind": "action", "skill": "only"}), {"only": skill}), states()
    assert policy.spec == skill.spec
    if skill.spec.hidden_dim:
        obs["memory"] = torch.rand(16, 1, 4)
        assert torch.equal(policy.next_hidden(obs), skill.next_hidden(obs))
    for deterministic in (True, False):
        chunks = [
            p.act(obs, deterministic=deterministic, generator=PerRowGenerator(range(16), [3] * 16))
            for p in (policy, skill)
        ]
        assert torch.equal(*chunks)


def test_swapping_a_leaf_changes_only_the_actions_of_its_rows():
    branch = {"kind": "action", "skill": "left", "until": "state[0] > 0"}
    tree = read_tree({"kind": "selector", "children": [{"kind": "sequence", "children": [branch, STOP]}]})
    policy, obs = make_tree_policy(tree, {"left": gaussian(0)}), states()
    other = policy.with_skill("left", gaussian(1))
    assert other.config.tree == policy.config.tree and torch.equal(other.tick(obs).statuses, policy.tick(obs).statuses)
    swapped = (policy.act(obs, deterministic=True) != other.act(obs, deterministic=True)).flatten(1).any(1)
    assert torch.equal(swapped, policy.tick(obs).action == 0)
    with pytest.raises(UserError, match="no skill 'right'"):
        policy.with_skill("right", gaussian(1))
    with pytest.raises(UserError, match="must agree on the number of actions"):
        make_tree_policy(
            read_tree({"kind": "selector", "children": [{"kind": "action", "skill": s} for s in "ab"]}),
            {"a": gaussian(), "b": gaussian(action_dim=3)},
        )


def test_skills_keep_their_chunk_lengths_and_the_tree_uses_the_shortest():
    turns = [{"kind": "action", "skill": name, "until": "state[0] > 0"} for name in ("slow", "quick")]
    policy = make_tree_policy(read_tree({"kind": "sequence", "children": turns}), {"slow": flow(), "quick": gaussian()})
    assert (policy.spec.horizon, policy.spec.action_horizon) == (1, 1) and policy.nfe == 3
    assert policy.act(states(3)).shape == (3, 1, 2)


def test_the_memory_of_a_skill_resets_when_it_is_inactive():
    tree = read_tree(
        {"kind": "selector", "children": [{"kind": "action", "skill": "r", "unless": "state[0] < 0"}, STOP]}
    )
    skill = recurrent()
    policy = make_tree_policy(tree, {"r": skill})
    obs = {"state": torch.tensor([[[1.0, 0, 0]], [[-1.0, 0, 0]]]), "memory": torch.rand(2, 1, 4)}
    after = policy.next_hidden(obs)
    assert torch.equal(after[0], skill.next_hidden(obs)[0]) and (after[1] == 0).all()
    with pytest.raises(UserError, match="This tree is recurrent"):
        policy.act({"state": obs["state"]})


def test_a_tree_is_saved_with_its_skills_in_one_checkpoint(tmp_path):
    tree = read_tree({"kind": "selector", "children": [{"kind": "action", "skill": "a", "limit": 2}, STOP]})
    policy = make_tree_policy(tree, {"a": flow(), "unused": gaussian()})
    assert set(policy.skills) == {"a"}
    obs = states(4) | {"memory": torch.zeros(4, 1, 1)}
    save_checkpoint(tmp_path / "tree", policy, task="toy/point_mass", obs_sample=obs)
    loaded, _ = load_policy(tmp_path / "tree")
    assert isinstance(loaded, TreePolicy) and loaded.tree.text() == tree.text() and loaded.spec == policy.spec
    assert verify_checkpoint(tmp_path / "tree").ok


@pytest.mark.slow
def test_an_exported_tree_has_the_same_memory_as_in_torch(tmp_path):
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    from robopolicy.deploy.bundle import open_bundle
    from robopolicy.deploy.export import export_bundle
    from robopolicy.spec import TaskMetadata

    tree = {"kind": "sequence", "resume": True, "children": [{**GO, "until": "norm(state) > 1"}, {**STOP, "limit": 2}]}
    policy = make_tree_policy(read_tree(tree), {}, SPEC)
    obs = states(4) | {"memory": torch.tensor([[0.0, 0], [1, 0], [1, 1], [1, 2]]).view(4, 1, 2)}
    export_bundle(policy, tmp_path / "b", task_metadata=TaskMetadata("toy/point_mass"), obs=obs)
    bundle = open_bundle(tmp_path / "b")
    steps = [[0.1, 0.0, 0.0], [2.0, 0.0, 0.0], [0.1, 0.0, 0.0], [0.1, 0.0, 0.0], [0.1, 0.0, 0.0]]
    found = [bundle.chunk({"state": np.array([step], np.float32)})[0].tolist() for step in steps]
    assert found == actions_of(tree, steps) == [[1, 0], [0, 1], [0, 1], [0, 1], [1, 0]]


def test_mutations_are_valid_trees_and_leave_the_original_unchanged():
    rng = np.random.default_rng(0)
    skilled = {"kind": "action", "skill": "a", "unless": "state[1] < -0.5"}
    plain = {"kind": "sequence", "children": [{"kind": "selector", "children": [GO, skilled]}, {**STOP, "limit": 3}]}
    before, seen = json.dumps(plain), set()
    for _ in range(200):
        made = mutate(plain, [plain], ["a"], rng)
        read_tree(made)
        seen.add(json.dumps(made))
    assert json.dumps(plain) == before and len(seen) > 50


def test_mutations_never_change_an_index():
    rng, plain = np.random.default_rng(0), {"kind": "condition", "holds": "state[2] > 0.5"}
    for _ in range(60):
        body = ast.parse(mutate(plain, [], [], rng)["holds"], mode="eval").body
        assert isinstance(body, ast.Compare) and ast.unparse(body.left) == "state[2]"


def test_an_outline_has_one_line_per_node():
    tree = {"kind": "sequence", "name": "brake", "resume": True, "children": [{**GO, "limit": 3}, STOP]}
    assert to_text(read_tree(tree)).splitlines() == [
        "sequence 'brake' (resumes)",
        "  action [1, 0] at most 3 decisions",
        "  action [0, 1]",
    ]


def test_a_tree_of_two_skills_succeeds_where_each_skill_fails():
    from robopolicy.evaluation.harness import evaluate
    from robopolicy.policies.wrappers.black_box import CallablePolicy
    from robopolicy.sim.registry import SimOptions, make_sim

    spec = PolicySpec({"state": (6,)}, 2)

    def skill(name, function):
        return CallablePolicy.wrap(name, lambda obs: function(obs["state"][:, -1])[:, None], spec, noise=False)

    across = skill("across", lambda s: torch.stack([8 * (s[:, 4] - s[:, 0]) - 3 * s[:, 2], -2 * s[:, 3]], 1))
    along = skill("along", lambda s: torch.stack([-2 * s[:, 2], 8 * (s[:, 5] - s[:, 1]) - 3 * s[:, 3]], 1))
    stages = [
        {"kind": "action", "skill": "across", "until": "abs(state[4] - state[0]) < 0.02"},
        {"kind": "action", "skill": "along"},
    ]
    tree = make_tree_policy(read_tree({"kind": "sequence", "children": stages}), {"across": across, "along": along})
    sim = make_sim("toy/point_mass", SimOptions(num_envs=16))
    rates = [float(evaluate(policy, sim, episodes=32).outcomes.mean()) for policy in (across, along, tree)]
    assert max(rates[:2]) < 0.2 and rates[2] > 0.8
