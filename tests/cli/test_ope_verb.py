"""Tests of `robopolicy ope`."""

import json

import numpy as np
import pytest
import torch

from robopolicy.cli.main import main
from robopolicy.data.collect import collect
from robopolicy.policies.base import PolicySpec
from robopolicy.policies.heads.flow import FlowConfig, FlowPolicy
from robopolicy.policies.heads.gaussian import GaussianConfig, GaussianPolicy
from robopolicy.training.checkpoint import save_checkpoint

TASK = "toy/point_mass"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Three checkpoints, and logs collected by the first one with exploration."""
    from robopolicy.sim.registry import SimOptions, make_sim

    folder = tmp_path_factory.mktemp("ope")
    sim = make_sim(TASK, SimOptions(num_envs=4))
    obs = {key: value[:, None] for key, value in sim.reset(0).items()}
    spec = PolicySpec({key: tuple(t.shape) for key, t in sim.spec.observation.items()}, sim.spec.action_dim)
    sim.close()
    torch.manual_seed(0)
    for name, policy in (
        ("first", GaussianPolicy(GaussianConfig(log_std_init=-1.0), spec)),
        ("second", GaussianPolicy(GaussianConfig(log_std_init=-1.0), spec)),
        ("flow", FlowPolicy(FlowConfig(hidden=(16,)), spec)),
    ):
        policy.update_stats(obs)
        policy.fit_normalizer(
            {
                key: {name: np.full(shape, value) for name, value in (("min", -1), ("max", 1), ("mean", 0), ("std", 1))}
                | {"count": np.array([1])}
                for key, shape in (*spec.observation.items(), ("action", (spec.action_dim,)))
            }
        )
        save_checkpoint(folder / name, policy, task=TASK, obs_sample=obs)
    arguments = ["--policy", str(folder / "first"), "--stochastic", "--keep-failures", "--episodes", "30"]
    assert main(["collect", TASK, *arguments, "--out", str(folder / "logs")]) == 0
    return folder


def test_importance_sampling_of_the_behaviour_policy_gives_the_logged_return(runs, capsys):
    capsys.readouterr()
    first, logs = str(runs / "first"), str(runs / "logs")
    arguments = ["ope", first, "--logs", logs, "--behavior-policy", first, "--stochastic", "--steps", "20", "--json"]
    assert main(arguments) == 0
    (found,) = json.loads(capsys.readouterr().out)["policies"].values()
    rows = found["estimates"]
    logged = rows["behaviour"]["interval"]["estimate"]
    for name in ("is", "pdis", "snis", "snpdis"):
        assert rows[name]["interval"]["estimate"] == pytest.approx(logged, rel=1e-4)
        assert rows[name]["effective"] == pytest.approx(30, rel=1e-4)


def test_logs_in_another_format_give_the_same_estimates(runs, tmp_path, capsys):
    pytest.importorskip("h5py", reason="needs robopolicy[hdf5]")
    assert main(["data", "convert", str(runs / "logs"), str(tmp_path / "logs.hdf5")]) == 0
    found = []
    for logs in (runs / "logs", tmp_path / "logs.hdf5"):
        capsys.readouterr()
        assert main(["ope", str(runs / "flow"), "--logs", str(logs), "--steps", "5", "--json"]) == 0
        found.append(json.loads(capsys.readouterr().out)["policies"])
    assert found[0] == found[1]


def test_a_policy_without_density_gets_density_free_estimators(runs, capsys):
    capsys.readouterr()
    assert main(["ope", str(runs / "flow"), "--logs", str(runs / "logs"), "--steps", "20"]) == 0
    text = capsys.readouterr().out
    assert "fitted Q-evaluation" in text and "marginal" in text and "needs the policy that collected the logs" in text


def test_ope_play_evaluates_each_policy_in_simulation_and_prints_sharpe_ratios(runs, capsys):
    capsys.readouterr()
    names = [str(runs / name) for name in ("first", "second")]
    assert main(["ope", *names, "--logs", str(runs / "logs"), "--steps", "20", "--play", "4"]) == 0
    text, progress = capsys.readouterr()
    for line in ("first (1 of 2): 4 episodes in the simulator", "second (2 of 2): fitted Q-evaluation"):
        assert f"{line} done after " in progress
    assert text.count("evaluated in the simulator") == 2 and "SharpeRatio@k" in text and "k = 3" in text


@pytest.mark.parametrize(("option", "expected"), [([], 50_000), (["--play-seed", "7"], 7)])
def test_played_episodes_are_not_the_ones_that_select_checkpoints(runs, monkeypatch, option, expected):
    seeds = []
    monkeypatch.setattr(
        "robopolicy.data.collect.collect",
        lambda *args, seed, **kw: seeds.append(seed) or collect(*args, seed=seed, **kw),
    )
    argv = ["ope", str(runs / "first"), "--logs", str(runs / "logs"), "--steps", "5", "--play", "2", *option]
    assert main(argv) == 0 and seeds == [expected]


def test_ope_compares_policies_on_logs_of_a_random_policy(runs, capsys):
    logs = ["--policy", "random", "--keep-failures", "--episodes", "20", "--out", str(runs / "random")]
    assert main(["collect", TASK, *logs]) == 0
    assert "kept 20" in capsys.readouterr().out
    members = [str(runs / name) for name in ("first", "second")]
    behaviour = ["--logs", str(runs / "random"), "--behavior-policy", "random", "--stochastic"]
    assert main(["ope", *members, *behaviour, "--steps", "5"]) == 0
    assert "chance to be best" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--gamma", "2"], "gamma must lie in [0, 1]"),
        (["--steps", "0"], "--steps must be at least 1"),
        (["--behavior-policy", "nowhere"], "nowhere"),
    ],
)
def test_bad_options_are_refused_in_one_line(runs, options, message, capsys):
    capsys.readouterr()
    assert main(["ope", str(runs / "first"), "--logs", str(runs / "logs"), *options]) == 2
    assert message in capsys.readouterr().err


def test_simulator_options_are_refused_without_play(runs, refused):
    for option in (["--num-envs", "2"], ["--reward", "shaped"], ["--backend", "auto"], ["--play-seed", "7"]):
        assert f"{option[0]} has no effect without --play" in refused("ope", "x", "--logs", "y", *option)


def test_experts_and_duplicates_are_refused(runs, capsys):
    first, logs = str(runs / "first"), str(runs / "logs")
    for players in (["expert"], [first, first]):
        assert main(["ope", *players, "--logs", logs]) == 2
        assert "checkpoint folders" in capsys.readouterr().err
