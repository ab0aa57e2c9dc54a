"""Tests of tasks with more grades than success, of judges, and of recipes that need these grades."""

import pytest

pytest.importorskip("transformers")

import torch
from graded_tasks import check_solutions_solve_and_fit

from robopolicy.contrib.text_catalogue.critique import Critique
from robopolicy.contrib.text_catalogue.decompose import Decompose, consistency, plan, solved
from robopolicy.contrib.text_catalogue.judge import PolicyJudge
from robopolicy.contrib.text_catalogue.nim import Nim, apply_move, divided, value
from robopolicy.contrib.text_catalogue.review import Review
from robopolicy.errors import UserError
from robopolicy.policies.base import PolicySpec
from robopolicy.sim.registry import SimOptions, make_sim
from robopolicy.text.policy import TextConfig, TextPolicy
from robopolicy.text.recipe_trainer import TextRecipe, TextRecipeConfig
from robopolicy.text.rollouts.protocols import Task
from robopolicy.text.task import JudgePrompt
from robopolicy.text.text_env import TextEnv
from robopolicy.training.text_file_source import recipe_source
from robopolicy_tasks.text.arithmetic import Arithmetic

ASKING = {
    "craft_gui": "critique",
    "mashost": "grid",
    "fate": "pits",
    "hila": "calculator",
    "videochat_m1": "critique",
    "urpo": "critique",
    "retroformer": "review",
    "daslam": "decompose",
    "gui_critic_r1": "review",
    "docthinker": "calculator",
    "xiangqi_r1": "nim",
    "read": "grid",
    "critique_rl": "review",
    "hiper": "waypoints",
    "a2p": "grid",
    "search_r2": "calculator",
}


def small(seed=0):
    torch.manual_seed(seed)
    return TextPolicy(TextConfig(width=16, layers=1, heads=2, context=384), PolicySpec({"text": (104,)}, 10))


def test_a_judge_compares_two_messages():
    policy = small()
    judge = PolicyJudge(policy, torch.Generator().manual_seed(0))
    prompts = [JudgePrompt("1+1=2?", "y", "n"), JudgePrompt("1+1=3?", "y", "n"), JudgePrompt("1+1=2?", "n", "y")]
    probs = judge(prompts)
    assert probs[0] + probs[2] == pytest.approx(1.0) and all(0.0 < one < 1.0 for one in probs) and judge([]) == []
    last = policy.tokenizer.prompt(["1+1=2?"])
    logits = policy.model(torch.tensor([last])).logits[0, -1].log_softmax(0)
    y, n = (policy.encode_message(word)[0] for word in "yn")
    # both messages have one letter and nearly equal end probabilities
    ratio = torch.stack([logits[y], logits[n]]).softmax(0)[0]
    assert probs[0] == pytest.approx(float(ratio.detach()), abs=0.05)


def test_tasks_and_settings_without_a_judge_are_refused():
    algorithm = TextRecipe(TextRecipeConfig(recipe="urpo"), small(), total_updates=4)
    with pytest.raises(UserError, match=r"text/arithmetic has no judge prompt"):
        recipe_source(make_sim("text/arithmetic", SimOptions(num_envs=1)), algorithm, seed=0)
    with pytest.raises(UserError, match="num_workers=0 for its judge"):
        TextRecipe(TextRecipeConfig(recipe="urpo", num_workers=2), small(), total_updates=4)
    with pytest.raises(UserError, match="num_workers must be at most 256"):
        TextRecipeConfig(num_workers=2000)
    external = TextRecipe(TextRecipeConfig(recipe="craft_gui"), small(), total_updates=4)
    with pytest.raises(UserError, match="requires a teacher"):
        recipe_source(make_sim("text/critique", SimOptions(num_envs=1)), external, seed=0)
    assert Arithmetic().judge_prompt(0, ["1"]) is None


def test_a_judge_reads_text_and_may_have_other_tokens():
    algorithm, teacher = TextRecipe(TextRecipeConfig(recipe="craft_gui"), small(), total_updates=4), small(1)
    teacher.model.resize_token_embeddings(teacher.vocabulary - 1)
    algorithm.set_teacher(teacher)
    assert algorithm.teacher is teacher


@pytest.mark.parametrize("recipe", ASKING)
def test_recipes_train_on_the_task_with_their_required_grades(recipe):
    policy, teacher = small(), small(1)
    config = TextRecipeConfig(recipe=recipe, prompts_per_update=4, num_prompts=40, group_size=2)
    algorithm = TextRecipe(config, policy, total_updates=4)
    algorithm.set_teacher(teacher)
    source = recipe_source(make_sim(f"text/{ASKING[recipe]}", SimOptions(num_envs=1)), algorithm, seed=0)
    metrics = algorithm.update(source.next(algorithm)) | source.metrics()
    assert all(torch.isfinite(torch.tensor(number)) for number in metrics.values())
    source.close()


@pytest.mark.parametrize("task", (Nim(), Review(), Decompose(), Critique()), ids=lambda task: task.name)
def test_solutions_of_contributed_tasks_solve_and_fit(task):
    check_solutions_solve_and_fit(task)


def test_claims_have_their_own_category():
    for seed in range(20):
        critique, kind = Critique().episode(seed), Critique().category(seed)
        (solution,) = critique.demonstration() or []
        assert critique.prompt.endswith("?" if kind else "=") and critique.step(solution).success
        if kind:
            claim = critique.prompt[:-1].split("=")
            holds = sum(map(int, claim[0].split("+"))) == int(claim[1])
            assert critique.demonstration() == ["y" if holds else "n"]


def graded(task, seed, *messages):
    """Grades of all messages, and the last turn."""
    episode = task.episode(seed)
    turns = [episode.step(message) for message in messages]
    return [turn.metrics for turn in turns], turns[-1]


def test_nim_grades_legal_and_winning_moves():
    assert divided(3 + 0 * 6 + 5 * 36) == [3, 0, 5] and apply_move([3, 0, 5], "c2+") == [3, 0, 3]
    assert apply_move([3, 0, 5], "b1+") is None and apply_move([3, 0, 5], "c2") is None
    seeds = {tuple(map(int, Nim().episode(seed).prompt[:-1].split())): seed for seed in range(2000)}
    won, invalid = seeds[3, 0, 5], seeds[2, 2, 0]
    (grades,), turn = graded(Nim(), won, "c2+")
    assert turn.success and grades["legal"] == grades["analysis"] == 1.0
    (grades,), turn = graded(Nim(), won, "a1-")
    assert not turn.success and (grades["legal"], grades["analysis"]) == (1.0, 0.0)
    (grades,), turn = graded(Nim(), won, "b1+")
    assert not turn.success and grades["legal"] == 0.0
    (grades,), turn = graded(Nim(), invalid, "a1+")
    assert value([2, 2, 0]) == 0 and turn.success and grades["analysis"] == 0.0


def test_review_grades_the_verdict_and_the_refined_answer():
    task = Review()
    claimed = task.episode(1).problem
    other = "yn"["yn".index(claimed.verdict) - 1]
    grades, turn = graded(task, 1, other, claimed.answer)
    assert grades[0]["verdict"] == 0.0 and grades[0]["first"] == float(claimed.right)
    assert turn.success and grades[1]["refined"] == 1.0
    assert {task.episode(seed).problem.right for seed in range(20)} == {True, False}


def test_the_solver_executes_plans_and_consistency_grades_them():
    assert solved("2*3 7-a") == 1 and solved("7-2 a*3") == 15 and solved("7-a 2*3") is None and solved("7-") is None
    assert plan(["7", "2", "3"], ["-", "*"]) == "2*3 7-a" and plan(["7", "2", "3"], ["*", "-"]) == "7*2 a-3"
    numbers = ["7", "2", "2"]
    assert consistency("2*2 7-a", numbers) == 1.0 and consistency("2*2 7-2", numbers) == 0.5
    assert consistency("2*2 2-a", numbers) == 0.5 and consistency("9*2 7-a", numbers) == 0.5
    assert consistency("", numbers) == 0.0


class Certain:
    """Judge that returns the length of the prompt."""

    def __call__(self, prompts):
        return [len(one.prompt) / 100 for one in prompts]


def test_the_judge_scores_open_answers_and_other_messages_use_the_reward():
    task, policy = Critique(), small()
    env = TextEnv(policy, task, torch.Generator().manual_seed(0))
    tasks = [Task(seed, payload=seed) for seed in range(12)]
    assert all("judge" not in trajectory.metrics for trajectory in env.rollout(tasks))
    env.judge = Certain()
    for trajectory in env.rollout(tasks):
        claimed = task.episode(trajectory.task.key).prompt
        responses = trajectory.record.responses[0].strip()
        open_ = trajectory.metrics["open"] == 1.0
        assert open_ == claimed.endswith("=")
        assert trajectory.metrics["judge"] == (len(f"{claimed}{responses}?") / 100 if open_ else trajectory.reward)
