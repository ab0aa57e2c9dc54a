"""Tests of parallel_map: items are processed in separate processes."""

import math

import torch

from robopolicy.training.parallel import parallel_map


def test_results_and_errors_are_returned_with_their_items():
    done = dict(parallel_map(math.sqrt, [4.0, -1.0, 9.0], jobs=2))
    assert (done[4.0].result(), done[9.0].result()) == (2.0, 3.0)
    assert isinstance(done[-1.0].exception(), ValueError)


def test_processes_use_one_torch_thread():
    ((_, future),) = parallel_map(threads, [None], jobs=1)
    assert future.result() == 1


def threads(_: None) -> int:
    return torch.get_num_threads()
