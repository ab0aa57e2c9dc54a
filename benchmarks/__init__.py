"""Benchmarks, run by `python -m benchmarks.NAME [--quick]`; many compare with other libraries."""
