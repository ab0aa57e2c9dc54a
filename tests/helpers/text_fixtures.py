"""Fixtures of a small text policy and of a model folder in transformers' format."""

from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from text_forms import CHAT, SPEC
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, GPT2Config, PreTrainedTokenizerFast

from robopolicy.text.policy import TextConfig, TextPolicy


@pytest.fixture
def policy() -> TextPolicy:
    """Two layers on bytes with a large output layer, hence a peaked distribution: temperature and entropy matter."""
    torch.manual_seed(0)
    policy = TextPolicy(TextConfig(width=32, layers=2, heads=2, context=96), SPEC)
    with torch.no_grad():
        policy.model.get_output_embeddings().weight.mul_(20.0)
    return policy


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    """A GPT-2 with dropout and a byte-level tokenizer with special tokens."""
    path = tmp_path_factory.mktemp("gpt2")
    special = ["<|end|>", "<|user|>", "<|assistant|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    inner = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>")
    inner.add_special_tokens({"additional_special_tokens": special[1:]})
    inner.chat_template = CHAT
    inner.save_pretrained(path)
    torch.manual_seed(1)
    size = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 128, "vocab_size": len(inner)}
    config = GPT2Config(**size, bos_token_id=None, eos_token_id=inner.eos_token_id)
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return path
