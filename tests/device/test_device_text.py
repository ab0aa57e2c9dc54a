"""Tests of text policies on the simulated device: the CPU's tokens and gradients, with few waits."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from budgets import check_budget

from robopolicy.cli.main import main
from robopolicy.policies.base import PolicySpec
from robopolicy.text import generation
from robopolicy.text.generation import Generation, generate
from robopolicy.text.policy import TextConfig, TextPolicy
from robopolicy.training.loop import Trainer

simulated = pytest.importorskip("simulated", exc_type=ImportError)
SMALL = ["policy.width=16", "policy.layers=1", "policy.heads=2", "evaluation.episodes=8", "logging.every=1", "out=runs"]
GROUPS = ["algorithm.minibatches=2", "algorithm.group_size=4"]
PROMPTS = [[1, 2, 3, 4], [1, 2], [1, 2], [5, 6, 7, 8, 9, 10]]


def made(device: str) -> TextPolicy:
    torch.manual_seed(0)
    policy = TextPolicy(TextConfig(width=16, layers=2, heads=2, context=64), PolicySpec({"text": (32,)}, 24))
    return policy.to(device)


def generated(device: str, eos: int) -> Generation:
    draws = (torch.randint(12, (16, 24), generator=torch.Generator().manual_seed(1)) + 0.5) / 12  # of few tokens
    return generate(
        made(device).model, PROMPTS * 4, draws, budget=24, temperature=torch.full((16,), 50.0), eos=eos, pad=0
    )


def test_rows_generate_the_tokens_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "READ_EVERY", 5)
    eos = int(generated("cpu", -1).tokens[:, 2:].flatten().bincount().argmax())  # rows end at a frequent token
    here, there = (generated(device, eos) for device in ("cpu", simulated.NAME))
    lengths = sorted(len(row) for row in here.completions())
    assert lengths[8] < 18 < lengths[-1] and len(set(lengths)) > 3  # half of the rows leave the batch before its end
    assert there.completions() == here.completions()
    copied = there.to_cpu()
    for name in ("logp", "entropy"):
        torch.testing.assert_close(getattr(copied, name), getattr(here, name), atol=1e-4, rtol=1e-4)
    for name in ("tokens", "mask", "truncated", "order"):
        assert torch.equal(getattr(copied, name), getattr(here, name)), name


def test_generation_waits_once_per_several_tokens() -> None:
    policy = made(simulated.NAME)
    policy.generate(PROMPTS)  # the first call initialises the model
    with simulated.record() as found:
        result = policy.generate(PROMPTS, torch.Generator().manual_seed(1))
    steps = result.tokens.shape[1]
    inside = sum(count for (_, op, place), count in found.events.items() if "generation.py" in place)
    assert steps > 16 and inside <= steps // generation.READ_EVERY + 7, found.places()  # seven for the prompts


def test_scores_and_gradients_are_those_of_the_cpu() -> None:
    completions = [[11, 12, 258], [13, 258], [14, 15, 16, 258], [258]]
    found: list[torch.Tensor] = []
    for name in ("cpu", simulated.NAME):
        policy = made(name)
        record: dict[str, Any] = dict(policy.pad_rows(PROMPTS, completions))
        with simulated.record() as counted:
            out = policy.score(**record, temperature=policy.temperatures(1.0, 4))
            (out.logp.sum() + 0.1 * out.entropy.sum()).backward()
        assert counted.waits <= 6, counted.places()  # four are empty tensors of a cache
        found.append(torch.cat([parameter.grad.flatten().cpu() for parameter in policy.trainable()]))  # type: ignore[union-attr]
        found.append(out.logp.detach().cpu())
    torch.testing.assert_close(found[2], found[0], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(found[3], found[1])


# Before: 278 launches and 19 waits of an update of supervised fine-tuning; with GRPO, 665 launches and 82 waits of a
# rollout of 6 tokens, 1,416 and 77 of an update with two minibatches.
@pytest.mark.parametrize(
    ("experiment", "settings", "kinds"),
    [
        ("text_sft", ["budget.updates=3", "algorithm.batch_size=8"], ["update"]),
        (
            "text_grpo",
            ["budget.updates=4", "algorithm.sft_updates=2", "algorithm.prompts_per_update=4", *GROUPS],
            ["next", "update"],
        ),
    ],
)
def test_updates_keep_their_budgets(
    experiment: str,
    settings: list[str],
    kinds: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    counts: dict[str, Any] = {}
    iterate = Trainer._iterate

    def counted(kind: str, call: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def inside(argument: Any) -> Any:
            with simulated.record() as counts[kind]:
                return call(argument)

        return inside

    def recorded(trainer: Trainer) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(trainer.source, "next", counted("next", trainer.source.next))
            patch.setattr(trainer.algorithm, "update", counted("update", trainer.algorithm.update))
            iterate(trainer)

    monkeypatch.setattr(Trainer, "_iterate", recorded)
    assert main(["train", f"experiment={experiment}", *SMALL, f"device={simulated.NAME}", "name=run", *settings]) == 0
    for kind in kinds:  # of the last update
        check_budget("text", f"{experiment}_{kind}", counts[kind].launches, counts[kind].waits, counts[kind])
