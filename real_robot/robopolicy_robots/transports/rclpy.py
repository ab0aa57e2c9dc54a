"""Transport to ROS 2 through `rclpy`, for a sourced ROS 2 installation.

A thread spins the node and stores the newest messages of each topic, which are converted on reading. ROS chooses the
middleware (RMW_IMPLEMENTATION).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from functools import partial
from importlib import import_module
from typing import Any

from robopolicy_robots.codecs import native
from robopolicy_robots.codecs.definitions import prepare
from robopolicy_robots.messages import JointTrajectory
from robopolicy_robots.transports.actions import FOLLOW_JOINT_TRAJECTORY, GoalTracker, goal_failure
from robopolicy_robots.transports.base import Arrival, M, Publisher, QoS, Subscription, Transport, TransportError, drain

SPIN = 0.1  # [s] interval at which the thread checks whether to end


class RclpyPublisher(Publisher[M]):
    """Publisher with rclpy."""

    def __init__(self, node: Any, topic: str, kind: type[M], qos: QoS) -> None:
        super().__init__(topic, kind)
        prepare(kind)
        profile = _profile(qos.offers_reliable, qos.latched)
        self._node = node
        self._inner: Any = node.create_publisher(native.native_type(kind), topic, profile)

    def _send(self, message: M) -> None:
        self._inner.publish(native.encode(message))  # the middleware decides whether this waits for a slow peer

    def _peers(self) -> tuple[str, ...]:
        # The graph also lists endpoints that do not match, without saying which; only the count is correct.
        known = _identities(self._node.get_subscriptions_info_by_topic(self.topic))
        return known[: self._inner.get_subscription_count()]

    def _leave(self) -> None:
        self._node.destroy_publisher(self._inner)


class RclpySubscription(Subscription[M]):
    """Subscription with rclpy."""

    def __init__(self, node: Any, topic: str, kind: type[M], qos: QoS) -> None:
        super().__init__(topic, kind, qos.depth)
        prepare(kind)
        self._node = node
        self._kept: deque[tuple[Any, float]] = deque(maxlen=qos.depth)  # rclpy message, time [s]
        profile = _profile(qos.requests_reliable, qos.latched, qos.depth)
        self._inner: Any = node.create_subscription(native.native_type(kind), topic, self._keep, profile)

    def _arrived(self) -> list[Arrival]:
        if not self._kept:
            return []
        peers = "+".join(self._peers())  # rclpy does not identify the sender
        return [Arrival(message, received, peers) for message, received in drain(self._kept)]

    def _read(self, data: Any) -> M:
        return native.decode(self.kind, data)

    def _peers(self) -> tuple[str, ...]:
        return _identities(self._node.get_publishers_info_by_topic(self.topic))

    def _leave(self) -> None:
        self._node.destroy_subscription(self._inner)

    def _keep(self, message: Any) -> None:
        self._kept.append((message, time.monotonic()))


class RclpyTrajectoryClient(GoalTracker):
    """Client of an action with rclpy."""

    def __init__(self, node: Any, action: str) -> None:
        super().__init__(action)
        self._kind = native.native_class(FOLLOW_JOINT_TRAJECTORY)
        self._inner: Any = import_module("rclpy.action").ActionClient(node, self._kind, action)
        self._handles: dict[str, Any] = {}  # of accepted goals

    @property
    def matched(self) -> int:
        """Number of action servers, 0 or 1."""
        return int(self._inner.server_is_ready())

    def close(self) -> None:
        """Destroy the client."""
        self._inner.destroy()

    def _send(self, goal: str, trajectory: JointTrajectory) -> None:
        message = self._kind.Goal()
        message.trajectory = native.encode(trajectory)
        future = self._inner.send_goal_async(message, feedback_callback=lambda _: self._answer(goal))
        future.add_done_callback(partial(self._on_response, goal))

    def _cancel(self, goal: str) -> None:
        if handle := self._handles.get(goal):  # else not accepted yet, and a later call cancels it
            handle.cancel_goal_async()

    def _on_response(self, goal: str, future: Any) -> None:
        handle = future.result()
        if not handle.accepted:
            self._end(goal, "rejected")
            return
        self._handles[goal] = handle
        self._answer(goal)
        handle.get_result_async().add_done_callback(partial(self._on_result, goal))

    def _on_result(self, goal: str, future: Any) -> None:
        self._handles.pop(goal, None)
        response = future.result()
        self._end(goal, goal_failure(response.status, response.result.error_code, response.result.error_string))


class RclpyTransport(Transport):
    """ROS 2 through a local installation.

    Args:
        domain: ROS_DOMAIN_ID; by default from the environment.
        node: Name of the ROS node.
    """

    module = "rclpy"
    install = "install ROS 2 and source its setup file"

    def __init__(self, domain: int | None = None, node: str = "robopolicy") -> None:
        super().__init__()
        try:
            rclpy = import_module("rclpy")
        except ImportError as error:
            text = "ROS 2 is not set up here; source its setup.bash and use its Python version."
            raise TransportError(text) from error
        self._context: Any = import_module("rclpy.context").Context()
        rclpy.init(context=self._context, domain_id=domain)
        self._node: Any = rclpy.create_node(node, context=self._context)
        self._executor = import_module("rclpy.executors").SingleThreadedExecutor(context=self._context)
        self._executor.add_node(self._node)
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._spin, daemon=True)
        self._thread.start()

    def _publisher(self, topic: str, kind: type[M], qos: QoS) -> RclpyPublisher[M]:
        return RclpyPublisher(self._node, topic, kind, qos)

    def _subscription(self, topic: str, kind: type[M], qos: QoS) -> RclpySubscription[M]:
        return RclpySubscription(self._node, topic, kind, qos)

    def _trajectory_client(self, action: str) -> RclpyTrajectoryClient:
        return RclpyTrajectoryClient(self._node, action)

    def _leave(self) -> None:
        self._ending.set()
        self._thread.join(10 * SPIN)
        self._executor.shutdown()
        self._node.destroy_node()
        self._context.shutdown()

    def _spin(self) -> None:
        while not self._ending.is_set():
            self._executor.spin_once(timeout_sec=SPIN)


def _profile(reliable: bool, latched: bool, depth: int = 1) -> Any:
    qos = import_module("rclpy.qos")
    return qos.QoSProfile(
        history=qos.HistoryPolicy.KEEP_LAST,
        depth=depth,
        reliability=qos.ReliabilityPolicy.RELIABLE if reliable else qos.ReliabilityPolicy.BEST_EFFORT,
        durability=qos.DurabilityPolicy.TRANSIENT_LOCAL if latched else qos.DurabilityPolicy.VOLATILE,
    )


def _identities(endpoints: Any) -> tuple[str, ...]:
    return tuple(sorted(bytes(each.endpoint_gid).hex() for each in endpoints))
