"""Export of a policy to a bundle (`bundle.py`): the graph of `act(deterministic=True)`, verified against torch.

The graph contains normalisers, encoders, all sampler steps, and critics for selection or guidance. The noise of the
sampler is an input: the initial noise, then the noise of DDPM, of multi-step consistency models and of stochastic
compositions, or the candidates of a selection. A Gaussian returns its mean. The graph computes one decision of one
robot with fixed shapes; parts that do not depend on the observation are computed at export. With `rtc`, it has the
additional inputs `prefix` and `prefix_weight`.
"""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from robopolicy.atomic import atomic_folder
from robopolicy.deploy.bundle import (
    GOLDEN,
    GRAPH,
    MANIFEST,
    SCHEMA,
    TOLERANCE,
    BundleManifest,
    golden_error,
    hash_files,
    write_manifest,
)
from robopolicy.deploy.graph import CHUNK, NEXT_MEMORY, NOISE, PREFIX, PREFIX_WEIGHT, metadata, open_session
from robopolicy.deploy.tracing import CountingNoise, ReplayNoise, trace
from robopolicy.errors import UserError
from robopolicy.files import check_owned
from robopolicy.nets.normalizer import Normalizer
from robopolicy.optional import require
from robopolicy.plurals import counted
from robopolicy.policies.base import Observation, Policy
from robopolicy.policies.noise import PerRowGenerator
from robopolicy.policies.real_time_chunking import act_with_prefix
from robopolicy.policies.wrappers.black_box import BlackBoxPolicy
from robopolicy.sim.registry import SimOptions, make_sim
from robopolicy.spec import IMAGE_PREFIX, TaskMetadata
from robopolicy.versions import versions

PACKAGES = ("robopolicy", "torch", "onnx", "onnxruntime", "numpy")
OPSET = 20


def read_task_metadata(task: str) -> TaskMetadata:
    """Read the metadata of a registered task from its simulator; raises `UserError` if it is not available."""
    sim = make_sim(task, SimOptions(num_envs=1))
    try:
        spec = sim.spec
    finally:
        sim.close()
    return TaskMetadata(
        spec.task,
        spec.control_dt,
        spec.action_names,
        tuple(spec.action_low.tolist()),
        tuple(spec.action_high.tolist()),
        {key: list(entry.names) for key, entry in spec.observation.items() if entry.names},
    )


class Decision:
    """One decision of a policy as a function of tensors."""

    def __init__(self, policy: Policy, *, rtc: bool) -> None:
        self.policy, self.rtc = policy, rtc
        self.keys = tuple(policy.spec.observation)
        self.noise_shape: tuple[int, ...] = ()  # (R, A), set by `inputs_for`

    @torch.no_grad()
    def inputs_for(self, obs: Observation) -> dict[str, Tensor]:
        """Create inputs of the graph for a batch of observations, with noise and prefixes of fixed seeds.

        Raises:
            UserError: `rtc` is set, but the policy cannot continue a prefix.
        """
        spec, rows = self.policy.spec, len(next(iter(obs.values())))
        streams = PerRowGenerator(range(rows), [0] * rows)
        inputs = {key: obs[key] for key in self.keys}
        prefix = torch.zeros(1, spec.horizon, spec.action_dim)
        counted, first = CountingNoise(), {key: value[:1] for key, value in inputs.items()}
        self._act(first, counted, prefix, prefix[..., 0])
        if counted.size:
            width = spec.action_dim
            self.noise_shape = (max(spec.horizon, -(-counted.size // width)), width)
            inputs[NOISE] = streams.normal((rows, *self.noise_shape))
        if self.rtc:
            generator = PerRowGenerator(range(rows), [1] * rows)
            inputs[PREFIX] = self.policy.act(obs, deterministic=True, generator=generator)
            inputs[PREFIX_WEIGHT] = torch.zeros(rows, spec.horizon)
            inputs[PREFIX_WEIGHT][1::2, : max(spec.horizon // 2, 1)] = 1  # every other row has a prefix
        return inputs

    def __call__(self, *values: Tensor) -> tuple[Tensor, ...]:
        """Compute the outputs of the graph for inputs in the order of `inputs_for`."""
        rest = list(values[len(self.keys) :])
        obs = dict(zip(self.keys, values, strict=False))
        noise = ReplayNoise(rest.pop(0)) if self.noise_shape else None
        outputs = (self._act(obs, noise, *rest),)
        return (*outputs, self.policy.next_hidden(obs)) if self.policy.spec.hidden_dim else outputs

    @property
    def outputs(self) -> list[str]:
        """Names of the outputs."""
        return [CHUNK, NEXT_MEMORY] if self.policy.spec.hidden_dim else [CHUNK]

    def _act(self, obs: Observation, noise: Any, *given: Tensor) -> Tensor:
        if self.rtc:
            return act_with_prefix(self.policy, obs, *given, generator=noise)
        return self.policy.act(obs, deterministic=True, generator=noise)


def export_bundle(
    policy: Policy,
    folder: str | Path,
    *,
    task_metadata: TaskMetadata,
    obs: Observation,
    checkpoint: str = "",
    rtc: bool = False,
    announce: Callable[[str], None] = lambda _: None,
) -> BundleManifest:
    """Write a bundle folder atomically, replacing an existing bundle.

    Args:
        policy: Policy to export, on the CPU and in evaluation mode.
        folder: Folder to create.
        task_metadata: Metadata of the task.
        obs: Observations `{key: (B, To, ...)}` for the comparison of graph and torch, stored as golden inputs.
        checkpoint: Hash of the checkpoint.
        rtc: Whether the graph can continue a prefix.
        announce: Called with a message before long operations.

    Raises:
        UserError: The policy cannot be exported, or the graph differs from torch by more than `TOLERANCE`.
    """
    folder = Path(folder)
    check_owned(folder, MANIFEST, "a bundle")
    black = next((part for part in policy.modules() if isinstance(part, BlackBoxPolicy)), None)
    if black is not None:
        raise UserError(f"{black.label} is not torch code of this project, so it cannot be exported; serve it instead.")
    decision = Decision(policy.eval(), rtc=rtc)
    inputs = decision.inputs_for(obs)
    for package in ("onnxscript", "onnxruntime"):
        require(package, "onnx")
    onnx = require("onnx", "onnx")
    announce(f"tracing '{policy.name}' with {counted(policy.nfe, 'network call')} per chunk; many calls take minutes")
    model = _graph(onnx, decision, {name: value[:1] for name, value in inputs.items()})
    golden = _golden(decision, inputs)
    scale = _scale(policy)
    with atomic_folder(folder) as temporary:
        (temporary / GRAPH).write_bytes(model)
        np.savez(temporary / GOLDEN, allow_pickle=False, **golden)
        error = golden_error(open_session(temporary / GRAPH, 1), golden, scale, temporary)
        if not error <= TOLERANCE:
            raise UserError(
                f"The graph differs from torch by {error:.2g} in normalised units, above {TOLERANCE:g}; rounding is "
                "amplified, e.g. by finite differences (use operator.derivative=exact) or nearly equal tokens."
            )
        manifest = BundleManifest(
            schema=SCHEMA,
            policy=policy.name,
            spec=policy.spec.to_dict(),
            network_calls=policy.nfe,
            noise_shape=decision.noise_shape,
            takes_prefix=rtc,
            task=task_metadata.task,
            control_dt=task_metadata.control_dt,
            action_names=task_metadata.action_names,
            action_low=task_metadata.action_low,
            action_high=task_metadata.action_high,
            observation_names={key: names for key, names in task_metadata.observation_names.items() if key in obs},
            cameras={
                key.removeprefix(IMAGE_PREFIX): list(shape[-2:])
                for key, shape in policy.spec.observation.items()
                if key.startswith(IMAGE_PREFIX)
            },
            action_scale=tuple(scale.tolist()),
            checkpoint=checkpoint,
            parity=error,
            versions=versions(PACKAGES),
            files=hash_files(temporary),
        )
        write_manifest(temporary, manifest)
    return manifest


def _graph(onnx: Any, decision: Decision, inputs: dict[str, Tensor]) -> bytes:
    """ONNX file of `decision`; raises `UserError` if it cannot be traced or ONNX lacks an operator."""
    policy = decision.policy
    try:
        with _quiet():
            graph = trace(decision, list(inputs.values()))
            names: dict[str, Any] = {"input_names": list(inputs), "output_names": decision.outputs}
            arguments = tuple(inputs.values())
            program = torch.onnx.export(graph, arguments, **names, opset_version=OPSET, dynamo=True, verbose=False)
    except UserError:
        raise
    except Exception as error:  # tracer and exporter raise many exceptions
        raise UserError(f"Policy '{policy.name}' cannot be exported: {_reason(error)}.") from error
    assert program is not None
    model = program.model_proto
    onnx.helper.set_model_props(model, metadata(policy.spec, policy.nfe))
    return model.SerializeToString()


@torch.no_grad()
def _golden(decision: Decision, inputs: dict[str, Tensor]) -> dict[str, np.ndarray]:
    """Golden inputs and the outputs of torch, computed for each row."""
    count = len(next(iter(inputs.values())))
    rows = [decision(*(value[row : row + 1] for value in inputs.values())) for row in range(count)]
    outputs = {name: torch.cat(values) for name, values in zip(decision.outputs, zip(*rows, strict=True), strict=True)}
    if not bool(outputs[CHUNK].isfinite().all()):
        raise UserError("The policy returns non-finite actions; verify its checkpoint first.")
    return {name: value.detach().numpy() for name, value in {**inputs, **outputs}.items()}


def _scale(policy: Policy) -> np.ndarray:
    """Action units `(A,)` per normalised unit; ones for policies without an action normaliser."""
    found = next((part.action_normalizer for part in policy.modules() if hasattr(part, "action_normalizer")), None)
    if isinstance(found, Normalizer) and len(found.scale) == policy.spec.action_dim:
        return found.scale.double().numpy()
    return np.ones(policy.spec.action_dim)


def _reason(error: BaseException) -> str:
    """Short reason of an export failure."""
    messages: list[str] = []
    cause: BaseException | None = error
    while cause is not None:
        messages.append(str(cause))
        cause = cause.__cause__
    text = "\n".join(messages)
    missing = re.search(r"No ONNX function found for <OpOverload\(op='([\w.]+)'", text)
    if missing:
        return f"ONNX has no operator for {missing[1]}"
    if "_local_scalar_dense" in text:
        return "its control flow depends on the values of its inputs"
    first = messages[-1].strip().splitlines()[0] if messages[-1].strip() else ""
    return f"{type(error).__name__}: {first}".rstrip(": .")


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress warnings and logs of the exporter."""
    previous = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(previous)
