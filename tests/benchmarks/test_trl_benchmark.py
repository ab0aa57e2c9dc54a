"""Tests of the TRL comparison: table, figures, the robopolicy run, and the error without TRL."""

import pytest

pytest.importorskip("transformers")

from benchmarks.trl import __main__ as comparison
from benchmarks.trl.sides import Setting, make_base, ours


def run(side, seed, speed, memory, right):
    figures = {"tokens_per_s": speed, "memory_mib": memory, "reward": 0.5, "rewards": [0.5]}
    return {"side": side, "seed": seed, "updates": 3, **figures, "correct": [1] * right + [0] * (100 - right)}


OURS = [run("robopolicy", seed, 300.0, 600.0, 60) for seed in (1, 2)]
RUNS = [*OURS, *(run("trl", seed, 100.0, 1000.0, 60) for seed in (1, 2))]


def test_figures_are_ratios_of_robopolicy_to_trl():
    found = comparison.figures(RUNS)
    assert found["speed"]["value"] == 3.0 and found["memory"]["value"] == 0.6
    assert found["reached"] == {"speed": True, "memory": True, "agree": True}
    slow = comparison.figures([*OURS, *(run("trl", seed, 290.0, 650.0, 20) for seed in (1, 2))])
    assert slow["reached"] == {"speed": False, "memory": False, "agree": False}


def test_trainers_agree_over_seeds():
    unlike = [run("trl", seed, 100.0, 1000.0, right) for seed, right in ((1, 50), (2, 70))]
    found = comparison.figures([*OURS, *unlike])
    assert found["accuracy_difference"]["value"] == pytest.approx(0) and not found["reached"]["agree"]


def test_rows_name_both_sides():
    first, second = comparison.rows(RUNS)
    assert (first["trainer"], second["trainer"]) == ("robopolicy", "trl")
    assert first["accuracy"].startswith("60.0%") and second["tokens/s"] == 100


def test_missing_trl_is_reported(monkeypatch):
    monkeypatch.setattr(comparison, "find_spec", lambda name: None)
    monkeypatch.setattr("sys.argv", ["trl"])
    with pytest.raises(SystemExit, match="TRL, which is not installed"):
        comparison.main()


def test_robopolicy_run_counts_tokens_after_the_first_update(tmp_path):
    make_base(tmp_path / "base", 1)
    _, times, rewards, tokens = ours(tmp_path / "base", Setting(1, 2))
    assert len(times) == len(rewards) == 2
    assert 256 <= tokens <= 256 * 6
