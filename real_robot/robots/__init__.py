"""Descriptions of robots, one YAML file each; see `real_robot.robot`."""
