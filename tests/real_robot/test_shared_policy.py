"""Test of a policy that several runners share: the owner waits for a request that its runner has abandoned."""

import threading
import time

import numpy as np

from robopolicy.spec import PolicySpec
from robopolicy_robots.policy_runner import PolicyRunner
from robopolicy_robots.policy_source import SharedChunkPolicy


class Slow:
    """Policy whose request takes longer than its runner waits for it, such as one that encodes a demonstration."""

    spec = PolicySpec({"state": (1,)}, 1)
    takes_prefix = False

    def __init__(self):
        self.started, self.ended = threading.Event(), False

    def chunk(self, obs, prefix=None):
        self.started.set()
        time.sleep(1.0)
        self.ended = True
        return np.zeros((1, 1), np.float32)


def test_the_owner_waits_for_an_abandoned_request():
    policy = Slow()
    shared = SharedChunkPolicy(policy)
    runner = PolicyRunner(shared)
    runner.request({"state": np.zeros((1, 1), np.float32)}, 0.0)
    assert policy.started.wait(5.0)
    runner.close()
    assert not policy.ended, "the runner does not wait"
    with shared.idle():
        assert policy.ended
