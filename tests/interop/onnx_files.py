"""Small ONNX files for the tests."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

WEIGHT = np.random.default_rng(0).normal(size=(6, 8)).astype(np.float32)


def write(path: Path, inputs: dict[str, list[Any]], nodes: list[Any], output: list[Any], **extra: Any) -> Path:
    """Write a graph; `extra` contains constants, `metadata`, and `types` of values other than float32."""
    properties, types = extra.pop("metadata", {}), extra.pop("types", {})
    values = [helper.make_tensor_value_info(k, types.get(k, TensorProto.FLOAT), shape) for k, shape in inputs.items()]
    chunk = helper.make_tensor_value_info("chunk", types.get("chunk", TensorProto.FLOAT), output)
    constants = [numpy_helper.from_array(value, name) for name, value in extra.items()]
    graph = helper.make_graph(nodes, "policy", values, [chunk], constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    helper.set_model_props(model, properties)
    onnx.save(model, path)
    return path


def noisy(path: Path, batch: Any = "B", state: str = "state", **extra: Any) -> Path:
    """chunk `(B, 4, 2)` = noise + reshape(state @ WEIGHT) for states `(B, 6)`."""
    nodes = [
        helper.make_node("MatMul", [state, "weight"], ["flat"]),
        helper.make_node("Reshape", ["flat", "sizes"], ["mean"]),
        helper.make_node("Add", ["mean", "noise"], ["chunk"]),
    ]
    inputs = {state: [batch, 6], "noise": [batch, 4, 2]}
    return write(path, inputs, nodes, [batch, 4, 2], weight=WEIGHT, sizes=np.array([-1, 4, 2]), **extra)
