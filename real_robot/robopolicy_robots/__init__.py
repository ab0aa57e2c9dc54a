"""The ROS bridge: a policy drives a robot over topics, behind the safety layer of `robopolicy.deploy`.

From the wire to the policy and back:

    transports/, codecs/, messages     topics of ROS 2, ROS 1, LeRobot or this process, newest message first
    reach                              which of them, with which settings
    intake                             what was heard, from whom, and how old it is
    embodiment, task_embodiment        what the policy sees of it (joints, cameras, a task's state), what it commands
    policy_source, policy_runner       a bundle, a checkpoint or a server, asked beside the loop
    playback                           chunks to joint targets: which action when, and when to ask for the next chunk
    loop, parts, states, pace          fixed rate, states and holds, priority
    commands                           the safe command as a message, and back
    robot, robots/, describe           what a robot is: joints, limits, topics, one YAML file each; from URDF or MJCF
    simulated/                         the simulated robot in a process of its own, and how to drive it
    recorder, filter_log               MCAP recordings, and running them through the filter again
    figures, live_view, browser_*      what a run looks like meanwhile: on the terminal and, by a process, in a browser
    deployment, check, deploy_verb     all of it put together, or only looked at: `robopolicy deploy [--check]`

Only `task_embodiment`, `wiring`, MJCF files and the simulated robot need MuJoCo. Only `task_embodiment`, the simulated
robot and a checkpoint need torch, hence `deployment`; a loop of your own around `JointEmbodiment` and a bundle does
not.
"""
