"""`robopolicy bench`: train several seeds and report their scores with intervals."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from robopolicy.cli.options import check_numbers
from robopolicy.errors import UserError
from robopolicy.plurals import counted

if TYPE_CHECKING:
    from robopolicy.training.config import TrainConfig

EXAMPLES = """\
examples:
  robopolicy bench --seeds 5 experiment=from_scratch task=half_cheetah
  robopolicy bench --seeds 10 --jobs 4 experiment=fine_tune init_from=runs/lift_flow_bc/checkpoints/best
  robopolicy bench --seeds 3 task=hopper policy=gaussian algorithm=bpo budget.env_steps=200000 --out runs/hopper_bpo
"""


def add_parser(subparsers: Any) -> None:
    """Register the command."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "bench",
        description="Train the same SETTINGS as for `train` with consecutive seeds, starting at seed=. Report the "
        "mean success and return over the seeds with a 95 % interval. Every run has its own process, which writes its "
        "output to OUT/queue. Finished runs are kept and interrupted runs resume: repeat the command to continue or to "
        "add seeds.",
        epilog=EXAMPLES,
    )
    parser.add_argument("settings", nargs="*", metavar="SETTING", help="group=preset or key=value, as for train")
    parser.add_argument("--seeds", type=int, default=5, help="number of seeds (default: 5)")
    parser.add_argument("--jobs", type=int, default=1, help="parallel runs (default: 1)")
    parser.add_argument("--out", type=Path, help="folder of runs and report (default: runs/bench_NAME)")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")


def run(args: argparse.Namespace) -> int:
    """Train missing runs and report; return 0, or 130 after Ctrl-C, or 1 if runs have not ended."""
    from robopolicy.atomic import write_text
    from robopolicy.evaluation.comparison import MIN_SEEDS
    from robopolicy.evaluation.report import aligned
    from robopolicy.files import check_owned
    from robopolicy.training.build import resolve_config
    from robopolicy.training.compose import compose_config, config_text
    from robopolicy.training.many_runs import draw_curves, run_seeds, seed_jobs, summarise

    check_numbers(args, positive=("seeds", "jobs"), non_negative=())
    if any(setting.split("=")[0] in ("out", "name") for setting in args.settings):
        raise UserError("The runs of bench are named seed0, seed1, ...; drop out= and name=, and pass --out FOLDER.")
    config = compose_config(args.settings)
    if not config.evaluation.episodes:
        raise UserError("evaluation.episodes must be at least 1: a bench reports the scores of evaluations.")
    name = config.name or resolve_config(config).name.removesuffix(f"_seed{config.seed}")
    out: Path = args.out or Path("runs") / f"bench_{name}"
    check_owned(out, "bench.yaml", "a bench")
    _check_same(out, config)
    jobs = seed_jobs(config, out, seeds=args.seeds)
    out.mkdir(parents=True, exist_ok=True)
    write_text(out / "bench.yaml", config_text(config))
    queue = run_seeds(jobs, out, parallel=args.jobs)
    if queue.failed:
        raise UserError(f"{', '.join(queue.failed)} failed; see {out}/queue/{queue.failed[0]}/log.txt.")
    if queue.signal or queue.interrupted or queue.elsewhere:
        print("Not all runs have ended; run the same command again to continue.")
        return queue.exit_code or 1
    folders = [out / job.name for job in jobs]
    report = summarise(folders)
    curves = draw_curves(folders, out / "curves.png", label=name)
    header, rows = _table(report)
    write_text(out / "report.json", json.dumps(report, indent=2) + "\n")
    write_text(out / "report.md", _markdown(name, header, rows))
    if args.json:
        print(json.dumps({"out": str(out), **report}))
        return 0
    print(aligned(header, rows))
    if args.seeds < MIN_SEEDS:
        found = "One seed gives no interval" if args.seeds == 1 else f"Only {args.seeds} seeds give a rough interval"
        print(f"note: {found}; use at least {MIN_SEEDS}.")
    finished = {folder.parent.name for folder in out.glob("seed*/report.json")}
    if omitted := sorted(finished - {folder.name for folder in folders}):
        print(f"note: {', '.join(omitted)} of {out} are not in the report; set seed= and --seeds to include them.")
    print(f"report: {out}/report.json, report.md" + (" and curves.png" if curves else ""))
    return 0


def _check_same(out: Path, config: TrainConfig) -> None:
    """Raise a UserError if `out` contains a bench with other settings than `config`; the seed may differ."""
    from dataclasses import replace

    from robopolicy.training.compose import read_config

    known = out / "bench.yaml"
    if known.exists() and replace(read_config(known), seed=config.seed) != config:
        raise UserError(f"Bench {out} has other settings; choose another folder, or delete it.")


def _table(report: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return header and rows, one row per stage and measure."""
    from robopolicy.training.many_runs import MEASURES, STAGES

    rows: list[list[str]] = []
    for stage in STAGES:
        for measure, (label, *_) in MEASURES.items():
            score = (report[stage] or {}).get(measure)
            if score is not None:
                text = "{:.1%}".format if measure == "success" else "{:.4g}".format
                bounds = [text(score[key]) for key in ("low", "high") if score[key] is not None]
                interval = f" [{', '.join(bounds) or '-'}]"  # one seed has none
                by_seed = " ".join(map(text, score["by_seed"]))
                rows.append([f"{stage} {label}", text(score["estimate"]) + interval, by_seed])
    return [counted(len(report["seeds"]), "seed"), "mean [95 %]", "by seed"], rows


def _markdown(name: str, header: list[str], rows: list[list[str]]) -> str:
    lines = [f"# {name}", "", *(f"| {' | '.join(row)} |" for row in (header, ["---"] * len(header), *rows))]
    return "\n".join(lines) + "\n"
