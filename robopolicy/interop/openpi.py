"""Policies on servers of openpi or vLLM-Omni, as black boxes; `robopolicy.deploy.openpi` has the protocol.

    policy = open_openpi("ws://127.0.0.1:8000", {"state": (8,)}, rename={"state": "observation/state"}, prompt="fold")

A server describes neither its observations nor its chunks, so that names come from the user and sizes from the reply to
a first request. Ours describes both, and takes noise if its policy does. Every row of a batch is one request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from robopolicy.constraints import NonNegative, NonNegativeInt
from robopolicy.deploy.openpi import NAME_PREFIX, OpenpiConnection
from robopolicy.deploy.websocket import reason_of
from robopolicy.deploy.wire import brief
from robopolicy.errors import UserError
from robopolicy.interop.remote import SharedConnection
from robopolicy.plurals import counted
from robopolicy.policies.base import Observation, PolicySpec
from robopolicy.policies.noise import Randomness, row_streams
from robopolicy.policies.wrappers.black_box import BlackBoxPolicy, RetryConfig
from robopolicy.spec import IMAGE_PREFIX

IMAGE_SIZE = 224  # rows and columns of pictures, to which clients of openpi resize theirs


@dataclass(frozen=True)
class OpenpiConfig(RetryConfig):
    """Address, names and timeouts; created by `open_openpi`."""

    noise: bool = False  # whether the server takes noise
    seeded: bool = False  # whether the server takes seed and step of its noise
    timeout: NonNegative = 30.0
    retries: NonNegativeInt = 2
    url: str = ""  # ws://HOST:PORT | wss://...
    names: dict[str, str] = field(default_factory=dict)  # our observation -> entry of requests
    prompt: str = ""  # instruction
    actions: tuple[str, ...] = ("actions",)  # entries of a reply with actions, in the order of their columns


class OpenpiPolicy(BlackBoxPolicy):
    """Policy behind openpi's protocol; verbs `act` and, for servers that take noise, `decode`."""

    name: ClassVar[str] = "openpi"
    config_class = OpenpiConfig
    config: OpenpiConfig

    def __init__(self, config: OpenpiConfig, spec: PolicySpec) -> None:
        """Check the address without connecting; a UserError is raised if it is invalid."""
        super().__init__(config, spec)
        self._line = SharedConnection(OpenpiConnection(config.url, config.timeout))

    @property
    def label(self) -> str:
        """Name for messages."""
        return f"The endpoint {self.config.url}"

    def act(self, obs: Observation, *, deterministic: bool = False, generator: Randomness = None) -> Tensor:
        """Chunks of the server's policy, on our servers with the streams of `generator`."""
        if not self.config.seeded:
            return self.compute(obs, lambda part, rows: self._requests(part))
        reference = next(iter(obs.values()))
        seeds, steps = row_streams(len(reference), generator, reference.device).unbind(1)
        return self.compute(obs, lambda part, rows: self._requests(part, seed=seeds[rows], step=steps[rows]))

    def call(self, obs: Observation, noise: Tensor | None) -> Any:
        """Chunks for `noise`, or with random numbers of the server."""
        return self._requests(obs) if noise is None else self._requests(obs, noise=noise)

    def _requests(self, obs: Observation, **by_row: Tensor) -> NDArray[np.float32]:
        """Send a request per row, with further entries, and wait for the chunks."""
        arrays, more = ({key: value.cpu().numpy() for key, value in tree.items()} for tree in (obs, by_row))
        chunks: list[NDArray[np.float32]] = []
        with self._line.lock:
            for row in range(len(next(iter(arrays.values())))):
                entries = {key: value[row] if value.ndim > 1 else int(value[row]) for key, value in more.items()}
                chunks.append(self.request({key: value[row] for key, value in arrays.items()}, **entries))
        return np.stack(chunks)

    def close(self) -> None:
        """Close the connection; the next call opens another."""
        self._line.connection.close()

    def request(self, row: Mapping[str, NDArray[Any]], **more: Any) -> NDArray[np.float32]:
        """Return the chunk `(H, A)` for one row `{key: (To, ...)}`; `more` are further entries of the request."""
        request = {self.config.names[key]: self._value(key, value) for key, value in row.items()} | more
        if self.config.prompt:
            request["prompt"] = self.config.prompt
        return actions_of(self._line.connection.infer(request), self.config.actions, self.label)

    def _value(self, key: str, value: NDArray[Any]) -> NDArray[Any]:
        """An observation `(To, ...)` as an entry of a request, without a history of one step."""
        if key.startswith(IMAGE_PREFIX):
            value = np.moveaxis(value, -3, -1)
        return value[0] if self.spec.obs_horizon == 1 else value


def open_openpi(
    url: str,
    shapes: Mapping[str, tuple[int, ...]],
    *,
    rename: Mapping[str, str] | None = None,
    actions: Sequence[str] = (),
    prompt: str = "",
    action_horizon: int = 0,
    **settings: Any,
) -> OpenpiPolicy:
    """Ask the server at `url` for one chunk and wrap it.

    Args:
        url: `ws://HOST:PORT`, with a path for vLLM-Omni, or `wss://...`.
        shapes: Observations of the task without cameras, by our names.
        rename: Our observation -> entry of requests; not needed for servers of this package.
        actions: Entries of a reply with actions; () for `actions`, or the `action_keys` of the metadata.
        prompt: Instruction.
        action_horizon: Actions executed per chunk; 0 for the number in the metadata, or for all.
        settings: Further fields of `OpenpiConfig`.

    Raises:
        UserError: The server is unreachable or gives no chunk, or a name is missing or unknown.
    """
    config = OpenpiConfig(url=url, prompt=prompt, **settings)
    connection = OpenpiConnection(url, config.timeout)
    try:
        metadata = connection.open()
    except OSError as error:
        reason = reason_of(error)
        raise UserError(f"The endpoint {url} cannot be reached ({reason}); start it, or check the address.") from error
    finally:
        connection.close()
    ours = metadata.get("protocol") == "openpi"
    found, names = _declared(metadata, rename or {}, url) if ours else _renamed(metadata, shapes, rename or {}, url)
    keys = tuple(actions) or metadata.get("action_keys") or config.actions
    if not isinstance(keys, list | tuple):
        raise UserError(f"The endpoint {url} has the action_keys {brief(keys)}, expected a list of names.")
    keys = tuple(map(str, keys))
    config = replace(config, names=names, actions=keys, noise=ours and metadata.get("noise") is True, seeded=ours)
    history = _size(metadata, "obs_horizon", 1) if ours else 1
    spec: dict[str, Any] = {"observation": found, "obs_horizon": history}
    horizon, dim = _first_chunk(config, PolicySpec.read({**spec, "action_dim": 1}, f"The endpoint {url}")).shape
    executed = action_horizon or (_size(metadata, "action_horizon", horizon) if ours else horizon)
    if executed > horizon:
        actions = counted(horizon, "action")
        raise UserError(f"The endpoint {url} returns chunks of {actions}, so {executed} cannot be executed.")
    spec |= {"action_dim": dim, "horizon": horizon, "action_horizon": executed}
    return OpenpiPolicy(config, PolicySpec.read(spec, f"The endpoint {url}"))


def actions_of(reply: Any, keys: Sequence[str], label: str) -> NDArray[np.float32]:
    """Chunk `(H, A)` of a reply: a bare array, or the entries `keys` next to each other.

    Raises:
        UserError: An entry is missing, is no array `(H, A)`, or has another length than the first.
    """
    if isinstance(reply, dict):
        missing = next((key for key in keys if key not in reply), None)
        if missing is not None:
            text = f"{label} returned no '{missing}' but {', '.join(map(str, reply))}"
            raise UserError(f"{text}; name its actions by --rename chunk=NAME,...")
        parts = [reply[key] for key in keys]
    else:
        parts = [reply]
    if not all(isinstance(part, np.ndarray) and part.ndim == 2 and part.size for part in parts):
        found = ", ".join(str(getattr(part, "shape", type(part).__name__)) for part in parts)
        raise UserError(f"{label} returned {found} instead of actions of shape (H, A).")
    if len({len(part) for part in parts}) > 1:
        raise UserError(f"{label} returned actions of different lengths {[len(part) for part in parts]}.")
    return np.concatenate(parts, 1).astype(np.float32)


Observations = tuple[dict[str, tuple[int, ...]], dict[str, str]]
"""Shape and name in requests of every observation that the server gets, by our names."""


def _declared(metadata: Mapping[str, Any], rename: Mapping[str, str], url: str) -> Observations:
    """Observations that a server of this package declares."""
    given = {"observation": metadata.get("observation"), "action_dim": 1}
    declared = PolicySpec.read(given, f"The endpoint {url}").observation
    if not declared:
        raise UserError(f"The endpoint {url} describes a policy without observations.")
    ours = {name: key for key, name in rename.items()}
    if unknown := set(ours) - set(declared):
        raise UserError(f"The endpoint {url} takes {', '.join(declared)}, not '{min(unknown)}'.")
    found, names = dict[str, tuple[int, ...]](), dict[str, str]()
    for name, shape in declared.items():
        picture = len(shape) == 3
        key = ours.get(name) or (IMAGE_PREFIX if picture else "") + name.removeprefix(NAME_PREFIX)
        if key in found:
            raise UserError(f"The endpoint {url} takes '{names[key]}' and '{name}', which are both '{key}' here.")
        found[key], names[key] = (shape[2], *shape[:2]) if picture else shape, name
    return found, names


def _renamed(
    metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], rename: Mapping[str, str], url: str
) -> Observations:
    """Observations that the user names, with pictures of the size in the metadata."""
    if not rename:
        text = "does not name its observations; pass e.g. --rename state=observation/state"
        raise UserError(f"The endpoint {url} {text}.")
    sides = metadata.get("image_resolution")
    known = isinstance(sides, list) and len(sides) == 2 and all(type(side) is int and side > 0 for side in sides)
    rows, columns = sides if known and sides else (IMAGE_SIZE, IMAGE_SIZE)
    for key in rename:
        if key not in shapes and not key.startswith(IMAGE_PREFIX):
            raise UserError(f"The task has no observation '{key}' but {', '.join(shapes)}; cameras are image.CAMERA.")
    return {key: (3, rows, columns) if key.startswith(IMAGE_PREFIX) else shapes[key] for key in rename}, dict(rename)


def _size(metadata: Mapping[str, Any], key: str, default: int) -> int:
    value = metadata.get(key, default)
    return value if type(value) is int and value > 0 else default


def _first_chunk(config: OpenpiConfig, spec: PolicySpec) -> NDArray[np.float32]:
    """Chunk for observations of zeros."""
    policy = OpenpiPolicy(replace(config, noise=False, seeded=False), spec)
    zeros = {
        key: np.zeros((spec.obs_horizon, *shape), np.uint8 if key.startswith(IMAGE_PREFIX) else np.float32)
        for key, shape in spec.observation.items()
    }
    try:
        return policy.request(zeros)
    except OSError as error:
        raise UserError(f"The endpoint {config.url} gave no chunk ({reason_of(error)}).") from error
    finally:
        policy.close()
