"""System-call filter for programs that only compute, as classic BPF (seccomp(2)).

The filter permits a list of calls and answers every other one with EPERM: no files, sockets, processes or signals.
Memory cannot become executable. Calls of another architecture end the process.
"""

from __future__ import annotations

import platform
import struct

# Calls that compute, use open descriptors, or read clocks, with their numbers on x86_64 and aarch64.
CALLS = {
    "brk": (12, 214),
    "clock_getres": (229, 114),
    "clock_gettime": (228, 113),
    "clock_nanosleep": (230, 115),
    "close": (3, 57),
    "exit": (60, 93),
    "exit_group": (231, 94),
    "futex": (202, 98),
    "getpid": (39, 172),
    "getrandom": (318, 278),
    "getrusage": (98, 165),
    "gettid": (186, 178),
    "gettimeofday": (96, 169),
    "lseek": (8, 62),
    "madvise": (28, 233),
    "mremap": (25, 216),
    "munmap": (11, 215),
    "nanosleep": (35, 101),
    "read": (0, 63),
    "restart_syscall": (219, 128),
    "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139),
    "sched_yield": (24, 124),
    "sigaltstack": (131, 132),
    "times": (100, 153),
    "write": (1, 64),
}
MEMORY_CALLS = {"mmap": (9, 222), "mprotect": (10, 226)}  # permitted without PROT_EXEC
MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column of the numbers, and AUDIT_ARCH

_LOAD, _EQUAL, _ANY_BIT, _RETURN = 0x20, 0x15, 0x45, 0x06  # operations of classic BPF
_NUMBER, _ARCHITECTURE, _THIRD_ARGUMENT = 0, 4, 32  # offsets in struct seccomp_data
_PERMIT, _REFUSE, _KILL = 0x7FFF0000, 0x00050001, 0x80000000  # ALLOW, ERRNO | EPERM, KILL_PROCESS
_PROT_EXEC = 4


def compute_only_filter(machine: str | None = None) -> bytes | None:
    """Return the filter as an array of struct sock_filter; None for an unknown `machine` (default: this one)."""
    if (machine or platform.machine()) not in MACHINES:
        return None
    column, architecture = MACHINES[machine or platform.machine()]
    memory = [numbers[column] for numbers in MEMORY_CALLS.values()]
    plain = [numbers[column] for numbers in CALLS.values()]
    # Layout: [architecture, number], the memory calls, the plain calls, refuse, check of memory, permit.
    refuse = 4 + len(memory) + len(plain)
    check, permit = refuse + 1, refuse + 4
    lines = [(_LOAD, 0, 0, _ARCHITECTURE), (_EQUAL, 1, 0, architecture), (_RETURN, 0, 0, _KILL), (_LOAD, 0, 0, _NUMBER)]
    for target, numbers in ((check, memory), (permit, plain)):
        for number in numbers:
            lines.append((_EQUAL, target - len(lines) - 1, 0, number))
    lines += [(_RETURN, 0, 0, _REFUSE), (_LOAD, 0, 0, _THIRD_ARGUMENT), (_ANY_BIT, 0, 1, _PROT_EXEC)]
    lines += [(_RETURN, 0, 0, _REFUSE), (_RETURN, 0, 0, _PERMIT)]
    return b"".join(struct.pack("=HBBI", *line) for line in lines)
