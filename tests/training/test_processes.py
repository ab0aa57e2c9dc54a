"""Items that are worked on in processes of their own."""

import math

import torch

from robopolicy.training.workers import parallel_map


def test_results_and_errors_come_back_with_their_items():
    done = dict(parallel_map(math.sqrt, [4.0, -1.0, 9.0], jobs=2))
    assert (done[4.0].result(), done[9.0].result()) == (2.0, 3.0)
    assert isinstance(done[-1.0].exception(), ValueError)


def test_processes_have_one_thread_of_torch():
    ((_, future),) = parallel_map(threads, [None], jobs=1)
    assert future.result() == 1


def threads(_: None) -> int:
    return torch.get_num_threads()
