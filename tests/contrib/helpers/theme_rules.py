"""Shared rules as tests over the names that one contrib theme registers.

A file in `tests/contrib/<theme>` inherits the classes for which its theme has names:

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
    check_acts_by_a_copy,
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
    check_learns_on_a_device,
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
    """Parametrizes every rule argument in `names` with the names of the theme."""

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
    """Rules of algorithms; `place` is a fixture of `tests/contrib`."""

    @classmethod
    def names(cls) -> dict[str, list[Any]]:
        """All algorithms, and the robot algorithms, which have heads."""
        algorithms = names_of(ALGORITHMS, cls.theme)
        own = {"algorithm": algorithms, "of_robots": [name for name in algorithms if allowed(name)]}
        return super().names() | own

    def test_an_algorithm_declares_its_data_source_heads_and_paper(self, algorithm: str) -> None:
        check_states_what_it_is(algorithm)

    def test_an_algorithm_can_be_chosen(self, algorithm: str) -> None:
        check_can_be_chosen("algorithm", algorithm)

    def test_an_algorithm_trains_distributed_or_is_refused(
        self, algorithm: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        check_is_shared_out_or_refused(algorithm, monkeypatch)

    def test_an_algorithm_updates_supported_policies_and_refuses_others_with_a_reason(
        self, of_robots: str, place: Path
    ) -> None:
        check_updates_what_it_allows(of_robots, place)

    def test_a_resumed_algorithm_ends_with_the_same_weights(self, of_robots: str, place: Path, tmp_path: Path) -> None:
        check_resumes_exactly(of_robots, place, tmp_path)

    def test_a_copy_acts_with_the_weights_of_its_last_update(self, of_robots: str, place: Path) -> None:
        check_acts_by_a_copy(of_robots, place)

    @pytest.mark.slow
    def test_an_algorithm_learns_on_a_device_resumes_and_acts(
        self, of_robots: str, place: Path, tmp_path: Path
    ) -> None:
        for head in allowed(of_robots):
            (tmp_path / head).mkdir()
            check_learns_on_a_device(of_robots, head, place, tmp_path / head)


class SourceRules(Rules):
    """Rules of data sources."""

    @classmethod
    def names(cls) -> dict[str, list[Any]]:
        """Sources."""
        return super().names() | {"source": names_of(SOURCES, cls.theme)}

    def test_a_source_declares_its_data_and_whether_it_yields_whole_episodes(self, source: str) -> None:
        check_source_says_what_it_provides(source)


class PolicyRules(Rules):
    """Rules of policies."""

    @classmethod
    def names(cls) -> dict[str, list[Any]]:
        """Policies."""
        return super().names() | {"policy_name": names_of(POLICIES, cls.theme)}

    def test_a_policy_can_be_chosen(self, policy_name: str) -> None:
        check_can_be_chosen("policy", policy_name)


class HeadRules(Rules):
    """Rules of pairs of heads and backbones, including product ones."""

    @classmethod
    def names(cls) -> dict[str, list[Any]]:
        """Pairs with at least one entry of the theme."""
        return super().names() | {"pair": pairs((PRODUCT, cls.theme), cls.theme)}

    def test_imitating_and_acting_from_every_kind_of_input(self, pair: tuple[str, str]) -> None:
        check_imitates_and_acts_from_every_kind_of_input(*pair)

    def test_loss_rows_are_independent(self, pair: tuple[str, str]) -> None:
        check_rows_of_a_loss_know_nothing_of_each_other(*pair)

    def test_padded_steps_have_no_gradient(self, pair: tuple[str, str]) -> None:
        check_padded_steps_send_no_gradient_back(*pair)

    def test_crops_and_dropped_embeddings_are_for_imitation_in_training_mode_only(self, pair: tuple[str, str]) -> None:
        check_crops_and_dropped_embeddings_are_for_imitation_alone(*pair)


class BackboneRules(Rules):
    """Rules of backbones."""

    @classmethod
    def names(cls) -> dict[str, list[Any]]:
        """Backbones, and numbers of input times."""
        return super().names() | {"kind": names_of(BACKBONES, cls.theme), "times": [1, 2]}

    @pytest.fixture
    def double(self) -> Iterator[None]:
        """Use float64, because the summation order depends on the number of rows."""
        torch.set_default_dtype(torch.float64)
        yield
        torch.set_default_dtype(torch.float32)

    @pytest.mark.usefixtures("double")
    def test_chains_are_read_as_their_iterates(self, kind: str, times: int) -> None:
        check_reads_chains_as_their_iterates(kind, times)

    @pytest.mark.usefixtures("double")
    def test_one_time_broadcasts_to_all_rows(self, kind: str, times: int) -> None:
        check_one_time_serves_all_rows(kind, times)

    @pytest.mark.usefixtures("double")
    def test_gradients_sum_over_rows_that_share_a_time(self, kind: str) -> None:
        check_gradients_add_up_over_the_rows_that_share_a_time(kind)


class ConfigRules(Rules):
    """Rules of configurations."""

    @classmethod
    def names(cls) -> dict[str, list[Any]]:
        """Configs of the theme's entries, and all configs nested in them."""
        return super().names() | {"entry": list(configs_of(cls.theme)), "config": sorted(nested(configs_of(cls.theme)))}

    def test_every_number_of_a_configuration_has_a_range(self, entry: str) -> None:
        assert unranged(configs_of(self.theme)[entry], entry) == []

    def test_out_of_range_numbers_are_refused_for_every_way_to_build_a_config(self, config: str) -> None:
        check_refuses_what_is_out_of_range(nested(configs_of(self.theme))[config])

    def test_a_number_beyond_its_bounding_field_is_refused(self, config: str) -> None:
        check_refuses_what_is_beyond_a_field(nested(configs_of(self.theme))[config])


class PresetRules(Rules):
    """Rules of task and experiment presets."""

    @classmethod
    def names(cls) -> dict[str, list[Any]]:
        """Pairs of group and name."""
        return super().names() | {"preset": presets_of(cls.theme)}

    def test_a_preset_composes(self, preset: tuple[str, str]) -> None:
        check_preset_composes(*preset)


class RecipeRules(Rules):
    """Rules of text recipes."""

    unmasked: ClassVar[tuple[str, ...]] = ()  # recipes that need more than a token table records

    @classmethod
    def names(cls) -> dict[str, list[Any]]:
        """All recipes, recipes that learn from rollouts, and recipes with their own rollout strategy."""
        recipes, rollouts = recipes_of(cls.theme), recipes_of(cls.theme, "rollout")
        masked = [name for name in recipes if name not in cls.unmasked]
        own = {"recipe": recipes, "masked": masked, "of_rollouts": rollouts, "playing": list(filter(plays, rollouts))}
        return super().names() | own | {"layout": ["tokens", "chain"]}

    def test_a_recipe_has_a_title_and_a_cited_source(self, recipe: str) -> None:
        check_says_what_it_is(recipe)

    def test_a_recipe_needs_no_other_theme(self, recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
        check_needs_no_other_theme(recipe, monkeypatch)

    def test_the_memory_of_a_recipe_survives_a_checkpoint(self, recipe: str) -> None:
        check_memory_survives_a_checkpoint(recipe)

    def test_masked_entries_reach_no_part_of_a_recipe(self, masked: str) -> None:
        check_what_is_masked_reaches_no_part(masked)

    def test_a_recipe_learns_from_tokens(self, of_rollouts: str) -> None:
        check_learns_from_tokens(of_rollouts)

    def test_a_recipe_updates_a_denoising_chain(self, of_rollouts: str) -> None:
        check_updates_a_denoising_chain(of_rollouts)

    def test_a_recipe_updates_a_flow_or_names_the_fields_that_robots_do_not_record(self, of_rollouts: str) -> None:
        check_updates_a_flow(of_rollouts)

    def test_a_recipe_collects_rollouts_and_learns(self, playing: str, layout: str) -> None:
        check_plays_and_learns(playing, layout)
