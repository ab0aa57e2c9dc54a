"""The ROS bridge: a policy drives a robot over topics, behind the safety layer of `robopolicy.deploy`.

From the wire to the policy and back:

    transports/, codecs/, messages     topics of ROS 2, ROS 1 or this process, newest message first
    intake, embodiment                 what was heard, and what the policy sees of it
    policy_source, policy_runner       a bundle, a checkpoint or a server, asked beside the loop
    playback                           chunks to joint targets, one action after the other
    loop, states, pace, commands       fixed rate, states and holds; the safe command as a message
    robot, robots/                     what a robot is: joints, limits, topics, one YAML file each
    sim_node, sim_robot, simulation    the simulated robot in a process of its own, and how to drive it
    recorder, filter_log               MCAP recordings, and running them through the filter again
    deployment, deploy_verb            all of it put together: `robopolicy deploy`

Only `task_embodiment`, `wiring` and the simulated robot need MuJoCo, and nothing but a checkpoint needs torch.
"""
