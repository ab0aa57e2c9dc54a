"""What `compose` does: load the parents, search their weights, try the result, write checkpoint and report."""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from robopolicy.cli.players import Player, open_sim, sim_options
from robopolicy.evaluation import plots
from robopolicy.evaluation.compare import Comparison
from robopolicy.evaluation.report import Report, write_report
from robopolicy.evaluation.result import EvalResult
from robopolicy.evaluation.search import (
    Ledger,
    SearchMethod,
    SimEvaluator,
    WeightSearch,
    against,
    hold_out,
    make_search,
    search_weights,
)
from robopolicy.evaluation.search.present import search_summary, search_table, weight_curve, write_table
from robopolicy.files import atomic_folder
from robopolicy.policies.base import Policy
from robopolicy.policies.wrappers.composed import ComposedPolicy, compose
from robopolicy.schema import to_plain
from robopolicy.sim.registry import get_task
from robopolicy.training.checkpoint import golden_observations, load_policy, save_checkpoint
from robopolicy.training.manifest import Parent, versions
from robopolicy.training.parents import shared_observations

LEDGER = "search.jsonl"  # what was played so far, in the output folder


@dataclass(frozen=True)
class Request:
    """What was asked for; kept with the record of what was played, so that it can go on."""

    parents: tuple[Parent, ...]  # what is composed, by place and content
    names: tuple[str, ...]  # what tables call them, and last the composition
    operator: str
    weights: tuple[float, ...] | None  # None: equal parts, or searched
    search: str | None  # None: the weights are given
    settings: dict[str, int]  # of the search
    seed: int  # first episode of the search
    report_episodes: int  # per policy, on other seeds; 0 for no report
    report_seed: int
    task: str
    backend: str
    reward: str
    num_envs: int
    stochastic: bool
    device: str

    @property
    def method(self) -> SearchMethod | None:
        """The search, if there is one."""
        return None if self.search is None else make_search(self.search, **self.settings)

    @property
    def plays(self) -> bool:
        """Whether any episode is to be played."""
        return self.search is not None or self.report_episodes > 0

    @property
    def reported(self) -> range:
        """Episode seeds of the report."""
        return range(self.report_seed, self.report_seed + self.report_episodes)

    def places(self, out: Path) -> list[Path]:
        """The parents' folders, seen from here."""
        return [Path(os.path.relpath(out.resolve() / parent.path)) for parent in self.parents]


@dataclass(frozen=True, eq=False)
class Outcome:
    """A composition and what is known of it."""

    composed: ComposedPolicy
    found: WeightSearch | None  # None: the weights were given
    results: dict[str, EvalResult]  # of the parents and, last, the composition; empty where nothing was played

    @property
    def compared(self) -> dict[str, Comparison]:
        """The composition against each parent on common seeds."""
        return against(self.results, list(self.results)[-1]) if self.results else {}


def load_and_compose(out: Path, request: Request) -> tuple[list[Policy], ComposedPolicy]:
    """The parents, and their composition with the weights asked for or equal ones."""
    policies = [load_policy(place, request.device)[0] for place in request.places(out)]
    return policies, compose(policies, operator=request.operator, weights=request.weights)


def play(
    out: Path, request: Request, policies: Sequence[Policy], composed: ComposedPolicy, ledger: Ledger | None
) -> Outcome:
    """Search the weights and try the result on other episodes, as far as asked for and not yet on record."""
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress

    method, own = request.method, request.names[-1]
    plan = None if method is None else method.plan(len(policies))
    total = request.report_episodes * len(request.names) + (0 if plan is None else plan.episodes)
    player = Player(own, lambda: composed, composed.spec)
    envs = min(request.num_envs, max(request.report_episodes, 0 if plan is None else plan.seeds))
    wanted = argparse.Namespace(backend=request.backend, reward=request.reward)
    columns = (*Progress.get_default_columns(), MofNCompleteColumn())
    with (
        closing(open_sim(get_task(request.task), sim_options(wanted, [player], envs), [player])) as sim,
        Progress(*columns, console=Console(stderr=True)) as progress,
    ):
        if plan is not None:
            progress.console.print(f"{request.search} search: {plan}")
        if request.report_episodes:
            progress.console.print(
                f"report: {len(request.names)} policies, {request.report_episodes} other episodes each"
            )
        if ledger is None:  # only now, when nothing can be refused any more
            out.mkdir(parents=True, exist_ok=True)
            ledger = Ledger(out / LEDGER, to_plain(request))
        bar = progress.add_task("compose", total=total)
        record = ledger

        def advance(finished: int) -> None:
            progress.update(bar, completed=record.episodes + finished)

        return _play(
            request,
            method,
            policies,
            composed,
            record,
            lambda probe: SimEvaluator(sim, deterministic=not request.stochastic, probe=probe, progress=advance),
        )


def _play(
    request: Request,
    method: SearchMethod | None,
    policies: Sequence[Policy],
    composed: ComposedPolicy,
    ledger: Ledger,
    evaluator: Callable[[bool], SimEvaluator],
) -> Outcome:
    found = None
    if method is not None:
        found = search_weights(
            method,
            [parent.identity for parent in request.parents],
            composed.with_weights,
            evaluator(False),
            seed=request.seed,
            ledger=ledger,
        )
        composed = composed.with_weights(found.weights)
    results: dict[str, EvalResult] = {}
    if request.report_episodes:
        tried = dict(zip(request.names, [*policies, composed], strict=True))
        results = hold_out(tried, evaluator(True), request.reported, ledger=ledger)
    return Outcome(composed, found, results)


def write(out: Path, request: Request, outcome: Outcome) -> None:
    """Write the checkpoint with its record and report; all of it appears at once."""
    places = request.places(out)
    composed, found, own = outcome.composed.cpu(), outcome.found, request.names[-1]
    training: dict[str, Any] = {"operator": request.operator}
    if found is not None:
        training["search"] = {key: value for key, value in search_summary(found).items() if key != "candidates"}
    if outcome.results:
        training["evaluation"] = outcome.results[own].summary()
    with atomic_folder(out) as folder:
        save_checkpoint(
            folder,
            composed,
            task=request.task,
            obs_sample=shared_observations([golden_observations(place) for place in places], composed.spec),
            training=training,
            parents=request.parents,
        )
        if request.plays:
            shutil.copyfile(out / LEDGER, folder / LEDGER)
            (folder / "report").mkdir()
            write_report(folder / "report", _report(folder / "report", request, outcome))


def _report(folder: Path, request: Request, outcome: Outcome) -> Report:
    """The report, with its pictures and tables already in `folder`."""
    *names, own = request.names
    found, curves, tables = outcome.found, {}, {}
    if found is not None:
        curves["Search over the weights"] = weight_curve(found, names, folder / "curve.png")
        tables["Search over the weights"] = search_table(found, names)
        write_table(found, names, folder / "search.csv")
    for number, (name, comparison) in enumerate(outcome.compared.items(), 1):
        if comparison.outcomes is not None:
            picture = folder / f"paired_{number}.png"
            curves[f"Outcome per seed, {name} and {own}"] = plots.paired_outcomes(comparison, name, own, picture)
    return Report(
        title=f"{' + '.join(names)} on {request.task}",
        results=outcome.results,
        verdicts=[comparison.sentence(name, own) for name, comparison in outcome.compared.items()],
        facts=_facts(request, outcome),
        curves=curves,
        tables=tables,
        extra={
            "search": None if found is None else search_summary(found),
            "against": {name: comparison.to_dict() for name, comparison in outcome.compared.items()},
        },
    )


def _facts(request: Request, outcome: Outcome) -> dict[str, str]:
    searched = {} if outcome.found is None else {"searched on seeds": _span(outcome.found.seeds)}
    return {
        "task": request.task,
        "operator": request.operator,
        "weights": weights_text(request, outcome),
        **searched,
        "reported on seeds": _span(request.reported),
        "actions": "with exploration noise" if request.stochastic else "deterministic",
        **{name: versions()[name] for name in ("robopolicy", "torch", "mujoco")},
    }


def weights_text(request: Request, outcome: Outcome) -> str:
    """The weights by the names of the parents."""
    *names, _ = request.names
    weights = outcome.composed.operator.nominal(len(names))
    return ", ".join(f"{name} {weight:.3g}" for name, weight in zip(names, weights, strict=True))


def _span(seeds: range) -> str:
    return f"{seeds.start} to {seeds.stop - 1}"
