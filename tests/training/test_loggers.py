"""Tests of metrics files and console output: complete, resumable, readable without any service."""

import csv
import io

import pytest
from rich.console import Console

from robopolicy.errors import UserError
from robopolicy.training.loggers import CsvLogger, JsonlLogger, RunConsole, read_jsonl


def table(file):
    with file.open(newline="") as stream:
        return list(csv.DictReader(stream))


def test_rows_are_on_disk_immediately(tmp_path):
    logger = JsonlLogger(tmp_path / "m.jsonl")
    logger.log(1, {"loss": 0.1 + 0.2})
    assert read_jsonl(tmp_path / "m.jsonl") == [{"update": 1, "loss": 0.1 + 0.2}]
    logger.close()


def test_csv_grows_columns(tmp_path):
    logger = CsvLogger(tmp_path / "m.csv")
    logger.log(1, {"loss": 1.5})
    logger.log(2, {"loss": 1.25, "a, b": 3})
    logger.log(3, {"a, b": 4})
    assert table(tmp_path / "m.csv") == [
        {"update": "1", "loss": "1.5", "a, b": ""},
        {"update": "2", "loss": "1.25", "a, b": "3"},
        {"update": "3", "loss": "", "a, b": "4"},
    ]


@pytest.mark.parametrize("kind, suffix", [(JsonlLogger, "jsonl"), (CsvLogger, "csv")])
def test_resume_drops_rows_after_the_resume_point(tmp_path, kind, suffix):
    file = tmp_path / f"m.{suffix}"
    first = kind(file)
    for update in (1, 2, 3):
        first.log(update, {"x": update})
    first.close()
    with file.open("a") as stream:
        stream.write('{"update": 4, "x' if suffix == "jsonl" else "4")  # cut short by a kill
    second = kind(file, resume_at=2)
    second.log(3, {"x": 30, "y": 1})
    second.close()
    rows = read_jsonl(file) if suffix == "jsonl" else table(file)
    assert [(int(row["update"]), int(row["x"])) for row in rows] == [(1, 1), (2, 2), (3, 30)]


@pytest.mark.parametrize("kind, suffix", [(JsonlLogger, "jsonl"), (CsvLogger, "csv")])
def test_restarted_run_replaces_its_first_row(tmp_path, kind, suffix):
    file = tmp_path / f"m.{suffix}"
    for x in (1, 2):  # killed before its first resume point, then restarted
        logger = kind(file)
        logger.log(0, {"x": x})
        logger.close()
    rows = read_jsonl(file) if suffix == "jsonl" else table(file)
    assert [(int(row["update"]), int(row["x"])) for row in rows] == [(0, 2)]


def test_damaged_lines_in_the_middle_are_named(tmp_path):
    (tmp_path / "m.jsonl").write_text('{"update": 1}\nnonsense\n{"update": 2}\n')
    with pytest.raises(UserError, match="line 2"):
        read_jsonl(tmp_path / "m.jsonl")


@pytest.mark.parametrize("line", ['{"loss": 1}', "[1]", '{"update": "x"}'])
def test_lines_without_an_update_are_named(tmp_path, line):
    (tmp_path / "m.jsonl").write_text(f'{line}\n{{"update": 2}}\n')
    with pytest.raises(UserError, match="line 1 has no number 'update'"):
        read_jsonl(tmp_path / "m.jsonl")


@pytest.mark.parametrize("kind, suffix", [(JsonlLogger, "jsonl"), (CsvLogger, "csv")])
def test_files_that_are_no_text_are_named(tmp_path, kind, suffix):
    (tmp_path / f"m.{suffix}").write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match=f"m.{suffix} is damaged"):
        kind(tmp_path / f"m.{suffix}", 1)


def test_plain_output_is_one_line_per_row():
    text = io.StringIO()
    console = RunConsole("run", 10, console=Console(file=text, width=40, soft_wrap=True))
    console.row(5, {"rollout/success": 0.25, "actor/loss": 1.0, "other": 3.0})
    console.close()
    assert text.getvalue().startswith("run  update 5/10  success 0.25  loss 1  ")
    assert text.getvalue().count("\n") == 1


def test_steps_and_critic_are_shown_and_the_clock_continues_after_a_resume():
    text = io.StringIO()
    console = RunConsole("run", 10, done=5, console=Console(file=text, soft_wrap=True))
    console.seconds_before = 60.0
    console.row(5, {"critic/loss": 0.5, "train/env_steps": 12_000.0})
    console.row(6, {"actor/loss": 1.0, "train/env_steps": 0})
    console.close()
    first, second = text.getvalue().splitlines()
    assert first.startswith("run  update 5/10  steps 12,000  critic 0.5  60 s, ")
    assert second.startswith("run  update 6/10  loss 1  60 s, ")


def test_closed_terminal_raises_no_error():
    class Gone(io.StringIO):
        def write(self, text):
            raise OSError(5, "Input/output error")

    console = RunConsole("run", 10, console=Console(file=Gone()))
    console.note("said to nobody")
    console.close()


def test_terminals_get_a_progress_bar():
    text = io.StringIO()
    console = RunConsole("run", 10, done=2, console=Console(file=text, force_terminal=True, width=120))
    console.row(5, {"rollout/success": 0.25})
    console.advance(10)
    console.close()
    assert "10/10" in text.getvalue()
    assert "success 0.25" in text.getvalue()
