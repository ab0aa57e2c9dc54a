"""One vector-simulator contract and its backends."""
