"""Tests of prompt, demonstration, pair and log files: validation of rows, and learning from them."""

import json
import re
from functools import partial

import pyarrow
import pyarrow.parquet
import pytest
import torch

from robopolicy.cli.main import main
from robopolicy.errors import UserError
from robopolicy.sim.registry import SimOptions, make_sim
from robopolicy.spec import PolicySpec
from robopolicy.text.datasets import read_demonstrations, read_offline, read_pairs, read_rows
from robopolicy.text.policy import TextConfig, TextPolicy
from robopolicy.text.recipe_trainer import TextRecipe, TextRecipeConfig
from robopolicy.text.sft import TextSFTConfig
from robopolicy.text.sim import TextSim
from robopolicy.text.task import unpack
from robopolicy.training.checkpoint import load_policy
from robopolicy.training.text_file_source import DemonstrationSource, recipe_source
from robopolicy_tasks.text.arithmetic import Arithmetic

SMALL = ["policy.width=16", "policy.layers=1", "policy.heads=2", "evaluation.episodes=0", "logging.every=1"]
PAIRS = [{"prompt": f"{i}?", "chosen": "yes", "rejected": "no"} for i in range(6)]


def written(path, rows):
    path.write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")
    return str(path)


def test_parquet_and_jsonl_hold_the_same_rows(tmp_path):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(PAIRS), tmp_path / "a.parquet")
    assert read_rows(str(tmp_path / "a.parquet")) == read_rows(written(tmp_path / "a.jsonl", PAIRS)) == PAIRS


def test_pairs_and_logs_become_groups(tmp_path):
    pairs = read_pairs(written(tmp_path / "p.jsonl", PAIRS))
    assert [(item.reward, item.group) for item in pairs[:4]] == [(1.0, 1), (0.0, 1), (1.0, 2), (0.0, 2)]
    rows = [{"prompt": "a", "completion": "b", "reward": 1}, {"prompt": "a", "completion": "c", "reward": 0.5}]
    logs = read_offline(written(tmp_path / "o.jsonl", rows))
    assert [(item.reward, item.group) for item in logs] == [(1.0, 0), (0.5, 0)]
    turns = {"messages": ["a", "b", "c", "d"], "rewards": [0.5, 1]}
    logs = read_offline(written(tmp_path / "t.jsonl", [turns, rows[1]]))
    assert [(item.rewards, item.reward, item.group) for item in logs] == [([0.5, 1.0], 1.5, 0), ([0.5], 0.5, 0)]
    conversation = read_demonstrations(written(tmp_path / "d.jsonl", [{"messages": ["a", "b", "c", "d"]}]))
    assert conversation[0].messages == ["a", "b", "c", "d"]


def test_texts_may_contain_unicode_line_separators(tmp_path):
    file = tmp_path / "x.jsonl"
    file.write_text('{"prompt": "a\u2028b\x85c", "chosen": "x", "rejected": "y"}\n', encoding="utf-8")
    assert read_pairs(str(file))[0].messages == ["a\u2028b\x85c", "x"]


@pytest.mark.parametrize(
    ("read", "rows", "message"),
    [
        (read_pairs, [{"prompt": "a", "chosen": "b"}], "row 1: 'rejected' must be a text, it is missing; columns:"),
        (read_pairs, [{"prompt": "a", "chosen": "b", "rejected": "b"}], "'chosen' and 'rejected' are equal"),
        (read_offline, [{"prompt": "a", "completion": "b", "reward": "1"}], "'reward' must be a finite number"),
        (
            read_offline,
            [{"messages": ["a", "b"], "rewards": 1}],
            "'rewards' must be 1 numbers, one for each assistant message",
        ),
        (read_offline, [{"messages": ["a", "b"], "rewards": ["x"]}], "'reward' must be a finite number, found 'x'"),
        (read_offline, [{"prompt": "a", "completion": 3, "reward": 1}], "'completion' must be a text, found 3"),
        (read_demonstrations, [{"messages": ["a"]}], "'messages' must be texts that alternate"),
        (read_demonstrations, [[1]], "line 1 must be an object, found list"),
        (read_offline, [{"prompt": "a", "completion": "b", "reward": 10**400}], "must be a finite number, found 1000"),
        (read_pairs, [{"prompt": "a\0b", "chosen": "c", "rejected": "d"}], "'prompt' contains U+0000 as character 2"),
        (
            read_offline,
            [{"messages": ["a", "\ud800"], "rewards": [1]}],
            "message 2 contains U+D800 as character 1",
        ),
    ],
)
def test_invalid_rows_are_reported_with_their_location(read, rows, message, tmp_path):
    with pytest.raises(UserError, match=r"x\.jsonl") as caught:
        read(written(tmp_path / "x.jsonl", rows))
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("x.csv", "", "must end with .jsonl or .parquet"),
        ("x.jsonl", "", "has no rows"),
        ("x.jsonl", "{", "line 1 is not JSON"),
        ("x.jsonl", "[" * 100_000, "line 1 is not JSON: it is nested too deeply"),
        ("x.jsonl", '{"prompt": ' + "1" * 5000 + "}", "line 1 is not JSON: Exceeds the limit"),
        ("x.parquet", "no", "cannot be read"),
    ],
)
def test_unreadable_files_are_refused(name, text, message, tmp_path):
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=message):
        read_rows(str(tmp_path / name))
    with pytest.raises(UserError, match="cannot be read"):
        read_rows(str(tmp_path / "missing.jsonl"))


def test_a_file_of_prompts_is_a_task(tmp_path):
    rows = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "half?", "answer": "0.5", "verify": "number"}]
    rows = [{**row, "split": "test"} for row in rows]
    sim = make_sim(f"prompts/{written(tmp_path / 'x.jsonl', rows)}", SimOptions(num_envs=2))
    assert unpack(sim.reset(0)["text"]) == ["1+1=", "half?"]
    assert sim.spec.action_dim == 1024
    short = make_sim(f"prompts/{tmp_path / 'x.jsonl'}:16", SimOptions(num_envs=1))
    assert short.spec.action_dim == 16 and short.spec.task.endswith("x.jsonl:16")
    for size in ("0", "-3", "a", "65537"):
        with pytest.raises(UserError, match=rf"x\.jsonl:BYTES must be 1 to 65536, got '{size}'"):
            make_sim(f"prompts/{tmp_path / 'x.jsonl'}:{size}", SimOptions())
    with pytest.raises(UserError, match=r"must end with \.jsonl or \.parquet"):
        make_sim(f"prompts/{tmp_path / 'x.txt'}:16", SimOptions())
    small = TextPolicy(TextConfig(width=16, layers=1, heads=2), PolicySpec({"text": (4096,)}, 1024))
    small.check_fits(1 + 4096, 1024)  # the context is long enough for the task
    with pytest.raises(UserError, match="'verify' must be one of exact, number, math"):
        make_sim(f"prompts/{written(tmp_path / 'y.jsonl', [{**rows[0], 'verify': 'x'}])}", SimOptions())
    with pytest.raises(UserError, match="'verify' must be one of exact, number, math"):
        make_sim(f"prompts/{written(tmp_path / 'z.jsonl', [{**rows[0], 'verify': ['exact']}])}", SimOptions())


@pytest.mark.parametrize("recipe", ["dpo", "kto", "sft"])
def test_offline_recipes_learn_from_data_files(recipe, tmp_path):
    rows = {
        "dpo": PAIRS,
        "kto": [
            {"prompt": f"{i}?", "completion": text, "reward": good}
            for i in range(6)
            for text, good in (("yes", 1), ("no", -1))
        ],
        "sft": [{"prompt": f"{i}?", "completion": "yes"} for i in range(6)],
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
    assert isinstance(policy, TextPolicy)
    prompt = policy.tokenizer.prompt(["3?"])
    with torch.no_grad():
        loss, _ = policy.sft_loss([prompt, prompt], [[*b"yes", 258], [*b"no", 258]])
    assert loss[0] < loss[1] - 0.3
    assert main(["train", *words[:-4], "algorithm.data=", "budget.updates=1", f"out={tmp_path}", "name=no"]) == 2


@pytest.mark.parametrize(
    ("recipe", "rows", "message"),
    [
        ("dpo", [*PAIRS, {"prompt": "p" * 40, "chosen": "c" * 30, "rejected": "r"}], "row 7 has 72 tokens, more"),
        ("text_sft", [{"prompt": "p" * 62, "completion": "c"}], "row 1 has 65 tokens, more"),
    ],
)
def test_rows_longer_than_the_context_are_refused_with_their_number(recipe, rows, message, tmp_path):
    file = written(tmp_path / "x.jsonl", rows)
    policy = TextPolicy(TextConfig(width=16, layers=1, heads=2, context=64), PolicySpec({"text": (16,)}, 6))
    if recipe == "text_sft":
        make = partial(DemonstrationSource, config=TextSFTConfig(data=file), policy=policy)
    else:
        algorithm = TextRecipe(TextRecipeConfig(recipe=recipe, data=file), policy, total_updates=2)
        make = partial(recipe_source, algorithm=algorithm)
    with pytest.raises(UserError, match=re.escape(f"{file} {message}")):
        make(TextSim(Arithmetic(), SimOptions(num_envs=1)), seed=0)
