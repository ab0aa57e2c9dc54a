"""Transports to a robot with the interface of `base`; one module each, imported on use."""
