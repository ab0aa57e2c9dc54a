"""Test that a sweep reports invalid settings before its first run."""

from pathlib import Path

SETTINGS = ["task=point_mass", "policy=gaussian", "budget.updates=2", "evaluation.episodes=0", "sim.num_envs=4"]


def test_a_missing_wrapper_is_named_before_the_first_run(tmp_path: Path, refused) -> None:
    words = ["train", "--multirun", *SETTINGS, "algorithm=ppo,stock_ac", f"out={tmp_path}/out"]
    assert "task.wrappers=[{name: stock, discount: 0.99}]" in refused(*words)
    assert not (tmp_path / "out").exists()
