"""Our simulators as environments of other libraries."""
