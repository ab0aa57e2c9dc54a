"""Learn in which order to visit points, from shortest ways through a few of them, and try it on more (BQ-NCO, S006).

    python -m robopolicy.contrib.ordering.example                 # a few minutes; writes runs/visits
    python -m robopolicy.contrib.ordering.example --quick         # the same path in seconds, to see that it runs
    python -m robopolicy.contrib.ordering.example --dim 3 --visits 9

The table tells how much longer the ways are than those of the nearest neighbour (below 1 is better) and, where it can
be known, than the shortest ones. `order_visits` then plans with the result:

    order = order_visits(points, start, policy=load_visits("runs/visits"))
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from robopolicy.contrib.ordering.exact import nearest_orders, path_length, shortest_orders
from robopolicy.contrib.ordering.network import VisitConfig, VisitPolicy, save_visits
from robopolicy.contrib.ordering.visits import order_visits, train_visits

EXACT = 8  # visits up to which the shortest ways are worked out for the table


def ratios(policy: VisitPolicy, count: int, instances: int = 128, seed: int = 1) -> tuple[float, float | None]:
    """Mean length of the policy's ways over that of the nearest neighbour's and, up to `EXACT` visits, the shortest."""
    generator = torch.Generator().manual_seed(seed)
    points = torch.rand(instances, count, policy.config.dim, generator=generator)
    start = torch.rand(instances, policy.config.dim, generator=generator)
    length = path_length(points, order_visits(points, start, policy=policy), start).mean()
    near = path_length(points, nearest_orders(points, start), start).mean()
    if count > EXACT:
        return float(length / near), None
    best = path_length(points, shortest_orders(points, start), start).mean()
    return float(length / near), float(length / best)


def main(argv: Sequence[str] | None = None) -> dict[int, tuple[float, float | None]]:
    """Train, save and report; returns the ratios by number of visits."""
    parser = argparse.ArgumentParser(description="Learn in which order to visit points.")
    parser.add_argument("--dim", type=int, default=2, help="coordinates of a point")
    parser.add_argument("--visits", type=int, default=8, help="points per training instance")
    parser.add_argument("--updates", type=int, default=5000, help="gradient steps")
    parser.add_argument("--width", type=int, default=64, help="of the transformer")
    parser.add_argument("--layers", type=int, default=3, help="of the transformer")
    parser.add_argument("--seed", type=int, default=0, help="of weights and instances")
    parser.add_argument("--out", type=Path, default=Path("runs/visits"), help="folder to write")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see in seconds that it runs")
    args = parser.parse_args(argv)
    if args.quick:
        args.visits, args.updates, args.width, args.layers = 5, 20, 16, 1

    def report(update: int, loss: float) -> None:
        if update % 500 == 0 or update == args.updates:
            print(f"update {update}: cross-entropy {loss:.3f}", flush=True)

    config = VisitConfig(dim=args.dim, width=args.width, layers=args.layers)
    policy = train_visits(config, updates=args.updates, visits=args.visits, seed=args.seed, progress=report)
    save_visits(policy, args.out)
    found = {count: ratios(policy, count) for count in (args.visits, 20, 50)}
    print("visits   over nearest neighbour   over shortest")
    for count, (near, best) in found.items():
        print(f"{count:6d}   {near:22.3f}   {'-' if best is None else f'{best:.3f}':>13s}")
    print(f"saved to {args.out}")
    return found


if __name__ == "__main__":
    main()
