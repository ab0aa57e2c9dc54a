"""Check of the sandbox for `robopolicy doctor`."""

from __future__ import annotations

from dataclasses import asdict

from robopolicy.cli.doctor import DoctorCheck
from robopolicy.contrib.programs.sandbox.layers import MEANING
from robopolicy.contrib.programs.sandbox.runner import Sandbox
from robopolicy.errors import UserError


def check_sandbox() -> DoctorCheck:
    """Start the sandbox for code of a model, and report its layers."""
    with Sandbox() as started:
        try:
            layers = started.layers
        except UserError as error:
            return DoctorCheck("sandbox", False, "does not start", str(error))
    found = ", ".join(name for name, holds in asdict(layers).items() if holds) or "no layers"
    missing = [f"{name} ({MEANING[name]})" for name in layers.missing()]
    return DoctorCheck("sandbox", layers.sufficient, found, f"missing: {'; '.join(missing)}" if missing else "")
