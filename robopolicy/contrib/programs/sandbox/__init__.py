"""Execution of Python code written by a model, confined by the kernel.

`runner.py` starts the process `server.py`, which confines itself and runs every program in a fork that only computes.
`seccomp.py` builds the system-call filter, and `layers.py` states which layers are required. `robopolicy.permissions`
has the permissions of the command line.
"""
