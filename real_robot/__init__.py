"""The ROS bridge."""
