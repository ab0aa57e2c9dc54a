"""A small rosbridge server (protocol v2, JSON) for tests: it forwards topics and goals and answers like rosapi.

It forwards the spelling of its clients and implements the part of the published protocol that the tests need.
"""

import json
import threading
from typing import Any

from trajectory_controller import TrajectoryController
from websockets.exceptions import ConnectionClosed
from websockets.sync.server import Server, ServerConnection, serve

from robopolicy_robots.codecs.json import decode
from robopolicy_robots.messages import JointTrajectory


class Hub:
    """A server on a local port; `rosapi` enables answers to queries about publishers, subscribers and actions."""

    def __init__(self, port: int = 0, rosapi: bool = True, controller: TrajectoryController | None = None) -> None:
        self.rosapi, self.controller = rosapi, controller
        self.requests: list[dict[str, Any]] = []  # all requests except publish
        self.headers: list[str | None] = []  # the Authorization headers of the clients
        self._clients: dict[ServerConnection, dict[str, set[str]]] = {}  # {client: its topics by role}
        self._latched: dict[str, str] = {}
        self._lock = threading.Lock()
        self._server: Server = serve(self._serve, "127.0.0.1", port, max_size=2**26, compression=None)
        self.port: int = self._server.socket.getsockname()[1]
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """The URL of the server."""
        return f"ws://127.0.0.1:{self.port}"

    def subscribers(self, topic: str) -> int:
        """Return the number of clients subscribed to a topic."""
        with self._lock:
            return sum(topic in topics["subscribe"] for topics in self._clients.values())

    def inject(self, topic: str, message: Any) -> None:
        """Send `message`, valid or not, on a topic."""
        self._pass_on(topic, json.dumps({"op": "publish", "topic": topic, "msg": message}))

    def send_raw(self, data: str | bytes) -> None:
        """Send raw data to every client."""
        for client in list(self._clients):
            client.send(data)

    def stop(self) -> None:
        """Stop, and close all connections."""
        self._server.shutdown()
        for client in list(self._clients):
            client.close()
        self._thread.join(5)

    def _serve(self, client: ServerConnection) -> None:
        request = client.request
        self.headers.append(None if request is None else request.headers.get("Authorization"))
        with self._lock:
            self._clients[client] = {"subscribe": set(), "advertise": set(), "latch": set()}
        try:
            for data in client:
                self._handle(client, str(data), json.loads(data))
        except ConnectionClosed:
            pass
        finally:
            with self._lock:
                del self._clients[client]

    def _handle(self, client: ServerConnection, data: str, request: dict[str, Any]) -> None:
        operation, topic = request["op"], request.get("topic", "")
        topics = self._clients[client]
        if operation == "publish":
            if topic in topics["latch"]:
                self._latched[topic] = data
            self._pass_on(topic, data)
            return
        if operation in ("subscribe", "advertise"):
            with self._lock:
                topics[operation].add(topic)
            if request.get("latch"):
                topics["latch"].add(topic)
            if operation == "subscribe" and topic in self._latched:
                client.send(self._latched[topic])
        elif operation.startswith("un"):
            with self._lock:
                topics[operation[2:]].discard(topic)
        elif operation == "send_action_goal" and self.controller is not None:
            self._execute(self.controller, client, request)
        elif operation == "cancel_action_goal" and self.controller is not None:
            self.controller.cancel(request["id"])
        elif operation == "call_service" and request["service"] == "/rosapi/action_servers":
            if self.rosapi:
                names = [self.controller.action] if self.controller else []
                answer = {"op": "service_response", "id": request["id"], "values": {"action_servers": names}}
                client.send(json.dumps(answer))
        elif operation == "call_service" and self.rosapi:
            word = request["service"].rsplit("/", 1)[-1]
            role = {"publishers": "advertise", "subscribers": "subscribe"}[word]
            asked = request["args"]["topic"]
            with self._lock:
                names = [f"/client{i}" for i, each in enumerate(self._clients.values()) if asked in each[role]]
            answer = {"op": "service_response", "id": request["id"], "values": {word: names}, "result": True}
            client.send(json.dumps(answer))
        self.requests.append(request)

    def _execute(self, controller: TrajectoryController, client: ServerConnection, request: dict[str, Any]) -> None:
        """Answer as rosbridge does: feedback after acceptance, and one result."""
        answer = {"id": request["id"], "action": request["action"]}

        def finish(status: int, code: int, text: str) -> None:
            values = {"error_code": code, "error_string": text}
            client.send(
                json.dumps({"op": "action_result", **answer, "values": values, "status": status, "result": True})
            )

        assert request["action_type"] == "control_msgs/action/FollowJointTrajectory"
        trajectory = decode(JointTrajectory, request["args"]["trajectory"])
        if controller.execute(request["id"], trajectory, finish):
            if request.get("feedback"):
                client.send(json.dumps({"op": "action_feedback", **answer, "values": {}}))
        else:
            text = "Action goal was rejected"
            client.send(json.dumps({"op": "action_result", **answer, "values": text, "status": 0, "result": False}))

    def _pass_on(self, topic: str, data: str) -> None:
        with self._lock:
            receivers = [client for client, topics in self._clients.items() if topic in topics["subscribe"]]
        for client in receivers:
            client.send(data)
