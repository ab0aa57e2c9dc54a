"""The shared algorithm core: depends on torch only, not on robots or text."""
