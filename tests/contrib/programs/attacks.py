"""Programs that try to leave the sandbox; each prints ESCAPED if it succeeds.

`PRELUDE` gives them what an attacker finds by walking objects: all loaded modules, and a libc function that calls the
kernel without an audit event, so that the attempts below reach the kernel. `{secret}` is a readable file, `{folder}`
a writable folder, `{port}` and `{name}` a listening TCP port and abstract socket, and `{parent}` the id of the process
that runs the tests. System-call numbers are for x86_64.
"""

PRELUDE = """
import collections
sys = collections._sys
modules = sys.modules
libc = modules["__main__"].libc
os, builtins, ctypes = modules["os"], modules["builtins"], modules["ctypes"]
libc.syscall.restype = ctypes.c_long

def kernel(number, *arguments):
    if libc.syscall(number, *arguments) >= 0:
        print("ESCAPED")

def find(text):
    if "53CR" + "37" in str(text):
        print("ESCAPED")
"""

FILES = {
    "builtin open": "find(open('{secret}').read())",
    "io.open": "find(modules['io'].open('{secret}').read())",
    "os.open": "find(os.read(os.open('{secret}', 0), 99))",
    "posix.open": "find(os.read(modules['posix'].open('{secret}', 0), 99))",
    "open": "kernel(2, b'{secret}', 0)",
    "openat": "kernel(257, -100, b'{secret}', 0)",
    "openat2": "kernel(437, -100, b'{secret}', b'\\0' * 24, 24)",
    "stat": "kernel(4, b'{secret}', ctypes.create_string_buffer(999))",
    "readlink of /proc/self/exe": "kernel(89, b'/proc/self/exe', ctypes.create_string_buffer(99), 99)",
    "listing of the root": "print('ESCAPED' if os.listdir('/') else '')",
    "environment of the parent": "print('ESCAPED' if open('/proc/{parent}/environ').read() else '')",
    "environment of the server": "kernel(2, b'/proc/1/environ', 0)",
    "memory of the parent": "kernel(2, b'/proc/{parent}/mem', 2)",
    "creat": "kernel(85, b'{folder}/made', 438)",
    "mkdir": "kernel(83, b'{folder}/made', 511)",
    "symlink": "kernel(88, b'{secret}', b'{folder}/made')",
    "link": "kernel(86, b'{secret}', b'{folder}/made')",
    "rename": "kernel(82, b'{folder}/victim', b'{folder}/made')",
    "unlink": "kernel(87, b'{folder}/victim')",
    "truncate": "kernel(76, b'{folder}/victim', 0)",
    "chmod": "kernel(90, b'{folder}/victim', 511)",
    "write with open": "open('{folder}/made', 'w').write('x')\nprint('ESCAPED')",
}
NETWORK = {
    "TCP connection": "modules['socket'].create_connection(('127.0.0.1', {port}))\nprint('ESCAPED')",
    "socket of TCP": "kernel(41, 2, 1, 0)",
    "socket of UDP": "kernel(41, 2, 2, 0)",
    "local socket": "kernel(41, 1, 1, 0)",
    "pair of sockets": "kernel(53, 1, 1, 0, ctypes.create_string_buffer(8))",
    "io_uring": "kernel(425, 4, ctypes.create_string_buffer(999))",
}
PROCESSES = {
    "os.kill": "os.kill({parent}, 0)\nprint('ESCAPED')",
    "kill of the parent": "kernel(62, {parent}, 0)",
    "kill of all": "kernel(62, -1, 0)",
    "kill of the server": "kernel(62, 1, 0)",
    "tgkill": "kernel(234, {parent}, {parent}, 0)",
    "pidfd": "kernel(434, {parent}, 0)",
    "ptrace": "kernel(101, 16, {parent}, 0, 0)",
    "reading another process": "kernel(310, {parent}, b'', 0, b'', 0, 0)",
    "os.fork": "os.fork()\nprint('ESCAPED')",
    "fork": "kernel(57)",
    "vfork": "kernel(58)",
    "clone": "kernel(56, 17, 0, 0, 0, 0)",
    "thread": "modules['_thread'].start_new_thread(print, ('ESCAPED',))\nmodules['time'].sleep(0.2)",
    "fork bomb": "while True:\n    kernel(57)",
    "execve": "kernel(59, b'/bin/true', (ctypes.c_char_p * 2)(b'true', None), None)",
    "os.system": "print('ESCAPED' if os.system('true') == 0 else '')",
    "setsid": "kernel(112)",
    "nice": "kernel(141, 0, 0, -20)",
}
PRIVILEGES = {
    "mount": "kernel(165, b'none', b'/', b'tmpfs', 0, None)",
    "umount": "kernel(166, b'/', 2)",
    "unshare": "kernel(272, 0x10000000)",
    "setns": "kernel(308, 0, 0)",
    "chroot": "kernel(161, b'/')",
    "setuid": "kernel(105, 0)",
    "limits raised": "kernel(302, 0, 9, (ctypes.c_ulong * 2)(-1, -1), None)",
    "dumpable": "kernel(157, 4, 1)",
    "second filter": "kernel(317, 2, 0, b'\\0' * 16)",
    "executable memory": "kernel(9, 0, 4096, 7, 34, -1, 0)",
    "memory made executable": "kernel(10, ctypes.c_long(libc.syscall(9, 0, 4096, 3, 34, -1, 0)), 4096, 7)",
    "keys": "kernel(250, 0, -3, 0)",
    "bpf": "kernel(321, 0, b'\\0' * 64, 64)",
    "performance events": "kernel(298, b'\\0' * 128, 0, -1, -1, 0)",
    "kernel log": "kernel(103, 3, ctypes.create_string_buffer(99), 99)",
}
OBJECTS = {
    "environment": "find(dict(os.environ))",
    "environment of the C library": "find(ctypes.string_at(ctypes.cast(libc.environ, ctypes.c_void_p), 99))",
    "settings of the server": "find(vars(modules['__main__']))",
    "frames": "frame = sys._getframe()\nwhile frame:\n    find(frame.f_locals)\n    frame = frame.f_back",
    "all objects": "find([str(x)[:999] for x in modules['gc'].get_objects() if type(x) in (dict, list, str)])",
    "subclasses": "find([c for c in ().__class__.__base__.__subclasses__() if c.__name__ == 'Popen'])",
    "real import": (
        "real = [c.cell_contents for c in builtins.__import__.__closure__ if callable(c.cell_contents)][0]\n"
        "find(real('subprocess').check_output(['cat', '{secret}']))"
    ),
    "guard switched off": (
        "modules['__main__'].guard_python = None\nbuiltins.open = modules['_io'].open\nfind(open('{secret}').read())"
    ),
    "hook by attribute": "modules['__main__'].prefixes = ()\nfind(open('{secret}').read())",
    "descriptors": "for i in range(3, 64):\n    kernel(1, i, b'x', 1)",
    "standard input": "find(sys.stdin.read() or os.read(0, 99))",
}
ESCAPES = {**FILES, **NETWORK, **PROCESSES, **PRIVILEGES, **OBJECTS}
# Attempts that harm nothing, which succeed outside the sandbox.
CONTROLS = (
    *("builtin open", "io.open", "os.open", "posix.open", "open", "openat", "stat", "readlink of /proc/self/exe"),
    *("listing of the root", "environment of the parent", "TCP connection", "socket of TCP"),
    *("socket of UDP", "local socket", "pair of sockets", "os.kill", "kill of the parent", "tgkill", "pidfd"),
    *("os.fork", "fork", "clone", "thread", "os.system", "executable memory", "memory made executable"),
    *("environment", "dumpable"),
)

# Attempts to outlive the limits of time, memory and output.
EXCESSES = {
    "loop": "while True: pass",
    "sleep": "modules['time'].sleep(60)",
    "ignored signals": "[libc.syscall(13, n, b'\\1' + b'\\0' * 31, 0, 8) for n in range(1, 32)]\nwhile True: pass",
    "closed output": "os.close(1)\nos.close(2)\nwhile True: pass",
    "regular expression": "import re\nre.match('(a+)+b', 'a' * 60)",
    "power": "9 ** 9 ** 9",
    "memory": "x = [0] * 10 ** 9",
    "memory in steps": "x = []\nwhile True: x.append(bytes(1 << 20))",
    "flood": "while True: print('x' * 65536)",
    "flood of errors": "while True: sys.stderr.write('x' * 65536)",
    "one long line": "sys.stdout.write('x' * (1 << 27))",
    "recursion": "def f(): f()\nsys.setrecursionlimit(10 ** 9)\nf()",
    "crash": "ctypes.string_at(0)",
    "exit": "os._exit(0)",
}
