"""Texts of generated pages about speed: rivals, robots and threads are complete, and axes have the right order."""

from benchmarks import bridge, demo, update_time
from docs.generate_numbers import comparisons
from docs.table_charts import CHARTS


def test_speed_is_compared_with_every_simulator_on_both_robots_and_states_threads() -> None:
    ppo, simulator = comparisons().splitlines()[2:4]
    for name in (
        "EnvPool",
        "`SyncVectorEnv`",
        "`AsyncVectorEnv`",
        "one thread per core",
        "one process per environment",
    ):
        assert name in simulator
    for name in ("HalfCheetah-v5", "Hopper-v5", "one thread per core", "second thread", "theirs on one thread"):
        assert name in ppo


def test_the_axis_of_overlap_names_the_ratio_of_the_table() -> None:
    assert CHARTS["overlap"].unit == "time with overlap / without"  # `benchmarks.overlap` divides in this order


def test_tables_with_intervals_explain_their_brackets() -> None:
    for notes in (update_time.NOTES, demo.NOTES, bridge.NOTES):
        assert any("brackets" in note.lower() for note in notes)
