"""Teleoperation: a person moves a simulated task or a robot, and takes over from a policy.

`contract` defines commands and input devices, `devices` lists the devices by name, `operator` turns commands into
actions through the safety filter, `session` runs and records episodes of a simulator.
"""
