"""Adapters of policies and simulators from and to other libraries, imported on use."""
