"""Tests of the attributes that every registered algorithm states, readable without importing the algorithm."""

import pytest
from algorithm_rules import check_source_says_what_it_provides, check_states_what_it_is

from robopolicy.algorithms.registry import ALGORITHMS
from robopolicy.training.make_source import SOURCES


@pytest.mark.parametrize("name", ALGORITHMS.product())
def test_a_class_states_its_data_source_its_policies_and_its_paper(name: str) -> None:
    check_states_what_it_is(name)


@pytest.mark.parametrize("name", SOURCES.product())
def test_a_source_says_what_it_provides_and_whether_in_whole_episodes(name: str) -> None:
    check_source_says_what_it_provides(name)
