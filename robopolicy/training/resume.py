"""State of runs for resuming, including checks of changed configurations."""

from __future__ import annotations

import fcntl
import json
import math
import random
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np
import torch
from safetensors.torch import load, load_file, save, save_file
from torch import Tensor

from robopolicy.errors import UserError
from robopolicy.files import parse_json, parse_yaml
from robopolicy.schema import to_dict

CAUSES = (UserError, AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError)
"""Exceptions of components that load the state of different ones."""


def run_exists_error(folder: Path) -> UserError:
    """Build the error for a new run in a folder that is not empty."""
    if not (folder / "config.yaml").exists():
        hint = f"{folder} contains files that are not a run; empty it"
    elif (folder / "report.json").exists():
        hint = f"Run {folder} has ended; continue from its weights with init_from={folder}/checkpoints/last"
    else:
        hint = f"Run {folder} exists; resume it with --resume {folder}"
    return UserError(f"{hint}, or choose another name=NAME.")


class Resumable(Protocol):
    """Interface of resumable runs, e.g. `Trainer`."""

    config: Any
    folder: Path

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state exactly."""
        ...

    def close(self) -> None:
        """Stop the run."""
        ...


def restore(run: Resumable, state: Mapping[str, Any]) -> None:
    """Restore a run, built from its `config.yaml`, to the resume point `state`, or close it.

    Raises:
        UserError: They do not fit; the message lists the changed settings.
    """
    try:
        run.load_state_dict(state)
    except CAUSES as error:
        run.close()
        saved = parse_yaml(state["config"]) if "config" in state else {}
        changed = list(_differences(saved, to_dict(run.config))) if isinstance(saved, dict) and saved else []
        if not changed and isinstance(error, UserError):
            raise
        last, file = run.folder / "checkpoints" / "last", run.folder / "config.yaml"
        found = f": {', '.join(changed)}" if changed else ""
        raise UserError(f"{last} does not fit {file}; revert the changes of the configuration{found}.") from error


def check_resume_point(state: Mapping[str, Any], checkpoint: Path, *keys: str) -> None:
    """Raise a UserError for a training state of `checkpoint` without the number of its update, or without `keys`."""
    update = state.get("update")
    if type(update) is not int or update < 0 or not state.keys() >= set(keys):
        raise UserError(f"{checkpoint} is damaged: its training state is incomplete; start a new run.")


def _differences(saved: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key in dict.fromkeys([*saved, *now]):
        old, new = saved.get(key), now.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            yield from _differences(old, new, f"{prefix}{key}.")
        elif old != new:
            yield f"{prefix}{key} was {old}, is {new}"


def random_state() -> dict[str, Any]:
    """Return the states of the global random generators."""
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def load_random_state(state: Mapping[str, Any]) -> None:
    """Restore `random_state`."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])


def lock_run(folder: Path) -> IO[str]:
    """Lock a run for this process until the file is closed or the process ends.

    Raises:
        UserError: Another process is training this run.
    """
    stream = (folder / "config.yaml").open(encoding="utf-8")
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        stream.close()
        raise UserError(f"Another process is training run {folder}; wait for it or stop it.") from error
    return stream


TENSORS, TREE = "tensors.safetensors", "tree.json"


def save_tree(folder: Path, tree: Any) -> None:
    """Write `tree` into `folder`, which must exist.

    Raises:
        TypeError: A leaf is not a tensor, array, number, string, bool or None; the message contains its path.
    """
    tensors: dict[str, Tensor] = {}
    encoded = _encode(tree, "", tensors)
    save_file(tensors, folder / TENSORS)
    (folder / TREE).write_text(json.dumps(encoded, indent=1), encoding="utf-8")


def load_tree(folder: Path) -> Any:
    """Read the tree that `save_tree` wrote, with tensors on the CPU; damaged text raises a ValueError."""
    tensors = load_file(folder / TENSORS)
    return _decode(parse_json((folder / TREE).read_text(encoding="utf-8")), tensors)


def pack_tree(tree: Any) -> bytes:
    """Return what `save_tree` would write, as bytes for another process."""
    tensors: dict[str, Tensor] = {}
    text = json.dumps(_encode(tree, "", tensors)).encode()
    return save({**tensors, TREE: torch.frombuffer(bytearray(text), dtype=torch.uint8)})


def unpack_tree(data: bytes) -> Any:
    """Inverse of `pack_tree`."""
    tensors = load(data)
    return _decode(json.loads(bytes(tensors.pop(TREE).numpy())), tensors)


def portable(tensor: Tensor) -> Tensor:
    """Return a contiguous CPU copy that owns its memory, as safetensors requires."""
    return tensor.detach().to("cpu", copy=True).contiguous()


def _put(tensors: dict[str, Tensor], where: str, tensor: Tensor) -> str:
    """Store a tensor under its dotted path, made unique since keys may contain dots; return the name."""
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
    raise TypeError(f"Training state '{where}' has type {type(value).__name__}, which checkpoints do not support.")


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
