"""sim.mujoco"""
