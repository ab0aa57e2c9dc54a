"""Tests of text training in the common loop: imitation, recipes, failures, overflow, exact resume, command line."""

import json
import re
import signal
from dataclasses import replace

import pytest
import torch
from recipe_learners import learner
from safetensors.torch import load_file

from robopolicy.cli.main import main
from robopolicy.core.ratios import importance_weight
from robopolicy.core.surrogates import SURROGATES
from robopolicy.errors import UserError
from robopolicy.sim.registry import SimOptions
from robopolicy.spec import PolicySpec
from robopolicy.text.policy import TextConfig, TextPolicy
from robopolicy.text.rollouts.protocols import Task
from robopolicy.text.sim import TextSim
from robopolicy.text.task import SingleTurn, TextTask, is_held_out
from robopolicy.text.text_env import TextEnv
from robopolicy.training.text_file_source import conversations
from robopolicy.training.text_rollout_source import AsyncTextRolloutSource, TextRolloutSource, training_prompts
from robopolicy_tasks.text.arithmetic import Arithmetic, ArithmeticHard
from robopolicy_tasks.text.grid import Grid
from robopolicy_tasks.text.panda import PandaTurns

SMALL = ["policy.width=16", "policy.layers=1", "policy.heads=2", "evaluation.episodes=10", "logging.every=1"]
FIXED = [word.split("=")[0] for word in SMALL]
SFT = ["experiment=text_sft", *SMALL, "budget.updates=6", "evaluation.every=3", "algorithm.batch_size=8"]


class Letter(TextTask):
    """The right answer is `b`: one byte decides, so learning takes seconds."""

    name, prompt_bytes, completion_bytes = "text/letter", 4, 1

    def episode(self, seed):
        if seed % 5 == 4:
            return SingleTurn("?", lambda completion: 1 / 0)
        return SingleTurn("?", lambda completion: float(completion == "b"), "b")


def source(task, algorithm, seed=0):
    return TextRolloutSource(TextSim(task, SimOptions(num_envs=1)), algorithm, seed=seed)


def test_the_schedule_of_a_recipe_starts_after_supervised_fine_tuning():
    algorithm = learner(Letter(), lr=1e-3, lr_final=0.0, sft_updates=4, sft_lr=1e-2)
    rates: list[float] = []
    for algorithm.updates in range(10):
        rates.append(algorithm.learning_rate())
    assert rates == pytest.approx([1e-2] * 4 + [1e-3 * (1 - step / 6) for step in range(6)])


def test_grpo_learns_a_letter_and_drops_rollouts_with_failed_rewards(capsys):
    algorithm = learner(Letter(), lr=1e-2, group_size=16)
    feed = source(Letter(), algorithm)
    optimizer = torch.optim.Adam(algorithm.policy.parameters(), lr=1e-2)
    for _ in range(20):  # the policy guesses one of eight letters
        loss, _ = algorithm.policy.sft_loss(
            [algorithm.policy.tokenizer.prompt(["?"])] * 8, [[97 + i] for i in range(8)]
        )
        optimizer.zero_grad()
        loss.mean().backward()
        optimizer.step()
    first = None
    for _ in range(20):
        metrics = algorithm.update(feed.next(algorithm))
        rollout = feed.metrics()
        first = rollout if first is None else first
        assert all(torch.isfinite(torch.tensor(value)) for value in metrics.values())
        assert metrics["actor/ratio_max"] < 1e-4  # one step per batch: fresh data
    assert first["rollout/reward_failed"] > 0
    assert rollout["rollout/success"] > 0.8 > first["rollout/success"] + 0.3
    assert "the reward raised (ZeroDivisionError" in capsys.readouterr().err


def test_task_whose_rewards_always_fail_is_refused():
    class Never(Letter):
        def episode(self, seed):
            return SingleTurn("?", lambda completion: float("nan"))

    for kind in (TextRolloutSource, AsyncTextRolloutSource):
        algorithm = learner(Never(), group_size=2, staleness=1)
        feed = kind(TextSim(Never(), SimOptions(num_envs=1)), algorithm, seed=0)
        with pytest.raises(UserError, match="None of 20 batches had a usable group: their rewards failed"):
            feed.next(algorithm)
        feed.close()


@pytest.mark.parametrize("prompt", ["\ud800", "a\0", "a" * 130])
def test_invalid_prompt_is_named_instead_of_the_recipe(prompt):
    class Odd(Letter):
        prompt_bytes = 200

        def episode(self, seed):
            return SingleTurn(prompt, float)

    algorithm = learner(Letter(), group_size=2)
    with pytest.raises(UserError, match=r"^Prompt \d+ of text/letter (has|contains) "):
        source(Odd(), algorithm).next(algorithm)


def test_half_precision_rescores_and_keeps_recorded_logp_as_behaviour():
    algorithm = learner(Grid(), group_size=2, dtype="bfloat16")
    batch = source(Grid(), algorithm).next(algorithm)
    prepared = algorithm._preprocess(batch)
    assert torch.equal(prepared.logp_behaviour, batch.logp_old)
    weight = importance_weight(prepared)[batch.valid()]
    assert 0 < float((weight - 1).abs().max()) < 0.1


def test_kl_cov_penalty_acts_within_an_update():
    """KL-Cov and its gradient are 0 at the first step of a batch; the penalty requires further steps."""

    class Odd(Letter):
        def episode(self, seed):
            return SingleTurn("?", lambda completion: float(bool(completion) and ord(completion) % 2))

    found = []
    for minibatches in (1, 0):
        algorithm = learner(Odd(), lr=1e-2, group_size=16, recipe="kl_cov", minibatches=minibatches)
        found.append(algorithm.update(source(Odd(), algorithm).next(algorithm))["actor/covariance_kl"])
    assert found[0] < 1e-6 < 1e-5 < found[1]


def test_overlong_messages_can_be_masked():
    kept, masked = (learner(Grid(), group_size=2, overlong=overlong) for overlong in ("score", "mask"))
    batch = source(Grid(), kept).next(kept)
    truncated = batch.extra["truncated"]
    assert truncated.any()
    assert torch.equal(kept._preprocess(batch).valid(), batch.valid())
    assert not masked._preprocess(batch).valid()[truncated].any()


def test_asynchronous_rollouts_respect_the_staleness_limit():
    algorithm = learner(Grid(), group_size=2, staleness=1)
    feed = AsyncTextRolloutSource(TextSim(Grid(), SimOptions(num_envs=1)), algorithm, seed=0)
    ages = []
    for _ in range(4):
        batch = feed.next(algorithm)
        ages.append(algorithm.updates - batch.version)
        assert len(batch) == 16 and torch.isfinite(torch.tensor(list(algorithm.update(batch).values()))).all()
    assert all(int(age.min()) >= 0 and int(age.max()) <= 1 for age in ages)
    assert feed.metrics()["rollout/staleness"] <= 1.0
    state = feed.state_dict()
    feed.close()
    again = AsyncTextRolloutSource(TextSim(Grid(), SimOptions(num_envs=1)), algorithm, seed=0)
    assert not again.load_state_dict(state)  # the rollouts differ from the uninterrupted run
    assert again.next(algorithm).version.min() == algorithm.updates
    again.close()


def test_asynchronous_rollouts_print_reward_errors(capsys):
    algorithm = learner(Letter(), group_size=2, staleness=1)
    feed = AsyncTextRolloutSource(TextSim(Letter(), SimOptions(num_envs=1)), algorithm, seed=0)
    for _ in range(3):
        algorithm.update(feed.next(algorithm))
    feed.close()
    assert re.search(r"text/letter, prompt \d+: the reward raised \(ZeroDivisionError", capsys.readouterr().err)


def test_rollouts_have_the_temperature_of_the_policy_unless_the_recipe_sets_another():
    algorithm = learner(Grid(), group_size=2)
    algorithm.policy.config = replace(algorithm.policy.config, temperature=0.5)
    for expected in (0.5, 2.0):
        assert set(source(Grid(), algorithm).next(algorithm).extra["temperature"].tolist()) == {expected}
        algorithm.recipe.rollout["temperature"] = 2.0


def test_training_prompts_are_different_problems():
    for task, count in ((Grid(), 206), (Arithmetic(), 300)):
        prompts = training_prompts(task, 7, 300, 16)
        contents = [task.content(prompt.payload) for prompt in prompts]
        assert len(set(contents)) == len(contents) == count and not any(map(is_held_out, contents))
        assert prompts == training_prompts(task, 7, 300, 16) and prompts[0] == Task(7, payload=task.training_seed(7))
    for unchanged in (ArithmeticHard(), PandaTurns()):  # without duplicates, and with scenes that differ
        keys = range(7, 207)
        expected = [Task(key, payload=unchanged.training_seed(key)) for key in keys]
        assert training_prompts(unchanged, 7, 200, 16) == expected


def test_a_task_with_few_problems_still_fills_a_batch():
    assert [prompt.key for prompt in training_prompts(Letter(), 3, 50, 8)] == list(range(3, 11))


def test_a_state_with_other_prompts_is_refused():
    algorithm = learner(Letter(), group_size=2)
    feed = source(Letter(), algorithm)
    state = feed.state_dict()
    assert feed.load_state_dict(state)
    del state["prompts"]  # as earlier versions wrote it
    with pytest.raises(UserError, match="saved by an earlier version with 50 prompts instead of 8 different ones"):
        feed.load_state_dict(state)


def test_batch_without_usable_rows_leaves_the_policy_unchanged():
    algorithm = learner(Grid(), group_size=2, recipe="rft")  # learns from successes only, and the batch has none
    before = {key: value.clone() for key, value in algorithm.policy.state_dict().items()}
    batch = source(Grid(), algorithm).next(algorithm)
    metrics = algorithm.update(batch.with_fields(reward=torch.zeros_like(batch.logp_old)))
    assert metrics["actor/row_fraction"] == 0.0 and algorithm.updates == 1
    assert all(torch.equal(value, before[key]) for key, value in algorithm.policy.state_dict().items())


def test_objective_without_a_reference_term_stores_no_reference():
    algorithm = learner(Grid(), group_size=4, recipe="gmpo")
    algorithm.update(source(Grid(), algorithm).next(algorithm))
    assert algorithm.reference_policy is None


def test_solutions_of_several_turns_are_conversations():
    (responses,) = conversations(Grid(), [3])
    assert responses[0] == Grid().episode(3).prompt and len(responses) % 2 == 0
    assert all(message in "nsew" for message in responses[1::2]) and all(
        reply.startswith(" at ") for reply in responses[2::2]
    )
    torch.manual_seed(0)
    policy = TextPolicy(TextConfig(width=16, layers=1, heads=2), PolicySpec({"text": (96,)}, 3))
    record, _ = policy.conversations([responses])
    chosen = record["tokens"][0][int(record["start"]) :][record["mask"][0]]
    assert policy.tokenizer.decode(chosen.tolist()) == "".join(responses[1::2])
    env = TextEnv(policy, Grid(), torch.Generator())
    conversation = env.start_conversation(Task(3, payload=3))
    for message in responses[1::2]:
        env.append_message(conversation, message, own=True)
    taught = env.trajectory_of(conversation).decisions  # same tokens as in rollouts
    assert torch.equal(taught.extra["tokens"], record["tokens"]) and torch.equal(taught.mask, record["mask"])


def test_text_and_robot_algorithms_share_surrogates():
    from robopolicy.core import surrogates

    algorithm = learner(Grid(), group_size=2)
    assert SURROGATES[algorithm.recipe.estimator.config.surrogate] is surrogates.clip


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs")
    assert main(["train", *SFT, f"out={out}", "name=sft"]) == 0
    return out / "sft" / "checkpoints" / "last"


def recipe_run(base, *extra):
    common = ["experiment=text_grpo", f"init_from={base}", "algorithm.sft_updates=0", "budget.updates=6"]
    return [
        *common,
        "algorithm.prompts_per_update=4",
        "algorithm.group_size=4",
        "evaluation.episodes=10",
        "checkpoint_every=2",
        "logging.every=1",
        *extra,
    ]


def test_a_run_learns_evaluates_and_reports(base, tmp_path, capsys):
    assert main(["train", *recipe_run(base), f"out={tmp_path}", "name=run"]) == 0
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert report["task"] == "text/arithmetic" and report["policy"] == "text"
    assert report["base"]["n"] == 10 == report["final"]["n"]
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert {"rollout/degenerate", "rollout/tokens", "actor/entropy"} <= {key for row in rows for key in row}
    assert main(["verify", str(tmp_path / "run" / "checkpoints" / "last")]) == 0


@pytest.mark.parametrize("kind", ["both", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("sft", "grpo"))])
def test_interrupted_text_runs_resume_bit_identically(kind, base, tmp_path, monkeypatch):
    import os

    from robopolicy.training.loggers import JsonlLogger

    settings = [*SFT, "checkpoint_every=2"] if kind == "sft" else recipe_run(base)
    if kind == "both":
        own = [word for word in settings[2:] if word.split("=")[0] not in (*FIXED, "algorithm.sft_updates")]
        settings = [settings[0], *SMALL, *own, "algorithm.sft_updates=4", "algorithm.warmup=1"]
    assert main(["train", *settings, f"out={tmp_path}", "name=whole"]) == 0
    log = JsonlLogger.log

    def interrupt(self, update, row):
        if update == 3:
            os.kill(os.getpid(), signal.SIGINT)
        log(self, update, row)

    with monkeypatch.context() as patch:
        patch.setattr(JsonlLogger, "log", interrupt)
        assert main(["train", *settings, f"out={tmp_path}", "name=stopped"]) == 130
    assert main(["train", "--resume", str(tmp_path / "stopped")]) == 0
    for file in ("model.safetensors", "training_state/tensors.safetensors"):
        one, two = (load_file(tmp_path / name / "checkpoints" / "last" / file) for name in ("whole", "stopped"))
        assert one.keys() == two.keys()
        assert [key for key in one if not torch.equal(one[key], two[key])] == []


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["algorithm.recipe=nothing"], "Unknown recipe 'nothing'"),
        (["algorithm.recipe=deep.yaml"], "Recipe deep.yaml cannot be read: it is nested too deeply"),
        (["algorithm.recipe=odd.yaml"], "Recipe 'odd.yaml': Option 'high' of bounds 'constant' must be a number"),
        (
            ["algorithm.sft_updates=460"],
            "sft_updates must be less than the 460 updates of the run (budget.updates), got 460",
        ),
        (["algorithm.overlong=cut"], "algorithm.overlong must be one of score, mask"),
        (["algorithm.data=x.jsonl"], "algorithm.data=x.jsonl is not used: recipe 'grpo' learns from its own rollouts"),
        (["algorithm.teacher=x"], "algorithm.teacher=x is not used: recipe 'grpo' has no teacher"),
        (["dataset=x"], "Algorithm 'text_recipe' does not use robot datasets; remove dataset="),
        (["algorithm.group_size=1"], "compares the rollouts of a group; set algorithm.group_size to 2 or more"),
        (["algorithm.sft_lr=-1"], "algorithm.sft_lr must be positive, got -1.0"),
        (["algorithm.prompts_per_update=0"], "algorithm.prompts_per_update must be at least 1"),
        (["task=lift", "chunk.horizon=1", "chunk.action_horizon=1"], "text"),
    ],
)
def test_wrong_settings_give_one_line(settings, message, base, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "deep.yaml").write_text("a: " + "[" * 5000)
    (tmp_path / "odd.yaml").write_text("estimator: {bounds: {name: constant, high: abc}}")
    start = [] if "task=lift" in settings else [f"init_from={base}"]
    words = ["train", "experiment=text_grpo", *start, *settings, f"out={tmp_path}", "name=run"]
    assert main(words) == 2
    error = capsys.readouterr().err.strip()
    assert message in error and len(error.splitlines()) == 1
