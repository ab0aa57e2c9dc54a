"""The one exception that means "the user can fix this", and the did-you-mean helper behind every name lookup."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

MOST_NAMES = 16  # longer lists do not help in an error line


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
    if not near:  # "lft" is far from "manipulation/lift" but close to its last part
        last = {option.rsplit("/", 1)[-1]: option for option in options}
        near = [last[part] for part in difflib.get_close_matches(name, last, n=1, cutoff=0.4)]
    hint = f" Did you mean '{near[0]}'?" if near else ""
    if len(options) <= MOST_NAMES:
        return UserError(f"Unknown {kind} '{name}'.{hint} Known: {', '.join(options)}.")
    return UserError(f"Unknown {kind} '{name}'.{hint} There are {len(options)}; see 'robopolicy list'.")
