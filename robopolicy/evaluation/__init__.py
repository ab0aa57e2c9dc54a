"""Evaluation harness, intervals, reports and videos."""
