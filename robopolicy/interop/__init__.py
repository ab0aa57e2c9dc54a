"""Policies and simulators of other libraries as ours, and ours as theirs; imported when they are used."""
