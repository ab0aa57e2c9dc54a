"""Environment checker: test a simulator against the contract and explain every violated rule.

problems = check_simulator(make_sim("locomotion/hopper", SimOptions(num_envs=3)))
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from robopolicy.errors import UserError
from robopolicy.sim.contract import Observation, Step, TensorSpec, VectorSim
from robopolicy.spec import IMAGE_PREFIX

_SEED = 17
_STEPS = 8  # control steps of the short comparisons
_MAX_WAIT = 3000  # maximum control steps until an episode ends


def check_simulator(sim: VectorSim, make: Callable[[int], VectorSim] | None = None) -> list[str]:
    """Check `sim` against every rule of the contract; return one sentence per violated rule.

    The simulator is reset and stepped; comparisons of rows need at least two environments. `make` builds the same
    simulator with a given number of environments; if given, results are compared for different numbers.
    """
    checker = _Checker(sim)
    checker.check_spec()
    checker.check_observation(sim.reset(_SEED), "reset")
    if checker.problems:
        return checker.problems  # the other checks would repeat these problems
    checker.check_step()
    checker.check_clipping()
    checker.check_kept_tensors()
    if sim.spec.seeded_episodes:
        checker.check_seeds()
    if sim.spec.supports_masked_step:
        checker.check_active()
    else:
        checker.check_reset_rows()
    checker.check_episode_end()
    checker.check_state_dict()
    if make is not None and sim.spec.seeded_episodes:
        checker.check_number_of_envs(make)
    return checker.problems


class _Checker:
    def __init__(self, sim: VectorSim) -> None:
        self.sim = sim
        self.problems: list[str] = []

    def expect(self, holds: bool, problem: str) -> None:
        if not holds and problem not in self.problems:
            self.problems.append(problem)

    def check_spec(self) -> None:
        spec = self.sim.spec
        low, high = spec.action_low, spec.action_high
        self.expect(bool(torch.isfinite(low).all() and torch.isfinite(high).all()), "Action bounds must be finite.")
        self.expect(low.dtype == high.dtype == torch.float32, "Action bounds must be float32.")
        self.expect(low.shape == high.shape and low.dim() == 1, "Action bounds must be two vectors of one size.")
        self.expect(bool((low < high).all()), "Every lower action bound must be below the upper one.")
        self.expect(spec.control_dt > 0, "control_dt must be positive: it is the time between two actions in seconds.")
        self.expect(spec.max_episode_steps > 0, "max_episode_steps must be positive.")
        named = not spec.action_names or len(spec.action_names) == spec.action_dim
        self.expect(named, "action_names needs one name per action dimension.")
        for key, entry in spec.observation.items():
            self._check_entry(key, entry)

    def _check_entry(self, key: str, entry: TensorSpec) -> None:
        image = key.startswith(IMAGE_PREFIX)
        if image:
            valid = len(entry.shape) == 3 and entry.shape[0] == 3 and entry.dtype == torch.uint8
            self.expect(valid, f"Image '{key}' must be uint8 (3, height, width), got {entry.dtype} {entry.shape}.")
        else:
            self.expect(entry.dtype == torch.float32, f"Observation '{key}' must be float32, got {entry.dtype}.")
        named = not entry.names or len(entry.names) == entry.shape[-1]
        self.expect(named, f"Observation '{key}' needs one name per element.")

    def check_observation(self, obs: Observation, where: str) -> None:
        """Check keys, shapes, types and finiteness against the spec."""
        sim = self.sim
        expected = set(sim.spec.observation)
        self.expect(set(obs) == expected, f"{where} returns keys {sorted(obs)}, the spec has {sorted(expected)}.")
        for key in expected & set(obs):
            value, entry = obs[key], sim.spec.observation[key]
            shape = (sim.num_envs, *entry.shape)
            self.expect(
                tuple(value.shape) == shape, f"{where}: '{key}' has shape {tuple(value.shape)}, expected {shape}."
            )
            self.expect(value.dtype == entry.dtype, f"{where}: '{key}' is {value.dtype}, the spec has {entry.dtype}.")
            finite = not value.is_floating_point() or bool(torch.isfinite(value).all())
            self.expect(finite, f"{where}: '{key}' has NaN or infinite values; end such episodes instead.")
            self.expect(value.device == sim.device, f"{where}: '{key}' is on {value.device}, expected {sim.device}.")

    def check_step(self) -> None:
        """Check types and shapes of the result of `step`."""
        sim = self.sim
        sim.reset(_SEED)
        step = sim.step(self._actions(1)[0])
        self.check_observation(step.obs, "step")
        self.check_observation(step.final_obs, "final_obs")
        for name, value, dtype in (
            ("reward", step.reward, torch.float32),
            ("terminated", step.terminated, torch.bool),
            ("truncated", step.truncated, torch.bool),
        ):
            valid = value.shape == (sim.num_envs,) and value.dtype == dtype
            self.expect(valid, f"{name} must be {dtype} of shape ({sim.num_envs},), got {value.dtype} {value.shape}.")
        self.expect(bool(torch.isfinite(step.reward).all()), "Rewards must be finite.")
        running = ~step.done
        same = _equal_rows(step.obs, step.final_obs, running)
        self.expect(same, "final_obs must equal obs where the episode continues: both are the successor observation.")
        for key, value in step.info.items():
            self.expect(value.shape[:1] == (sim.num_envs,), f"info['{key}'] must have one entry per environment.")
        if "success" in step.info:
            self.expect(step.info["success"].dtype == torch.bool, "info['success'] must be bool.")

    def check_clipping(self) -> None:
        """Check that actions beyond the bounds have the effect of the bound."""
        if not self.sim.spec.seeded_episodes:
            return
        high = self.sim.spec.action_high.expand(self.sim.num_envs, -1)
        self.sim.reset(_SEED)
        inside = self.sim.step(high)
        self.sim.reset(_SEED)
        outside = self.sim.step(high + 5.0)
        self.expect(_same(inside, outside), "Actions beyond the bounds must be clipped to them by the backend.")

    def check_kept_tensors(self) -> None:
        """Check that returned tensors keep their values."""
        self.sim.reset(_SEED)
        actions = self._actions(3)
        step = self.sim.step(actions[0])
        values = {"reward": step.reward, **{f"obs.{key}": value for key, value in step.obs.items()}}
        values |= {f"final_obs.{key}": value for key, value in step.final_obs.items()}
        copies = {key: value.clone() for key, value in values.items()}
        for action in actions[1:]:
            self.sim.step(action)
        for key, value in values.items():
            self.expect(
                torch.equal(value, copies[key]),
                f"'{key}' returned by one step was overwritten by a later one; return fresh tensors, "
                "because rollouts keep them.",
            )

    def check_seeds(self) -> None:
        """Check that equal seeds and actions give equal episodes in every row."""
        sim, actions = self.sim, self._actions(_STEPS)
        first = sim.reset(_SEED)
        expected = torch.arange(_SEED, _SEED + sim.num_envs)
        self.expect(
            torch.equal(sim.episode_seed.cpu(), expected), "After reset(s), environment i must run episode s + i."
        )
        first_run = [sim.step(action) for action in actions]
        again = sim.reset(_SEED)
        repeated = [sim.step(action) for action in actions]
        same = _equal(first, again) and all(_same(a, b) for a, b in zip(first_run, repeated, strict=True))
        self.expect(same, "Two runs with the same seed and actions differ; draw every number from the episode's seed.")
        if sim.num_envs < 2:
            return
        sim.reset([_SEED] * sim.num_envs)
        for action in actions:
            step = sim.step(action[:1].expand_as(action))
            equal = all(torch.equal(value[0], value[-1]) for value in step.final_obs.values())
            equal = equal and bool(step.reward[0] == step.reward[-1])
            self.expect(equal, "Two rows with the same seed and actions differ; rows must not influence each other.")
            if bool(step.done.any()):
                break

    def check_active(self) -> None:
        """Check that inactive rows do not move or change."""
        sim = self.sim
        if sim.num_envs < 2:
            return
        action = self._actions(1)[0]
        start = sim.reset(_SEED)
        active = torch.zeros(sim.num_envs, dtype=torch.bool, device=sim.device)
        active[0] = True
        partial = sim.step(action, active)
        inactive = ~active
        still = _equal_rows(partial.obs, start, inactive) and _equal_rows(partial.final_obs, start, inactive)
        self.expect(still, "The observation of a row that is not active must not change.")
        zeroed = not bool((partial.reward[inactive] != 0).any() or partial.done[inactive].any())
        self.expect(zeroed, "A row that is not active must have reward 0 and both flags False.")
        self.expect(not bool(sim.episode_step[inactive].any()), "A row that is not active must not count the step.")
        if not sim.spec.seeded_episodes:
            return
        late = sim.step(action, inactive)
        sim.reset(_SEED)
        full = sim.step(action)
        unchanged = _equal_rows(late.final_obs, full.final_obs, inactive)
        unchanged = unchanged and _equal_rows(partial.final_obs, full.final_obs, active)
        self.expect(unchanged, "A masked step must not change later steps of inactive rows or the step of active rows.")

    def check_reset_rows(self) -> None:
        """Check that a row that ends in a masked step waits for `reset_rows`."""
        sim = self.sim
        sim.reset(_SEED)
        active = torch.ones(sim.num_envs, dtype=torch.bool, device=sim.device)
        actions = self._actions(min(sim.spec.max_episode_steps, _MAX_WAIT) + 1)
        done = ~active
        for action in actions[:-1]:
            done = sim.step(action, active).done
            if bool(done.any()):
                break
        late = sim.step(actions[-1], ~done)
        try:
            obs, _ = sim.reset_rows(done | late.done)
        except UserError:
            return  # allowed: such a backend executes one action per decision
        zeroed = not bool((late.reward[done] != 0).any() or late.done[done].any())
        self.expect(zeroed, "A row that ended earlier in the chunk must have reward 0 and both flags False.")
        self.check_observation(obs, "reset_rows")
        kept = _equal_rows(obs, late.obs, ~(done | late.done))
        self.expect(kept, "reset_rows must not change the observations of the other rows.")
        self.expect(not bool(sim.episode_step[done].any()), "episode_step must be 0 after reset_rows.")

    def check_episode_end(self) -> None:
        """Step until an episode ends; check automatic reset, final observation and time limit."""
        sim = self.sim
        sim.reset(_SEED)
        limit = min(sim.spec.max_episode_steps, _MAX_WAIT)
        age = torch.zeros(sim.num_envs, dtype=torch.int64)
        step = None
        for action in self._actions(limit):
            step = sim.step(action)
            age += 1
            if bool(step.done.any()):
                break
            self.expect(torch.equal(sim.episode_step.cpu(), age), "episode_step must count the control steps.")
        if step is None or not bool(step.done.any()):
            reached = limit < sim.spec.max_episode_steps
            self.expect(reached, f"No episode was truncated after max_episode_steps = {limit} control steps.")
            return
        done = step.done.cpu()
        self.expect(not bool(sim.episode_step.cpu()[done].any()), "episode_step must be 0 right after an episode ends.")
        if sim.spec.final_obs_exact:
            differs = not _equal_rows(step.final_obs, step.obs, step.done)
            self.expect(
                differs,
                "final_obs shows the first observation of the next episode; it must be the last observation of the "
                "ended episode, or truncated episodes bootstrap from the wrong state.",
            )
        self.check_observation(step.obs, "obs after automatic reset")
        if sim.spec.seeded_episodes:
            self._check_next_seeds(step, done)

    def _check_next_seeds(self, step: Step, done: Tensor) -> None:
        sim, seeds = self.sim, self.sim.episode_seed.cpu()
        unused = torch.arange(_SEED + sim.num_envs, _SEED + sim.num_envs + int(done.sum()))
        self.expect(
            torch.equal(seeds[done], unused),
            "Episodes after the first must take the next unused seeds in order of environment index.",
        )
        fresh = sim.reset([int(seed) for seed in seeds])
        self.expect(
            _equal_rows(step.obs, fresh, step.done),
            "obs after an automatic reset must be the first observation of the next seed's episode.",
        )

    def check_state_dict(self) -> None:
        """Check that a restored simulator continues exactly."""
        sim, actions = self.sim, self._actions(2 * _STEPS)
        sim.reset(_SEED)
        for action in actions[:_STEPS]:
            obs = sim.step(action).obs
        try:
            state = sim.state_dict()
        except RuntimeError:
            return  # allowed: such a backend resumes with fresh episodes
        straight = [sim.step(action) for action in actions[_STEPS:]]
        restored = sim.load_state_dict(state)
        self.expect(_equal(obs, restored), "load_state_dict must return the observation of the saved state.")
        resumed = [sim.step(action) for action in actions[_STEPS:]]
        same = all(_same(a, b) for a, b in zip(straight, resumed, strict=True))
        self.expect(same, "After load_state_dict the episodes continue differently; save the complete state.")

    def check_number_of_envs(self, make: Callable[[int], VectorSim]) -> None:
        """Check that environment 0 does not depend on the number of environments."""
        actions = self._actions(_STEPS)
        episodes: list[list[Tensor]] = []
        for count in (1, 3):
            sim = make(count)
            sim.reset(_SEED)
            episode: list[Tensor] = []
            for action in actions:
                step = sim.step(action[:1].expand(count, -1))
                episode += [step.reward[0], *(value[0] for value in step.final_obs.values())]
                if bool(step.done[0]):
                    break  # the seed of the next episode depends on the number of environments
            episodes.append(episode)
            sim.close()
        same = len(episodes[0]) == len(episodes[1])
        same = same and all(torch.equal(a, b) for a, b in zip(*episodes, strict=True))
        self.expect(
            same, "The same episode differs with 1 and 3 environments; results must not depend on their number."
        )

    def _actions(self, count: int) -> list[Tensor]:
        """Random actions within the bounds, equal in every call."""
        spec, generator = self.sim.spec, torch.Generator().manual_seed(_SEED)
        low, high = spec.action_low.cpu(), spec.action_high.cpu()
        shape = (self.sim.num_envs, spec.action_dim)
        uniform = [torch.rand(shape, generator=generator) for _ in range(count)]
        return [(low + (high - low) * part).to(self.sim.device) for part in uniform]


def _equal(left: Observation, valid: Observation) -> bool:
    return all(torch.equal(value, valid[key]) for key, value in left.items())


def _equal_rows(left: Observation, valid: Observation, rows: Tensor) -> bool:
    return all(torch.equal(value[rows], valid[key][rows]) for key, value in left.items())


def _same(left: Step, valid: Step) -> bool:
    flags = torch.equal(left.terminated, valid.terminated) and torch.equal(left.truncated, valid.truncated)
    return flags and torch.equal(left.reward, valid.reward) and _equal(left.final_obs, valid.final_obs)
