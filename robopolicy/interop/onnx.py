"""Policies from ONNX files, as black boxes; noise is an optional input of the graph.

    policy = open_onnx("policy.onnx", rename={"state": "obs"})
    steered = LatentPolicy.from_base(policy, NoiseSpace(kind="repeat"), STEERING_ACTOR)

The graph is stored as bytes among the weights of a checkpoint, which needs no other file. Shapes come from the metadata
entry `METADATA` (a JSON object with the keys of `PolicySpec.to_dict()` and `network_calls`) or, without one, from the
graph: an input `(B, D)` is one observation, `(B, To, D)` a history, an image `(B, 3, h, w)` or `(B, To, 3, h, w)`; an
output `(B, A)` is one action, `(B, H, A)` a chunk. Images are uint8 where the graph accepts it, otherwise numbers in
[0, 1]. A graph with a fixed batch size is called with that many rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from robopolicy.constraints import Bytes, NonNegativeInt
from robopolicy.deploy.graph import CHUNK, METADATA, NEXT_MEMORY, NOISE, PREFIX, PREFIX_WEIGHT, TYPES, open_session
from robopolicy.errors import UserError, unknown_name
from robopolicy.files import parse_json
from robopolicy.nets.encoder import IMAGE_PREFIX
from robopolicy.optional import require
from robopolicy.plurals import counted
from robopolicy.policies.base import Observation, PolicySpec
from robopolicy.policies.wrappers.black_box import BlackBoxConfig, BlackBoxPolicy
from robopolicy.spec import HIDDEN_STATE

OPTIONAL = (PREFIX, PREFIX_WEIGHT)  # inputs that are zero here, without a prefix


@dataclass(frozen=True)
class OnnxConfig(BlackBoxConfig):
    """Inputs and outputs of a graph; created by `open_onnx`."""

    size: Bytes = 0  # bytes of the file
    inputs: dict[str, str] = field(default_factory=dict)  # observation key or "noise" -> input of the graph
    output: str = CHUNK  # output of the graph that holds the chunk
    noise_rows: NonNegativeInt = 0  # R, rows of the noise; 0 is one per action of the chunk
    threads: NonNegativeInt = 1  # of the runtime; 0 is one per core


class OnnxPolicy(BlackBoxPolicy):
    """An ONNX graph as a policy."""

    name: ClassVar[str] = "onnx"
    config_class = OnnxConfig
    config: OnnxConfig
    graph: Tensor

    def __init__(self, config: OnnxConfig, spec: PolicySpec) -> None:
        """Allocate a graph of `config.size` bytes, which are loaded with the weights."""
        super().__init__(config, spec)
        self.register_buffer("graph", torch.zeros(config.size, dtype=torch.uint8))
        self._runtime = _Runtime()

    @property
    def label(self) -> str:
        """Name for messages."""
        return "The ONNX graph"

    @property
    def noise_shape(self) -> tuple[int, int]:
        """Shape of the noise input of the graph."""
        return self.config.noise_rows or self.spec.horizon, self.spec.action_dim

    def call(self, obs: Observation, noise: Tensor | None) -> Any:
        """Run the graph."""
        chunk = self._run(self.config.output, dict(obs) if noise is None else {**obs, NOISE: noise})
        return chunk[:, None] if chunk.ndim == 2 else chunk

    def next_hidden(self, obs: Observation) -> Tensor:
        """Hidden state after `obs`, if the graph returns it."""
        if not self.spec.hidden_dim:
            raise self._lacks("next_hidden")
        obs = self._select_inputs(obs)
        rows = len(obs[HIDDEN_STATE])
        size = self.config.max_batch or rows
        parts = [{key: value[i : i + size] for key, value in obs.items()} for i in range(0, rows, size)]
        return torch.cat([torch.from_numpy(self._run(NEXT_MEMORY, part)) for part in parts]).to(obs[HIDDEN_STATE])

    def _run(self, output: str, values: dict[str, Tensor]) -> np.ndarray:
        session = self._runtime.session(self.graph, self.config.threads)
        rows = len(next(iter(values.values())))
        for key, shape in ((PREFIX, (self.spec.horizon, self.spec.action_dim)), (PREFIX_WEIGHT, (self.spec.horizon,))):
            values.setdefault(key, torch.zeros(rows, *shape))
        by_name = {name: key for key, name in self.config.inputs.items()}
        feed = {
            entry.name: _fed(by_name[entry.name], values[by_name[entry.name]], entry) for entry in session.get_inputs()
        }
        batch = self.config.max_batch
        if rows < batch:  # only for a graph with a fixed batch size
            feed = {name: value[np.arange(batch) % rows] for name, value in feed.items()}
        return session.run([output], feed)[0][:rows]

    def _load_from_state_dict(self, *args: Any) -> None:
        self._runtime.close()
        super()._load_from_state_dict(*args)


class _Runtime:
    """Session of a graph, opened on first use; a copy of the policy opens its own session."""

    def __init__(self) -> None:
        self._session: Any = None

    def __deepcopy__(self, memo: dict[int, Any]) -> _Runtime:
        return _Runtime()

    def session(self, graph: Tensor, threads: int) -> Any:
        """The open session."""
        if self._session is None:
            self._session = open_session(graph.cpu().numpy().tobytes(), threads, cuda=graph.is_cuda)
        return self._session

    def close(self) -> None:
        """Close the session, because the graph changes."""
        self._session = None


def open_onnx(
    path: str | Path,
    *,
    rename: Mapping[str, str] | None = None,
    spec: PolicySpec | None = None,
    action_horizon: int = 0,
    **settings: Any,
) -> OnnxPolicy:
    """Read an ONNX file, including external weight files.

    Args:
        path: The file.
        rename: Names in the graph of observation keys, of "noise" and of "chunk", where they differ.
        spec: Specification, if neither the metadata nor the graph define it.
        action_horizon: Actions executed per chunk; 0 for the value in the metadata, else all.
        **settings: Further fields of `OnnxConfig`.

    Raises:
        UserError: The file cannot be read, is too large to be stored, or does not look like a policy.
    """
    path = Path(path)
    data = _read(path)
    try:
        session = open_session(data, 1)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    names = dict(rename or {})
    inputs = _inputs(session, names, path)
    output = _output(session, names.get(CHUNK), path)
    described = _metadata(session, path)
    if spec is None:
        spec = _described_spec(described, path) or _graph_spec(inputs, output, path)
    if action_horizon:
        if action_horizon > spec.horizon:
            raise UserError(
                f"{path} returns chunks of {counted(spec.horizon, 'action')}, "
                f"so action_horizon={action_horizon} is too many."
            )
        spec = PolicySpec.read({**spec.to_dict(), "action_horizon": action_horizon}, str(path))
    _check_inputs(inputs, output, spec, path)
    if spec.hidden_dim and NEXT_MEMORY not in [entry.name for entry in session.get_outputs()]:
        raise UserError(f"{path} takes '{HIDDEN_STATE}' but has no output '{NEXT_MEMORY}'; export it with one.")
    known = {"max_batch": _batch(inputs, path), "network_calls": described.get("network_calls", 1)}
    if NOISE in inputs and isinstance(inputs[NOISE].shape[1], int) and len(inputs[NOISE].shape) == 3:
        known["noise_rows"] = inputs[NOISE].shape[1]
    config = OnnxConfig(
        noise=NOISE in inputs,
        size=len(data),
        inputs={key: entry.name for key, entry in inputs.items()},
        output=output.name,
        **(known | settings),
    )
    policy = OnnxPolicy(config, spec)
    policy.graph.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    return policy


def _read(path: Path) -> bytes:
    onnx = require("onnx", "onnx")
    try:
        return onnx.load(str(path)).SerializeToString()
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror or error}); pass an ONNX file.") from error
    except Exception as error:  # protobuf's own errors differ between its versions
        reason = f"{type(error).__name__}: {error}".splitlines()[0].rstrip(".")
        raise UserError(
            f"{path} is not an ONNX file of at most 2 GB ({reason}); export it again, or serve it."
        ) from error


def _inputs(session: Any, names: Mapping[str, str], path: Path) -> dict[str, Any]:
    """Inputs of the graph by observation key, or "noise"."""
    found = {entry.name: entry for entry in session.get_inputs()}
    for key, name in names.items():
        if key != CHUNK and name not in found:
            raise unknown_name("input", name, found, f"of {path} for '{key}'")
    keys = {name: key for key, name in names.items() if key != CHUNK}
    inputs = {str(keys.get(name, name)): entry for name, entry in found.items()}
    for key, entry in inputs.items():
        image = key.startswith(IMAGE_PREFIX)  # other integers would cut fractions off
        allowed = [
            name for name, kind in TYPES.items() if np.issubdtype(kind, np.floating) or (image and kind == np.uint8)
        ]
        if entry.type not in allowed:
            raise UserError(f"Input '{entry.name}' of {path} takes {entry.type}, expected {' or '.join(allowed)}.")
    return inputs


def _output(session: Any, name: str | None, path: Path) -> Any:
    found = {entry.name: entry for entry in session.get_outputs()}
    name = name or (str(next(iter(found))) if len(found) == 1 else CHUNK)
    if name not in found:
        raise unknown_name("output", name, found, f"of {path}")
    allowed = [kind for kind, number in TYPES.items() if np.issubdtype(number, np.floating)]
    for entry in (found[name], *(found[other] for other in found.keys() & {NEXT_MEMORY})):
        if entry.type not in allowed:
            raise UserError(f"Output '{entry.name}' of {path} is {entry.type}, expected {' or '.join(allowed)}.")
    if len(found[name].shape) not in (2, 3):
        raise UserError(f"Output '{name}' of {path} has shape {_shape(found[name])}, expected (B, A) or (B, H, A).")
    return found[name]


def _metadata(session: Any, path: Path) -> dict[str, Any]:
    text = session.get_modelmeta().custom_metadata_map.get(METADATA)
    if text is None:
        return {}
    try:
        described = parse_json(text)
    except ValueError as error:
        raise UserError(f"The metadata '{METADATA}' of {path} is not JSON: {error}.") from error
    if not isinstance(described, dict) or not isinstance(described.get("network_calls", 1), int):
        raise UserError(f"The metadata '{METADATA}' of {path} must be an object that describes a policy, found {text}.")
    return described


def _described_spec(described: Mapping[str, Any], path: Path) -> PolicySpec | None:
    fields = {key: value for key, value in described.items() if key != "network_calls"}
    return PolicySpec.read(fields, f"The metadata '{METADATA}' of {path}") if fields else None


def _graph_spec(inputs: Mapping[str, Any], output: Any, path: Path) -> PolicySpec:
    """Derive the specification from the shapes of the graph."""
    observation: dict[str, tuple[int, ...]] = {}
    horizons: dict[str, int] = {}
    for key, entry in inputs.items():
        if key in (NOISE, *OPTIONAL):
            continue
        plain = 3 if key.startswith(IMAGE_PREFIX) else 1
        sizes = _fixed(entry.shape[1:], f"Input '{entry.name}'", path)
        if len(sizes) not in (plain, plain + 1):
            raise UserError(f"Input '{entry.name}' of {path} has shape {_shape(entry)}; describe it in the metadata.")
        horizons[key] = sizes[0] if len(sizes) > plain else 1
        observation[key] = tuple(sizes[-plain:])
    if len(set(horizons.values())) != 1:
        raise UserError(f"The inputs of {path} have histories of lengths {horizons}, expected one length for all.")
    sizes = _fixed(output.shape[1:], f"Output '{output.name}'", path)
    horizon = sizes[0] if len(sizes) == 2 else 1
    shapes = {"observation": observation, "action_dim": sizes[-1], "obs_horizon": next(iter(horizons.values()))}
    return PolicySpec.read({**shapes, "horizon": horizon, "action_horizon": horizon}, str(path))


def _check_inputs(inputs: Mapping[str, Any], output: Any, spec: PolicySpec, path: Path) -> None:
    """Compare what the graph declares with the specification."""
    wanted = {key: (spec.obs_horizon, *shape) for key, shape in spec.observation.items()}
    absent = sorted(wanted.keys() - inputs.keys())
    extra = sorted(inputs.keys() - wanted.keys() - {NOISE, *OPTIONAL})
    if absent or extra:
        raise UserError(
            f"{path} has the inputs {', '.join(sorted(inputs))}, expected {', '.join(sorted(wanted))} and perhaps "
            f"{NOISE}; rename them (KEY=NAME)."
        )
    wanted[NOISE] = wanted[PREFIX] = (spec.horizon, spec.action_dim)
    wanted[PREFIX_WEIGHT] = (spec.horizon,)
    for key, entry in inputs.items():
        shapes = [wanted[key], wanted[key][1:]] if wanted[key][0] == 1 else [wanted[key]]
        if key == NOISE and len(entry.shape) == 3 and isinstance(entry.shape[1], int):
            shapes[0] = (max(entry.shape[1], spec.horizon), spec.action_dim)  # the graph may have more rows
        if not any(_fits(entry.shape[1:], shape) for shape in shapes):
            raise UserError(
                f"Input '{entry.name}' of {path} has shape {_shape(entry)}, expected (B, {_list(shapes[0])})."
            )
    shapes = [(spec.horizon, spec.action_dim), (spec.action_dim,)][: 2 if spec.horizon == 1 else 1]
    if not any(_fits(output.shape[1:], shape) for shape in shapes):
        raise UserError(
            f"Output '{output.name}' of {path} has shape {_shape(output)}, expected (B, {_list(shapes[0])})."
        )


def _batch(inputs: Mapping[str, Any], path: Path) -> int:
    """Return the batch size of the graph; 0 for any."""
    sizes = {entry.shape[0] if isinstance(entry.shape[0], int) else 0 for entry in inputs.values()}
    if len(sizes) != 1:
        raise UserError(f"The inputs of {path} have different batch sizes {sorted(sizes)}; export it again.")
    return sizes.pop()


def _fed(key: str, value: Tensor, entry: Any) -> np.ndarray:
    """Convert a value to the input format: without history if the input has none, images in [0, 1] unless uint8."""
    kind = TYPES[entry.type]
    if len(entry.shape) < value.dim():
        value = value.squeeze(1)
    if key.startswith(IMAGE_PREFIX) and kind is not np.uint8:
        value = value.float() / 255
    return value.cpu().numpy().astype(kind, copy=False)


def _fits(declared: Any, shape: tuple[int, ...]) -> bool:
    """Whether sizes declared by a graph, some of them open, allow `shape`."""
    return len(declared) == len(shape) and all(
        not isinstance(size, int) or size == wanted for size, wanted in zip(declared, shape, strict=True)
    )


def _fixed(sizes: Any, what: str, path: Path) -> list[int]:
    if not all(isinstance(size, int) for size in sizes):
        raise UserError(f"{what} of {path} has open sizes {list(sizes)}; describe the policy in the metadata.")
    return list(sizes)


def _shape(entry: Any) -> str:
    return f"({_list(entry.shape)})"


def _list(sizes: Any) -> str:
    return ", ".join(str(size) for size in sizes)
