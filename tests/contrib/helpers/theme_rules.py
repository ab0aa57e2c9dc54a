"""The rules of the product's families as tests over the names that one theme of contrib adds to them.

A file of `tests/contrib/<theme>` takes those that its theme has names for:

    class TestRules(AlgorithmRules, ConfigRules):
        theme = "control"
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from algorithm_rules import (
    check_resumes_exactly,
    check_source_says_what_it_provides,
    check_states_what_it_is,
    check_updates_what_it_allows,
)
from backbone_rules import (
    check_gradients_add_up_over_the_rows_that_share_a_time,
    check_one_time_serves_all_rows,
    check_reads_chains_as_their_iterates,
)
from head_rules import (
    check_crops_and_dropped_embeddings_are_for_imitation_alone,
    check_imitates_and_acts_from_every_kind_of_input,
    check_padded_steps_send_no_gradient_back,
    check_rows_of_a_loss_know_nothing_of_each_other,
    pairs,
)
from range_rules import (
    check_refuses_what_is_beyond_a_field,
    check_refuses_what_is_out_of_range,
    configs_of,
    nested,
    unranged,
)
from recipe_rules import (
    check_learns_from_tokens,
    check_memory_survives_a_checkpoint,
    check_needs_no_other_theme,
    check_plays_and_learns,
    check_says_what_it_is,
    check_updates_a_denoising_chain,
    check_what_is_masked_reaches_no_part,
    plays,
)
from recipe_tuners import check_updates_a_flow
from run_rules import (
    check_can_be_chosen,
    check_is_shared_out_or_refused,
    check_learns_on_a_gpu,
    check_preset_composes,
)
from theme_names import names_of, presets_of, recipes_of

from docs.compatibility import allowed
from robopolicy.algorithms.registry import ALGORITHMS
from robopolicy.nets.backbone import BACKBONES
from robopolicy.plugins import PRODUCT
from robopolicy.policies.registry import POLICIES
from robopolicy.training.make_source import SOURCES


class Rules:
    """Gives every argument of a rule that `names` knows the names of the theme."""

    theme: ClassVar[str]

    @classmethod
    def names(cls) -> dict[str, list[Any]]:
        """Argument -> values."""
        return {}

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Run a test for each of the names."""
        for argument, values in type(self).names().items():
            if argument in metafunc.fixturenames:
                metafunc.parametrize(argument, values, ids=str)


class AlgorithmRules(Rules):
    """Of algorithms; `place` is a fixture of `tests/contrib`."""

    @classmethod
    def names(cls) -> dict[str, list[Any]]:
        """Algorithms; those of robots, which have heads; sources of data."""
        algorithms = names_of(ALGORITHMS, cls.theme)
        own = {"algorithm": algorithms, "of_robots": [name for name in algorithms if allowed(name)]}
        return super().names() | own

    def test_an_algorithm_states_where_it_learns_from_what_it_trains_and_its_paper(self, algorithm: str) -> None:
        check_states_what_it_is(algorithm)

    def test_an_algorithm_can_be_chosen(self, algorithm: str) -> None:
        check_can_be_chosen("algorithm", algorithm)

    def test_an_algorithm_is_shared_out_or_refused(self, algorithm: str, monkeypatch: pytest.MonkeyPatch) -> None:
        check_is_shared_out_or_refused(algorithm, monkeypatch)

    def test_an_algorithm_updates_what_it_allows_and_refuses_the_rest_with_a_reason(
        self, of_robots: str, place: Path
    ) -> None:
        check_updates_what_it_allows(of_robots, place)

    def test_a_resumed_algorithm_ends_with_the_same_weights(self, of_robots: str, place: Path, tmp_path: Path) -> None:
        check_resumes_exactly(of_robots, place, tmp_path)

    def test_an_algorithm_learns_on_a_gpu_goes_on_from_its_resume_point_and_acts(
        self, of_robots: str, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        check_learns_on_a_gpu(of_robots, place, tmp_path, monkeypatch)


class SourceRules(Rules):
    """Of sources of data."""

    @classmethod
    def names(cls) -> dict[str, list[Any]]:
        """Sources."""
        return super().names() | {"source": names_of(SOURCES, cls.theme)}

    def test_a_source_says_what_it_provides_and_whether_in_whole_episodes(self, source: str) -> None:
        check_source_says_what_it_provides(source)


class PolicyRules(Rules):
    """Of policies."""

    @classmethod
    def names(cls) -> dict[str, list[Any]]:
        """Policies."""
        return super().names() | {"policy_name": names_of(POLICIES, cls.theme)}

    def test_a_policy_can_be_chosen(self, policy_name: str) -> None:
        check_can_be_chosen("policy", policy_name)


class HeadRules(Rules):
    """Of heads and backbones, with those of the product."""

    @classmethod
    def names(cls) -> dict[str, list[Any]]:
        """Pairs of which one is the theme's."""
        return super().names() | {"pair": pairs((PRODUCT, cls.theme), cls.theme)}

    def test_imitating_and_acting_from_every_kind_of_input(self, pair: tuple[str, str]) -> None:
        check_imitates_and_acts_from_every_kind_of_input(*pair)

    def test_one_row_of_a_loss_knows_nothing_of_the_others(self, pair: tuple[str, str]) -> None:
        check_rows_of_a_loss_know_nothing_of_each_other(*pair)

    def test_padded_steps_send_no_gradient_back(self, pair: tuple[str, str]) -> None:
        check_padded_steps_send_no_gradient_back(*pair)

    def test_crops_and_dropped_embeddings_are_for_imitation_in_training_mode_only(self, pair: tuple[str, str]) -> None:
        check_crops_and_dropped_embeddings_are_for_imitation_alone(*pair)


class BackboneRules(Rules):
    """Of backbones."""

    @classmethod
    def names(cls) -> dict[str, list[Any]]:
        """Backbones, and numbers of times that they are given."""
        return super().names() | {"kind": names_of(BACKBONES, cls.theme), "times": [1, 2]}

    @pytest.fixture
    def double(self) -> Iterator[None]:
        """The claims are about rows, not about rounding: the order of sums depends on how many rows there are."""
        torch.set_default_dtype(torch.float64)
        yield
        torch.set_default_dtype(torch.float32)

    @pytest.mark.usefixtures("double")
    def test_chains_are_read_as_their_iterates(self, kind: str, times: int) -> None:
        check_reads_chains_as_their_iterates(kind, times)

    @pytest.mark.usefixtures("double")
    def test_one_time_serves_all_rows(self, kind: str, times: int) -> None:
        check_one_time_serves_all_rows(kind, times)

    @pytest.mark.usefixtures("double")
    def test_gradients_add_up_over_the_rows_that_share_a_time(self, kind: str) -> None:
        check_gradients_add_up_over_the_rows_that_share_a_time(kind)


class ConfigRules(Rules):
    """Of everything that has settings."""

    @classmethod
    def names(cls) -> dict[str, list[Any]]:
        """Configs of the theme's entries, and all that lie within them."""
        return super().names() | {"entry": list(configs_of(cls.theme)), "config": sorted(nested(configs_of(cls.theme)))}

    def test_every_number_of_a_configuration_has_a_range(self, entry: str) -> None:
        assert unranged(configs_of(self.theme)[entry], entry) == []

    def test_a_number_outside_its_range_is_refused_however_a_config_is_built(self, config: str) -> None:
        check_refuses_what_is_out_of_range(nested(configs_of(self.theme))[config])

    def test_a_number_beyond_the_field_that_bounds_it_is_refused(self, config: str) -> None:
        check_refuses_what_is_beyond_a_field(nested(configs_of(self.theme))[config])


class PresetRules(Rules):
    """Of presets of tasks and experiments."""

    @classmethod
    def names(cls) -> dict[str, list[Any]]:
        """Group and name."""
        return super().names() | {"preset": presets_of(cls.theme)}

    def test_a_preset_composes(self, preset: tuple[str, str]) -> None:
        check_preset_composes(*preset)


class RecipeRules(Rules):
    """Of text recipes."""

    unmasked: ClassVar[tuple[str, ...]] = ()  # recipes that cannot do with what a table of tokens records

    @classmethod
    def names(cls) -> dict[str, list[Any]]:
        """Recipes; those that learn from rollouts; those that play them in a way of their own."""
        recipes, rollouts = recipes_of(cls.theme), recipes_of(cls.theme, "rollout")
        masked = [name for name in recipes if name not in cls.unmasked]
        own = {"recipe": recipes, "masked": masked, "of_rollouts": rollouts, "playing": list(filter(plays, rollouts))}
        return super().names() | own | {"layout": ["tokens", "chain"]}

    def test_a_recipe_says_what_it_is(self, recipe: str) -> None:
        check_says_what_it_is(recipe)

    def test_a_recipe_needs_no_other_theme(self, recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
        check_needs_no_other_theme(recipe, monkeypatch)

    def test_the_memory_of_a_recipe_survives_a_checkpoint(self, recipe: str) -> None:
        check_memory_survives_a_checkpoint(recipe)

    def test_what_is_masked_reaches_no_part_of_a_recipe(self, masked: str) -> None:
        check_what_is_masked_reaches_no_part(masked)

    def test_a_recipe_learns_from_tokens(self, of_rollouts: str) -> None:
        check_learns_from_tokens(of_rollouts)

    def test_a_recipe_updates_a_denoising_chain(self, of_rollouts: str) -> None:
        check_updates_a_denoising_chain(of_rollouts)

    def test_a_recipe_updates_a_flow_or_names_what_robots_do_not_record(self, of_rollouts: str) -> None:
        check_updates_a_flow(of_rollouts)

    def test_a_recipe_plays_and_learns(self, playing: str, layout: str) -> None:
        check_plays_and_learns(playing, layout)
