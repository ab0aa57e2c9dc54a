"""Simulator backends behind the contract of `robopolicy.sim.contract`."""
