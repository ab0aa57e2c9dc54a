"""Tests of the Slurm scripts in examples, with the variables of a job of one node and replaced Slurm commands."""

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from replay_runs import COMMON
from run_rules import SETTINGS

EXAMPLES = Path(__file__).parents[2] / "examples"
COMMANDS = {
    "scontrol": "echo localhost",
    "srun": 'while [[ "$1" == --* ]]; do [[ "$1" == --overlap ]] || shift; shift; done; exec "$@"',  # drops options
    "torchrun": f'exec {sys.executable} -m torch.distributed.run "$@"',
    "robopolicy": f'exec {sys.executable} -m robopolicy "$@"',
}


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("localhost", 0))
        return int(server.getsockname()[1])


def run_script(name: str, folder: Path, *words: str, **variables: str) -> None:
    """Run a script as a Slurm job of one node would."""
    for command, text in COMMANDS.items():
        (folder / command).write_text(f"#!/bin/bash\n{text}\n")
        (folder / command).chmod(0o755)
    path = f"{folder}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    job = {
        "SLURM_JOB_NODELIST": "localhost",
        "SLURM_JOB_NUM_NODES": "1",
        "SLURM_JOB_ID": "7",
        "SLURM_CPUS_PER_TASK": "2",
    }
    environment = {**os.environ, **job, "PATH": path, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", **variables}
    with subprocess.Popen(["bash", str(EXAMPLES / name), *words], env=environment, start_new_session=True) as process:
        try:
            assert process.wait(timeout=240) == 0
        finally:
            with suppress(ProcessLookupError):  # it has ended, and its children with it
                os.killpg(process.pid, signal.SIGTERM)


@pytest.mark.parametrize("script", sorted(EXAMPLES.glob("*.sh")), ids=lambda path: path.name)
def test_scripts_parse_and_stop_at_the_first_error(script: Path):
    subprocess.run(["bash", "-n", str(script)], check=True)
    lines = script.read_text().splitlines()
    assert lines[0] == "#!/bin/bash" and "set -euo pipefail" in lines
    first_command = next(number for number, line in enumerate(lines) if line and not line.startswith("#"))
    assert all(number < first_command for number, line in enumerate(lines) if line.startswith("#SBATCH"))


@pytest.mark.slow
def test_the_slurm_script_trains_in_all_processes_of_a_node(tmp_path: Path):
    words = [
        *SETTINGS,
        "algorithm=ppo",
        "algorithm.num_steps=8",
        "evaluation.episodes=0",
        f"out={tmp_path}",
        "name=run",
    ]
    run_script("slurm.sh", tmp_path, *words, SLURM_GPUS_ON_NODE="2", RDZV_PORT=str(free_port()))
    report = json.loads((tmp_path / "run/report.json").read_text())
    assert report["update"] == 2


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed")
def test_the_ray_script_trains_with_actors(tmp_path: Path):
    words = ["train", *COMMON, "algorithm=sac", "budget.updates=3", "sim.num_workers=2", "sim.worker_backend=ray"]
    run_script("slurm_ray.sh", tmp_path, *words, f"out={tmp_path}", "name=run", RAY_PORT=str(free_port()))
    assert json.loads((tmp_path / "run/report.json").read_text())["update"] == 3
