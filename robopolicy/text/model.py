"""Construction of causal language models: small ones from scratch or pretrained ones, optionally with LoRA."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from robopolicy.device import list_factories
from robopolicy.errors import UserError
from robopolicy.optional import require

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
PROBE = 3  # tokens of the test input of `check_head`


def small_llama(width: int, layers: int, heads: int, context: int, vocabulary: int) -> dict[str, Any]:
    """Return the `transformers` architecture of the default model."""
    return {
        "model_type": "llama",
        "vocab_size": vocabulary,
        "hidden_size": width,
        "intermediate_size": 3 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "max_position_embeddings": context,
        "tie_word_embeddings": False,
    }


def build_model(architecture: dict[str, Any], dtype: str) -> nn.Module:
    """Build a causal language model with random weights.

    Raises:
        UserError: `transformers` does not support the architecture.
    """
    transformers = require("transformers", "text")
    ignored = ("model_type", "architectures", "dtype")
    settings = {key: value for key, value in architecture.items() if key not in ignored}
    model_type = str(architecture.get("model_type", ""))
    try:
        config = _without_dropout(transformers.AutoConfig.for_model(model_type, **settings))
        return transformers.AutoModelForCausalLM.from_config(config, dtype=DTYPES[dtype])
    except (KeyError, TypeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"transformers cannot build a causal model of type '{model_type}': {reason}") from error


def load_pretrained(source: str, dtype: str) -> tuple[nn.Module, Any, dict[str, Any]]:
    """Load model, tokenizer and architecture of a local folder or a hub id; weights only from safetensors.

    Raises:
        UserError: There is no such model, or it has no safetensors.
    """
    transformers = require("transformers", "text")
    list_factories()
    try:
        config = _without_dropout(transformers.AutoConfig.from_pretrained(source))
        settings = {"config": config, "dtype": DTYPES[dtype], "use_safetensors": True}
        model = transformers.AutoModelForCausalLM.from_pretrained(source, **settings)
        tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        where = "folder" if Path(source).exists() else "folder or hub id"
        raise UserError(f"'{source}' is not a {where} of a causal language model: {reason}") from error
    return model, tokenizer, json.loads(model.config.to_json_string(use_diff=False))


def _without_dropout(config: Any) -> Any:
    """Set every dropout rate to 0: tokens must be scored by the network that sampled them."""
    for key, value in config.to_dict().items():
        if "drop" in key and isinstance(value, float):
            setattr(config, key, 0.0)
    return config


def add_lora(model: nn.Module, rank: int, alpha: float) -> None:
    """Freeze the model and add trainable low-rank updates to all linear layers except the output layer."""
    peft = require("peft", "text")
    config = peft.LoraConfig(r=rank, lora_alpha=alpha, target_modules="all-linear", task_type="CAUSAL_LM")
    peft.inject_adapter_in_model(config, model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)


def check_head(model: nn.Module) -> None:
    """Check that the logits are the output layer applied to the last hidden states, as the blockwise scores assume.

    Raises:
        UserError: The model scales or caps its logits.
    """
    device = next(model.parameters()).device
    tokens = torch.arange(PROBE, device=device)[None]
    training = model.training
    model.eval()
    with torch.no_grad():
        logits: Tensor = model(input_ids=tokens, use_cache=False).logits
        hidden: Tensor = body_of(model)(input_ids=tokens, use_cache=False).last_hidden_state
        same = torch.allclose(logits.float(), head_of(model)(hidden).float(), rtol=1e-2, atol=1e-2)
    model.train(training)
    if not same:
        raise UserError("This model changes the logits of its output layer, which is not supported.")


def body_of(model: nn.Module) -> nn.Module:
    """Return the transformer without its output layer."""
    body: nn.Module = model.base_model  # type: ignore[assignment]
    return body


def head_of(model: nn.Module) -> nn.Linear:
    """Return the output layer."""
    head: nn.Linear = model.get_output_embeddings()  # type: ignore[operator]
    return head
