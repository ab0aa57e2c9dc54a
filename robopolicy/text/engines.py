"""Generation by an engine other than the policy itself, whose log-probabilities differ from the policy's.

An engine has a copy of the weights and returns tokens with its own log-probabilities. The learner scores the tokens
again: `logp_old` comes from the policy, `logp_behaviour` from the engine, and every recipe weights decisions by
`min(policy / engine, cap)` (truncated importance sampling, Zheng et al. 2025).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any, Protocol

import torch
from torch import Tensor

from robopolicy.errors import UserError
from robopolicy.optional import require
from robopolicy.text.generation import Generation
from robopolicy.text.policy import TextPolicy
from robopolicy.text.tokenizers import right_padded

NATIVE = "native"  # the policy itself


class Engine(Protocol):
    """Interface of a generation engine; `TextPolicy.generate` is the policy's own."""

    def load(self, policy: TextPolicy) -> None:
        """Load the weights of the policy."""
        ...

    def generate(
        self, prompts: Sequence[Sequence[int]], generator: torch.Generator, *, temperature: Tensor
    ) -> Generation:
        """Complete the N prompts at temperatures (N,); the result may have zero entropy everywhere."""
        ...


class VLLM:
    """vLLM in this process (extra `vllm`, in a separate environment), on a device that vLLM supports.

    Written from the public documentation: `LLM.generate` on token ids, log-probabilities of the sampling distribution
    (`logprobs_mode="processed_logprobs"`), weights by `LLM.apply_model`.
    """

    def __init__(self, policy: TextPolicy) -> None:
        """Pass the model to vLLM through a temporary folder.

        Raises:
            UserError: vLLM is not installed, or does not support this policy.
        """
        if policy.name != TextPolicy.name:
            raise UserError(f"Engine 'vllm' needs a causal model (policy=text), not '{policy.name}'.")
        if policy.config.lora_rank:
            raise UserError("Engine 'vllm' does not support LoRA; set policy.lora_rank=0.")
        self._library = require("vllm", "vllm")
        self._policy = policy
        with TemporaryDirectory() as folder:
            policy.model.save_pretrained(folder)  # type: ignore[operator]
            options: dict[str, Any] = {"max_model_len": policy.context} if policy.context < 2**31 else {}
            options |= {"dtype": policy.config.dtype, "logprobs_mode": "processed_logprobs"}
            self._llm: Any = self._library.LLM(model=folder, skip_tokenizer_init=True, **options)

    def load(self, policy: TextPolicy) -> None:
        """Replace the weights and clear the prefix cache of the old ones."""
        weights = {name: value.detach() for name, value in policy.model.state_dict().items()}
        self._llm.apply_model(partial(_replace, weights=weights))
        self._llm.reset_prefix_cache()

    def generate(
        self, prompts: Sequence[Sequence[int]], generator: torch.Generator, *, temperature: Tensor
    ) -> Generation:
        """Complete the prompts, each with its own seed."""
        tokenizer, budget = self._policy.tokenizer, self._policy.budget
        self._policy.check_fits(max(map(len, prompts)), budget)
        seeds = torch.randint(2**31 - 1, (len(prompts),), generator=generator).tolist()
        common = {"max_tokens": budget, "stop_token_ids": [tokenizer.eos], "logprobs": 0, "detokenize": False}
        settings = [
            self._library.SamplingParams(temperature=temperatures, seed=seed, **common)
            for temperatures, seed in zip(temperature.tolist(), seeds, strict=True)
        ]
        requests = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        answers = [answer.outputs[0] for answer in self._llm.generate(requests, settings, use_tqdm=False)]
        rows = [list(answer.token_ids) for answer in answers]
        scores = [
            [step[token].logprob for step, token in zip(answer.logprobs, row, strict=True)]
            for answer, row in zip(answers, rows, strict=True)
        ]
        return generation_from(rows, scores, eos=tokenizer.eos, pad=tokenizer.pad)


def generation_from(
    rows: Sequence[Sequence[int]], logp: Sequence[Sequence[float]], *, eos: int, pad: int
) -> Generation:
    """Build the result of an engine from the tokens of each row, `eos` included, and their log-probabilities."""
    tokens, mask = right_padded(rows, pad)
    scores = torch.zeros(tokens.shape)
    for row, values in enumerate(logp):
        scores[row, : len(values)] = torch.tensor(values)
    truncated = ~((tokens == eos) & mask).any(1)
    return Generation(tokens, mask, scores, torch.zeros_like(scores), truncated, mask.long().cumsum(1) * mask)


ENGINES: dict[str, Callable[[TextPolicy], Engine]] = {"vllm": VLLM}


def with_importance_cap(recipe: Mapping[str, Any], cap: float) -> dict[str, Any]:
    """Add importance weights for the mismatch of an engine, truncated at `cap`, to a plain recipe without a cap."""
    estimator = recipe.get("estimator", {})
    if estimator is None or estimator.get("importance_cap") is not None:
        return dict(recipe)
    return {**recipe, "estimator": {**estimator, "importance_cap": cap}}


def _replace(model: Any, *, weights: Mapping[str, Tensor]) -> None:
    model.load_weights(weights.items())
