"""Tests of the queue of jobs: order, failures, locks, and jobs that resume after a stop or a kill."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import pytest
import queued_cells as cells

from robopolicy.errors import UserError
from robopolicy.training.queue import QueueFolder, duration, estimate, locked, remaining, run_queue

# A queue in a process of its own, which the test can kill.
PROGRAM = """
import sys
from pathlib import Path
import queued_cells as cells
from robopolicy.training.queue import run_queue
if __name__ == "__main__":
    root = Path(sys.argv[1])
    jobs = [cells.job(root, name, getattr(cells, work)) for name, work in (arg.split(":") for arg in sys.argv[2:])]
    sys.exit(run_queue(jobs, root / "work").exit_code)
"""


def start_queue(root, *jobs):
    path = os.pathsep.join(sys.path)
    program = root / "program.py"
    program.write_text(PROGRAM)
    return subprocess.Popen([sys.executable, program, root, *jobs], env={**os.environ, "PYTHONPATH": path})


def wait_for(condition, seconds=20):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.02)


def test_jobs_run_by_priority_and_only_if_their_result_is_missing(tmp_path):
    jobs = [cells.job(tmp_path, name, priority=rank) for name, rank in (("a/1", 2), ("b/1", 1), ("b/2", 1), ("c", 0))]
    jobs[2].run(tmp_path)  # its result exists already
    lines = []
    report = run_queue(jobs, tmp_path / "work", report=lines.append)
    assert cells.order(tmp_path) == ["b/2", "c", "b/1", "a/1"]
    assert report.done == ["c", "b/1", "a/1"] and report.exit_code == 0
    assert "4 of 4 done" in lines[-1] and "of unknown length" in lines[1]
    assert not (tmp_path / "work/a/1").exists()  # folders of finished jobs are removed
    run_queue(jobs, tmp_path / "work", report=lines.append)
    assert lines[-1] == "Nothing to run: 4 of 4 done."


def test_a_failed_job_is_recorded_and_stops_nothing(tmp_path):
    jobs = [cells.job(tmp_path, "bad", cells.failing), cells.job(tmp_path, "good")]
    lines = []
    report = run_queue(jobs, tmp_path / "work", report=lines.append)
    assert report.failed == ["bad"] and report.done == ["good"] and report.exit_code == 1
    assert "bad: FAILED: ValueError: of no use" in lines[1]
    workspace = QueueFolder(tmp_path / "work")
    assert workspace.state(jobs[0]) == "failed" and workspace.state(jobs[1]) == "done"
    record = json.loads((tmp_path / "work/bad/failed.json").read_text())
    assert "in failing" in record["traceback"]
    assert "about to divide" in (tmp_path / "work/bad/log.txt").read_text()
    assert run_queue(jobs, tmp_path / "work").failed == ["bad"] and cells.order(tmp_path).count("bad") == 1
    run_queue(jobs, tmp_path / "work", retry_failed=True)
    assert cells.order(tmp_path).count("bad") == 2


def test_jobs_have_one_thread_and_the_niceness_of_the_queue(tmp_path):
    run_queue([cells.job(tmp_path, "a", cells.threads)], tmp_path / "work", niceness=3)
    assert cells.result(tmp_path, "a").read_text() == f"1 {min(19, os.nice(0) + 3)}"


def test_a_killed_job_is_left_for_the_next_queue(tmp_path):
    jobs = [cells.job(tmp_path, "a", cells.killing_itself), cells.job(tmp_path, "b")]
    lines = []
    report = run_queue(jobs, tmp_path / "work", report=lines.append)
    assert report.interrupted == ["a"] and report.done == ["b"]
    assert "ended by signal 9" in lines[1] and QueueFolder(tmp_path / "work").state(jobs[0]) == "interrupted"


def test_a_killed_queue_loses_nothing_and_its_jobs_resume(tmp_path):
    queue = start_queue(tmp_path, "count:counting")
    steps = tmp_path / "work/count/steps.txt"
    wait_for(lambda: steps.exists() and len(steps.read_text()) > 3)
    queue.kill()
    queue.wait()
    job = cells.job(tmp_path, "count", cells.counting)
    workspace = QueueFolder(tmp_path / "work")
    wait_for(lambda: workspace.state(job) == "interrupted")  # the job ends with its queue, and releases its lock
    counted = len(steps.read_text())
    assert run_queue([job], tmp_path / "work").done == ["count"]
    assert 3 < int(cells.result(tmp_path, "count").read_text()) == counted


def test_a_signal_stops_the_queue(tmp_path):
    queue = start_queue(tmp_path, "long:sleeping", "other:sleeping")
    wait_for(lambda: (tmp_path / "order.txt").exists())
    queue.send_signal(signal.SIGINT)
    assert queue.wait(timeout=20) == 130
    assert cells.order(tmp_path) == ["long"] and not cells.is_stored(tmp_path, "long")


def test_a_second_signal_kills_jobs_that_do_not_stop(tmp_path):
    queue = start_queue(tmp_path, "long:stubborn", "other:sleeping")
    folder = tmp_path / "work/long"
    for sign in "ready", "warned":
        wait_for((folder / sign).exists)
        queue.send_signal(signal.SIGINT)
    assert queue.wait(timeout=20) == 130
    assert cells.order(tmp_path) == ["long"] and not cells.is_stored(tmp_path, "long")


def test_two_queues_never_run_one_job_at_a_time(tmp_path):
    queue = start_queue(tmp_path, "held:waiting", "next:counting")
    folder = tmp_path / "work/held"
    wait_for((folder / "ready").exists)
    jobs = [cells.job(tmp_path, name, cells.counting) for name in ("held", "next")]
    workspace = QueueFolder(tmp_path / "work")
    assert workspace.state(jobs[0]) == "running"
    assert workspace.lock_file(jobs[0]).read_text().split()[0].isdecimal()

    def release(line: str) -> None:
        """Let the first queue continue when the second one has passed over its job and runs the other."""
        if line.startswith("next: started"):
            wait_for(lambda: workspace.state(jobs[1]) == "running")
            (folder / "release").touch()

    report = run_queue(jobs, tmp_path / "work", report=release)
    assert queue.wait(timeout=20) == 0
    assert report.elsewhere == ["held"] and sorted(cells.order(tmp_path)) == ["held", "next"]


def test_a_process_that_ends_before_its_job_is_a_failure(tmp_path):
    report = run_queue([cells.job(tmp_path, "a", cells.leaving)], tmp_path / "work")
    assert report.failed == ["a"] and report.exit_code == 1
    assert QueueFolder(tmp_path / "work").failure(cells.job(tmp_path, "a")) == "its process ended with exit code 3"


def test_looking_at_a_job_does_not_keep_it_from_running(tmp_path):
    workspace, job = QueueFolder(tmp_path / "work"), cells.job(tmp_path, "a")
    workspace.lock_file(job).parent.mkdir(parents=True)
    workspace.lock_file(job).touch()
    ended = threading.Event()

    def look():
        while not ended.is_set():
            workspace.state(job)

    looking = threading.Thread(target=look)
    looking.start()
    report = run_queue([job], tmp_path / "work")
    ended.set()
    looking.join()
    assert report.done == ["a"]


def test_a_lock_of_a_dead_process_is_free(tmp_path):
    (tmp_path / "a.lock").write_text("1 somewhere\n")
    with locked(tmp_path / "a.lock", wait=0) as first, locked(tmp_path / "a.lock", wait=0) as second:
        assert first and not second
    done = []
    with locked(tmp_path / "a.lock"):
        waiting = threading.Thread(target=partial(_wait_and_append, tmp_path / "a.lock", done))
        waiting.start()
        time.sleep(0.1)
        assert not done
    waiting.join(timeout=10)
    assert done == [True]


def test_estimates_use_the_durations_of_finished_jobs(tmp_path):
    workspace = QueueFolder(tmp_path)
    jobs = {name: cells.job(tmp_path, name) for name in ("control/ppo-0", "control/sac-0", "text/grpo-0")}
    assert estimate(list(jobs.values()), workspace) == (0.0, 3)
    workspace.record(jobs["control/ppo-0"], 10.0)
    workspace.record(cells.job(tmp_path, "control/ppo-1"), 30.0)
    assert estimate([cells.job(tmp_path, "control/ppo-7")], workspace) == (20.0, 0)
    assert estimate([jobs["control/sac-0"]], workspace) == (20.0, 0)  # of the same study
    assert estimate([cells.job(tmp_path, "text/grpo-0", seconds=5.0), jobs["control/ppo-0"]], workspace) == (25.0, 0)
    assert remaining(list(jobs.values()), workspace, 2) == "about 20 s left and 1 of unknown length"
    assert remaining([jobs["text/grpo-0"]], workspace, 1) == "1 of unknown length" and remaining([], workspace, 1) == ""
    assert [duration(s) for s in (50, 900, 9000, 50_000, 500_000)] == ["50 s", "15 min", "2.5 h", "14 h", "6 days"]


def test_jobs_with_one_name_and_folders_that_cannot_be_written_are_refused(tmp_path):
    with pytest.raises(UserError, match="same name"):
        run_queue([cells.job(tmp_path, "a"), cells.job(tmp_path, "a")], tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="choose another folder"):
        run_queue([], Path(tmp_path / "file"))


def _wait_and_append(file, done):
    with locked(file) as free:
        done.append(free)
