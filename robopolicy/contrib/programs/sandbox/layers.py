"""Layers of confinement that a running sandbox has, and the ones that programs require."""

from __future__ import annotations

from dataclasses import dataclass, fields

from robopolicy.errors import UserError

MEANING = {
    "seccomp": "programs may only compute: no files, sockets, processes and signals",
    "landlock": "no files, TCP connections and signals to other processes",
    "namespaces": "own users, processes, network and an empty root folder",
    "user": "an unprivileged user",
    "bubblewrap": "namespaces by bubblewrap, where it is installed",
}


@dataclass(frozen=True)
class Layers:
    """Which layers hold; each was tried when the sandbox started."""

    seccomp: bool = False
    landlock: bool = False
    namespaces: bool = False
    user: bool = False
    bubblewrap: bool = False

    @property
    def sufficient(self) -> bool:
        """Whether programs of a model may run: the system-call filter and one further layer hold."""
        return self.seccomp and (self.landlock or self.namespaces)

    def missing(self) -> list[str]:
        """Names of the layers that do not hold, without bubblewrap."""
        return [entry.name for entry in fields(self) if entry.name != "bubblewrap" and not getattr(self, entry.name)]

    def check(self) -> None:
        """Raise a UserError unless the layers are sufficient."""
        if not self.sufficient:
            raise UserError(
                f"Code of a model cannot be confined on this machine (missing: {', '.join(self.missing())}; see "
                "'robopolicy doctor'); run it in a container or pass --unsafe-code to run it unconfined."
            )
