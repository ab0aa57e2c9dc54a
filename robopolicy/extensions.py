"""What other packages add: functions that entry points name, called once before names are looked up.

`robopolicy.tasks` is the group of functions that register tasks (`robopolicy.sim.registry`), `robopolicy.extensions`
that of functions that add to `POLICIES` and `ALGORITHMS`. Verbs have a group of their own (`robopolicy.cli.main`).
"""

from __future__ import annotations

from importlib.metadata import entry_points

from robopolicy.errors import UserError

TASKS = "robopolicy.tasks"
EXTENSIONS = "robopolicy.extensions"

_loaded: set[str] = set()


def load_extensions(group: str = EXTENSIONS) -> None:
    """Call the functions of a group, unless that has been done.

    Raises:
        UserError: One cannot be imported, or failed; it names the entry point.
    """
    if group in _loaded:
        return
    _loaded.add(group)
    for point in entry_points(group=group):
        try:
            point.load()()
        except Exception as error:
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise UserError(f"{point.name} = {point.value} of {group} failed: {reason}; mend or remove it.") from error
