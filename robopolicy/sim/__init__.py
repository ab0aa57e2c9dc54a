"""Vector-simulator contract, its backends and wrappers."""
