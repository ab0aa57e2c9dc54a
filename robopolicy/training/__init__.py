"""The loop, checkpoints, resume and logging."""

import robopolicy.text  # noqa: F401 - runs and checkpoints may name its policy and algorithms
