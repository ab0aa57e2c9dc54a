"""Execution of `compose`: load the parents, search their weights, evaluate, write checkpoint and report."""

from __future__ import annotations

import argparse
import shutil
import sys
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from robopolicy.atomic import atomic_folder
from robopolicy.cli.compose_config import CompositionConfig, CompositionParts, load_composition_parts
from robopolicy.cli.policy_args import PolicyEntry, open_sim, sim_options
from robopolicy.cli.progress import progress_bars
from robopolicy.evaluation import plots
from robopolicy.evaluation.report import Report, table, write_report
from robopolicy.evaluation.result import Comparison, EvalResult
from robopolicy.evaluation.search.methods import SearchMethod
from robopolicy.evaluation.search.search_report import search_summary, search_table, weight_curve, write_table
from robopolicy.evaluation.search.weights import (
    SearchLog,
    SimEvaluator,
    WeightSearch,
    compare_with,
    evaluate_held_out,
    make_search,
    search_weights,
)
from robopolicy.plurals import counted
from robopolicy.policies.base import Policy
from robopolicy.schema import to_dict
from robopolicy.sim.contract import VectorSim
from robopolicy.sim.registry import get_task
from robopolicy.spec import TaskMetadata, common_metadata
from robopolicy.training.checkpoint import golden_observations, save_checkpoint
from robopolicy.training.manifest import Parent, parent_path, read_manifest, shared_observations
from robopolicy.training.world_sims import is_world
from robopolicy.versions import versions

SEARCH_LOG = "search.jsonl"  # finished episodes, in the output folder
PREDICTED = "The same episodes in the world model"


@dataclass(frozen=True)
class CompositionRequest:
    """Request of a composition, stored in its search log so that it can be resumed."""

    parents: tuple[Parent, ...]
    names: tuple[str, ...]  # names in tables; the last is the composition
    critic: Parent | None  # checkpoint whose critic guides or selects
    then: dict[str, Parent]  # name in POST_COMPOSITION -> checkpoint, in order
    gate_data: str  # dataset that trains the selector; empty: no selection
    composition: CompositionConfig
    weights: tuple[float, ...] | None  # None: of the composition, or searched
    search: str | None  # None: no search
    objective: str  # success | return, of the search
    settings: dict[str, int]  # of the search
    seed: int  # first episode of the search
    report_episodes: int  # per policy, on other seeds; 0 for no report
    report_seed: int
    task: str
    backend: str  # of the search
    report_backend: str  # of the report
    judge: str  # of a world model
    reward: str
    num_envs: int
    stochastic: bool
    device: str

    @property
    def method(self) -> SearchMethod | None:
        """Search method, if any."""
        return None if self.search is None else make_search(self.search, **self.settings)

    @property
    def needs_rollouts(self) -> bool:
        """Whether the request requires episodes."""
        return self.search is not None or self.report_episodes > 0

    @property
    def compares_backends(self) -> bool:
        """Whether the report compares results in a world model with results in a simulator."""
        return self.report_episodes > 0 and is_world(self.backend) and not is_world(self.report_backend)

    @property
    def reported(self) -> range:
        """Episode seeds of the report."""
        return range(self.report_seed, self.report_seed + self.report_episodes)

    @property
    def sources(self) -> tuple[Parent, ...]:
        """All checkpoints that the composition uses."""
        return (*self.parents, *([] if self.critic is None else [self.critic]), *self.then.values())

    @property
    def operands(self) -> list[str]:
        """Names of the weighted policies."""
        return self.composition.operands(self.names[:-1])

    @property
    def identities(self) -> list[str]:
        """Content identities of the weighted policies."""
        return self.composition.operands([parent.identity for parent in self.parents])

    @property
    def nominal(self) -> tuple[float, ...]:
        """Weights before the search."""
        operator = self.composition.build_operator()
        return (operator if self.weights is None else operator.with_weights(self.weights)).nominal(len(self.operands))


@dataclass(frozen=True, eq=False)
class CompositionResult:
    """Composed policy with its search and evaluation results."""

    policy: Policy
    weights: tuple[float, ...]
    found: WeightSearch | None  # None without a search
    results: dict[str, EvalResult]  # of the parents and, last, the composition; empty without a report
    predicted: dict[str, EvalResult] = field(default_factory=dict[str, EvalResult])  # the same in the world model
    gate_accuracy: float | None = None  # see `CompositionParts`; None without a gate

    @property
    def compared(self) -> dict[str, Comparison]:
        """Comparison of the composition with each parent on common seeds."""
        return compare_with(self.results, list(self.results)[-1]) if self.results else {}


def load_parts(out: Path, request: CompositionRequest) -> CompositionParts:
    """Load the components of the composition; missing or incompatible ones raise a UserError."""
    paths = [parent_path(parent, out) for parent in request.parents]
    critic = None if request.critic is None else parent_path(request.critic, out)
    then = {name: parent_path(part, out) for name, part in request.then.items()}
    names, device = request.names[:-1], request.device
    return load_composition_parts(request.composition, paths, critic, then, names, device, request.gate_data)


def search_and_evaluate(
    out: Path, request: CompositionRequest, parts: CompositionParts, log: SearchLog | None
) -> CompositionResult:
    """Search the weights and evaluate the result on held-out episodes; episodes in the log are not repeated."""
    method, own, policy = request.method, request.names[-1], parts.policy(request.weights)
    plan = None if method is None else method.plan(len(request.operands))
    policy_entry = PolicyEntry(own, lambda: policy, policy.spec)
    envs = min(request.num_envs, max(request.report_episodes, 0 if plan is None else plan.seeds))
    with ExitStack() as stack:

        def open_backend(backend: str) -> VectorSim:
            judge = request.judge if backend == request.backend or is_world(backend) else ""
            args = argparse.Namespace(backend=backend, reward=request.reward)
            options = sim_options(args, [policy_entry], envs, request.device, judge)
            return stack.enter_context(closing(open_sim(get_task(request.task), options, [policy_entry])))

        needed = {
            request.backend: method is not None or request.compares_backends,
            request.report_backend: request.report_episodes > 0,
        }
        sims = {backend: open_backend(backend) for backend, used in needed.items() if used}
        if plan is not None:
            print(f"{request.search} search: {plan}", file=sys.stderr)
        if request.report_episodes:
            count = f"{len(request.names)} policies, {request.report_episodes} held-out episodes each"
            print(f"report: {count}", file=sys.stderr)
        if log is None:  # after all checks
            shutil.rmtree(out, ignore_errors=True)  # so that an interruption does not mix old and new files
            out.mkdir(parents=True, exist_ok=True)
            log = SearchLog(out / SEARCH_LOG, to_dict(request))
        record, weights = log, request.nominal
        with progress_bars() as add_bar:
            reports = request.report_episodes * len(request.names) * (1 + request.compares_backends)
            advance = add_bar("compose", reports + (plan.episodes if plan else 0))

            def evaluator(backend: str, *, probe: bool, measure: str = "success") -> SimEvaluator:
                return SimEvaluator(
                    sims[backend],
                    deterministic=not request.stochastic,
                    probe=probe,
                    measure=measure,
                    progress=lambda finished: advance(record.episodes + finished),
                )

            found = None
            if method is not None:
                found = search_weights(
                    method,
                    request.identities,
                    parts.policy,
                    evaluator(request.backend, probe=False, measure=request.objective),
                    seed=request.seed,
                    log=record,
                )
                policy, weights = parts.policy(found.weights), found.weights
            results: dict[str, EvalResult] = {}
            predicted: dict[str, EvalResult] = {}
            policies = dict(zip(request.names, [*parts.policies, policy], strict=True))
            if request.report_episodes:
                real = evaluator(request.report_backend, probe=True)
                results = evaluate_held_out(policies, real, request.reported, log=record)
            if request.compares_backends:
                world = evaluator(request.backend, probe=False)
                predicted = evaluate_held_out(
                    policies, world, request.reported, log=record, where=" in the world model"
                )
    return CompositionResult(policy, weights, found, results, predicted, parts.gate_accuracy)


def composed_metadata(request: CompositionRequest, out: Path) -> TaskMetadata | None:
    """Metadata of the parents' task without a simulator, if they have them.

    Raises:
        UserError: Rates or names of the parents differ.
    """
    paths = [parent_path(parent, out) for parent in request.parents]
    found = {str(path): read_manifest(path).task_metadata for path in paths}
    known = {path: metadata for path, metadata in found.items() if metadata is not None}
    return common_metadata(known) if known else None


def write(out: Path, request: CompositionRequest, outcome: CompositionResult, metadata: TaskMetadata | None) -> None:
    """Write the checkpoint with its search log and report atomically."""
    policy, found, own = outcome.policy.cpu(), outcome.found, request.names[-1]
    samples = [golden_observations(parent_path(parent, out)) for parent in request.parents]
    training: dict[str, Any] = {"operator": request.composition.operator["name"], "weights": list(outcome.weights)}
    if found is not None:
        training["search"] = {key: value for key, value in search_summary(found).items() if key != "candidates"}
    if outcome.results:
        training["evaluation"] = outcome.results[own].summary()
    with atomic_folder(out) as folder:
        save_checkpoint(
            folder,
            policy,
            task=request.task,
            obs_sample=shared_observations(samples, policy.spec),
            training=training,
            parents=request.sources,
            task_metadata=metadata,
        )
        if request.needs_rollouts:
            shutil.copyfile(out / SEARCH_LOG, folder / SEARCH_LOG)
            (folder / "report").mkdir()
            write_report(folder / "report", _report(folder / "report", request, outcome))


def _report(folder: Path, request: CompositionRequest, outcome: CompositionResult) -> Report:
    """Build the report; its plots and tables are written to `folder`."""
    *names, own = request.names
    found, curves, tables = outcome.found, {}, {}
    if found is not None:
        curves["Search over the weights"] = weight_curve(found, request.operands, folder / "curve.png")
        tables["Search over the weights"] = search_table(found, request.operands)
        write_table(found, request.operands, folder / "search.csv")
    if outcome.predicted:
        tables[PREDICTED] = table(outcome.predicted)
    for number, (name, comparison) in enumerate(outcome.compared.items(), 1):
        if comparison.outcomes is not None:
            plot = folder / f"paired_{number}.png"
            curves[f"Outcome per seed, {name} and {own}"] = plots.paired_outcomes(comparison, name, own, plot)
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
            "predicted": {name: result.summary() for name, result in outcome.predicted.items()},
        },
    )


def _facts(request: CompositionRequest, outcome: CompositionResult) -> dict[str, str]:
    searched = {} if outcome.found is None else {"searched on seeds": _span(outcome.found.seeds)}
    backend = (
        {"searched in": request.backend, "reported in": request.report_backend} if request.compares_backends else {}
    )
    return {
        "task": request.task,
        **backend,
        "operator": request.composition.operator["name"],
        "weights": weights_text(request, outcome),
        **({} if (gate := gate_text(request, outcome)) is None else {"gate": gate}),
        **searched,
        "reported on seeds": _span(request.reported),
        "actions": "with exploration noise" if request.stochastic else "deterministic",
        **{name: versions()[name] for name in ("robopolicy", "torch", "mujoco")},
    }


def weights_text(request: CompositionRequest, outcome: CompositionResult) -> str:
    """Format the weights with the names of the policies."""
    return ", ".join(f"{name} {w:.3g}" for name, w in zip(request.operands, outcome.weights, strict=True))


def gate_text(request: CompositionRequest, outcome: CompositionResult) -> str | None:
    """Describe which policies the gate selects, and its training; None without a gate."""
    selection, names = request.composition.selection, request.operands
    if selection is None or outcome.gate_accuracy is None:
        return None
    count = "one" if selection.top == 1 else f"up to {min(selection.top, len(names))}"
    near = f" (preferred at least {selection.least:g} as much as the first)" if selection.least else ""
    return (
        f"at every decision the observation selects {count} of {', '.join(names)}{near}; trained in "
        f"{counted(selection.updates, 'step')} on {request.gate_data}, where it ranks the policy nearest to the "
        f"demonstration first for {100 * outcome.gate_accuracy:.0f} % of the chunks "
        f"(at random: {100 / len(names):.0f} %)"
    )


def _span(seeds: range) -> str:
    return f"{seeds.start} to {seeds.stop - 1}"
