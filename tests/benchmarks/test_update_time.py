"""Tests of the update-time benchmark: every learner gets the same work."""

import pytest

from benchmarks import update_time
from benchmarks.finetune.methods import METHODS
from benchmarks.update_time import LEARNERS, PEER


def test_times_are_paired_with_dppo() -> None:
    rows, figures = update_time.summarise(128, {PEER: [2.0, 4.0, 2.0], "reinflow": [1.0, 2.0, 1.0]})
    assert figures["reinflow"] == {"seconds": 1.0, "of_dppo": {"value": 0.5, "low": 0.5, "high": 0.5}}
    assert [row["of DPPO's"] for row in rows] == ["1.00x [1.00, 1.00]", "0.50x [0.50, 0.50]"]


@pytest.mark.parametrize(
    "name", [*LEARNERS[:3], *(pytest.param(name, marks=pytest.mark.slow) for name in LEARNERS[3:])]
)
def test_learners_use_equal_rollouts_and_networks(name: str) -> None:
    assert METHODS[name].base is not None
    parts = update_time.parts_of(name, 8)
    rollout = parts.source.next(parts.algorithm)
    config = parts.algorithm.config  # type: ignore[attr-defined]
    assert rollout.shape == (8, 64) and config.epochs == 10
    assert config.target_kl is None and config.critic_warmup == 0
    assert parts.algorithm.policy.head.config.hidden == (8, 8, 8)  # type: ignore[union-attr]
    parts.close()


def test_every_turn_of_every_learner_is_timed() -> None:
    seconds = update_time.measure(8, (PEER, "reinflow-flow-1"), turns=2)
    assert all(len(taken) == 2 and min(taken) > 0 for taken in seconds.values())
