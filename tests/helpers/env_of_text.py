"""The environment of a text task with a small policy."""

from typing import Any

import torch

from robopolicy.spec import PolicySpec
from robopolicy.text.policy import TextConfig, TextPolicy
from robopolicy.text.text_env import TextEnv


def env_of(task, seed=0) -> Any:
    torch.manual_seed(seed)
    spec = PolicySpec({"text": (task.prompt_bytes,)}, task.completion_bytes)
    policy = TextPolicy(TextConfig(width=16, layers=1, heads=2, context=160), spec)
    return TextEnv(policy, task, torch.Generator().manual_seed(seed))
