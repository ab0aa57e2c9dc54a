"""A simulated robot in a process of its own: MuJoCo behind the topics of the real one.

robot     the physics: delayed motors, noise, encoders, and holding still when commands stop
node      the process around it: `python -m robopolicy_robots.simulated.node`
topics    what it says and hears beside the topics of the real one: episodes, faults
client    the other end of those: start it, start its episodes, make it fail, keep time with it in lockstep
"""
