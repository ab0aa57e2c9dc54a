"""Checks for every registered algorithm and every data source."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from docs.compatibility import Outcome, all_heads, allowed, opened, try_pair
from docs.references import references
from robopolicy.algorithms.registry import ALGORITHMS
from robopolicy.data.batches import Rollout
from robopolicy.policies.base import Policy
from robopolicy.policies.noise import PerRowGenerator
from robopolicy.training.checkpoint import load_policy, save_checkpoint, verify_checkpoint
from robopolicy.training.make_source import SOURCES
from robopolicy.training.overlap import ActingCopy, rescore
from robopolicy.training.resume import load_tree, save_tree


def check_states_what_it_is(name: str) -> None:
    """Class attributes state an algorithm's data source, heads and paper, also before its import."""
    algorithm = ALGORITHMS[name]
    for attribute in ("name", "data_source", "heads", "reference"):
        assert attribute in vars(algorithm), f"{algorithm.__name__} states no {attribute}"
        assert ALGORITHMS.attribute(name, attribute) == getattr(algorithm, attribute)
    assert algorithm.name == name
    assert algorithm.data_source in SOURCES
    assert algorithm.reference in references()
    assert algorithm.heads
    for head in algorithm.heads:
        assert head in all_heads() or head == "text" or callable(getattr(Policy, head)), head


def check_updates_what_it_allows(name: str, place: Path) -> None:
    """An algorithm updates every head that it allows, and refuses all other heads with a one-line message."""
    found: dict[str, Outcome] = {head: try_pair(place, name, head) for head in all_heads()}
    assert {head for head, outcome in found.items() if outcome.reason is None} == allowed(name)
    for head, outcome in found.items():
        assert all(math.isfinite(value) for value in outcome.metrics.values())
        if outcome.reason is not None:
            assert f"'{all_heads()[head][0]}'" in outcome.reason, outcome.reason
            assert len(outcome.reason.splitlines()) == 1


def check_source_says_what_it_provides(name: str) -> None:
    """A data source has a one-sentence summary and states whether it provides whole episodes and uses replay."""
    assert SOURCES.summary(name).endswith(".")
    assert isinstance(SOURCES[name].whole_episodes, bool)
    assert isinstance(SOURCES[name].uses_replay, bool)


def check_resumes_exactly(name: str, place: Path, folder: Path, head: str = "") -> None:
    """An algorithm restored from files continues bitwise like the saved algorithm."""
    head = head or min(allowed(name))
    with opened(place, name, head) as saved, opened(place, name, head) as restored:
        for _ in range(2):
            saved.algorithm.update(saved.source.next(saved.algorithm))
        save_tree(folder, {"algorithm": saved.algorithm.state_dict(), "source": saved.source.state_dict()})
        state = load_tree(folder)
        restored.algorithm.load_state_dict(state["algorithm"])
        restored.source.load_state_dict(state["source"])
        for run in (saved, restored):
            torch.manual_seed(7)
            for _ in range(2):
                run.algorithm.update(run.source.next(run.algorithm))
        assert differences(saved.algorithm.state_dict(), restored.algorithm.state_dict()) == []


def check_acts_by_a_copy(name: str, place: Path) -> None:
    """The copy of an algorithm for `sim.overlap` acts with the weights of its last update during later ones."""
    if not ALGORITHMS[name].supports_overlap:
        return
    with opened(place, name, min(allowed(name))) as run:
        algorithm, source = run.algorithm, run.source
        acting = ActingCopy(algorithm)
        batch = source.next(algorithm)
        if isinstance(batch, Rollout):
            assert torch.allclose(rescore(batch, algorithm).logp, batch.logp, atol=1e-5)
        for _ in range(2):
            algorithm.update(source.next(algorithm))
            acting.update(algorithm)
            expected = _chunk(algorithm, source.observations())
            algorithm.update(source.next(algorithm))
            assert torch.equal(_chunk(acting, source.observations()), expected)


def _chunk(actor: Any, obs: dict[str, Tensor]) -> Tensor:
    return actor.act(obs, generator=torch.Generator().manual_seed(3)).chunk


def check_deploys_exactly(name: str, place: Path, folder: Path) -> None:
    """A deployed policy acts the same after loading; saving leaves the mode of every module unchanged."""
    for head in {min(allowed(name)), max(allowed(name))}:
        with opened(place, name, head) as run:
            run.algorithm.update(run.source.next(run.algorithm))
            deployed = run.algorithm.inference_policy()
            networks = [part for part in run.algorithm.checkpoint_items().values() if isinstance(part, nn.Module)]
            before = [module.training for part in (deployed, *networks) for module in part.modules()]
            obs = {key: torch.randn(4, deployed.spec.obs_horizon, *x) for key, x in deployed.spec.observation.items()}
            save_checkpoint(folder / head, deployed, task="toy/point_mass", obs_sample=obs)
            assert before == [module.training for part in (deployed, *networks) for module in part.modules()]
            assert verify_checkpoint(folder / head).ok
            loaded = load_policy(folder / head)[0]
            for deterministic in (True, False):
                chunks = [
                    policy.act(obs, deterministic=deterministic, generator=PerRowGenerator(range(4), [0] * 4))
                    for policy in (run.algorithm.inference_policy(), loaded)
                ]
                assert torch.equal(*chunks)


def check_stays_finite_under_autocast_and_shows_a_nan(name: str, place: Path) -> None:
    """Metrics are finite in half precision; a NaN in the data appears in the metrics."""
    with opened(place, name, min(allowed(name))) as run:
        data = run.source.next(run.algorithm)
        with torch.autocast("cpu", torch.bfloat16):
            metrics = run.algorithm.update(data)
        assert all(math.isfinite(value) for value in metrics.values()), metrics
        data = run.source.next(run.algorithm)
        (data.reward if hasattr(data, "reward") else data.obs["state"])[..., 1] = math.nan
        assert any(math.isnan(value) for value in run.algorithm.update(data).values())


def differences(one: Any, other: Any, path: str = "") -> list[str]:
    """Paths at which two trees of mappings, sequences, tensors and numbers differ; NaN equals NaN."""
    if isinstance(one, Mapping):
        if one.keys() != other.keys():
            return [f"{path}: {sorted(map(str, one.keys() ^ other.keys()))}"]
        return [found for key in one for found in differences(one[key], other[key], f"{path}/{key}")]
    if isinstance(one, torch.Tensor):
        same = one.shape == other.shape and torch.equal(one.nan_to_num(), other.nan_to_num())
        return [] if same else [path]
    if isinstance(one, Sequence) and not isinstance(one, str):
        if len(one) != len(other):
            return [f"{path}: {len(one)} and {len(other)} items"]
        pairs = zip(one, other, strict=True)
        return [found for i, pair in enumerate(pairs) for found in differences(*pair, f"{path}/{i}")]
    return [] if one == other or (one != one and other != other) else [path]
