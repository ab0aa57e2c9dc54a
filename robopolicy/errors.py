"""The one exception that means "the user can fix this", and the did-you-mean helper behind every name lookup."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """Bad input: the command line prints the message as one line and exits with code 2.

    Say what was expected, what was found and what to do, in one sentence without line breaks.
    """


def unknown_name(kind: str, name: str, known: Iterable[str]) -> UserError:
    """Build the error for a name that is not registered, suggesting the nearest one.

    Args:
        kind: What the name should have been ("task", "policy", "algorithm").
        name: What was asked for.
        known: The registered names.
    """
    options = sorted(known)
    near = difflib.get_close_matches(name, options, n=1, cutoff=0.4)
    hint = f" Did you mean '{near[0]}'?" if near else ""
    return UserError(f"Unknown {kind} '{name}'.{hint} Known: {', '.join(options)}.")
