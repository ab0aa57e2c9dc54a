"""Tests of pass@k for text policies, in functions and on the command line."""

import json

import torch

from robopolicy.cli.main import main
from robopolicy.spec import PolicySpec
from robopolicy.text.evaluation import SampledRollouts, powers_of_two, sample_rollouts
from robopolicy.text.policy import TextConfig, TextPolicy
from robopolicy.text.task import pack
from robopolicy.training.checkpoint import save_checkpoint
from robopolicy_tasks.text.arithmetic import Arithmetic


def policy():
    torch.manual_seed(0)
    return TextPolicy(TextConfig(width=16, layers=1, heads=2), PolicySpec({"text": (16,)}, 6))


def test_pass_at_k_counts_prompts_with_one_success():
    success = torch.tensor([[True, False], [False, False], [True, True]])
    sampled = SampledRollouts(success, 0.0, 1.0, 0)
    assert sampled.pass_at(1).estimate == 0.5
    assert abs(sampled.pass_at(2).estimate - 2 / 3) < 1e-12
    assert abs(sampled.degenerate - 2 / 3) < 1e-12
    assert powers_of_two(8) == [1, 2, 4, 8] and powers_of_two(5) == [1, 2, 4]


def test_rollouts_are_the_same_for_the_same_seed():
    first, second = (sample_rollouts(policy(), Arithmetic(), range(6), samples=4) for _ in range(2))
    assert torch.equal(first.success, second.success) and first.entropy == second.entropy > 0


def test_eval_prints_accuracy_and_pass_at_k(tmp_path, capsys):
    obs = {"text": pack(["1+1="], 16)[:, None]}
    save_checkpoint(tmp_path / "a", policy(), task="text/arithmetic", obs_sample=obs)
    words = ["eval", str(tmp_path / "a"), "--episodes", "12", "--samples", "4"]
    assert main([*words, "--out", str(tmp_path / "one")]) == 0
    printed = capsys.readouterr().out
    assert "note: pass@k: with a 95 % interval over the prompts; entropy: mean over the sampled tokens" in printed
    assert "degenerate: prompts whose sampled answers are all right or all wrong." in printed
    assert "pass@4" in printed and "success" in printed
    assert main([*words, "--out", str(tmp_path / "two"), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)["sampled"]
    (found,) = facts.values()
    assert found["samples"] == 4 and set(found["pass_at"]) == {"1", "2", "4"}


def test_eval_refuses_invalid_arguments(tmp_path, capsys):
    obs = {"text": pack(["1+1="], 16)[:, None]}
    save_checkpoint(tmp_path / "a", policy(), task="text/arithmetic", obs_sample=obs)
    assert main(["eval", str(tmp_path / "a"), "--samples", "-1"]) == 2
    assert main(["eval", str(tmp_path / "a"), "--task", "text/nothing"]) == 2
    assert main(["eval", str(tmp_path / "a"), "--task", "toy/point_mass", "--out", str(tmp_path / "x")]) == 2
    errors = capsys.readouterr().err.strip().splitlines()
    assert len(errors) == 3 and all(line.startswith("robopolicy: error:") for line in errors)
