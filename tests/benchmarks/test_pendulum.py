"""Tests of the pendulum benchmark: controller, reward noise, and the figures that compare learners."""

from contextlib import closing
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from benchmark_rules import check_pendulum_row_can_be_built

from benchmarks.pendulum import study
from benchmarks.pendulum.cell import ENV_STEPS, ROWS, jerk, judge, value_bias
from benchmarks.pendulum.study import STUDY, Claim, measured
from benchmarks.pendulum.tasks import CONTROLLER, NOISE, PLAIN, register
from benchmarks.study_table import tabulate
from benchmarks.themes import contributed
from robopolicy.algorithms.sac import SAC, SACConfig
from robopolicy.policies.base import PolicySpec
from robopolicy.policies.heads.gaussian import GaussianConfig, GaussianPolicy
from robopolicy.policies.wrappers.black_box import CallableConfig, CallablePolicy
from robopolicy.sim.registry import SimOptions, make_sim


def test_the_controller_swings_the_pendulum_up_and_holds_it() -> None:
    register()
    spec = PolicySpec({"state": (3,)}, action_dim=1)
    policy = CallablePolicy(CallableConfig(function=CONTROLLER, noise=False), spec)
    policy.fit_normalizer({"action": {"min": [-2.0], "max": [2.0]}})
    with closing(make_sim(PLAIN, SimOptions(num_envs=50))) as sim:
        found = judge(policy, sim)
    assert found["return"] > -350 and found["jerk"] > 0
    assert found["held"]["16"] < -600  # holding each action for 16 steps fails


def test_noise_is_added_only_to_rewards() -> None:
    register()
    plain, noisy = (gymnasium.make(name) for name in ("Pendulum-v1", "NoisyPendulum-v1"))
    seen: list[list[tuple[Any, ...]]] = []
    for env in (plain, noisy):
        env.reset(seed=3)
        seen.append([env.step(np.array([0.5], dtype=np.float32)) for _ in range(200)])
    added = np.array([float(b[1]) - float(a[1]) for a, b in zip(*seen, strict=True)])
    assert all(np.array_equal(a[0], b[0]) for a, b in zip(*seen, strict=True))
    assert abs(added.mean()) < 0.5 and 0.8 * NOISE < added.std() < 1.2 * NOISE
    assert seen[1][-1][3]  # truncated after 200 steps


def test_jerk_is_the_sum_of_second_differences() -> None:
    assert jerk(torch.tensor([[[0.0], [1.0], [0.0], [0.0]], [[0.0], [1.0], [2.0], [3.0]]])) == (2 + 1 + 0) / 2


@pytest.mark.parametrize("too_high", [0.0, 5.0])
def test_bias_is_the_predicted_value_minus_the_return(too_high: float) -> None:
    """Rewards are zero; the critic's first values are `too_high`, later values are zero."""
    spec = PolicySpec({"state": (3,)}, action_dim=1)
    policy = GaussianPolicy(GaussianConfig(squash=True, normalization="identity"), spec)
    policy.fit_normalizer({"action": {"min": [-2.0], "max": [2.0]}})
    algorithm = SAC(SACConfig(temperature=1e-9), policy, total_updates=1)
    critic_values = iter([torch.full((20,), too_high), torch.zeros(20)])
    algorithm.critic.min_q = lambda obs, chunk: next(critic_values)  # type: ignore[method-assign]
    with closing(make_sim(PLAIN, SimOptions(num_envs=20))) as sim:
        step = sim.step
        sim.step = lambda *given: type(found := step(*given))(  # type: ignore[method-assign]
            **{**vars(found), "reward": torch.zeros(20)}
        )
        assert value_bias(algorithm, sim) == pytest.approx(too_high, abs=1e-5)


@pytest.mark.parametrize("name", sorted(ROWS.keys() - contributed("pendulum", "rows").keys()))
def test_every_row_can_be_built(name: str) -> None:
    if "ray" in name:
        pytest.importorskip("ray")
    check_pendulum_row_can_be_built(name)


def cell(row: str, seed: int, gain: float) -> dict[str, Any]:
    held = {"1": -150.0 + gain, "4": -200.0, "8": -600.0 + 10 * gain, "16": -900.0}
    curve = [(4000, -500.0), (5000 - 100 * int(gain), -190.0)]
    figures = {"return": held["1"], "jerk": 40.0 - gain, "held": held, "bias": -gain, "curve": curve}
    return {"row": row, "seed": seed, "seconds": 10.0, "env_steps": ENV_STEPS, **figures}


def test_claims_are_tested_over_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second of two rows has a return 9 higher, 9 less jerk and 9 more absolute bias in every seed."""
    monkeypatch.setitem(ROWS, "other", ROWS["sac"])
    monkeypatch.setattr(study, "CLAIMS", {"other": (Claim("jerk"), Claim("absolute bias"))})
    cells = [cell(row, seed, seed + (9.0 if row == "other" else 0.0)) for row in ("sac", "other") for seed in range(5)]
    assert measured(cells[0])["steps to -200"] == 5000 and measured(cells[0])["lost when deciding every 8 steps"] == 450
    verdicts = {entry.measure: entry.verdict for entry in tabulate(STUDY, cells).entries if entry.verdict}
    assert {measure: verdict.verdict for measure, verdict in verdicts.items()} == {
        "return": "ahead",
        "jerk": "ahead",
        "absolute bias": "behind",
    }


def test_a_learner_without_values_has_no_bias() -> None:
    cells = [cell("sac", seed, 0.0) | {"bias": None} for seed in range(3)]
    assert tabulate(STUDY, cells).rows()[0]["bias"] == "-"


def test_a_run_that_diverges_has_the_return_of_random_actions_and_no_jerk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ROWS, "other", ROWS["sac"])
    monkeypatch.setattr(study, "CLAIMS", {"other": (Claim("jerk"),)})
    cells = [cell(row, seed, seed + (9.0 if row == "other" else 0.0)) for row in ("sac", "other") for seed in range(5)]
    cells[-1] = {"key": ["other", 4], "row": "other", "seed": 4, "env_steps": ENV_STEPS, "diverged": "NaN"}
    entries = {entry.measure: entry for entry in tabulate(STUDY, cells).entries if entry.method == "other"}
    assert entries["return"].runs.means[4] == study.RANDOM and entries["return"].seeds == "5, 1 diverged"
    assert entries["jerk"].verdict is not None and entries["jerk"].verdict.verdict == "no value"
