"""The option `--display` of commands that run policies."""

from __future__ import annotations

import argparse
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from robopolicy.viewer.display import Display

LIVE, PORT = "live", 8080


def add_display_option(parser: argparse.ArgumentParser) -> None:
    """Add `--display`."""
    text = (
        f"show what happens in 3D in a browser ({LIVE}: port {PORT} of 127.0.0.1), or write it for Foxglove (.mcap) or "
        "Rerun (.rrd): bodies, images, joints, actions, chunks, success and safety events (default: neither)"
    )
    parser.add_argument("--display", metavar=f"{LIVE}[:PORT]|FILE", help=text)


def check_display(args: argparse.Namespace) -> tuple[Path | None, int] | None:
    """Return the file, None for the page, and the port of `--display`; None without it.

    Raises:
        UserError: The port is invalid, the file exists or has an unknown suffix.
    """
    from robopolicy.errors import UserError
    from robopolicy.files import check_new_file
    from robopolicy.viewer.sinks import SINKS

    if args.display is None:
        return None
    name, _, port = args.display.partition(":")
    if name == LIVE:
        if port and not (port.isdecimal() and int(port) < 2**16):
            raise UserError(f"--display {LIVE}:PORT needs a port from 0 to 65535, got '{port}'.")
        return None, int(port or PORT)
    path = Path(args.display)
    check_new_file(path, *SINKS, overwrite=args.overwrite, option="--display")
    return path, 0


def open_display(args: argparse.Namespace) -> AbstractContextManager[Display | None]:
    """Open the display of `--display`; None without the option; see `check_display` for errors."""
    found = check_display(args)
    if found is None:
        return nullcontext()
    from robopolicy.viewer.display import Display

    return Display(*found)
