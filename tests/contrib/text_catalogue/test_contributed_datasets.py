"""Tests of training from files of preference pairs, rated completions and logged conversations."""

import json

import pytest
import torch

from robopolicy.cli.main import main
from robopolicy.sim.registry import SimOptions
from robopolicy.spec import PolicySpec
from robopolicy.text.policy import TextConfig, TextPolicy
from robopolicy.text.recipe_trainer import TextRecipe, TextRecipeConfig
from robopolicy.text.sim import TextSim
from robopolicy.training.checkpoint import load_policy
from robopolicy.training.text_file_source import recipe_source
from robopolicy_tasks.text.arithmetic import Arithmetic

SMALL = ["policy.width=16", "policy.layers=1", "policy.heads=2", "evaluation.episodes=0", "logging.every=1"]


PAIRS = [{"prompt": f"{i}?", "chosen": "yes", "rejected": "no"} for i in range(6)]


def written(path, rows):
    path.write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("recipe", ["seppo", "a_lol"])
def test_recipes_learn_from_files(recipe, tmp_path):
    rows = {
        "seppo": PAIRS,
        "a_lol": [
            {"prompt": f"{i}?", "completion": text, "reward": good}
            for i in range(6)
            for text, good in (("yes", 1), ("no", -1))
        ],
    }
    file = written(tmp_path / "x.jsonl", rows[recipe])
    words = ["experiment=text_grpo", *SMALL, "algorithm.sft_updates=0", f"algorithm.recipe={recipe}"]
    words += [
        f"algorithm.data={file}",
        "algorithm.prompts_per_update=6",
        "algorithm.lr=5e-3",
        "budget.updates=15",
        "evaluation.every=0",
    ]
    assert main(["train", *words, f"out={tmp_path}", "name=run"]) == 0
    policy, _ = load_policy(tmp_path / "run" / "checkpoints" / "last")
    prompt = policy.tokenizer.prompt(["3?"])
    with torch.no_grad():
        loss, _ = policy.sft_loss([prompt, prompt], [[*b"yes", 258], [*b"no", 258]])
    if recipe == "seppo":  # both are imitated until the rejected one is likelier; 5.6 nats at the start
        assert loss.max() < 4.5
    else:
        assert loss[0] < loss[1] - 0.3
    assert main(["train", *words[:-4], "algorithm.data=", "budget.updates=1", f"out={tmp_path}", "name=no"]) == 2


def test_logged_turn_rewards_are_kept_and_discounted_per_turn(tmp_path):
    """Returns of the strategist (Liu et al. 2025) are discounted from turn to turn, and a turn is a unit."""
    rows = [
        {"messages": ["go", "a", "on", "bb", "", "c"], "rewards": [1, 0.25, 0.5]},
        {"prompt": "go", "completion": "dd", "reward": 2},
    ]
    file = written(tmp_path / "x.jsonl", rows)
    torch.manual_seed(0)
    policy = TextPolicy(TextConfig(width=16, layers=1, heads=2, context=64), PolicySpec({"text": (16,)}, 6))
    algorithm = TextRecipe(TextRecipeConfig(recipe="epo", data=file, prompts_per_update=1), policy, total_updates=2)
    batch = recipe_source(TextSim(Arithmetic(), SimOptions(num_envs=1)), algorithm, 0).next(algorithm)
    own, unit = batch.valid(), batch.unit
    assert [int((own[0] & (unit[0] == turn)).sum()) for turn in range(3)] == [2, 3, 2]
    assert batch.reward[0][own[0]].tolist() == [0, 1, 0, 0, 0.25, 0, 0.5]
    assert batch.reward[1][own[1]].tolist() == [0, 0, 2]
    found = algorithm.recipe.advantage(batch)[0]
    last = 0.25 + 0.99 * 0.5
    for turn, togo in enumerate((1 + 0.99 * last, last, 0.5)):
        torch.testing.assert_close(found[own[0] & (unit[0] == turn)], torch.full((2 + turn % 2,), togo))
