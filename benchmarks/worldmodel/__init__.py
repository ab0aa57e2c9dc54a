"""Policies of graded quality, judged in a learned world model, in the simulator and from logs."""
