"""Corrections by a person: cloning before and after DAgger."""
