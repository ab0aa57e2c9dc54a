"""The two sides of the comparison, run as `python -m benchmarks.trl.sides SIDE BASE OUT SEED UPDATES`."""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.common import outcomes
from robopolicy.evaluation.harness import evaluate
from robopolicy.optional import require
from robopolicy.sim.registry import SimOptions, make_sim
from robopolicy.spec import PolicySpec
from robopolicy.text.model import small_llama
from robopolicy.text.policy import TextConfig, TextPolicy
from robopolicy.text.recipe_trainer import TextRecipe, TextRecipeConfig
from robopolicy.text.sft import TextSFT, TextSFTConfig
from robopolicy.text.sim import TextSim
from robopolicy.training.text_file_source import DemonstrationSource
from robopolicy.training.text_rollout_source import TextRolloutSource, training_prompts

TASK = "text/arithmetic"
PROMPTS, GROUP, BUDGET = 32, 8, 6  # per update; attempts per prompt; tokens per answer
LR, CLIP, GRAD_CLIP, BETAS = 2e-4, 0.2, 1.0, (0.9, 0.99)
POOL = 2000  # different prompts
HELD_OUT, JUDGED = 500_000, 200
IMITATION = 160  # imitation updates before both sides


@dataclass(frozen=True)
class Setting:
    """Settings that differ between runs."""

    seed: int
    updates: int


def make_base(folder: Path, updates: int) -> None:
    """Train a small byte-level Llama by imitation and save it as a folder that both sides read."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    torch.set_num_threads(1)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({token: place for place, token in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>", pad_token="<pad>")
    shape = small_llama(width=128, layers=3, heads=4, context=64, vocabulary=len(tokenizer))
    config = AutoConfig.for_model(shape.pop("model_type"), **shape)
    config.eos_token_id, config.pad_token_id, config.bos_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id, None
    tokenizer.save_pretrained(folder)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    policy, sim = _policy(folder), _sim()
    learner = TextSFT(TextSFTConfig(), policy, total_updates=updates)
    with closing(DemonstrationSource(sim, learner.config, learner.policy, seed=1_000_000)) as source:
        for _ in range(updates):
            learner.update(source.next(learner))
    policy.model.save_pretrained(folder)  # type: ignore[operator]


def ours(base: Path, setting: Setting) -> tuple[TextPolicy, list[float], list[float], int]:
    """GRPO by the recipe; returns policy, time and mean reward per update, and the tokens after the first update."""
    policy = _policy(base)
    adam = {"lr": LR, "beta1": BETAS[0], "beta2": BETAS[1], "warmup": 0, "grad_clip": GRAD_CLIP}
    config = TextRecipeConfig(recipe="grpo", prompts_per_update=PROMPTS, group_size=GROUP, num_prompts=POOL, **adam)
    learner = TextRecipe(config, policy, total_updates=setting.updates)
    times, rewards, first = [], [], 0
    with closing(TextRolloutSource(_sim(), learner, seed=2_000_000 + 10_000 * setting.seed)) as source:
        for _ in range(setting.updates):
            learner.update(source.next(learner))
            rewards.append(source.metrics()["rollout/return"])
            times.append(time.monotonic())
            first = first or source.generated
        return policy, times, rewards, source.generated - first


def theirs(base: Path, setting: Setting) -> tuple[TextPolicy, list[float], list[float], int]:
    """GRPO by TRL with the same settings and results."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

    datasets, trl = require("datasets", "trl"), require("trl", "trl")
    task = _sim().task
    seeds = [prompt.payload for prompt in training_prompts(task, 2_000_000 + 10_000 * setting.seed, POOL, PROMPTS)]
    tokenizer = AutoTokenizer.from_pretrained(base)
    start = tokenizer.eos_token  # our prompts start with it too: there is no other such token
    data = datasets.Dataset.from_list([{"prompt": start + task.episode(seed).prompt, "key": seed} for seed in seeds])
    counts: list[int] = []
    rewards: list[float] = []
    times: list[float] = []

    def judge(completions: list[str], key: list[int], completion_ids: list[Any], **_: Any) -> list[float]:
        found = [task.episode(seed).step(text).reward for seed, text in zip(key, completions, strict=True)]
        counts.append(sum(map(len, completion_ids)))
        rewards.append(fmean(found))
        return found

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            times.append(time.monotonic())

    with TemporaryDirectory() as folder:
        config = trl.GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=PROMPTS * GROUP,
            num_generations=GROUP,
            max_completion_length=BUDGET,
            max_steps=setting.updates,
            learning_rate=LR,
            lr_scheduler_type="constant",
            warmup_steps=0,
            adam_beta1=BETAS[0],
            adam_beta2=BETAS[1],
            weight_decay=0.0,
            max_grad_norm=GRAD_CLIP,
            epsilon=CLIP,
            beta=0.0,
            loss_type="grpo",
            temperature=1.0,
            top_k=0,
            seed=setting.seed,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            logging_steps=1000,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        trainer = trl.GRPOTrainer(
            model=model,
            reward_funcs=judge,
            args=config,
            train_dataset=data,
            processing_class=tokenizer,
            callbacks=[Clock()],
        )
        trainer.train()
        policy = _policy(base)
        policy.model.load_state_dict(trainer.model.state_dict())
    return policy, times, rewards, sum(counts[1 : setting.updates])


def judged(policy: TextPolicy) -> list[int]:
    """Whether the most likely answer solves each held-out prompt."""
    with closing(make_sim(TASK, SimOptions(num_envs=32))) as sim:
        result = evaluate(policy.eval(), sim, episodes=JUDGED, seed=HELD_OUT)
    return outcomes(result)


SIDES: dict[str, Callable[[Path, Setting], tuple[TextPolicy, list[float], list[float], int]]] = {
    "robopolicy": ours,
    "trl": theirs,
}


def main() -> None:
    """Run one side and write its figures."""
    side, base, out, seed, updates = sys.argv[1:]
    torch.set_num_threads(1)
    torch.manual_seed(int(seed))
    policy, times, rewards, tokens = SIDES[side](Path(base), Setting(int(seed), int(updates)))
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024  # before the evaluation [MiB]
    figures = {
        "side": side,
        "seed": int(seed),
        "updates": len(times),
        "tokens_per_s": 2 * tokens / (times[-1] - times[0]),
        "memory_mib": memory,
        "reward": fmean(rewards[-max(1, len(rewards) // 3) :]),
        "rewards": rewards,
        "correct": judged(policy),
    }
    Path(out).write_text(json.dumps(figures), encoding="utf-8")


def _policy(folder: Path) -> TextPolicy:
    task = _sim().task
    return TextPolicy(TextConfig(pretrained=str(folder)), PolicySpec({"text": (task.prompt_bytes,)}, BUDGET))


def _sim() -> TextSim:
    sim = make_sim(TASK, SimOptions(num_envs=1))
    assert isinstance(sim, TextSim)
    return sim


if __name__ == "__main__":
    main()
