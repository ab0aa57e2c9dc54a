"""Simulated robot in its own process: MuJoCo behind the topics of the real robot.

robot     physics: delayed motors, noise, encoders, and a hold when commands stop
node      process: `python -m robopolicy_robots.simulated.node`
topics    additional topics: episodes, faults
client    client of these topics: start, episodes, faults, lockstep
"""
