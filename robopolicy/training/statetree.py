"""Nested training state as one safetensors file plus one JSON tree; nothing is ever unpickled.

Tensors and arrays go to `tensors.safetensors`, everything else to `tree.json`, where a leaf that is not plain JSON is
written as a one-key object: `{"$tensor": name}`, `{"$array": name}`, `{"$tuple": [...]}`, `{"$float": "nan"}`, and
`{"$pairs": [[key, value], ...]}` for mappings whose keys are not all strings (optimiser states have integer keys).
Python integers keep any size, as the states of random generators need.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

TENSORS, TREE = "tensors.safetensors", "tree.json"


def save_tree(folder: Path, tree: Any) -> None:
    """Write `tree` into `folder`, which must exist.

    Raises:
        TypeError: A leaf is neither tensor, array, number, string, bool nor None; the message names where it is.
    """
    tensors: dict[str, Tensor] = {}
    encoded = _encode(tree, "", tensors)
    save_file(tensors, folder / TENSORS)
    (folder / TREE).write_text(json.dumps(encoded, indent=1), encoding="utf-8")


def load_tree(folder: Path) -> Any:
    """Read what `save_tree` wrote; tensors come back on the CPU."""
    tensors = load_file(folder / TENSORS)
    return _decode(json.loads((folder / TREE).read_text(encoding="utf-8")), tensors)


def portable(tensor: Tensor) -> Tensor:
    """A contiguous CPU copy that owns its memory, as safetensors requires."""
    return tensor.detach().to("cpu", copy=True).contiguous()


def _put(tensors: dict[str, Tensor], where: str, tensor: Tensor) -> str:
    """Store under the dotted path, made unique: keys may contain dots themselves."""
    name = where or "value"
    while name in tensors:
        name += "'"
    tensors[name] = tensor
    return name


def _encode(value: Any, where: str, tensors: dict[str, Tensor]) -> Any:
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": repr(float(value))}
    if isinstance(value, Tensor):
        return {"$tensor": _put(tensors, where, portable(value))}
    if isinstance(value, np.ndarray | np.generic):
        return {"$array": _put(tensors, where, torch.from_numpy(np.array(value, order="C")))}
    if isinstance(value, Mapping):
        return _encode_mapping(value, where, tensors)
    if isinstance(value, list | tuple):
        items = [_encode(item, f"{where}.{index}", tensors) for index, item in enumerate(value)]
        return items if isinstance(value, list) else {"$tuple": items}
    raise TypeError(f"Training state '{where}' has type {type(value).__name__}, which a checkpoint cannot hold.")


def _encode_mapping(value: Mapping[Any, Any], where: str, tensors: dict[str, Tensor]) -> Any:
    rows = [[key, _encode(item, f"{where}.{key}" if where else str(key), tensors)] for key, item in value.items()]
    if all(isinstance(key, str) and not key.startswith("$") for key, _ in rows):
        return dict(rows)
    if not all(isinstance(key, str | int) for key, _ in rows):
        raise TypeError(f"Training state '{where}' has keys that are neither strings nor integers.")
    return {"$pairs": rows}


def _decode(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [_decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        tag, content = next(iter(value.items()))
        if tag in _DECODERS:
            return _DECODERS[tag](content, tensors)
    return {key: _decode(item, tensors) for key, item in value.items()}


_DECODERS: dict[str, Callable[[Any, Mapping[str, Tensor]], Any]] = {
    "$tensor": lambda name, tensors: tensors[name],
    "$array": lambda name, tensors: tensors[name].numpy(),
    "$float": lambda text, _: float(text),
    "$tuple": lambda items, tensors: tuple(_decode(item, tensors) for item in items),
    "$pairs": lambda rows, tensors: {key: _decode(item, tensors) for key, item in rows},
}
