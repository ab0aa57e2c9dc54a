"""The hyperparameters of the recipe equal the values of its source, independent of the defaults of the parts."""

from recipe_numbers import HELP, check_numbers

NUMBERS = {
    HELP + "inpaint.low": 0.2,
    HELP + "inpaint.high": 0.6,
    "estimator.masks.uncertain_prefix.share": 0.2,
    "estimator.level": "sequence",
}


def test_igpo_has_the_hyperparameters_of_its_source() -> None:
    check_numbers("igpo", NUMBERS)
