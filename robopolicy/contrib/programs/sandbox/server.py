"""Program server: confines this process, then runs every program in a fork of its own that may only compute.

`runner.py` starts it as `python -I -S server.py SETTINGS`, so it imports nothing but the standard library. It imports
the modules that programs may use, drops the user, enters an empty root, and restricts files and sockets. Then it
serves. A frame is a length of four bytes, big endian, and JSON. The first frame it writes lists the layers that hold;
each was tried. Every program is a fork without descriptors other than two pipes, under the system-call filter; a
program can neither reach the pipes of the server nor leave anything for the next program.
"""

import builtins
import ctypes
import gc
import json
import os
import resource
import select
import signal
import socket
import struct
import sys
import time
import traceback
from contextlib import suppress

NOBODY = 65534
READ_BYTES = 1 << 16
ERROR_BYTES = 4096  # of standard error that are kept, from its end
# Constants of Linux: prctl(2), unshare(2), mount(2), umount2(2), landlock(7).
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, MODE_FILTER = 1, 4, 22, 38, 2
NEW_USER, NEW_MOUNTS, NEW_PIDS, NEW_NETWORK = 0x10000000, 0x00020000, 0x20000000, 0x40000000
NEW_IPC, NEW_HOSTNAME = 0x08000000, 0x04000000
NAMESPACES = NEW_USER | NEW_MOUNTS | NEW_PIDS | NEW_NETWORK | NEW_IPC | NEW_HOSTNAME
RECURSIVE_PRIVATE, READ_ONLY, DETACH = 0x44000, 0x1, 0x2
PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
LANDLOCK_CREATE, LANDLOCK_RESTRICT = 444, 446
LANDLOCK_FILES = {1: 13, 2: 14, 3: 15, 5: 16}  # first ABI -> number of access rights of files

libc = ctypes.CDLL(None, use_errno=True)


def call(function, *arguments):
    """Call a function of libc; an OSError is raised if it fails."""
    if function(*arguments) == -1:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def drop_user():
    """Become an unprivileged user if this one is root; return whether the user is not root."""
    if os.geteuid() == 0:
        with suppress(OSError):
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
            libc.prctl(PR_SET_DUMPABLE, 1)  # cleared with the change of the user; the maps below need it
    return os.geteuid() != 0


def enter_namespaces(root):
    """Enter new namespaces with an empty read-only root; the caller continues as process 1 of the namespace."""
    user, group = os.geteuid(), os.getegid()
    call(libc.unshare, NAMESPACES)
    for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    null = os.open(os.devnull, os.O_RDWR)  # now: the child also changes the root of this process
    child = os.fork()
    if child:  # process 1 ends with its parent
        os.dup2(null, 0)
        os.dup2(null, 1)
        os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 0xFF)
    os.close(null)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    empty_root(root)


def empty_root(root):
    """Mount an empty read-only file system at the folder `root` of this namespace and make it the root."""
    call(libc.mount, b"none", b"/", None, RECURSIVE_PRIVATE, None)
    place = os.fsencode(root)
    call(libc.mount, b"none", place, b"tmpfs", READ_ONLY, b"size=4k,nr_inodes=2,mode=555")
    os.chdir(place)
    call(libc.syscall, PIVOT_ROOT[os.uname().machine], b".", b".")
    call(libc.umount2, b".", DETACH)
    os.chdir("/")


def restrict_with_landlock():
    """Forbid all files, TCP, abstract sockets and signals to other processes, as far as this kernel knows them."""
    version = libc.syscall(LANDLOCK_CREATE, None, 0, 1)
    if version < 1:
        raise OSError("no landlock")
    rights = max(count for first, count in LANDLOCK_FILES.items() if first <= version)
    rules = struct.pack("=QQQ", (1 << rights) - 1, 3 if version >= 4 else 0, 3 if version >= 6 else 0)
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    handle = libc.syscall(LANDLOCK_CREATE, rules, size, 0)
    try:
        call(libc.syscall, LANDLOCK_RESTRICT, handle, 0)
    finally:
        os.close(handle)


def install_filter(program):
    """Install the system-call filter for this process."""

    class Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_char_p)]

    call(libc.prctl, PR_SET_SECCOMP, MODE_FILTER, ctypes.byref(Program(len(program) // 8, program)), 0, 0)


def confine(settings):
    """Apply every layer that this machine has; return which of them hold."""
    layers = {"user": drop_user(), "bubblewrap": settings["bubblewrap"]}
    layers["namespaces"] = settings["bubblewrap"] or in_fork(lambda: tried_namespaces(settings["root"])) == 0
    if layers["namespaces"] and not settings["bubblewrap"]:
        enter_namespaces(settings["root"])
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    try:
        restrict_with_landlock()
        layers["landlock"] = not can(lambda: os.listdir("/"))
    except OSError:
        layers["landlock"] = False
    libc.prctl(PR_SET_DUMPABLE, 0)
    layers["seccomp"] = in_fork(lambda: tried_filter(settings["filter"])) == 0
    return layers


def tried_namespaces(root):
    """Enter the namespaces in this fork; return 0 if they hold. A failure half way could not be undone."""
    enter_namespaces(root)
    return int(os.getpid() != 1 or bool(os.listdir("/")))


def can(attempt):
    """Whether an attempt is permitted."""
    try:
        attempt()
    except OSError:
        return False
    return True


def tried_filter(program):
    """Install the filter and try what it forbids; return 0 if it holds."""
    install_filter(program)
    attempts = (lambda: os.listdir("/"), os.fork, socket.socket, lambda: os.kill(os.getpid(), 0))
    return int(any(can(attempt) for attempt in attempts))


def in_fork(work):
    """Exit code of `work` in a fork; 1 if it raises."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = work()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def limit(memory_mib, seconds):
    """Limit memory [MiB], CPU time [s], files and processes of this process."""
    size, time_limit = memory_mib << 20, int(seconds) + 1
    for name, number in (("AS", size), ("CPU", time_limit), ("FSIZE", 0), ("CORE", 0), ("NPROC", 0), ("NOFILE", 3)):
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (number, number))


def guard_python(allowed):
    """Report forbidden imports and calls by name; the kernel forbids them anyway."""
    real, prefixes = builtins.__import__, ("open", "os.", "socket.", "subprocess.", "shutil.", "ctypes.", "pty.")

    def guarded(name, globals=None, locals=None, fromlist=(), level=0):
        if name.split(".")[0] not in allowed:
            raise ImportError(f"import of {name} is not allowed")
        return real(name, globals, locals, fromlist, level)

    def hook(event, _):
        if event.startswith(prefixes) or event == "sys.addaudithook":
            raise PermissionError(f"{event} is not allowed")

    builtins.__import__ = guarded
    sys.addaudithook(hook)


def execute(source, function, given):
    """Run the program; with a `function`, print its result for `given` and an error message as JSON."""
    if function is None:
        exec(compile(source, "<program>", "exec"), {"__name__": "__main__"})
        sys.stdout.flush()
        return
    try:
        space = {"__name__": "program", "print": lambda *_, **__: None}
        exec(compile(source, "<program>", "exec"), space)
        answer = [space[function](given), ""]
        text = json.dumps(answer)
    except Exception as error:
        text = json.dumps([None, f"{type(error).__name__}: {error}"[:200]])
    write_all(1, text.encode())


def write_all(descriptor, data):
    """Write all bytes to a pipe."""
    while data:
        data = data[os.write(descriptor, data) :]


class Kept:
    """The first or last `limit` bytes that were read from a pipe; the others are dropped."""

    def __init__(self, limit, *, from_end=False):
        self.data, self.limit, self.from_end = b"", max(0, limit), from_end

    def read(self, descriptor):
        """Read once; return False at the end of the pipe."""
        part = os.read(descriptor, READ_BYTES)
        self.data = (
            (self.data + part)[-self.limit :] if self.from_end else self.data + part[: self.limit - len(self.data)]
        )
        return bool(part)


class Server:
    """Serves the requests of one parent."""

    def __init__(self, settings):
        self.settings = settings
        self.null = os.open(os.devnull, os.O_RDWR)
        self.layers = confine(settings)

    def serve(self):
        """Answer requests until the parent closes the pipe."""
        self.write({"layers": self.layers})
        while header := self.read(4):
            request = json.loads(self.read(struct.unpack("!I", header)[0]))
            self.write({"results": self.results(request)})

    def read(self, size):
        """Read `size` bytes; fewer at the end of the input."""
        found = b""
        while len(found) < size and (part := os.read(0, size - len(found))):
            found += part
        return found

    def write(self, content):
        """Write a frame."""
        data = json.dumps(content).encode()
        write_all(1, struct.pack("!I", len(data)) + data)

    def results(self, request):
        """One [status, output, error] per input; after a program that runs out of time, the others are not run."""
        end, room, found = time.monotonic() + request["seconds"], request["longest"], []
        for given in request["inputs"]:
            status, output, error = self.run(request, given, end, room)
            room -= len(output)
            found.append([status, output.decode(errors="replace"), error.decode(errors="replace")])
            if status == "timed out":
                break
        return found

    def run(self, request, given, end, room):
        """Exit status of a program or "timed out", its output up to `room` bytes, and the end of its errors."""
        output, error = os.pipe(), os.pipe()
        child = os.fork()
        if child == 0:
            self.become_program(request, given, output[1], error[1])
        os.close(output[1])
        os.close(error[1])
        try:
            handle = os.pidfd_open(child)
            try:
                return self.watch(child, handle, output[0], error[0], end, room)
            finally:
                os.close(handle)
        finally:
            os.close(output[0])
            os.close(error[0])

    def watch(self, child, handle, output, error, end, room):
        """Read both pipes until the program ends, the time is over, or the parent is gone."""
        pipes = {output: Kept(room), error: Kept(ERROR_BYTES, from_end=True)}
        poll = select.poll()
        for descriptor in (handle, output, error):
            poll.register(descriptor, select.POLLIN)
        poll.register(0, 0)  # reports a parent that is gone
        running = True
        while running:
            left = end - time.monotonic()
            ready = dict(poll.poll(1e3 * left)) if left > 0 else {}
            if not ready or 0 in ready:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                if ready:
                    os._exit(0)
                return "timed out", b"", b""
            running = handle not in ready
            for descriptor in pipes.keys() & ready:
                if not pipes[descriptor].read(descriptor):
                    poll.unregister(descriptor)
        for descriptor, kept in pipes.items():  # what the program wrote last
            os.set_blocking(descriptor, False)
            with suppress(BlockingIOError):
                while kept.read(descriptor):
                    pass
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        return status, pipes[output].data, pipes[error].data

    def become_program(self, request, given, output, error):
        """Turn this fork into the program; it never returns."""
        code = 1
        try:
            for source, target in ((self.null, 0), (output, 1), (error, 2)):
                os.dup2(source, target)
            os.closerange(3, 256)
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            limit(self.settings["memory_mib"], request["seconds"])
            if self.layers["seccomp"]:
                install_filter(self.settings["filter"])
            guard_python(frozenset(self.settings["imports"]))
            execute(request["source"], request["function"], given)
            code = 0
        except SystemExit as leave:
            code = 0 if leave.code is None else leave.code if isinstance(leave.code, int) else 1
        except BaseException as failure:
            with suppress(BaseException):
                text = "".join(traceback.format_exception_only(failure))
                write_all(2, text.encode()[-ERROR_BYTES:])
        finally:
            os._exit(code)


def main():
    """Serve one parent with the settings of the command line."""
    settings = json.loads(sys.argv.pop())
    settings["filter"] = bytes.fromhex(settings["filter"])
    for name in settings["imports"]:
        __import__(name)
    gc.freeze()
    Server(settings).serve()


if __name__ == "__main__":
    main()
