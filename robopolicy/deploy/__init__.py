"""From a checkpoint to something that a robot can run: bundles, a chunk server, chunk alignment and the safety layer.

All but `export.py` and `tracing.py`, which need torch, runs on numpy alone, so that a robot's computer needs neither
torch nor MuJoCo.
"""
