"""Echo node: answers every JointState with a one-point JointTrajectory, through the rospy of Debian."""

# ruff: noqa: T201  (it prints when it is ready)

import rospy
from sensor_msgs.msg import JointState
from trajectory_msgs.msg import JointTrajectory, JointTrajectoryPoint


def main() -> None:
    """Run until the process ends."""
    rospy.init_node("echo", anonymous=True)
    publisher = rospy.Publisher("/arm/joint_trajectory", JointTrajectory, queue_size=1, tcp_nodelay=True)

    def answer(state: JointState) -> None:
        point = JointTrajectoryPoint(positions=state.position, velocities=state.velocity)
        point.time_from_start = rospy.Duration(0, 20_000_000)
        command = JointTrajectory(joint_names=state.name, points=[point])
        command.header.stamp, command.header.frame_id = state.header.stamp, state.header.frame_id
        publisher.publish(command)

    rospy.Subscriber("/joint_states", JointState, answer, queue_size=1, tcp_nodelay=True)
    print("ready", flush=True)
    rospy.spin()


if __name__ == "__main__":
    main()
