"""A queue of long jobs that survives interruptions; every job runs in its own process.

A job writes its result itself, so the queue keeps no state that could be lost: whatever has no result is missing. A job
holds a file lock while it runs. The system releases the lock with the process, even after `kill -9`, so that several
queues share a folder and never run the same job twice.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import connection, get_context, parent_process
from multiprocessing.context import SpawnProcess
from pathlib import Path
from statistics import median
from typing import IO, Literal

from robopolicy.atomic import write_text
from robopolicy.errors import UserError
from robopolicy.shutdown import Interrupted, handle_shutdown

State = Literal["done", "failed", "running", "interrupted", "missing"]
LOG, FAILURE, DURATIONS = "log.txt", "failed.json", "durations.jsonl"
FAILED, STOPPED, BUSY = 70, 75, 76  # exit codes of a job's process: software failure, try again, locked
LOOK = 1.0  # [s] longest time that a look at the lock of a job can hold it
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@dataclass(frozen=True)
class Job:
    """One job; `run` and `is_done` belong to importable modules, since they are pickled."""

    name: str  # unique; parts between slashes are folders
    run: Callable[[Path], object]  # does the work in a folder that survives interruptions, and stores the result
    is_done: Callable[[], bool]  # whether the result is stored
    priority: int = 0  # lower starts first
    seconds: float | None = None  # expected duration
    describe: Callable[[], str] = str  # one line about a stored result

    @property
    def group(self) -> str:
        """The name without the part after the last hyphen, usually a seed: jobs of a group take equally long."""
        return self.name.rpartition("-")[0] or self.name


@dataclass
class QueueReport:
    """Names of the jobs by what became of them."""

    done: list[str] = field(default_factory=list)  # stored by this queue
    failed: list[str] = field(default_factory=list)  # including earlier failures that were not retried
    interrupted: list[str] = field(default_factory=list)  # stopped or killed; they resume
    elsewhere: list[str] = field(default_factory=list)  # running in another queue
    signal: int | None = None  # that stopped the queue

    @property
    def exit_code(self) -> int:
        """128 + signal after a signal, 1 after failed or killed jobs, else 0."""
        return 128 + self.signal if self.signal else int(bool(self.failed or self.interrupted))


class QueueFolder:
    """Folder of a queue: locks, durations, and one folder per unfinished job."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def folder(self, job: Job) -> Path:
        """Folder of an unfinished job."""
        return self.root / job.name

    def state(self, job: Job) -> State:
        """State of a job; interrupted jobs continue from what their folder contains."""
        if job.is_done():
            return "done"
        if is_locked(self.lock_file(job)):
            return "running"
        if (self.folder(job) / FAILURE).exists():
            return "failed"
        return "interrupted" if self.folder(job).exists() else "missing"

    def failure(self, job: Job) -> str | None:
        """Error of a failed job, in one line; None if none is recorded."""
        try:
            return json.loads((self.folder(job) / FAILURE).read_text(encoding="utf-8"))["error"]
        except (OSError, ValueError, KeyError):
            return None

    def lock_file(self, job: Job) -> Path:
        """File that is locked while the job runs; it is never deleted, so that all processes lock the same file."""
        return self.root / ".locks" / f"{job.name.replace('/', '~')}.lock"

    def record(self, job: Job, seconds: float) -> None:
        """Store the duration of an uninterrupted job."""
        with (self.root / DURATIONS).open("a", encoding="utf-8") as stream:
            stream.write(json.dumps({"name": job.name, "group": job.group, "seconds": round(seconds, 1)}) + "\n")

    def durations(self) -> dict[str, list[float]]:
        """Durations of finished jobs by group and by first part of the name."""
        found: dict[str, list[float]] = {}
        with suppress(OSError):
            for line in (self.root / DURATIONS).read_text(encoding="utf-8").splitlines():
                with suppress(ValueError, KeyError):
                    row = json.loads(line)
                    for key in {row["group"], row["name"].partition("/")[0]}:
                        found.setdefault(key, []).append(float(row["seconds"]))
        return found


def run_queue(
    jobs: Sequence[Job],
    work: Path,
    *,
    parallel: int = 1,
    niceness: int = 0,
    retry_failed: bool = False,
    report: Callable[[str], object] = print,
) -> QueueReport:
    """Run all jobs without a result, `parallel` at a time, each on one thread.

    A failed job is recorded in its folder and does not stop the others. SIGINT, SIGTERM and SIGHUP stop the queue:
    training runs save a resume point. A second signal kills the jobs. Start the queue again to continue.

    Args:
        jobs: Jobs, started by priority and then in this order.
        work: Folder for unfinished jobs, shared by all queues that run the same jobs.
        parallel: Jobs at a time.
        niceness: Added to the niceness of the processes; 19 leaves the machine to everything else.
        retry_failed: Run failed jobs again.
        report: Receives one line per event.

    Raises:
        UserError: Two jobs have one name, or the folder cannot be written.
    """
    if len({job.name for job in jobs}) < len(jobs):
        raise UserError("Two jobs of the queue have the same name.")
    try:
        (work / ".locks").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"Cannot write {work}: {error.strerror}; choose another folder.") from error
    return _Queue(jobs, QueueFolder(work), parallel, niceness, retry_failed, report).run()


@contextmanager
def locked(file: Path, *, wait: float | None = None) -> Iterator[bool]:
    """Hold the lock `file`, which contains the process id of the holder; False if it is held for `wait` seconds.

    Without `wait`, it waits as long as needed.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a+", encoding="utf-8") as stream:
        if wait is None:
            fcntl.flock(stream, fcntl.LOCK_EX)
        elif not _lock_within(stream, wait):
            yield False
            return
        stream.truncate(0)
        stream.write(f"{os.getpid()} {socket.gethostname()}\n")
        stream.flush()
        yield True


def _lock_within(stream: IO[str], seconds: float) -> bool:
    until = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= until:
                return False
            time.sleep(0.01)


def is_locked(file: Path) -> bool:
    """Whether another process holds the lock `file`, which is held here for a moment."""
    if not file.exists():
        return False
    with file.open(encoding="utf-8") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False


class _Queue:
    def __init__(
        self,
        jobs: Sequence[Job],
        place: QueueFolder,
        parallel: int,
        niceness: int,
        retry_failed: bool,
        report: Callable[[str], object],
    ) -> None:
        self.place, self.parallel, self.niceness, self.report = place, parallel, niceness, report
        self.waiting: list[Job] = []
        self.running: dict[Job, tuple[SpawnProcess, float | None]] = {}  # process, and start of a whole run
        self.result, self.signals, self.total = QueueReport(), 0, len(jobs)
        for job in sorted(jobs, key=lambda job: job.priority):
            if job.is_done():
                continue
            if not retry_failed and (place.folder(job) / FAILURE).exists():
                self.result.failed.append(job.name)
                continue
            self.waiting.append(job)

    def run(self) -> QueueReport:
        if not self.waiting:
            self.report(f"Nothing to run: {self._progress()}.")
        with handle_shutdown(self._stop):
            while self.running or (self.waiting and not self.signals):
                while self.waiting and len(self.running) < self.parallel and not self.signals:
                    self._start(self.waiting.pop(0))
                ended = connection.wait([process.sentinel for process, _ in self.running.values()], timeout=0.2)
                for job in [job for job, (process, _) in self.running.items() if process.sentinel in ended]:
                    self._finish(job)
        return self.result

    def _start(self, job: Job) -> None:
        whole = not self.place.folder(job).exists()
        place = self.place.folder(job), self.place.lock_file(job)
        process = get_context("spawn").Process(target=_work, args=(job.run, job.is_done, *place, self.niceness))
        with _one_thread():
            process.start()
        self.report(f"{job.name}: started; its output is in {place[0] / LOG}")
        self.running[job] = process, time.monotonic() if whole else None

    def _finish(self, job: Job) -> None:
        process, start = self.running.pop(job)
        _kill_group(process)  # what the job has started and left behind, before the system can reuse its process id
        process.join()
        if process.exitcode == BUSY:
            self.result.elsewhere.append(job.name)
            return
        if process.exitcode == 0 and job.is_done():
            self.result.done.append(job.name)
            line = f"{job.name}: {job.describe() or 'done'}"
            if start is not None:
                spent = time.monotonic() - start
                self.place.record(job, spent)
                line += f" in {duration(spent)}"
            self.report(f"{line} ({self._progress()})")
        elif process.exitcode is not None and process.exitcode >= 0 and process.exitcode != STOPPED:
            if self.place.failure(job) is None:  # it did not reach its job, or a library ended it
                _record_failure(self.place.folder(job), f"its process ended with exit code {process.exitcode}")
            self.result.failed.append(job.name)
            self.report(f"{job.name}: FAILED: {self.place.failure(job)} ({self._progress()})")
        else:
            self.result.interrupted.append(job.name)
            stopped = self.signals or process.exitcode == STOPPED
            ended = "stopped" if stopped else f"ended by signal {-(process.exitcode or 0)}"
            self.report(f"{job.name}: {ended}; it continues when the queue starts again")

    def _progress(self) -> str:
        gone = [*self.result.failed, *self.result.interrupted, *self.result.elsewhere]
        finished = self.total - len(self.waiting) - len(self.running) - len(gone)
        parts = [f"{finished} of {self.total} done"]
        parts += [f"{len(self.result.failed)} failed"] if self.result.failed else []
        return ", ".join(filter(None, [*parts, remaining([*self.waiting, *self.running], self.place, self.parallel)]))

    def _stop(self, number: int) -> None:
        self.signals += 1
        self.result.signal = number
        if self.signals == 1:
            self.report("Stopping: running jobs save what they can; a second signal kills them.")
        for process, _ in self.running.values():
            if self.signals == 1:
                process.terminate()
            else:
                _kill_group(process)


def estimate(jobs: Sequence[Job], place: QueueFolder) -> tuple[float, int]:
    """Expected seconds of `jobs`, one at a time, and the number of jobs without an estimate, which are left out.

    Durations are measured or stated, else of jobs whose names have the same first part.
    """
    known = place.durations()
    total, unknown = 0.0, 0
    for job in jobs:
        alike = known.get(job.group)
        if alike is None and job.seconds is None:
            alike = known.get(job.name.partition("/")[0])
        seconds = median(alike) if alike else job.seconds
        total += seconds or 0.0
        unknown += seconds is None
    return total, unknown


def remaining(jobs: Sequence[Job], place: QueueFolder, parallel: int) -> str:
    """Estimate for the end of `jobs` in words; empty without jobs."""
    if not jobs:
        return ""
    total, unknown = estimate(jobs, place)
    parts = [f"about {duration(total / parallel)} left"] if unknown < len(jobs) else []
    return " and ".join([*parts, *([f"{unknown} of unknown length"] if unknown else [])])


def duration(seconds: float) -> str:
    """Readable duration: 40 s, 12 min, 3.5 h, 4 days."""
    for size, unit in ((86_400, "days"), (3_600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.{int(unit == 'h' and seconds < 36_000)}f} {unit}"
    return f"{seconds:.0f} s"


def _work(run: Callable[[Path], object], is_done: Callable[[], bool], folder: Path, lock: Path, niceness: int) -> None:
    """Run a job in its process: a session of its own, which terminals do not interrupt, with its output in a file."""
    os.setsid()
    os.nice(niceness)
    threading.Thread(target=_stop_with_parent, daemon=True).start()
    with locked(lock, wait=LOOK) as free:
        if not free:
            sys.exit(BUSY)
        if is_done():  # another queue has stored it since
            return
        folder.mkdir(parents=True, exist_ok=True)
        (folder / FAILURE).unlink(missing_ok=True)
        with (folder / LOG).open("a", encoding="utf-8", buffering=1) as log:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
                os.dup2(log.fileno(), stream.fileno())
        try:
            run(folder)
        except Interrupted:
            sys.exit(STOPPED)
        except (Exception, SystemExit) as error:
            text = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
            _record_failure(folder, " ".join(text.split()), traceback.format_exc())
            sys.exit(FAILED)
        if not is_done():
            _record_failure(folder, "it ended without a result")
            sys.exit(FAILED)
        shutil.rmtree(folder, ignore_errors=True)


def _record_failure(folder: Path, error: str, details: str = "") -> None:
    what = {"error": error, "traceback": details, "time": time.ctime()}
    write_text(folder / FAILURE, json.dumps(what, indent=2) + "\n")


def _stop_with_parent() -> None:
    """Stop this process when its queue has ended, even by `kill -9`."""
    parent = parent_process()
    if parent is not None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)
        os._exit(STOPPED)


def _kill_group(process: SpawnProcess) -> None:
    """Kill a job and all processes that it has started."""
    assert process.pid is not None
    with suppress(ProcessLookupError, PermissionError):  # it has no session yet, or all have ended
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()


@contextmanager
def _one_thread() -> Iterator[None]:
    """Let processes that start inside use one thread each; libraries read these variables when they are imported."""
    before = {name: os.environ.get(name) for name in THREADS}
    os.environ.update(dict.fromkeys(THREADS, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
