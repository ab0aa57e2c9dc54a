"""Tests of invalid options of contributed parts, which are refused in one line."""

import pytest

from robopolicy.core.registry import build


def test_beta_scale_accepts_a_negative_low() -> None:
    assert build("stage", {"name": "beta_scale", "low": -1}).low == -1


@pytest.mark.parametrize(
    ("slot", "plain", "message"),
    [
        ("partition", "key", "Option 'key' of partition 'key' is missing"),
        ("bounds", {"name": "probability", "dims": 2.5}, "must be a whole number, got 2.5"),
        ("stage", {"name": "smooth_standardize", "seen": {}}, "Unknown option 'seen'"),
        ("weight", {"name": "entropy_gate", "bounds": "constant"}, "must be EntropyBounds, got 'constant'"),
        ("stage", {"name": "beta_scale", "low": 1}, "'beta_scale' needs low < high, got 1 and 1.0"),
        ("mask", {"name": "uncertain", "below": 0}, r"'below' of mask 'uncertain' must lie in \(0, 1\], got 0"),
        ("selector", {"name": "diverse", "keep": 0}, "'keep' of selector 'diverse' must be at least 1, got 0"),
        (
            "stage",
            {"name": "shape", "bonus": {"name": "early_bonus", "key": "x"}, "fraction": 1},
            r"'fraction' of stage 'shape' must lie in",
        ),
        (
            "estimator",
            {"surrogate": "drift", "surrogate_options": {"beta": 0}},
            "'beta' of surrogate 'drift' must be positive, got 0",
        ),
        (
            "controller",
            {"name": "adaptive", "value": 1, "target": 0, "horizon": 1},
            "'target' .* must be positive, got 0",
        ),
    ],
)
def test_invalid_options_are_refused_in_one_line(slot: str, plain: object, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        build(slot, plain)
    assert len(str(error.value).splitlines()) == 1
