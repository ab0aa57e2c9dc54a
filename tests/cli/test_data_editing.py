"""Tests of `robopolicy data merge | split | filter | edit`."""

import errno
import gc
import pkgutil
import sys
from pathlib import Path

import pytest
from own_arm import record

from robopolicy.cli.main import main
from robopolicy.data.formats.lerobot import read_lerobot


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six demonstrations with a camera and rewards."""
    return record(tmp_path_factory.mktemp("editing") / "data", episodes=6, camera=True, reward=True, video=True)


def test_merged_parts_of_a_split_have_all_episodes(data: Path, tmp_path: Path, capsys) -> None:
    parts = [str(tmp_path / name) for name in ("train", "test")]
    assert main(["data", "split", str(data), "--fraction", "0.34", "--out", *parts]) == 0
    assert "4 episodes (80 frames), 1 video file with 40 frames" in capsys.readouterr().out
    assert main(["data", "merge", *parts, "--out", str(tmp_path / "both")]) == 0
    both, source = read_lerobot(tmp_path / "both"), read_lerobot(data)
    assert read_lerobot(parts[1]).num_episodes == 2 and both.num_episodes == 6
    first = lambda episodes: sorted(episodes.arrays["state"][episodes.starts].tolist())  # noqa: E731
    assert first(both) == first(source)
    assert both.arrays["image.front"].sum(dtype=int) == source.arrays["image.front"].sum(dtype=int)


def test_episodes_are_chosen_by_number(data: Path, tmp_path: Path, capsys) -> None:
    words = ["--episodes", "0-3,5", "--exclude", "2", "--out", str(tmp_path / "some")]
    assert main(["data", "filter", str(data), *words]) == 0
    assert "4 episodes" in capsys.readouterr().out
    found, source = read_lerobot(tmp_path / "some"), read_lerobot(data)
    assert found.arrays["state"][found.starts].tolist() == source.arrays["state"][source.starts[[0, 1, 3, 5]]].tolist()


def test_keys_and_instruction_are_changed(data: Path, tmp_path: Path) -> None:
    words = ["--rename", "state=joints", "--remove", "image.front", "--instruction", "put it down"]
    words += ["--names", "action=a [rad],b,c,d,e,f", "--out", str(tmp_path / "edited")]
    assert main(["data", "edit", str(data), *words]) == 0
    found = read_lerobot(tmp_path / "edited")
    assert set(found.observation_keys) == {"joints"} and found.tasks == ("put it down",) * 6
    assert found.names["action"][:2] == ("a [rad]", "b") and not list((tmp_path / "edited").rglob("*.mp4"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["filter", "--success"], "does not state which episodes succeeded"),
        (["filter", "--min-length", "21"], "No episode of"),
        (["filter", "--min-quality", "1", "--random", "0"], "requires both --random and --best"),
        (["filter", "--min-quality", "1"], "requires both --random and --best"),
        (["filter", "--random", "0", "--best", "9"], "--random has no effect without --min-quality; leave it out"),
        (["filter", "--episodes", "3-1"], "numbers and ranges"),
        (["filter", "--episodes", "9"], "episode 9 is missing"),
        (["filter", "--max-idle", "nan"], "--max-idle must be a number, got nan"),
        (["filter", "--min-return", "nan"], "--min-return must be a number, got nan"),
        (["filter", "--episodes", "0", "--min-length", "21"], "which has 6 episodes, meets the conditions"),
        (["edit"], "Nothing is changed"),
        (["edit", "--names", "action=a,b,a,d,e,f"], "'action' need different names, and 'a' is given twice"),
        (["edit", "--rename", "state"], "pairs such as"),
        (["edit", "--rename", "stat=x"], "Did you mean 'state'"),
    ],
)
def test_choices_and_changes_that_do_not_fit_are_refused(words, message, data, tmp_path, refused) -> None:
    action, *options = words
    assert message in refused("data", action, data, *options, "--out", tmp_path / "out")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("target", ["pyarrow.parquet.ParquetWriter.write_table", "shutil.copyfile"])
@pytest.mark.parametrize("written", [0, 1, 2])
def test_a_full_disk_is_one_line_that_names_the_folder(
    written: int, target: str, data: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    full, original = OSError(errno.ENOSPC, "the library's own words"), pkgutil.resolve_name(target)
    calls, ignored = [], []

    def limited(*args, **options):
        calls.append(target)
        if len(calls) > written:
            raise full
        return original(*args, **options)

    def close(self) -> None:
        raise full

    monkeypatch.setattr(target, limited)
    monkeypatch.setattr("pyarrow.parquet.ParquetWriter.close", close)
    monkeypatch.setattr(sys, "unraisablehook", ignored.append)
    parts = [str(tmp_path / name) for name in ("train", "test")]
    assert main(["data", "split", str(data), "--out", *parts]) == 2
    gc.collect()
    line = capsys.readouterr().err
    assert line.count("\n") == 1 and not ignored and not list(tmp_path.iterdir())
    assert any(f"Cannot write {part}: No space left on device; free some space" in line for part in parts)


def test_folders_that_do_not_fit_are_refused(data, tmp_path, refused) -> None:
    assert "No LeRobot dataset" in refused("data", "merge", tmp_path / "no", "--out", tmp_path / "out")
    assert "exists already" in refused("data", "merge", data, "--out", data)
    assert "is the input" in refused("data", "merge", data, "--out", data, "--overwrite")
    assert "two different folders" in refused("data", "split", data, "--out", tmp_path / "a", tmp_path / "a")
    assert "--fraction must lie in (0, 1)" in refused(
        "data", "split", data, "--fraction", "1", "--out", tmp_path / "a", tmp_path / "b"
    )
