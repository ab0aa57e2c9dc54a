"""ONNX graphs of policies: names of inputs and outputs, metadata and sessions; without torch.

Inputs are the observations by key, `(B, To, ...)`, and optionally

    noise           (B, R, A)   noise of one decision, starting with the noise of the chunk
    prefix          (B, H, A)   actions to continue, in action units
    prefix_weight   (B, H)      weight of each prefix action, 0 without a prefix

Outputs are `chunk` `(B, H, A)` and, for recurrent policies, `next_memory` `(B, 1, M)`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from robopolicy.errors import UserError
from robopolicy.optional import require
from robopolicy.spec import PolicySpec

METADATA = "robopolicy"  # key in the metadata of the file
NOISE, CHUNK = "noise", "chunk"
PREFIX, PREFIX_WEIGHT = "prefix", "prefix_weight"
NEXT_MEMORY = "next_memory"
_TYPES = {"float": np.float32, "double": np.float64, "float16": np.float16, "uint8": np.uint8, "int64": np.int64}
TYPES = {f"tensor({name})": kind for name, kind in _TYPES.items()}


def metadata(spec: PolicySpec, network_calls: int = 1) -> dict[str, str]:
    """Metadata of a graph with its specification."""
    return {METADATA: json.dumps({**spec.to_dict(), "network_calls": network_calls})}


def open_session(source: bytes | Path, threads: int, *, cuda: bool = False) -> Any:
    """Open a session of onnxruntime; idle threads do not spin, since the control loop needs the cores.

    Args:
        source: Path or content of the graph.
        threads: Threads per operator; 0 for one per core.
        cuda: Use the GPU if the runtime supports it.

    Raises:
        UserError: The graph cannot be run here.
    """
    runtime = require("onnxruntime", "onnx")
    options = runtime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.log_severity_level = 3
    gpu = ["CUDAExecutionProvider"] if cuda and "CUDAExecutionProvider" in runtime.get_available_providers() else []
    content = source if isinstance(source, bytes) else str(source)
    try:
        return runtime.InferenceSession(content, options, providers=[*gpu, "CPUExecutionProvider"])
    except Exception as error:  # the runtime has its own error classes
        reason = str(error).splitlines()[0]
        raise UserError(f"onnxruntime cannot run this graph ({reason}); export it for this version.") from error
