"""Tests of file writing: files and folders appear complete or not at all; a replacement never loses the old one."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from robopolicy.atomic import (
    atomic_file,
    atomic_folder,
    create_text,
    read_stable,
    restore_partial,
    scratch_folder,
    sibling,
    write_text,
)
from robopolicy.errors import UserError
from robopolicy.files import check_new_file, check_new_folder, next_free_path, parse_json, parse_yaml


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


@pytest.mark.parametrize("links", [True, False])
def test_a_text_file_is_created_once(links, tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError("no links")

    if not links:
        monkeypatch.setattr(os, "link", refuse)
    create_text(tmp_path / "x", "first")
    with pytest.raises(FileExistsError):
        create_text(tmp_path / "x", "second")
    assert (tmp_path / "x").read_text() == "first" and names(tmp_path) == ["x"]


def test_a_folder_replaces_the_old_one_as_a_whole(tmp_path):
    for text in ("first", "second"):
        with atomic_folder(tmp_path / "x") as folder:
            (folder / text).write_text(text)
    assert names(tmp_path) == ["x"]
    assert names(tmp_path / "x") == ["second"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: &a {b: *a}", "an alias refers to a value that contains it"),
        (
            "\n".join(["a0: &a0 [x]", *(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 9))]),
            "100,000",
        ),
    ],
)
def test_aliases_of_yaml_neither_loop_nor_explode(text, message):
    with pytest.raises(ValueError, match=message):
        parse_yaml(text)


def test_partly_written_folder_is_removed_on_failure(tmp_path):
    with pytest.raises(ZeroDivisionError), atomic_folder(tmp_path / "x") as folder:
        (folder / "part").write_text("half")
        1 / 0  # noqa: B018
    assert names(tmp_path) == []


def dead_process() -> int:
    """Id of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def sibling_of(process: int, kind: str, name: str = "x") -> str:
    """Hidden name of another process."""
    return sibling(Path(name), kind).name.replace(f"-{os.getpid()}", f"-{process}")


def test_a_crash_between_the_two_renames_is_undone(tmp_path):
    (tmp_path / sibling_of(dead_process(), "previous")).mkdir()
    restore_partial(tmp_path / "x")
    assert names(tmp_path) == ["x"]


def test_a_crash_before_the_old_one_was_deleted_is_cleaned_up(tmp_path):
    (tmp_path / "x").mkdir()
    (tmp_path / sibling_of(dead_process(), "previous")).mkdir()
    restore_partial(tmp_path / "x")
    assert names(tmp_path) == ["x"]


def test_a_living_writer_keeps_its_folders(tmp_path):
    """A reader used to move the old folder back between the two renames of a writer."""
    for kind in ("previous", "writing"):
        (tmp_path / sibling_of(os.getppid(), kind)).mkdir()
    (tmp_path / sibling_of(dead_process(), "previous").replace(os.uname().nodename.split(".")[0], "elsewhere")).mkdir()
    before = names(tmp_path)
    restore_partial(tmp_path / "x")
    assert names(tmp_path) == before


def test_partial_folders_of_dead_writers_are_removed(tmp_path):
    dead, alive = dead_process(), os.getppid()
    kept = [sibling_of(alive, "writing"), sibling_of(dead, "writing", "xy"), ".x.writing-me"]
    for name in (sibling_of(dead, "writing"), *kept):
        (tmp_path / name).mkdir()
        (tmp_path / name / "part").write_text("")
    with atomic_folder(tmp_path / "x"):
        pass
    assert names(tmp_path) == sorted([*kept, "x"])


def test_partial_files_of_dead_writers_are_removed(tmp_path):
    dead, alive = dead_process(), os.getppid()
    kept = [sibling_of(alive, "writing", "x.zip"), sibling_of(dead, "writing", "x.npz"), ".x.writing-me.zip"]
    for name in (sibling_of(dead, "writing", "x.zip"), *kept):
        (tmp_path / name).write_text("half")
    (tmp_path / sibling_of(dead, "scratch", "x.zip")).mkdir()
    with atomic_file(tmp_path / "x.zip") as file, scratch_folder(tmp_path / "x.zip") as folder:
        assert not names(folder)
        file.write_text("whole")
    assert names(tmp_path) == sorted([*kept, "x.zip"])


@pytest.mark.parametrize("exchange", [True, False])
def test_readers_see_one_version_while_a_writer_publishes(tmp_path, monkeypatch, exchange):
    """16 of 6,602 reads of a folder used to fail or to move it under its writer."""
    if not exchange:
        monkeypatch.setattr("robopolicy.atomic._exchange", lambda *_: False)
    monkeypatch.setattr("robopolicy.atomic._sync", lambda _: None)
    path, done, reads, failures = tmp_path / "x", threading.Event(), [], []

    def read() -> None:
        while not done.is_set():
            try:
                parts = read_stable(path, lambda: [(path / name).read_text() for name in ("a", "b")])
            except (UserError, OSError) as error:
                failures.append(error)
            else:
                reads.append(parts)

    def publish(text: str) -> None:
        with atomic_folder(path) as folder:
            for name in ("a", "b"):
                (folder / name).write_text(text)

    publish("0")
    thread = threading.Thread(target=read)
    thread.start()
    for count in range(1, 400):
        publish(str(count))
    done.set()
    thread.join()
    assert reads and all(first == second for first, second in reads)
    assert not failures
    assert names(tmp_path) == ["x"]


def test_of_two_writers_one_is_told(tmp_path):
    with atomic_folder(tmp_path / "x") as folder:
        (folder / "first").write_text("")
        with pytest.raises(UserError, match="x is being written by another process"), atomic_folder(tmp_path / "x"):
            pass
    assert names(tmp_path / "x") == ["first"] and names(tmp_path) == ["x"]
    with atomic_folder(tmp_path / "x"):
        pass
    assert names(tmp_path / "x") == []


def test_text_replaces_the_old_file_and_failure_is_one_clear_line(tmp_path):
    for text in ("first", "second"):
        write_text(tmp_path / "x.txt", text)
    assert (tmp_path / "x.txt").read_text() == "second"
    with pytest.raises(UserError, match="Cannot write"):
        write_text(tmp_path / "x.txt" / "y.txt", "third")
    assert names(tmp_path) == ["x.txt"]


def test_next_free_path_takes_the_next_number_and_keeps_the_suffix(tmp_path):
    for place, second, third in (("x", "x_2", "x_3"), ("x.mp4", "x_2.mp4", "x_3.mp4")):
        assert next_free_path(tmp_path / place) == tmp_path / place
        (tmp_path / place).mkdir()
        (tmp_path / second).mkdir()
        assert next_free_path(tmp_path / place) == tmp_path / third


def test_folder_is_replaced_only_if_marked_and_overwrite_is_set(tmp_path):
    ours, other, empty, file = (tmp_path / name for name in ("ours", "other", "empty", "file"))
    for folder in (ours, other, empty):
        folder.mkdir()
    for path in (ours / "mark", other / "x", file):
        path.write_text("")
    for free in (empty, tmp_path / "new" / "deep"):
        check_new_folder(free, "a thing", "mark")
    check_new_folder(ours, "a thing", "sign", "mark", overwrite=True, sources=[other])
    for overwrite in (False, True):
        for place in (other, file):
            with pytest.raises(UserError, match=f"{place} exists and is not a thing; choose another folder"):
                check_new_folder(place, "a thing", "mark", overwrite=overwrite)
    with pytest.raises(UserError, match="exists already; choose another folder, or pass --overwrite"):
        check_new_folder(ours, "a thing", "mark")
    with pytest.raises(UserError, match=r"is the input .*part"):
        check_new_folder(ours, "a thing", "mark", overwrite=True, sources=[ours / "part"])
    with pytest.raises(UserError, match=r"Cannot write .*: a file exists where a folder is required"):
        check_new_folder(file / "x", "a thing", "mark")
    assert names(tmp_path) == ["empty", "file", "other", "ours"]


def test_file_is_replaced_only_if_overwrite_is_set(tmp_path):
    (tmp_path / "x.mp4").write_text("")
    check_new_file(tmp_path / "new" / "y.mp4", ".mp4", ".gif")
    check_new_file(tmp_path / "x.mp4", ".mp4", overwrite=True)
    with pytest.raises(UserError, match="exists already; choose another file, or pass --overwrite"):
        check_new_file(tmp_path / "x.mp4", ".mp4")
    with pytest.raises(UserError, match=r"--record must end in .mp4 or .gif, got .*x.avi"):
        check_new_file(tmp_path / "x.avi", ".mp4", ".gif", option="--record")
    with pytest.raises(UserError, match=r"Cannot write .*: Is a directory"):
        check_new_file(tmp_path, overwrite=True)


def test_plain_values_are_read_from_json_and_yaml():
    assert parse_json('{"a": [1, 2.5, null]}') == parse_yaml("a: [1, 2.5, null]") == {"a": [1, 2.5, None]}
    assert parse_yaml("a: &x {b: 1}\nc: {<<: *x, d: 2}") == {"a": {"b": 1}, "c": {"b": 1, "d": 2}}


DEEP = 20_000


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * DEEP, "nested too deeply"),
        ("- " * DEEP + "1", "nested too deeply"),
        ("a: 1\na: 2", "'a' twice"),
        ("a: [1", "expected"),
        ("a: 9" + "9" * 9_999, "Exceeds the limit|digits"),
        ('a: !!int ""', "does not fit its tag"),
        ("a: !!python/name:os.system", "could not determine a constructor"),
        ("a: \0", "characters are not allowed"),
    ],
)
def test_invalid_yaml_is_reported_in_one_line(text, message):
    with pytest.raises(ValueError, match=message) as refusal:
        parse_yaml(text)
    assert "\n" not in str(refusal.value)


def test_deep_json_is_reported_in_one_line():
    with pytest.raises(ValueError, match="nested too deeply"):
        parse_json("[" * 200_000)


@pytest.mark.parametrize("there", [True, False])
def test_link_stays_and_its_target_is_replaced_repeatedly(tmp_path: Path, there: bool) -> None:
    """With a link to a larger disk, a second replacement used to fail and lose the computed data."""
    disk, here = tmp_path / "disk", tmp_path / "here"
    for folder in (disk, here):
        folder.mkdir()
    if there:
        (disk / "set").mkdir()
        (disk / "note").write_text("old")
    (here / "set").symlink_to(disk / "set")
    (here / "note").symlink_to(disk / "note")
    for text in ("first", "second", "third"):
        with atomic_folder(here / "set") as folder:
            (folder / "content").write_text(text)
        write_text(here / "note", text)
    assert (here / "set").is_symlink() and (here / "note").is_symlink()
    assert (disk / "set" / "content").read_text() == (disk / "note").read_text() == "third"
    assert sorted(path.name for path in tmp_path.rglob("*")) == sorted(
        [*["disk", "here"], *["set", "note"] * 2, "content"]
    )
