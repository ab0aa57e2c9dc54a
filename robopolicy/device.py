"""Where networks run, and simulators that can run on more than the CPU."""

from __future__ import annotations

import torch

from robopolicy.errors import UserError


def usable_device(name: str | torch.device) -> torch.device:
    """The device called `name`, once it has been seen to work.

    Raises:
        UserError: There is no such device here.
    """
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
        if device.type == "meta":
            raise RuntimeError("it holds no numbers")
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip().splitlines()[0].rstrip(".")
        if reason.startswith("Expected one of"):  # torch lists all its backends
            reason = "it is not a device such as cpu, cuda or cuda:0"
        raise UserError(f"Device '{name}' cannot be used: {reason}; use device cpu.") from error
    return device
