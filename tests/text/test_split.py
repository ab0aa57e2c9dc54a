"""Tests of the split of problems by content: training and held-out problems are disjoint on every text task."""

import json

import pytest

pytest.importorskip("transformers")

from env_of_text import env_of
from recipe_learners import learner
from split_rules import check_problems_are_disjoint

from robopolicy.cli.main import main
from robopolicy.errors import UserError
from robopolicy.evaluation.actors import RandomActor
from robopolicy.evaluation.harness import evaluate
from robopolicy.sim import registry
from robopolicy.sim.registry import SimOptions, make_sim, task_names
from robopolicy.text import evaluation
from robopolicy.text.datasets import PromptTask
from robopolicy.text.sim import TextSim
from robopolicy.text.task import SingleTurn, TextTask, is_held_out, unpack
from robopolicy.training.compose import compose_config
from robopolicy.training.learner import eval_simulator, simulator
from robopolicy.training.text_file_source import conversations, recipe_source
from robopolicy.training.text_rollout_source import TextRolloutSource
from robopolicy_tasks.text.arithmetic import Arithmetic
from robopolicy_tasks.text.countdown import Countdown
from robopolicy_tasks.text.grid import Pits

NAMES = [name for name in task_names() if name.startswith("text/")]


class One(TextTask):
    """A single problem."""

    name, prompt_bytes, completion_bytes = "text/one", 8, 4

    def episode(self, seed):
        return SingleTurn("1", lambda completion: 1.0)


def written(path, rows):
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return str(path)


@pytest.mark.parametrize("name", [*NAMES, "reasoning_gym/chain_sum"])
def test_training_and_held_out_problems_are_disjoint(name):
    sim = make_sim(name, SimOptions(num_envs=1))
    assert isinstance(sim, TextSim)
    check_problems_are_disjoint(sim.task)


def test_an_eighth_of_the_contents_is_held_out_by_their_hash():
    share = sum(is_held_out(str(number)) for number in range(8000)) / 8000
    assert abs(share - 1 / 8) < 4 * (1 / 8 * 7 / 8 / 8000) ** 0.5
    assert [number for number in range(40) if is_held_out(str(number))] == [0, 9, 10, 21, 32, 35]


@pytest.mark.parametrize("task", [Arithmetic(), Countdown(), Pits()], ids=lambda task: task.name)
def test_tasks_have_more_than_100000_problems(task):
    """The count of repeated prompts among n draws estimates the number of problems: n (n - 1) / 2 / repetitions."""
    draws = 6000
    prompts = [task.episode(seed).prompt for seed in range(draws)]
    assert draws - len(set(prompts)) < draws * (draws - 1) / 2 / 100_000


@pytest.mark.parametrize("seed", range(3))
def test_permutations_of_a_sum_are_on_the_same_side(seed):
    task = Arithmetic()
    assert task.content(seed) == "+" + "+".join(sorted(task.episode(seed).prompt[:-1].split("+")))


def test_a_training_pool_and_demonstrations_have_no_held_out_problem():
    task = Arithmetic()
    algorithm = learner(task)
    source = recipe_source(TextSim(task, SimOptions(num_envs=1)), algorithm, 0)
    assert isinstance(source, TextRolloutSource)
    pool = source.pool.tasks
    assert len(pool) == 50 and not any(task.is_held_out(entry.payload) for entry in pool)
    shown = {conversation[0] for conversation in conversations(task, range(200))}
    held_out = {task.episode(task.held_out_seed(seed)).prompt for seed in range(200)}
    assert not shown & held_out


def test_the_simulator_and_pass_at_k_use_held_out_problems(monkeypatch):
    task = Arithmetic()
    expected = [task.episode(task.held_out_seed(seed)).prompt for seed in range(7, 10)]
    sim = TextSim(task, SimOptions(num_envs=3))
    assert unpack(sim.reset(7)["text"]) == expected
    state = sim.state_dict()
    again = TextSim(task, SimOptions(num_envs=3))
    again.load_state_dict(state)
    assert [episode.prompt for episode in again.episodes] == expected
    training = TextSim(task, SimOptions(num_envs=3, held_out=False))
    assert unpack(training.reset(7)["text"]) == [task.episode(task.training_seed(seed)).prompt for seed in range(7, 10)]
    seen = []
    policy = env_of(task).policy
    plain = policy.env_class.start_conversation
    monkeypatch.setattr(
        policy.env_class,
        "start_conversation",
        lambda env, one: seen.append(plain(env, one)) or seen[-1],
    )
    evaluation.sample_rollouts(policy, task, [7, 8, 9], samples=1)
    assert [conversation.episode.prompt for conversation in seen] == expected


def test_paraphrases_are_training_problems():
    task = Arithmetic()
    problems = [task.training_seed(seed) for seed in range(40)]
    assert not any(task.is_held_out(task.paraphrase(seed, "varied")) for seed in problems)


def test_a_task_without_problems_on_one_side_is_refused():
    with pytest.raises(UserError, match="draws of text/one have no held-out problem"):
        One().held_out_seed(0)
    assert One().training_seed(5) == 5


def test_the_column_split_of_a_file_decides(tmp_path):
    rows = [{"prompt": f"{n}", "answer": "a", "split": "test" if n % 2 else "train"} for n in range(6)]
    task = PromptTask(written(tmp_path / "x.jsonl", rows))
    assert [task.episode(task.training_seed(seed)).prompt for seed in range(4)] == ["0", "2", "4", "0"]
    assert [task.episode(task.held_out_seed(seed)).prompt for seed in range(4)] == ["1", "3", "5", "1"]
    with pytest.raises(UserError, match="row 7: the prompt is in both splits"):
        PromptTask(written(tmp_path / "y.jsonl", [*rows, {**rows[0], "split": "test"}]))
    with pytest.raises(UserError, match="row 1: 'split' must be train or test, found 'dev'"):
        PromptTask(written(tmp_path / "z.jsonl", [{**rows[0], "split": "dev"}]))
    with pytest.raises(UserError, match=r"has no held-out prompts; .* column split with test"):
        PromptTask(written(tmp_path / "w.jsonl", rows[:1])).held_out_seed(0)


def test_rows_of_a_file_without_the_column_are_split_by_their_prompt(tmp_path):
    rows = [{"prompt": f"{n}", "answer": "a"} for n in range(100)]
    check_problems_are_disjoint(PromptTask(written(tmp_path / "x.jsonl", rows)))


def test_collected_demonstrations_and_training_simulators_use_training_problems(tmp_path, monkeypatch):
    built = []
    plain = registry.make_sim
    monkeypatch.setattr(registry, "make_sim", lambda name, options: built.append(options) or plain(name, options))
    words = ["collect", "text/arithmetic", "--episodes", "2", "--out", str(tmp_path / "data")]
    assert main(words) == 0 and [options.held_out for options in built] == [False]
    config = compose_config(["experiment=text_sft"])
    assert isinstance(train := simulator(config, 1), TextSim) and isinstance(
        held_out := eval_simulator(config), TextSim
    )
    assert not train.task.is_held_out(train._problem(3)) and held_out.task.is_held_out(held_out._problem(3))


class Few(TextTask):
    """40 problems, several of which are held out."""

    name, prompt_bytes, completion_bytes = "text/few", 8, 4

    def episode(self, seed):
        return SingleTurn(str(seed % 40), lambda completion: 1.0)


def test_an_evaluation_has_each_of_few_problems_once(monkeypatch):
    task = Few()
    assert task.held_out_problems == (0, 9, 10, 21, 32, 35) and not Arithmetic().held_out_problems
    sim = TextSim(task, SimOptions(num_envs=4))
    result = evaluate(RandomActor(), sim, episodes=100, seed=50_000)
    assert len(result.returns) == 6
    seen = {task.episode(task.held_out_seed(seed)).prompt for seed in range(50_000, 50_006)}
    assert seen == {"0", "9", "10", "21", "32", "35"}
    assert TextSim(task, SimOptions(num_envs=1, held_out=False)).spec.num_problems is None


def test_eval_reports_how_many_problems_a_task_has(tmp_path, capsys):
    assert main(["eval", "expert", "--task", "text/nim", "--video", "0", "--out", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    assert "text/nim, 23 episodes" in printed
    assert "text/nim has 23 held-out problems; each is evaluated once." in printed


def test_held_out_rows_of_a_file_are_evaluated_once(tmp_path):
    rows = [{"prompt": f"{n // 2}?", "answer": "1", "split": "test" if n % 4 < 2 else "train"} for n in range(20)]
    task = PromptTask(written(tmp_path / "prompts.jsonl", rows))
    assert task.held_out_problems == (0, 4, 8, 12, 16) and task.held_out_seed(7) == 8
