"""Tests of the demo: its commands have valid settings."""

from pathlib import Path

from examples import demo
from robopolicy.training.compose import compose_config


def test_both_training_commands_have_valid_settings(tmp_path: Path, monkeypatch):
    commands: list[list[str]] = []
    monkeypatch.setattr(demo, "robopolicy", lambda words: commands.append(words) or 0)
    demo.improve(tmp_path, 3, ["device=cpu"], video=0)
    base, finetuned = (compose_config(words[1:]) for words in commands if words[0] == "train")
    assert (base.task.name, base.algorithm["name"]) == (demo.TASK, "bc")
    assert (finetuned.algorithm["name"], finetuned.budget.updates) == ("reinflow", 200)  # as the README says
