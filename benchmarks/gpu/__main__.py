"""All measurements of a machine with a GPU, in the order of their value, in at most 40 minutes.

    make gpu
    python -m benchmarks.gpu --again throughput go1       # run finished steps again
    python -m benchmarks.gpu --table                      # only write the page
    python -m benchmarks.gpu --device cpu --quick         # all code in tiny sizes; results in runs/gpu

Each step runs in a process of its own with a time limit and writes a row to `benchmarks/results/gpu/STEP.json` as soon
as it is measured. A failed step keeps its rows and the reason, and the next step runs. The same command later runs the
steps that have not finished. The page is `benchmarks/results/gpu.md`.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from pathlib import Path

import torch

from benchmarks.common import RESULTS
from benchmarks.gpu import correctness, speed, training
from benchmarks.gpu.records import UNFINISHED, Options, Step, load_record, run_step, save_record, write_page

STEPS = {
    "device": Step("Is the machine usable, and do the kernels load?", correctness.device, 180),
    "parity": Step("Do the GPU and the CPU agree?", correctness.parity, 150),
    "waits": Step("How often does an update wait for the GPU?", correctness.waits, 120),
    "throughput": Step("How many environments run how fast?", speed.throughput, 300),
    "ppo": Step("Is PPO as fast as rsl_rl's?", speed.ppo, 180),
    "go1": Step("How soon does the Go1 walk?", training.go1, 510),
    "lift": Step("How fast does RL improve a cloned policy?", training.lift, 400),
    "flashsac": Step("How soon does it walk with FlashSAC?", training.flashsac, 165),
    "settings": Step("What do TF32 and compilation change?", speed.settings, 200),
    "cameras": Step("How fast are cameras?", speed.cameras, 75),
    "replay": Step("How fast is the replay buffer?", speed.replay, 30),
    "text": Step("How fast is GRPO?", training.text, 45),
    "worldmodel": Step("How fast are world models?", speed.worldmodel, 45),
}


def run_in_process(name: str, options: Options, seconds: float) -> None:
    """Run a step in a new process, which is ended after `seconds` with all processes that it has started."""
    words = ["--child", name, "--device", options.device, "--out", str(options.results.parent)]
    command = [sys.executable, "-m", "benchmarks.gpu", *words, *(["--quick"] if options.quick else [])]
    process = subprocess.Popen(command, start_new_session=True)
    try:
        process.wait(seconds)
        reason = f"the process ended with code {process.returncode}"
    except subprocess.TimeoutExpired:
        reason = f"stopped after {seconds:.0f} s"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    record = load_record(name, options)
    if record is None or record["error"] == UNFINISHED:
        empty = {"step": name, "rows": [], "seconds": seconds, "quick": options.quick, "versions": {}, "machine": {}}
        save_record(name, {**(record or empty), "error": reason}, options)


def is_finished(name: str, options: Options) -> bool:
    """Whether a step has run to its end."""
    record = load_record(name, options)
    return record is not None and record["error"] is None


def main() -> None:
    """Run the steps that have not finished, and write the page after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1, ... or cpu (default: cuda)")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, which run all code")
    parser.add_argument("--again", nargs="+", default=[], metavar="STEP", choices=STEPS, help="steps to run again")
    parser.add_argument("--table", action="store_true", help="only write the page from the finished steps")
    parser.add_argument(
        "--out", type=Path, help="folder (default: benchmarks/results; runs/gpu if quick or on the CPU)"
    )
    parser.add_argument("--child", choices=STEPS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    if device.type == "cuda" and not arguments.table and not torch.cuda.is_available():
        parser.error("no GPU is available to torch; pass --device cpu --quick to try the steps.")
    published = device.type == "cuda" and not arguments.quick
    out: Path = arguments.out or (RESULTS if published or arguments.table else Path("runs") / "gpu")
    options = Options(arguments.device, arguments.quick, out / "gpu", Path("runs") / "gpu" / "work")
    if arguments.child:
        run_step(arguments.child, STEPS[arguments.child], options)
        return
    for name, step in {} if arguments.table else STEPS.items():
        if name not in arguments.again and is_finished(name, options):
            print(f"{name}: has finished before", flush=True)
            continue
        print(f"{name}: {step.question}", flush=True)
        run_in_process(name, options, step.seconds * (10 if arguments.quick else 1))  # kernels compile on the CPU
        record = load_record(name, options) or {}
        print(f"{name}: {record.get('error') or 'finished'} after {record.get('seconds', 0):.0f} s", flush=True)
        write_page(STEPS, options)
    print(write_page(STEPS, options))


if __name__ == "__main__":
    main()
