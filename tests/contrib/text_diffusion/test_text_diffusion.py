"""Tests of masked diffusion over tokens: distribution of the chain, bound of the likelihood, and recipes on both."""

import json
from itertools import permutations, product

import pytest
import torch
from text_forms import SPEC

from robopolicy.cli.main import main
from robopolicy.contrib.text_diffusion.policy import DiffusionTextConfig, DiffusionTextPolicy
from robopolicy.contrib.text_diffusion.recipe_parts import Inpaint
from robopolicy.errors import UserError
from robopolicy.policies.noise import PerRowGenerator
from robopolicy.sim.registry import SimOptions
from robopolicy.spec import PolicySpec
from robopolicy.text.annotators import with_features
from robopolicy.text.policy import TextConfig, TextPolicy
from robopolicy.text.recipe_trainer import TextRecipe, TextRecipeConfig
from robopolicy.text.rollouts.protocols import Task
from robopolicy.text.rollouts.strategies import Independent
from robopolicy.text.sft import TextSFTConfig
from robopolicy.text.sim import TextSim
from robopolicy.text.task import SingleTurn, TextTask, pack, unpack
from robopolicy.text.text_env import TextEnv, score
from robopolicy.text.tokenizers import ByteTokenizer
from robopolicy.training.text_file_source import DemonstrationSource
from robopolicy.training.text_rollout_source import TextRolloutSource
from robopolicy_tasks.text.arithmetic import Arithmetic
from robopolicy_tasks.text.grid import Grid


class Few(ByteTokenizer):
    """Tokenizer with three symbols, the last of which ends a message, and a beginning-of-sequence token."""

    size, pad, bos, eos = 4, 3, 3, 2

    def encode(self, text):
        return [int(letter) for letter in text]

    def decode(self, tokens):
        return "".join(str(token) for token in tokens if token < 2)


def policy_of(budget=3, prompt=16, **settings):
    torch.manual_seed(0)
    config = DiffusionTextConfig(**{"width": 16, "layers": 2, "heads": 2, "context": 160, "steps": 3, **settings})
    policy = DiffusionTextPolicy(config, PolicySpec({"text": (prompt,)}, budget))
    with torch.no_grad():
        policy.model.get_output_embeddings().weight.mul_(15.0)
    return policy


@pytest.fixture
def tiny(monkeypatch):
    """Messages of two tokens from a vocabulary of five (mask included), so that all messages can be enumerated."""
    monkeypatch.setattr("robopolicy.text.policy.ByteTokenizer", Few)
    policy = policy_of(budget=2, steps=2)
    policy._tokenizer = Few()
    return policy


def enumerated(policy, prompt):
    """All messages, and their log-probability for each order of filling both tokens: (2, V^2)."""
    every = torch.tensor(list(product(range(5), repeat=2)))
    record = policy.pad_rows([prompt] * len(every), every.tolist())
    temperatures = torch.ones(len(every))
    logps = [
        policy.score(**record, temperature=temperatures, order=torch.tensor([order]).expand(len(every), 2)).logp.sum(1)
        for order in permutations((1, 2))
    ]
    return every, torch.stack(logps).detach()


def test_the_chain_is_a_distribution_for_every_order(tiny):
    _, logp = enumerated(tiny, [3, 0, 1])
    torch.testing.assert_close(logp.exp().sum(1), torch.ones(2))


def test_message_frequencies_follow_the_distribution_of_the_chain(tiny):
    """With random order, 4000 messages follow the probabilities of the chain averaged over both orders."""
    every, logp = enumerated(tiny, [3, 0, 1])
    probabilities = logp.exp().mean(0)
    made = tiny.generate([[3, 0, 1]] * 4000, torch.Generator().manual_seed(0))
    index = (made.tokens @ torch.tensor([5, 1])).long()
    counts = torch.bincount(index, minlength=len(every)) / 4000
    assert float((counts - probabilities).abs().max()) < 4 * 0.5 / 4000**0.5


def test_bound_equals_the_mean_over_masks_and_never_exceeds_the_log_likelihood(tiny):
    """L = 2: with probability one half both tokens are masked (weight 1), else one of them (weight 2)."""
    every, logp = enumerated(tiny, [3, 0, 1])
    record = tiny.pad_rows([[3, 0, 1]] * len(every), every.tolist())
    masked = torch.tensor([[True, True], [True, False], [False, True]]).expand(len(every), 3, 2)
    order = torch.ones(len(every), 2, dtype=torch.int64)
    scored, temperatures = torch.ones(len(every), 3, dtype=torch.bool), torch.ones(len(every))
    record.pop("mask")
    phi = tiny.score(**record, mask=scored, temperature=temperatures, order=order, masked=masked).logp.detach()
    bound = phi @ torch.tensor([0.5, 0.25, 0.25])
    torch.testing.assert_close(bound, logp.mean(0), rtol=0, atol=1e-5)  # any-order autoregression
    assert (bound <= logp.exp().mean(0).log() + 1e-5).all()


def test_masks_are_sampled_as_the_bound_requires(tiny):
    order = torch.ones(1, 2, dtype=torch.int64).expand(4000, 2)
    masked = tiny.masks(order, 1, torch.Generator().manual_seed(0))[:, 0]
    assert masked.any(1).all()
    assert float((masked.all(1).double().mean() - 0.5).abs()) < 0.03
    assert float((masked[:, 0].double().mean() - 0.75).abs()) < 0.03


@pytest.mark.parametrize("order", ["random", "confident"])
@pytest.mark.parametrize("steps", [1, 2, 5])
def test_the_ratio_of_fresh_tokens_is_one(order, steps):
    policy = policy_of(budget=5, order=order, steps=steps)
    obs = {"text": pack(["1+1=", "a longer prompt", "x"], 16)[:, None]}
    sample = policy.sample(obs, generator=torch.Generator().manual_seed(0))
    out = policy.decisions(obs, sample.record)
    torch.testing.assert_close(out.logp, sample.logp, rtol=0, atol=3e-5)
    assert sample.chunk.shape == (3, 1, 5) and (out.entropy > 0).all()
    assert sample.record["order"].amax(1).tolist() == [min(steps, 5)] * 3


@pytest.mark.parametrize("likelihood", ["chain", "elbo"])
@pytest.mark.parametrize("task", [Arithmetic(), Grid()], ids=["one turn", "turns"])
def test_the_ratio_of_a_batch_is_one(task, likelihood):
    policy = policy_of(task.completion_bytes, task.prompt_bytes, likelihood=likelihood)
    env = policy.env_class(policy, task, torch.Generator().manual_seed(0))
    batch = env.batch(Independent().rollout(env, [Task(key, payload=key, budget=2) for key in (5, 6)]))
    assert batch.shape[1] == (policy.config.samples if likelihood == "elbo" else batch.require("unit").shape[1])
    torch.testing.assert_close(score(policy, batch).logp, batch.logp_old, rtol=0, atol=1e-4)


def test_later_turns_do_not_change_earlier_log_probabilities():
    policy = policy_of(3, 96)
    responses = [["goal 00 at 22:", "w", " at 12:", "w", " at 02:", "s"], ["goal 00 at 22:", "w", " at 12:", "w"]]
    order = torch.Generator().manual_seed(0)
    record, _ = policy.conversations(responses, order)
    record["order"][1, : 3 + 7 + 3] = record["order"][0, : 3 + 7 + 3]
    logp = policy.score(**record, temperature=torch.ones(2)).logp
    torch.testing.assert_close(logp[0, :13], logp[1, :13])


def test_rows_do_not_depend_on_the_rest_of_the_batch():
    policy = policy_of(5)
    prompts = [policy.tokenizer.prompt([text]) for text in ("1+1=", "a longer prompt", "x")]
    together = policy.generate(prompts, PerRowGenerator(range(3), [0] * 3)).completions()
    alone = [policy.generate([row], PerRowGenerator([seed], [0])).completions()[0] for seed, row in enumerate(prompts)]
    assert alone == together


def test_messages_end_at_their_first_eos():
    policy = policy_of(4)
    eos = policy.tokenizer.eos
    assert policy.decode_message([*b"4", eos, *b"7", eos]) == "4"
    assert policy.encode_message("42") == [*b"42", eos, eos] and policy.encode_message("123456") == [*b"1234"]


def test_injected_tokens_are_kept_and_scored_like_generated_tokens():
    policy = policy_of(6)
    env = policy.env_class(policy, Arithmetic(), torch.Generator().manual_seed(0))
    assert hasattr(env, "inpaint") and not hasattr(TextEnv, "inpaint")
    task = env.inpaint(Task(5, payload=5), 1.0)
    (trajectory,) = env.rollout([task])
    answer = Arithmetic().episode(5).demonstration()[0]
    assert trajectory.success and trajectory.record.responses == [answer]
    injected = trajectory.decisions.extra["injected"]
    assert int(injected.sum()) == len(answer) + 1
    group = Inpaint(low=1.0, high=1.0).apply(env.rollout([Task(5, payload=5)] * 2), env)
    batch = env.batch(group)
    assert batch.reward.sum() == 2.0
    torch.testing.assert_close(score(policy, batch).logp, batch.logp_old, rtol=0, atol=3e-5)
    assert torch.equal(batch.logp_behaviour[batch.extra["injected"]], batch.logp_old[batch.extra["injected"]])


class Letter(TextTask):
    """The rewarded completion is `b`."""

    name, prompt_bytes, completion_bytes = "text/letter", 4, 1

    def episode(self, seed):
        return SingleTurn("?", lambda completion: float(completion == "b"), "b")


def test_imitation_learns_to_answer_prompts():
    policy = policy_of(2, steps=2)
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    obs, chunk = {"text": pack(["2+3=", "2+4="] * 4, 16)[:, None]}, pack(["5", "6"] * 4, 2)[:, None]
    generator = torch.Generator().manual_seed(0)
    for _ in range(60):
        loss, _ = policy.imitation_loss(obs, chunk, generator=generator)
        optimizer.zero_grad()
        loss.mean().backward()
        optimizer.step()
    assert unpack(policy.act(obs, deterministic=True, generator=generator)[:2, 0]) == ["5", "6"]


@pytest.mark.parametrize(("recipe", "likelihood"), [("grpo", "chain"), ("igpo", "chain"), ("bgpo", "elbo")])
def test_diffusion_recipes_learn_the_letter_task(recipe, likelihood):
    policy = policy_of(1, 4, steps=1, layers=1, likelihood=likelihood, samples=2)
    config = TextRecipeConfig(prompts_per_update=8, num_prompts=50, warmup=0, recipe=recipe, lr=1e-2, group_size=16)
    algorithm = TextRecipe(config, policy, total_updates=10)
    feed = TextRolloutSource(TextSim(Letter(), SimOptions(num_envs=1)), algorithm, seed=0)
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    for _ in range(20):  # a uniform policy over eight letters
        loss, _ = policy.conversation_loss([["?", chr(97 + i)] for i in range(8)])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    rates = []
    for _ in range(12):
        metrics = algorithm.update(feed.next(algorithm))
        rates.append(feed.metrics()["rollout/success"])
        assert all(torch.isfinite(torch.tensor(value)) for value in metrics.values())
    feed.close()
    assert rates[-1] > 0.8 > rates[0] + 0.3


def test_a_diffusion_policy_cannot_be_the_teacher_of_a_causal_policy():
    teacher = policy_of()
    algorithm = TextRecipe(TextRecipeConfig(recipe="kdrl"), TextPolicy(TextConfig(), teacher.spec), total_updates=2)
    with pytest.raises(UserError, match="it is a policy of type 'text_diffusion', not 'text'"):
        algorithm.set_teacher(teacher)


def test_command_line_trains_evaluates_and_verifies_a_diffusion_policy(tmp_path):
    small = ["policy=text_diffusion", "policy.width=16", "policy.layers=1", "policy.heads=2", "policy.steps=3"]
    words = [
        "experiment=text_grpo",
        *small,
        "algorithm.sft_updates=1",
        "algorithm.prompts_per_update=2",
        "budget.updates=2",
    ]
    assert main(["train", *words, "evaluation.episodes=4", f"out={tmp_path}", "name=run"]) == 0
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert report["policy"] == "text_diffusion" and report["final"]["n"] == 4
    assert main(["verify", str(tmp_path / "run" / "checkpoints" / "last")]) == 0


def test_invalid_settings_are_refused():
    for settings, message in (
        ({"order": "left"}, "policy.order must be one of random, confident"),
        ({"likelihood": "exact"}, "policy.likelihood must be one of chain, elbo"),
        ({"steps": 0}, "steps must be at least 1"),
        ({"pretrained": "gpt2"}, "trained from scratch"),
    ):
        with pytest.raises(UserError, match=message):
            DiffusionTextConfig(**settings)


def test_attention_rhythm_is_refused_for_masked_diffusion():
    diffusion = DiffusionTextPolicy(DiffusionTextConfig(width=16, layers=1, heads=2), SPEC)
    with pytest.raises(UserError, match="Part 'attention_rhythm' of this recipe reads a causal model"):
        with_features(diffusion, None, {"attention_rhythm": {}})


def test_messages_longer_than_the_canvas_are_refused(tmp_path):
    file = tmp_path / "x.jsonl"
    file.write_text('{"prompt": "p", "completion": "ccccccc"}\n')
    policy = DiffusionTextPolicy(
        DiffusionTextConfig(width=16, layers=1, heads=2, context=64), PolicySpec({"text": (16,)}, 6)
    )
    with pytest.raises(UserError, match="row 1 has a message of 7 tokens, but a"):
        DemonstrationSource(TextSim(Arithmetic(), SimOptions(num_envs=1)), TextSFTConfig(data=str(file)), policy, 0)
