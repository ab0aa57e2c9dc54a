"""Tests of the card of a dataset."""

import numpy as np
import pytest

from robopolicy.data.episodes import Episode, Episodes
from robopolicy.errors import UserError
from robopolicy.evaluation.dataset_card import ADVICE, References, dataset_card, recommend
from robopolicy.evaluation.intervals import wilson


def make_data(*, successes: int = 3, episodes: int = 4, images: bool = False) -> Episodes:
    rng = np.random.default_rng(0)

    def one(index: int) -> Episode:
        state = rng.normal(size=(10, 2)).astype(np.float32)
        arrays = {"image.front": np.zeros((10, 3, 2, 2), np.uint8)} if images else {"state": state}
        reward = np.zeros(10, np.float32)
        reward[-1] = index < successes
        success = reward > 0
        arrays |= {"action": rng.normal(size=(10, 1)).astype(np.float32), "reward": reward, "success": success}
        return Episode({**arrays, "terminated": success}, "toy", index, "expert")

    return Episodes.from_list([one(index) for index in range(episodes)], 0.05)


def test_card_counts_episodes_steps_and_features() -> None:
    card = dataset_card(make_data(), cameras={"image.top": (3, 8, 9)})
    assert (card.episodes, card.steps, card.rate, card.lengths) == (4, 40, 20.0, (10, 10.0, 10))
    assert card.tasks == {"toy": 4} and card.behaviours == {"expert": 4}
    assert card.features["state"] == ("float32", (2,)) and card.features["image.top"] == ("uint8", (3, 8, 9))
    assert card.success == wilson(3, 4) and card.returns.estimate == 0.75
    assert card.quality is None and card.coverage.saco is None and card.idle == 0.0


def test_quality_carries_the_interval_of_the_return() -> None:
    card = dataset_card(make_data(), References(random=0.5, best=1.0))
    assert card.quality.estimate == pytest.approx(0.5)
    assert card.quality.low == pytest.approx((card.returns.low - 0.5) / 0.5)


def test_quality_of_data_without_rewards_is_refused() -> None:
    bare = Episodes.from_list([Episode({"state": np.ones((3, 1)), "action": np.ones((3, 1))})], 0.1)
    with pytest.raises(UserError, match="needs rewards"):
        dataset_card(bare, References(0.0, 1.0))
    assert dataset_card(bare).advice == "unrewarded"


@pytest.mark.parametrize(
    ("quality", "saco", "advice"),
    [
        (0.95, 0.1, "imitation"),
        (0.95, 0.9, "imitation"),
        (0.5, 0.9, "unconstrained"),
        (0.5, 0.3, "constrained"),
        (0.1, 0.1, "explore"),
        (0.1, None, "constrained"),
        (None, None, "unknown"),
    ],
)
def test_quality_and_coverage_determine_the_recommended_learning_method(quality, saco, advice) -> None:
    assert recommend(quality, saco, rewarded=True) == advice
    assert set(ADVICE) >= {advice}


def test_success_rate_replaces_missing_quality() -> None:
    assert dataset_card(make_data(successes=4)).advice == "imitation"
    assert dataset_card(make_data(successes=2)).advice == "constrained"


def test_uninformative_coverage_gives_no_advice() -> None:
    """Random reals: no two steps share a fine bin, so the coverage holds no information."""
    data = make_data(successes=2)
    card = dataset_card(data, References(replay=data))
    assert card.coverage.saco == 1.0 and card.advice == "constrained"
    assert any("Coverage is not informative" in warning for warning in card.warnings)
    assert dataset_card(data, References(replay=data), bins=2).advice == "unconstrained"


def test_images_alone_have_no_coverage() -> None:
    data = make_data(images=True)
    assert dataset_card(data).coverage is None
    with pytest.raises(UserError, match="has no vectors"):
        dataset_card(data, References(replay=data))


def test_warnings_name_the_faults() -> None:
    state = np.repeat(np.arange(50.0), 2)[:, None] * [1.0, 0.0]
    action = np.repeat(np.linspace(-2, 2, 50), 2)[:, None].clip(-1, 1)
    episode = Episode({"state": state, "action": action, "reward": np.zeros(100), "success": np.zeros(100, np.bool_)})
    text = " ".join(dataset_card(Episodes.from_list([episode, episode], 0.1)).warnings)
    for part in (
        "Only 2 episodes",
        "state[1]",
        "action[0] in 5",
        "stand still",
        "Exact copies of earlier episodes: 1",
        "reward is constant",
    ):
        assert part in text, part
