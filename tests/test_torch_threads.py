"""Tests of torch threads: results do not depend on the thread that computes them."""

import os
import subprocess
import sys

import pytest

SCRIPT = """
import os
import threading

import torch

from robopolicy.device import use_configured_threads

torch.set_num_threads(1)
network = torch.nn.Sequential(torch.nn.Linear(70, 256), torch.nn.SiLU(), torch.nn.Linear(256, 8))
inputs = torch.randn(64, 70)
outputs = [network(inputs)]


def compute():
    {first_line}
    outputs.append(network(inputs))
    print(torch.equal(*outputs), len(os.listdir("/proc/self/task")))


thread = threading.Thread(target=compute)
thread.start()
thread.join()
"""


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="counts the threads of the process on Linux")
def test_a_new_thread_computes_with_the_configured_torch_threads() -> None:
    def run(first_line: str) -> tuple[str, int]:
        command = [sys.executable, "-c", SCRIPT.format(first_line=first_line)]
        environment = {**os.environ, "OMP_NUM_THREADS": "4", "MKL_NUM_THREADS": "4"}
        output = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=120)
        equal, threads = output.stdout.split()
        return equal, int(threads)

    (equal, threads), (_, default) = run("use_configured_threads()"), run("pass")
    assert equal == "True"
    assert threads <= default - 3  # torch starts three more of its own, unless it is asked
