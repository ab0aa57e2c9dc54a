"""Rollout harness, intervals, reports and video."""
