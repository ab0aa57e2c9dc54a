"""pi0 and pi0.5 with networks of a few thousand weights, built and saved by `lerobot`.

LeRobot has them in two sizes of billions of weights and loads their tokenizer from the hub. So the fixtures shrink the
networks and replace the tokenizer by a small one; everything else is LeRobot's.
"""

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from lerobot_saved import features, save_backbone, save_policy, statistics

NAMES = {"pi0": "PI0", "pi05": "PI05"}
WIDTH, WORDS = 16, 64


def shrink(kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Patch lerobot to build small networks of `kind` and to load tokenizers from `folder`."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    modeling: Any = import_module(f"lerobot.policies.{kind}.modeling_{kind}")
    gemma = modeling.GemmaConfig(width=WIDTH, depth=2, mlp_dim=32, num_heads=2, num_kv_heads=1, head_dim=8)
    seeing, acting = modeling.PaliGemmaForConditionalGenerationWithPiGemma, modeling.PiGemmaForCausalLM

    def small_seeing(config: Any) -> Any:
        config.vision_config.update(
            {
                "hidden_size": WIDTH,
                "projection_dim": WIDTH,
                "intermediate_size": 32,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
            }
        )
        config.update({"hidden_size": WIDTH, "projection_dim": WIDTH, "image_token_index": WORDS - 1})
        config.text_config.update({"vocab_size": WORDS, "pad_token_id": 0})
        return seeing(config)

    def small_acting(config: Any) -> Any:
        config.update({"vocab_size": WORDS, "pad_token_id": 0})
        return acting(config)

    tokenizer = PreTrainedTokenizerFast.from_pretrained(save_backbone(folder))
    monkeypatch.setattr(modeling, "get_gemma_config", lambda variant: gemma)
    monkeypatch.setattr(modeling, "PaliGemmaForConditionalGenerationWithPiGemma", small_seeing)
    monkeypatch.setattr(modeling, "PiGemmaForCausalLM", small_acting)
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *_, **__: tokenizer)


def save_pi(kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Save a small policy of `kind` with its processors; returns it."""
    shrink(kind, folder.parent / "backbone", monkeypatch)
    configuration: Any = import_module(f"lerobot.policies.{kind}.configuration_{kind}")
    modeling: Any = import_module(f"lerobot.policies.{kind}.modeling_{kind}")
    torch.manual_seed(0)
    config = getattr(configuration, f"{NAMES[kind]}Config")(
        **features(camera=True),
        chunk_size=6,
        n_action_steps=3,
        max_state_dim=8,
        max_action_dim=4,
        image_resolution=(28, 28),
        num_inference_steps=3,
        tokenizer_max_length=16,
        device="cpu",
        push_to_hub=False,
    )
    quantiles = {key: {**found, "q01": found["min"], "q99": found["max"]} for key, found in statistics().items()}
    return save_policy(folder, getattr(modeling, f"{NAMES[kind]}Policy")(config), quantiles)
