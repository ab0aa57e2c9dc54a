"""Descriptions of robots, one YAML file each; see `robopolicy_robots.robot`."""
