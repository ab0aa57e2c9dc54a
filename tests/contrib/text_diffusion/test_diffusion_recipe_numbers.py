"""The numbers that the source gives for a method are those of its recipe, whatever the defaults of the parts."""

from recipe_numbers import HELP, check_numbers

NUMBERS = {
    HELP + "inpaint.low": 0.2,
    HELP + "inpaint.high": 0.6,
    "estimator.masks.uncertain_prefix.share": 0.2,
    "estimator.level": "sequence",
}


def test_igpo_has_the_numbers_of_its_source() -> None:
    check_numbers("igpo", NUMBERS)
