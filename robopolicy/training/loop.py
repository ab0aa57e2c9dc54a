"""The training loop: source -> update -> log -> evaluate -> checkpoint, the same for every algorithm.

A run is a folder with `config.yaml` (in full), `metrics.jsonl`, `metrics.csv`, `checkpoints/best`, `checkpoints/last`
(the resume point) and, after the end, `report.json`. On the CPU a resumed run gives bit-identical results.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from rich.console import Console

from robopolicy.algorithms.common.algorithm import IMITATION, read_metrics
from robopolicy.atomic import write_text
from robopolicy.core.distributed import all_reduce_max, rank, world_size
from robopolicy.device import deterministic_kernels
from robopolicy.errors import SimulatorFailed, UserError
from robopolicy.evaluation.harness import evaluate
from robopolicy.evaluation.intervals import PairedDifference
from robopolicy.nets.normalizer import unfitted_normalizers
from robopolicy.policies.base import Policy
from robopolicy.shutdown import Interrupted, handle_shutdown
from robopolicy.training import guards
from robopolicy.training.build import RunComponents
from robopolicy.training.checkpoint import load_policy, load_training_state, save_checkpoint
from robopolicy.training.compose import config_text
from robopolicy.training.distributed import gather_states, state_of_process, with_own_generator
from robopolicy.training.guards import Summary, TrainingDiverged, check_metrics, check_parameters
from robopolicy.training.loggers import RunConsole, describe_evaluation, describe_vs_base, make_loggers
from robopolicy.training.resume import load_random_state, lock_run, random_state
from robopolicy.training.schedule import Schedule
from robopolicy.training.trackers import make_trackers
from robopolicy.versions import versions

Report = dict[str, Any]


class Trainer:
    """Training run; created by `start_run` or `resume_run`, executed by `train`."""

    def __init__(self, parts: RunComponents, folder: Path, resume_at: int = 0, *, lock: IO[str] | None = None) -> None:
        self.parts, self.config, self.folder = parts, parts.config, folder
        self.algorithm, self.source = parts.algorithm, parts.source
        self.total, self.update = parts.total_updates, resume_at
        self.best: Summary | None = None
        self.base: Summary | None = None
        self.latest: Summary | None = None
        self.vs_base: PairedDifference | None = None  # of the best checkpoint, on held-out episodes
        self.is_new = False  # whether this process created the folder
        self.num_restores = 0  # restores of the best state after a collapse
        self._seconds = 0.0  # spent before this process
        self._updating = 0.0  # seconds in updates, without rollouts, evaluation and saving
        self._start = time.monotonic()
        self._signal: int | None = None
        self._unevaluated = False  # whether an evaluation of the present update is due
        self.schedule = Schedule(self.config, self.total, parts.eval_sim)
        self.writes = rank() == 0
        if self.writes and lock is None:
            lock = lock_run(folder)
        self._lock = lock  # before the loggers, which truncate files of the run
        self.loggers = (
            [*make_loggers(folder, resume_at), *make_trackers(self.config, folder, resume_at)] if self.writes else []
        )
        self.console = RunConsole(self.config.name, self.total, resume_at, None if self.writes else Console(quiet=True))

    def train(self) -> Report:
        """Train to the end of the budget and return the content of `report.json`.

        Raises:
            UserError: A component fails; a new run without checkpoints deletes its folder.
            TrainingDiverged: A metric or a tensor is not finite; the checkpoints are intact.
            SimulatorFailed: An environment raised an exception; the resume point has been saved.
            Interrupted: SIGINT, SIGTERM or SIGHUP; the resume point has been saved.
        """
        try:
            return self._train()
        except UserError as error:
            self._cleanup()
            if isinstance(error, TrainingDiverged):
                left = guards.describe_checkpoints(self.folder, self.saved_checkpoints())
                raise TrainingDiverged(f"{error} {left}") from error
            if isinstance(error, SimulatorFailed) and self._checkpoint("last").exists():
                raise SimulatorFailed(f"{error} Resume with: robopolicy train --resume {self.folder}") from error
            raise

    def _train(self) -> Report:
        try:
            with handle_shutdown(self._request_stop):
                if self.update == 0 and self.config.init_from:
                    policy = self.algorithm.policy
                    if unfitted_normalizers(policy):  # an actor on a black-box policy, without data so far
                        policy.update_stats(self.source.observations())
                    self.base = self._evaluate_base()
                if self._unevaluated:  # it failed before the run was resumed
                    self._evaluate_now()
                while self.update < self.total:
                    self._iterate()
                    if signum := all_reduce_max(self._signal or 0):
                        self._save_last()
                        raise Interrupted(signum, self.folder)
                return self._finish()
        except SimulatorFailed:
            if self.update and world_size() == 1:  # between two updates or in an evaluation: the state is consistent
                self._save_last()
            raise
        finally:
            self.close()

    def close(self) -> None:
        """Stop the display, the loggers and the simulators."""
        self.console.close()
        for logger in self.loggers:
            logger.close()
        self.parts.close()
        if self._lock is not None:
            self._lock.close()

    def saved_checkpoints(self) -> list[str]:
        """Return the checkpoints that exist."""
        return [f"checkpoints/{name}" for name in ("best", "last") if self._checkpoint(name).is_dir()]

    def _cleanup(self) -> None:
        """Remove the files of a new run whose only checkpoint, if any, is a copy of its base."""
        if self.is_new and not self._checkpoint("last").exists() and not (self.best or {}).get("update"):
            guards.delete_run(self.folder)

    def _iterate(self) -> None:
        batch = self.source.next(self.algorithm)
        start = time.monotonic()
        with deterministic_kernels(self.config.gpu.deterministic):  # playing needs none
            metrics = self.algorithm.update(batch)
        self._updating += time.monotonic() - start
        self.update += 1
        self.latest = None
        logging = self.schedule.logs(self.update)
        evaluating, saving = self.schedule.evaluates(self.update), self.schedule.saves(self.update)
        row = read_metrics(metrics) if logging else {}
        if self.config.guards.finite:
            check_metrics(row or metrics, self.algorithm, self.update)
            if evaluating or saving:
                check_parameters(self.algorithm, self.update)
        if logging:
            row |= {**self.source.metrics(), "train/env_steps": self.source.env_steps}
            self._log(row)
            self.console.row(self.update, row)
        self.console.advance(self.update)
        if evaluating:
            self._evaluate_now()
        if saving:
            self._save_last()

    def _evaluate_now(self) -> None:
        """Evaluate the present update; it is due in the resume point if its simulator fails."""
        self._unevaluated = True
        self._evaluate()
        self._unevaluated = False

    def _evaluate_base(self) -> Summary | None:
        """Evaluate the initial policy, and the inference policy of the algorithm if it differs."""
        initial = self.parts.policy
        base = None if self.algorithm.inference_policy() is initial else self._evaluate_policy(initial)
        first = self._evaluate()
        return first if base is None else base

    def _evaluate_policy(self, policy: Policy) -> Summary | None:
        """Evaluate `policy` on the evaluation episodes of this run; None if the run has no evaluation."""
        if self.parts.held_out is not None and self.writes:
            return self.parts.held_out.error(policy).summary()
        if self.parts.eval_sim is None:
            return None
        episodes, seed = self.schedule.episodes(self.update), self.config.evaluation.seed
        return evaluate(policy, self.parts.eval_sim, episodes=episodes, seed=seed).summary()

    def _evaluate(self) -> Summary | None:
        """Evaluate the policy, save a new best checkpoint, and restore the best one after a collapse."""
        self.latest = summary = self._evaluate_policy(self.algorithm.inference_policy())
        collapsed = False
        if summary is not None:
            self._log({f"eval/{key}": value for key, value in summary.items() if isinstance(value, int | float)})
            if self.update == self.total and self.schedule.grows and self.best is not None:
                best = load_policy(self._checkpoint("best"), self.parts.policy.device)[0]
                self.best |= self._evaluate_policy(best) or {}  # on as many episodes
            self.console.note(f"{self.config.name}  update {self.update}/{self.total}  {describe_evaluation(summary)}")
            if guards.is_better(summary, self.best):
                self.best = {**summary, "update": self.update}
                self._save("best", {"algorithm": self.algorithm.state_dict()})
            else:
                collapsed = self.best is not None and guards.has_collapsed(summary, self.best)
        if all_reduce_max(int(collapsed)):  # process 0 evaluates for all
            self._restore()
        return summary

    def _restore(self) -> None:
        if not self._is_rl or (self.algorithm.may_regress and self.update < self.total):
            return
        state = load_training_state(self._checkpoint("best"))["algorithm"]
        self.algorithm.load_state_dict(with_own_generator(state, self.algorithm))
        self.algorithm.reset_episodes()  # the restored episode state belongs to earlier episodes
        self.num_restores += 1
        self.latest = self.best
        self._log({"train/restores": float(self.num_restores)})
        if self.best is not None:  # process 0
            self.console.note(f"{self.config.name}  {guards.describe_restore(self.best)}")

    @property
    def _is_rl(self) -> bool:
        """Whether a lower success rate is a failure; it is expected in imitation and constrained learning."""
        expected = self.algorithm.data_source in IMITATION or self.algorithm.constrained
        return self.config.guards.restore_best and self.parts.held_out is None and not expected

    def _compare_with_base(self) -> bool:
        """Compare the best checkpoint with the initial policy on held-out episodes and keep the better one."""
        if not self._is_rl or self.base is None or self.best is None or self.parts.eval_sim is None:
            return False
        if self.best["update"] == 0 and self.algorithm.inference_policy() is self.parts.policy:
            self.console.note(f"{self.config.name}  no update was better than the base, now checkpoints/best")
            return False
        folders = Path(self.config.init_from), self._checkpoint("best")
        base, best = (load_policy(folder, self.parts.policy.device)[0] for folder in folders)
        settings = self.config.evaluation
        self.vs_base = outcome = guards.compare_with_base(
            base,
            best,
            self.parts.eval_sim,
            episodes=settings.episodes,
            seed=settings.seed + settings.episodes,
            before_round=self._stop_if_requested,
        )
        if reverted := outcome.difference.estimate < 0:
            self.best = self.latest = {**self.base, "update": 0}
            self._save("best", {}, base)
        self.console.note(f"{self.config.name}  {describe_vs_base(outcome, self.base, reverted)}")
        return reverted

    def _stop_if_requested(self) -> None:
        """Raise Interrupted after a stop signal; called by process 0 when the resume point has been saved."""
        if self._signal is not None:
            raise Interrupted(self._signal, self.folder)

    def _log(self, row: Mapping[str, float]) -> None:
        for logger in self.loggers:
            logger.log(self.update, row)

    def _checkpoint(self, name: str) -> Path:
        return self.folder / "checkpoints" / name

    def _save(self, name: str, state: Mapping[str, Any], policy: Policy | None = None) -> None:
        if not self.writes:
            return
        saved = {}
        if name == "best" and self.best is not None:
            guards.backup_best(self._checkpoint("best"))
            saved = {"update": self.best["update"]}  # 0 if the base replaces it, so that `restore_backup` sees it
        save_checkpoint(
            self._checkpoint(name),
            policy or self.algorithm.inference_policy(),
            task=self.config.task.name,
            task_metadata=self.parts.task_metadata,
            obs_sample=self.source.observations(),
            training={**self._summary(), **saved, "evaluation": self.latest},
            training_state=state,
        )

    def _save_last(self) -> None:
        self._save("last", self.state_dict())
        if self.writes:
            guards.clear_backup(self._checkpoint("best"))

    def _run_facts(self) -> dict[str, Any]:
        return {"run": self.config.name, "task": self.config.task.name, "policy": self.config.policy["name"]}

    def _summary(self) -> dict[str, Any]:
        return {
            "algorithm": self.algorithm.name,
            "update": self.update,
            "total_updates": self.total,
            "env_steps": self.source.env_steps,
            "seed": self.config.seed,
        }

    def _finish(self) -> Report:
        final = self.latest
        reverted_to_base = self._compare_with_base()
        report = {
            **self._run_facts(),
            **self._summary(),
            "base": self.base,
            "best": self.best,
            "final": final,
            "num_restores": self.num_restores,
            "reverted_to_base": reverted_to_base,
            "vs_base": None if self.vs_base is None else asdict(self.vs_base),
            "seconds": self._elapsed(),
            "seconds_updating": self._updating,
            "versions": versions(),
        }
        if self.writes:
            write_text(self.folder / "report.json", json.dumps(report, indent=2) + "\n")
            guards.clear_backup(self._checkpoint("best"))
        return report

    def _elapsed(self) -> float:
        return self._seconds + time.monotonic() - self._start

    def state_dict(self) -> dict[str, Any]:
        """Return the resume point."""
        state = {
            "config": config_text(self.config),  # to report later changes
            "update": self.update,
            "seconds": self._elapsed(),
            "seconds_updating": self._updating,
            "best": self.best,
            "base": self.base,
            "latest": self.latest,
            "unevaluated": self._unevaluated,
            "num_restores": self.num_restores,
            "algorithm": self.algorithm.state_dict(),
            "source": self.source.state_dict(),
            "random": random_state(),
        }
        return gather_states(state, self.algorithm)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict` exactly."""
        state = state_of_process(state)
        self.update, self._seconds = int(state["update"]), float(state["seconds"])
        self._updating = float(state["seconds_updating"])
        self.console.seconds_before = self._seconds
        self.best, self.base, self.latest = state["best"], state["base"], state["latest"]
        self._unevaluated = bool(state.get("unevaluated", False))
        self.num_restores = int(state.get("num_restores", state.get("restored", 0)))
        self.algorithm.load_state_dict(state["algorithm"])
        if not self.source.load_state_dict(state["source"]):
            self.algorithm.reset_episodes()
            self.console.note("This backend cannot save its state: the resumed run starts new episodes.")
        load_random_state(state["random"])

    def _request_stop(self, signum: int) -> None:
        """Request a stop after the current update; a second signal stops immediately."""
        if self._signal is not None:
            raise KeyboardInterrupt
        self._signal = signum
        self.console.note("Stopping after this update ...")
