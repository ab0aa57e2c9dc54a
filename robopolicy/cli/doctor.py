"""`robopolicy doctor`: report the machine, its packages and the features of missing packages."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import metadata, util
from typing import Any

from robopolicy.plugins import Registry

EXAMPLES = """\
examples:
  robopolicy doctor
  robopolicy doctor --json
"""

CORE = ("robopolicy", "torch", "numpy", "mujoco", "gymnasium", "safetensors", "hydra-core", "pyarrow")

# distribution, module, feature, installation; backends and commands add their packages
OPTIONAL = (
    ("metaworld", "metaworld", "Meta-World", "pip install scipy; pip install --no-deps metaworld==3.1.1"),
    ("ogbench", "ogbench", "OGBench tasks and their oracles", "pip install 'robopolicy[ogbench]'"),
    ("gym-pusht", "gym_pusht", "the PushT task and its planner", "pip install 'robopolicy[pusht]'"),
    ("stable-baselines3", "stable_baselines3", "baselines and SB3's checker", "pip install 'robopolicy[sb3]'"),
    ("rsl-rl-lib", "rsl_rl", "simulators for the runner of rsl_rl", "pip install 'robopolicy[rslrl]'"),
    ("onnxruntime", "onnxruntime", "policies in ONNX files", "pip install 'robopolicy[onnx]'"),
    ("pygame", "pygame", "gamepads", "pip install 'robopolicy[gamepad]'"),
    ("pyspacemouse", "pyspacemouse", "SpaceMouse devices", "pip install 'robopolicy[spacemouse]'"),
    ("websockets", "websockets", "remote policies", "pip install 'robopolicy[remote]'"),
    ("tensorboard", "tensorboard", "logging.tensorboard=true", "pip install 'robopolicy[tensorboard]'"),
    ("wandb", "wandb", "logging.wandb=true", "pip install 'robopolicy[wandb]'"),
    ("trackio", "trackio", "logging.trackio=true", "pip install 'robopolicy[trackio]'"),
    ("viser", "viser", "robopolicy view", "pip install 'robopolicy[viewer]'"),
    ("rerun-sdk", "rerun", "files of Rerun (robopolicy view --out FILE.rrd)", "pip install 'robopolicy[rerun]'"),
    ("diffusers", "diffusers", "schedulers of diffusers", "pip install 'robopolicy[diffusers]'"),
    ("h5py", "h5py", "datasets of robomimic, D4RL and Minari", "pip install 'robopolicy[hdf5]'"),
    ("zarr", "zarr", "datasets of Diffusion Policy", "pip install 'robopolicy[zarr]'"),
    ("mcap", "mcap", "recordings of robots as datasets", "pip install 'robopolicy[record]'"),
    ("lerobot", "lerobot", "policies of LeRobot (Python 3.12)", "pip install 'robopolicy[lerobot]'"),
)


@dataclass(frozen=True)
class DoctorCheck:
    """One line of the report."""

    name: str
    ok: bool
    found: str  # version or state
    note: str = ""  # feature of a missing package and its installation


def add_parser(subparsers: Any) -> None:
    """Register the command."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "doctor",
        description="Report the features of this machine and what each missing one would enable. Always exits with 0.",
        epilog=EXAMPLES,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Print the report; return 0."""
    sections = {"core": core(), "machine": machine(), "optional": [optional(*row) for row in optional_packages()]}
    if args.json:
        print(json.dumps({name: [asdict(finding) for finding in findings] for name, findings in sections.items()}))
        return 0
    for name, findings in sections.items():
        print(name)
        for finding in findings:
            mark = "ok" if finding.ok else "--"
            print(f"  {mark}  {finding.name:<20} {finding.found}{'  ' + finding.note if finding.note else ''}".rstrip())
    return 0


def core() -> list[DoctorCheck]:
    """Check Python and the required packages."""
    python = DoctorCheck("python", sys.version_info >= (3, 11), platform.python_version())
    return [python, *(_package(name, "pip install robopolicy") for name in CORE)]


def machine() -> list[DoctorCheck]:
    """Check cores, disk, and what is in `CHECKS`."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    free = shutil.disk_usage(".").free / 2**30
    disk_note = "" if free > 5 else "datasets with cameras and checkpoints require several GiB"
    return [
        DoctorCheck("cpu cores", True, f"{cores}"),
        DoctorCheck("free disk here", free > 5, f"{free:.1f} GiB", disk_note),
        *(CHECKS[name]() for name in CHECKS),
    ]


def gpu() -> DoctorCheck:
    """Check the first CUDA device."""
    enables = "faster image policies (device=cuda) and GPU simulation; everything else works without"
    try:
        import torch

        if torch.cuda.is_available():
            memory = torch.cuda.get_device_properties(0).total_memory / 2**30
            return DoctorCheck("gpu", True, f"{torch.cuda.get_device_name(0)}, {memory:.0f} GiB")
    except ImportError:
        pass
    return DoctorCheck("gpu", False, "none", enables)


def rendering() -> DoctorCheck:
    """Render a tiny frame."""
    enables = "camera observations and videos; on Debian: apt install libegl1 libgl1-mesa-dri, or libosmesa6"
    try:
        import mujoco

        from robopolicy.sim.backends.mujoco.render import Renderer
        from robopolicy.sim.gl import gl_backend

        backend = gl_backend()
        box = "<geom type='box' size='.1 .1 .1' rgba='1 0 0 1'/><light pos='0 0 2'/>"
        model = mujoco.MjModel.from_xml_string(f"<mujoco><worldbody>{box}</worldbody></mujoco>")
        renderer = Renderer(model, 16, 16)
        mujoco.mj_forward(model, renderer.data)
        bright = int(renderer.frame().max())
        renderer.close()
        state = f"works (MUJOCO_GL={backend})"
        return DoctorCheck("rendering", bright > 0, state if bright else "black frames", "" if bright else enables)
    except Exception as error:  # a missing GL library raises various errors, and the report must not fail
        reason = str(error).strip().splitlines()
        return DoctorCheck("rendering", False, reason[0][:80] if reason else type(error).__name__, enables)


CHECKS: Registry[Callable[[], DoctorCheck]] = Registry("doctor", {"gpu": gpu, "rendering": rendering})
"""Checks of the machine; themes and packages add theirs."""


def optional_packages() -> list[tuple[str, str, str, str]]:
    """Return the rows of `OPTIONAL`, of simulator backends and of components of commands, one per module."""
    from robopolicy.cli.commands import extra_registries
    from robopolicy.sim.backends import BACKENDS

    rows = {row[1]: row for row in OPTIONAL}
    found = [(f"backend {name}", row.module, row.extra, "") for name, row in BACKENDS.items()]
    for registry in extra_registries():
        for name in registry:
            module, extra, install = (registry.attribute(name, key) for key in ("module", "extra", "install"))
            found.append((f"{registry.kind.removesuffix('s')} {name}", module, extra, install))
    for name, module, extra, install in found:
        if module:
            distribution, _, enables, hint = rows.get(module, (module.replace("_", "-"), module, "", ""))
            package = f"'robopolicy[{extra}]'" if extra else distribution
            enables = f"{enables}, {name}" if enables else name
            rows[module] = distribution, module, enables, hint or install or f"pip install {package}"
    return list(rows.values())


def optional(distribution: str, module: str, enables: str, install: str) -> DoctorCheck:
    """Check an optional package without importing it."""
    try:
        present = util.find_spec(module) is not None
    except (ImportError, ValueError):
        present = False
    if not present:
        return DoctorCheck(distribution, False, "missing", f"enables {enables}: {install}")
    try:
        return DoctorCheck(distribution, True, metadata.version(distribution))
    except metadata.PackageNotFoundError:
        return DoctorCheck(distribution, True, "present")


def _package(name: str, install: str) -> DoctorCheck:
    try:
        return DoctorCheck(name, True, metadata.version(name))
    except metadata.PackageNotFoundError:
        return DoctorCheck(name, False, "missing", install)
