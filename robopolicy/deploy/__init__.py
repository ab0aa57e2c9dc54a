"""Deployment of policies on robots: bundles, a chunk server, chunk alignment and the safety layer.

Only `export.py`, `tracing.py` and `safety/ood.py` need torch; everything else needs only numpy.
"""
