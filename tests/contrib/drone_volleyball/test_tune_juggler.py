"""End-to-end tests of tuning the juggler's gains with agents."""

import json

import pytest
import torch

from robopolicy.cli.main import main
from robopolicy.contrib.drone_volleyball import tune_juggler
from robopolicy.contrib.drone_volleyball.juggler import JugglingStyle
from robopolicy.sim.registry import SimOptions, make_sim


def test_style_of_assigns_every_tuned_setting():
    values = [float(i) for i in range(len(tune_juggler.NAMES))]
    style = tune_juggler.style_of(values)
    made = {**vars(style), **vars(style.gains)}
    assert [made[name] for name in tune_juggler.NAMES] == values
    assert style.gains.heading == JugglingStyle().gains.heading and style.apex == JugglingStyle().apex


def test_default_settings_are_within_the_search_ranges():
    made = {**vars(JugglingStyle()), **vars(JugglingStyle().gains)}
    for parameter in (parameter for group in tune_juggler.AGENTS for parameter in group):
        assert parameter.low <= made[parameter.name] <= parameter.high


def test_bad_gains_have_lower_returns_on_the_same_seeds():
    sim = make_sim("volley/bump", SimOptions(num_envs=4, threads=1))
    limp = tune_juggler.style_of([4.0, 2.5, 50.0, 36.0, 0.6, 0.2, 0.08, 1.0])
    good, again, bad = (tune_juggler.returns(sim, style, 0, 120) for style in (JugglingStyle(), JugglingStyle(), limp))
    assert torch.equal(good, again) and bad.mean() < good.mean()


def test_command_tunes_the_juggler_and_reports_held_out_episodes(tmp_path, capsys: pytest.CaptureFixture[str]):
    sizes = ["--rounds", "2", "--trials", "2", "--episodes", "2", "--steps", "60", "--held-out", "2"]
    assert main(["tune_juggler", "--task", "volley/hit", *sizes, "--out", str(tmp_path)]) == 0
    assert set(json.loads((tmp_path / "style.json").read_text())) == set(tune_juggler.NAMES)
    assert "round 2" in (text := capsys.readouterr().out) and "held-out episodes" in text
    with pytest.raises(SystemExit):
        main(["tune_juggler", "--help"])
    assert "eight settings of the scripted juggler" in capsys.readouterr().out
