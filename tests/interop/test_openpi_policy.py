"""Tests of policies behind openpi's protocol: equal chunks, replies of other servers, and one-line errors."""

import json
import socket
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("msgpack", reason="needs robopolicy[remote]")
pytest.importorskip("websockets", reason="needs robopolicy[remote]")

from openpi_toys import openpi_server, tiled
from test_import import DSRL

from robopolicy.cli.main import main
from robopolicy.deploy.server import ServerConfig, running
from robopolicy.deploy.wire import Greeting
from robopolicy.errors import UserError
from robopolicy.interop.openpi import open_openpi
from robopolicy.interop.remote import ServedPolicy
from robopolicy.interop.sources import CheckpointChunkPolicy
from robopolicy.policies.base import PolicySpec
from robopolicy.policies.noise import PerRowGenerator
from robopolicy.policies.registry import POLICIES
from robopolicy.policies.wrappers.latent import STEERING_ACTOR, LatentPolicy, NoiseSpace
from robopolicy.training.checkpoint import load_policy

STATE = {"state": torch.arange(12.0).reshape(2, 1, 6)}
NAMES = {"state": "observation/state"}
OURS = {"protocol": "openpi", "observation": {"observation/state": [6]}}  # metadata of our servers


def test_chunks_are_those_of_the_server() -> None:
    with openpi_server() as (url, requests):
        policy = open_openpi(url, {"state": (6,)}, rename=NAMES, prompt="push", action_horizon=8)
        assert policy.spec == PolicySpec({"state": (6,)}, 2, horizon=10, action_horizon=8) and not policy.is_steerable
        chunk = policy.act(STATE)
        assert torch.equal(chunk, STATE["state"][:, :, :2].expand(2, 10, 2))
        assert [set(request) for request in requests] == [{"observation/state", "prompt"}] * 3  # one for the sizes
        assert requests[-1]["prompt"] == "push" and requests[-1]["observation/state"].dtype == np.float32
        policy.close()


def test_cameras_have_the_size_of_the_metadata_and_channels_last() -> None:
    names = {**NAMES, "image.front": "observation/image"}
    with openpi_server(metadata={"image_resolution": [4, 6]}) as (url, requests):
        policy = open_openpi(url, {"state": (6,)}, rename=names)
        assert policy.spec.observation["image.front"] == (3, 4, 6)
        image = torch.randint(0, 255, (1, 1, 3, 4, 6), dtype=torch.uint8)
        policy.act({"state": STATE["state"][:1], "image.front": image})
        np.testing.assert_array_equal(requests[-1]["observation/image"], image[0, 0].permute(1, 2, 0))
        policy.close()
    with openpi_server() as (url, requests):
        assert open_openpi(url, {"state": (6,)}, rename=names).spec.observation["image.front"] == (3, 224, 224)


def test_replies_of_vllm_omni_are_read() -> None:
    sessions = {"needs_session_id": True, "action_keys": ["arm", "gripper"]}

    def parts(obs: dict[str, Any]) -> dict[str, Any]:
        return {"gripper": np.ones((10, 1)), "arm": tiled(obs)["actions"], "uncertainty": np.zeros(3)}

    with openpi_server(parts, sessions) as (url, requests):
        policy = open_openpi(url, {"state": (6,)}, rename=NAMES)
        assert torch.equal(policy.act(STATE)[1, 0], torch.tensor([6.0, 7.0, 1.0]))
        assert len({request["session_id"] for request in requests}) == 3
    with openpi_server(lambda obs: tiled(obs)["actions"]) as (url, _):
        assert open_openpi(url, {"state": (6,)}, rename=NAMES).spec.action_dim == 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"error": "Traceback (most recent call last):\n  ...\nKeyError: 'observation/image'\n"}, "KeyError: 'obs.*"),
        ({"infer": lambda obs: {"type": "error", "message": "no model"}}, "returned no chunk: no model"),
        ({"infer": lambda obs: {"action": np.ones((2, 2))}}, "returned no 'actions' but action; name its actions"),
        ({"infer": lambda obs: {"actions": np.ones(2)}}, r"returned \(2,\) instead of actions of shape \(H, A\)"),
        ({"infer": lambda obs: {"actions": "soon"}}, "returned str instead of actions"),
        ({"error": b"\xc1"}, "returned no message of openpi: expected MessagePack"),
        ({"metadata": ["list"]}, "is no openpi server: expected a map"),
        ({"infer": lambda obs: {"actions": np.ones((5000, 2))}}, "horizons may be at most 4096, got 5000"),
        ({"metadata": {"action_keys": 5}}, "has the action_keys 5, expected a list of names"),
        ({"metadata": {**OURS, "observation": {"state": "wide"}}}, "does not describe a policy: observation must map"),
        ({"metadata": {**OURS, "observation": {}}}, "describes a policy without observations"),
        ({"metadata": {**OURS, "obs_horizon": 10**9}}, "horizons may be at most 4096, got 1 and 1000000000"),
        (
            {"metadata": {**OURS, "observation": {"observation/state": [6], "state": [2]}}},
            "takes 'observation/state' and 'state', which are both 'state' here",
        ),
    ],
)
def test_failures_are_one_line(settings: dict[str, Any], message: str) -> None:
    with openpi_server(**settings) as (url, _), pytest.raises(UserError, match=message) as error:
        open_openpi(url, {"state": (6,)}, rename=NAMES)
    assert "\n" not in str(error.value)


def test_observations_need_names_and_servers_must_exist() -> None:
    with openpi_server() as (url, _):
        with pytest.raises(UserError, match="does not name its observations; pass"):
            open_openpi(url, {"state": (6,)})
        with pytest.raises(UserError, match="The task has no observation 'joints' but state"):
            open_openpi(url, {"state": (6,)}, rename={"joints": "observation/joint_position"})
        with pytest.raises(UserError, match="chunks of 10 actions, so 11 cannot be executed"):
            open_openpi(url, {"state": (6,)}, rename=NAMES, action_horizon=11)
    with pytest.raises(UserError, match=r"cannot be reached \(.*refused"):
        open_openpi(url, {"state": (6,)}, rename=NAMES)
    with pytest.raises(UserError, match="is another machine, so the endpoint needs a token"):
        open_openpi("ws://robot.lab:8000", {"state": (6,)}, rename=NAMES)


def test_a_served_policy_is_imported_with_its_names_history_and_noise() -> None:
    policy_class: Any = POLICIES["flow"]
    spec = PolicySpec({"state": (6,), "image.front": (3, 16, 16)}, 2, horizon=4, action_horizon=2, obs_horizon=2)
    policy = policy_class(policy_class.config_class(), spec).eval()
    policy.fit_normalizer({k: {"min": -torch.ones(n), "max": torch.ones(n)} for k, n in (("state", 6), ("action", 2))})
    obs = {
        "state": torch.randn(3, 2, 6),
        "image.front": torch.randint(0, 255, (3, 2, 3, 16, 16), dtype=torch.uint8),
    }
    with running(ServedPolicy(policy), ServerConfig(port=0, openpi_port=0)) as server:
        remote = open_openpi(server.openpi_url, {})
        assert remote.spec == policy.spec and remote.is_steerable
        noise = torch.randn(3, 4, 2)
        torch.testing.assert_close(remote.decode(obs, noise), policy.decode(obs, noise), atol=2e-6, rtol=0)
        streams = [PerRowGenerator(range(3), [0] * 3) for _ in range(2)]
        expected = policy.act(obs, generator=streams[0])
        torch.testing.assert_close(remote.act(obs, generator=streams[1]), expected, atol=2e-6, rtol=0)
        with pytest.raises(UserError, match="takes observation/state, observation/front, not 'observation/wrist'"):
            open_openpi(server.openpi_url, {}, rename={"image.wrist": "observation/wrist"})
        remote.close()


def test_a_server_is_imported_evaluated_and_deployed_but_not_steered(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with openpi_server() as (url, _):
        base = str(tmp_path / "base")
        words = ["import", "openpi", url, "--task", "point_mass", "--rename", "state=observation/state"]
        assert main([*words, "--instruction", "reach", "--out", base, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["takes_noise"] is False
        assert main(["eval", base, "--episodes", "2", "--video", "0", "--out", str(tmp_path / "e")]) == 0
        assert main(["verify", base]) == 0
        policy, _ = load_policy(base)
        chunk = CheckpointChunkPolicy(policy).chunk({"state": np.ones((1, 6), np.float32)})
        np.testing.assert_array_equal(chunk, np.ones((10, 2)))
        with running(ServedPolicy(policy), ServerConfig(port=0, openpi_port=0)) as server:
            again = open_openpi(server.openpi_url, {})
            assert torch.equal(again.act(STATE), policy.act(STATE))
            again.close()
        capsys.readouterr()
        assert main(["train", "algorithm=dsrl_sac", f"init_from={base}", *DSRL, f"out={tmp_path}", "name=s"]) == 2
        assert "Steering needs a policy that takes noise, but 'openpi' takes none" in capsys.readouterr().err
        assert main([*words, "--instruction", "a", "--instruction", "b", "--out", base, "--overwrite"]) == 2
        assert "one instruction; pass --instruction once" in capsys.readouterr().err


def test_a_server_that_takes_noise_can_be_steered() -> None:
    class Shift:
        greeting = Greeting(PolicySpec({"state": (6,)}, 2, horizon=4, action_horizon=2), "shift", noise=True)

        def chunks(self, obs: Any, noise: Any, prefix: Any, streams: Any) -> Any:
            return obs["state"][:, -1:, :2] + (np.zeros((1, 4, 2)) if noise is None else noise)

    with running(Shift(), ServerConfig(port=0, openpi_port=0)) as server:
        steered = LatentPolicy.from_base(open_openpi(server.openpi_url, {}), NoiseSpace(kind="repeat"), STEERING_ACTOR)
        noise = steered.act(STATE, deterministic=True) - STATE["state"][:, :, :2]
        assert torch.allclose(noise, noise[:, :1].expand(2, 4, 2), atol=1e-6)  # one noise for all steps of a chunk


def test_our_client_gets_the_chunks_of_openpis_own_server() -> None:
    theirs: Any = pytest.importorskip("openpi.serving.websocket_policy_server", reason="needs openpi")

    class Stub:
        def infer(self, obs: dict[str, Any]) -> dict[str, Any]:
            return tiled(obs)

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = theirs.WebsocketPolicyServer(Stub(), "127.0.0.1", port, {"reset_pose": [0.0]})
    threading.Thread(target=server.serve_forever, daemon=True).start()
    time.sleep(0.5)
    policy = open_openpi(f"ws://127.0.0.1:{port}", {"state": (6,)}, rename=NAMES, retries=0)
    assert torch.equal(policy.act(STATE), STATE["state"][:, :, :2].expand(2, 10, 2))
    with pytest.raises(UserError, match="KeyError: 'observation/state'"):
        open_openpi(f"ws://127.0.0.1:{port}", {"state": (6,)}, rename={"state": "wrong"})
    policy.close()
