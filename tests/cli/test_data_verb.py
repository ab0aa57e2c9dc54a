"""Tests of `robopolicy data`."""

import json

import numpy as np
import pytest

from robopolicy.cli.main import main
from robopolicy.data.episodes import Episode, Episodes
from robopolicy.data.formats.lerobot import write_lerobot
from robopolicy.data.quality import coverage


def episodes(seed: int, reward: float = 1.0, images: bool = False) -> Episodes:
    rng = np.random.default_rng(seed)

    def one(index: int) -> Episode:
        arrays = {
            "state": rng.integers(0, 5, (6, 2)).astype(np.float32),
            "action": rng.integers(0, 2, (6, 1)).astype(np.float32),
            "reward": np.full(6, reward, np.float32),
            "terminated": np.arange(6) == 5,
        }
        arrays |= {"image.top": rng.integers(0, 255, (6, 3, 32, 48), np.uint8)} if images else {}
        return Episode(arrays, "toy", index)

    return Episodes.from_list([one(index) for index in range(5)], 0.1)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("data")
    for name, data in (
        ("mixed", episodes(0, 0.5, images=True)),
        ("random", episodes(1, 0.0)),
        ("best", episodes(2, 1.0)),
    ):
        write_lerobot(data, root / name)
    bare = episodes(3)
    del bare.arrays["reward"]
    write_lerobot(bare, root / "bare")
    return root


def test_card_shows_features_and_missing_inputs(folders, capsys):
    assert main(["data", "card", str(folders / "mixed")]) == 0
    text = capsys.readouterr().out
    assert "30 at 10 Hz" in text and "3 x 32 x 48" in text and "3 [3, 3]" in text
    assert "needs --random and --best" in text and "needs --replay" in text and "learn with: unknown" in text


def test_reference_options_add_quality_and_coverage_to_the_data_card(folders, capsys):
    references = ["--random", str(folders / "random"), "--best", "6", "--replay", str(folders / "best")]
    assert main(["data", "card", str(folders / "mixed"), *references, "--json"]) == 0
    card = json.loads(capsys.readouterr().out)
    assert card["quality"]["estimate"] == pytest.approx(0.5)  # return 3 between 0 (random) and 6 (best)
    assert card["coverage"]["saco"] == pytest.approx(coverage(episodes(0, images=True), episodes(2)).saco)
    assert card["advice"]["kind"] in ("constrained", "unconstrained")


def test_bad_input_is_refused_in_one_line(folders, refused):
    mixed = folders / "mixed"
    assert "DATASET" in refused("data", "card")
    assert "No LeRobot dataset" in refused("data", "card", folders / "nowhere")
    assert "both --random and --best" in refused("data", "card", mixed, "--best", "3")
    assert "above the return of random" in refused("data", "card", mixed, "--random", "3", "--best", "1")
    assert "must be a finite return" in refused("data", "card", mixed, "--random", "nan", "--best", "1")
    assert "No LeRobot dataset at elsewhere" in refused("data", "card", mixed, "--random", "elsewhere", "--best", "1")
    assert "has no rewards" in refused("data", "card", mixed, "--random", folders / "bare", "--best", "1")
    assert "--bins must be at least 0, got -3" in refused("data", "card", mixed, "--bins", "-3")
    assert "--bins must be at most 1000000" in refused("data", "card", mixed, "--bins", "99999999999")
    assert "invalid int value" in refused("data", "card", mixed, "--bins", "many")
