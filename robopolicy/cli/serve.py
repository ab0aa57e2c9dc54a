"""`robopolicy serve`: serve the action chunks of one policy to robots and evaluations."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from robopolicy.cli.options import check_numbers, reject_unused, renames
from robopolicy.plurals import counted

if TYPE_CHECKING:
    from robopolicy.deploy.batching import BatchedPolicy

EXAMPLES = """\
examples:
  robopolicy serve runs/lift_reinflow/checkpoints/best
  robopolicy serve runs/lift_reinflow/checkpoints/best --port 9000 --max-batch 16 --batch-delay-ms 5
  robopolicy serve bundles/lift --openpi 8000 --rename image.front=observation/image
  robopolicy import remote ws://127.0.0.1:8765 --task lift --out runs/served
  robopolicy serve bundles/lift --host 0.0.0.0 --tls-cert server.pem --tls-key server.key
clients must send the token, which they bind to the host:
  export ROBOPOLICY_TOKEN=$(openssl rand -hex 32)  # server
  export ROBOPOLICY_TOKEN_GPU1_LAB=TOKEN           # client of wss://gpu1.lab:8765
"""


def add_parser(subparsers: Any) -> None:
    """Register the command."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "serve",
        description="Serve a checkpoint or a bundle over websockets to many clients. It listens only on this machine "
        "by default; other addresses require a token, which is sent unencrypted without TLS. Ctrl-C answers pending "
        "requests and stops.",
        epilog=EXAMPLES,
    )
    parser.add_argument("policy", type=Path, metavar="CKPT_OR_BUNDLE", help="checkpoint folder, or bundle of 'export'")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, default=8765, help="port; 0 uses a free one (default: 8765)")
    text = "also serve clients of openpi, on this port; 0 uses a free one"
    parser.add_argument("--openpi", type=int, metavar="PORT", help=text)
    text = "NAME of an observation KEY in requests of openpi (default: observation/state for state, observation/front "
    text += "for image.front); may be repeated"
    parser.add_argument("--rename", action="append", default=[], metavar="KEY=NAME", help=text)
    text = "environment variable with the token (default: ROBOPOLICY_TOKEN)"
    parser.add_argument("--token-env", default="ROBOPOLICY_TOKEN", metavar="NAME", help=text)
    parser.add_argument("--tls-cert", type=Path, metavar="PEM", help="certificate: serve wss:// instead of ws://")
    parser.add_argument("--tls-key", type=Path, metavar="PEM", help="private key of the certificate")
    parser.add_argument("--max-batch", type=int, default=32, help="observations per call of the policy (default: 32)")
    text = "maximum batching delay in milliseconds (default: 2)"
    parser.add_argument("--batch-delay-ms", type=float, default=2.0, help=text)
    parser.add_argument("--max-clients", type=int, default=64, help="maximum number of connections (default: 64)")
    parser.add_argument("--max-message-mib", type=int, default=64, help="maximum message size in MiB (default: 64)")
    parser.add_argument("--log-every", type=float, default=60.0, metavar="S", help="seconds between statistics (60)")
    parser.add_argument("--device", default="auto", help="device of a checkpoint (default: the GPU, if any)")
    parser.add_argument("--stochastic", action="store_true", help="act with exploration noise (checkpoints)")


def run(args: argparse.Namespace) -> int:
    """Serve until interrupted; return 0."""
    import os
    import sys

    from robopolicy.deploy.server import ChunkServer, ServerConfig, serve
    from robopolicy.errors import UserError
    from robopolicy.tokens import is_loopback

    check_numbers(args, positive=("max_batch", "max_clients", "max_message_mib"), non_negative=())
    if args.openpi is None:
        reject_unused(args, "without --openpi", "--rename")
    token = os.environ.get(args.token_env, "")
    if "--token-env" in args.given and not token:
        raise UserError(f"The variable {args.token_env} of --token-env contains no token.")
    config = ServerConfig(
        host=args.host,
        port=args.port,
        openpi_port=args.openpi,
        openpi_names=renames(args.rename),
        token=token,
        tls_cert=args.tls_cert,
        tls_key=args.tls_key,
        max_batch=args.max_batch,
        window=args.batch_delay_ms / 1000,
        max_bytes=args.max_message_mib * 2**20,
        max_clients=args.max_clients,
        log_every=args.log_every,
    )
    policy = _load(args)
    spec = policy.greeting.spec

    def ready(server: ChunkServer) -> None:
        chunk = f"{counted(spec.horizon, 'action')} of {counted(spec.action_dim, 'number')}"
        print(f"serving {args.policy} at {server.url}: chunks of {chunk}")
        if server.openpi_url:
            print(f"openpi at {server.openpi_url}")
        if not is_loopback(config.host) and config.tls_cert is None:
            print("note: without TLS the token is sent unencrypted; pass --tls-cert and --tls-key")
        print("Ctrl-C stops", flush=True)

    if not serve(policy, config, lambda line: print(line, flush=True), ready):
        print("The policy still computes; exiting without it.", file=sys.stderr, flush=True)
        os._exit(0)
    return 0


def _load(args: argparse.Namespace) -> BatchedPolicy:
    """Load a checkpoint or a bundle."""
    from robopolicy.deploy.bundle import MANIFEST, open_bundle
    from robopolicy.errors import UserError

    if (args.policy / MANIFEST).is_file():
        from robopolicy.deploy.batching import ServedChunkPolicy

        if args.stochastic or (args.device != "cpu" and "--device" in args.given):
            raise UserError("A bundle is served as it was exported; --device and --stochastic are for checkpoints.")
        bundle = open_bundle(args.policy)
        if bundle.manifest.policy_spec.hidden_dim:
            raise UserError("A recurrent policy cannot be served: requests are stateless.")
        manifest, model = bundle.manifest, f"{args.policy.name}@{bundle.manifest.identity[:12]}"
        noise_shape = tuple(manifest.noise_shape)
        return ServedChunkPolicy(bundle, model, noise_shape=noise_shape, network_calls=manifest.network_calls)
    from robopolicy.cli.policy_args import short_names
    from robopolicy.interop.remote import ServedPolicy
    from robopolicy.training.checkpoint import MODEL, load_policy

    policy, manifest = load_policy(args.policy, args.device)
    model = f"{short_names([str(args.policy)])[0]}@{manifest.files[MODEL][:12]}"
    return ServedPolicy(policy, model, deterministic=not args.stochastic)
