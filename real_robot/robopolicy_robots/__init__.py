"""ROS bridge: controls a robot with a policy over topics, behind the safety layer of `robopolicy.deploy`.

    transports/, codecs/, messages     topics of ROS 2, ROS 1, LeRobot or this process
    connection                         transport and its settings
    sensor_inputs                      newest messages, their publishers and ages
    embodiment, task_embodiment        observations (joints, cameras, task state) and commands
    policy_source, policy_runner       a bundle, a checkpoint or a server, in a background thread
    chunk_executor                     chunks to joint targets, and requests of the next chunk
    loop, loop_options, states, rate   fixed rate, states and holds, priority
    commands                           the safe command as a message, and back
    robot, robots/, import_urdf        robot description: joints, limits, topics, one YAML file each; from URDF or MJCF
    simulated/                         simulated robot in its own process, and its client
    recorder, filter_log               MCAP recordings, and filtering them again
    metrics, tui, browser_*            live metrics of a run on the terminal and in a browser
    deployment, check, cli             the command `robopolicy deploy [--check]`

MuJoCo is needed only for `task_embodiment`, `mujoco_topics`, MJCF files and the simulated robot. Torch is needed only
for `task_embodiment`, the simulated robot, checkpoints, and thus `deployment`.
"""
