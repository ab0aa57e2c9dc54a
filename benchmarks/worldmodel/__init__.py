"""Policies of graded quality, evaluated in a learned world model, in the simulator and from logs."""
