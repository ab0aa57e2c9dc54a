"""Tiny policies built and saved by `lerobot` itself, with random weights and nothing from a hub."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

STATE, CAMERA, ACTION = "observation.state", "observation.images.front", "action"
DIMS, SIZE, HISTORY, HORIZON = 6, 32, 2, 8


def features(camera: bool) -> dict[str, Any]:
    """Constructor arguments of a configuration: its input and output features."""
    from lerobot.configs.types import FeatureType, PolicyFeature

    extra = (
        {CAMERA: PolicyFeature(FeatureType.VISUAL, (3, SIZE, SIZE))}
        if camera
        else {"observation.environment_state": PolicyFeature(FeatureType.ENV, (2,))}
    )
    return {
        "input_features": {STATE: PolicyFeature(FeatureType.STATE, (DIMS,)), **extra},
        "output_features": {ACTION: PolicyFeature(FeatureType.ACTION, (2,))},
    }


def statistics() -> dict[str, dict[str, Tensor]]:
    """Statistics of a dataset in lerobot's format."""
    generator = torch.Generator().manual_seed(3)

    def of(*shape: int) -> dict[str, Tensor]:
        middle, spread = torch.randn(shape, generator=generator), torch.rand(shape, generator=generator) + 0.5
        return {"mean": middle, "std": spread, "min": middle - 2 * spread, "max": middle + 2 * spread}

    return {
        STATE: of(DIMS),
        CAMERA: of(3, 1, 1),
        "observation.environment_state": of(2),
        ACTION: {name: value / 2 for name, value in of(2).items()},
    }


def save_diffusion(folder: Path, *, camera: bool = False, stats: Any = None, **settings: Any) -> Any:
    """Save a DiffusionPolicy with its processors; returns it."""
    from lerobot.policies.diffusion.configuration_diffusion import DiffusionConfig
    from lerobot.policies.diffusion.modeling_diffusion import DiffusionPolicy

    small: dict[str, Any] = {
        "n_obs_steps": HISTORY,
        "horizon": HORIZON,
        "n_action_steps": 4,
        "down_dims": (16, 32),
        "n_groups": 4,
        "diffusion_step_embed_dim": 16,
        "noise_scheduler_type": "DDIM",
        "num_inference_steps": 5,
        "num_train_timesteps": 50,
        "pretrained_backbone_weights": None,
        "use_group_norm": True,
        "spatial_softmax_num_keypoints": 4,
        "device": "cpu",
        "push_to_hub": False,
    }
    torch.manual_seed(0)
    config = DiffusionConfig(**features(camera), **(small | settings))
    return save_policy(folder, DiffusionPolicy(config), stats)


def save_smolvla(folder: Path) -> Any:
    """Save a SmolVLA of a few thousand weights, next to a vision-language backbone and tokenizer of its size."""
    from lerobot.policies.smolvla.configuration_smolvla import SmolVLAConfig
    from lerobot.policies.smolvla.modeling_smolvla import SmolVLAPolicy

    backbone = save_backbone(folder.parent / "backbone")
    torch.manual_seed(0)
    config = SmolVLAConfig(
        **features(camera=True),
        vlm_model_name=str(backbone),
        load_vlm_weights=False,
        num_vlm_layers=2,
        num_expert_layers=2,
        chunk_size=6,
        n_action_steps=3,
        max_state_dim=8,
        max_action_dim=4,
        resize_imgs_with_padding=(SIZE, SIZE),
        tokenizer_max_length=8,
        num_steps=3,
        device="cpu",
        push_to_hub=False,
    )
    return save_policy(folder, SmolVLAPolicy(config), None)


def save_policy(folder: Path, policy: Any, stats: Any) -> Any:
    """Save a policy with its processors, which use `statistics()` if `stats` is None; returns it."""
    from lerobot.policies.factory import make_pre_post_processors

    policy.eval()
    policy.save_pretrained(folder)
    for pipeline in make_pre_post_processors(policy.config, dataset_stats=statistics() if stats is None else stats):
        pipeline.save_pretrained(folder)
    return policy


def save_backbone(folder: Path) -> Path:
    """A SmolVLM with the configuration, tokenizer and processor of a few thousand weights, without weights."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast, SmolVLMConfig, SmolVLMImageProcessor, SmolVLMProcessor
    from transformers.models.smolvlm.video_processing_smolvlm import SmolVLMVideoProcessor

    named = {
        "image_token": "<image>",
        "fake_image_token": "<fake_token_around_image>",
        "global_image_token": "<global-img>",
        "end_of_utterance_token": "<end_of_utterance>",
    }
    words = ["<pad>", "<unk>", *named.values(), "push", "the", "block", "open", "drawer"]
    raw = Tokenizer(WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    raw.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="<pad>", unk_token="<unk>", extra_special_tokens=named
    )
    processor = SmolVLMProcessor(SmolVLMImageProcessor(), tokenizer, SmolVLMVideoProcessor(), chat_template="")
    processor.save_pretrained(folder)
    text = {"model_type": "llama", "vocab_size": 32, "hidden_size": 32, "intermediate_size": 64}
    text |= {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    text |= {"pad_token_id": 0}
    vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": SIZE, "patch_size": 8}
    config_class: Any = SmolVLMConfig  # its generated constructor is unknown to type checkers
    config = config_class(text_config=text, vision_config=vision, scale_factor=2, image_token_id=2, pad_token_id=0)
    config.save_pretrained(folder)
    return folder


def observations(rows: int, *, camera: bool, history: int = HISTORY, seed: int = 1) -> dict[str, Tensor]:
    """Observations in the format of robopolicy policies."""
    generator = torch.Generator().manual_seed(seed)
    shown = (
        {"image.front": torch.randint(0, 256, (rows, history, 3, SIZE, SIZE), generator=generator, dtype=torch.uint8)}
        if camera
        else {"environment_state": torch.randn(rows, history, 2, generator=generator)}
    )
    return {"state": torch.randn(rows, history, DIMS, generator=generator), **shown}


def theirs(obs: dict[str, Tensor]) -> dict[str, Any]:
    """The observations with lerobot's names and units."""
    batch: dict[str, Any] = {f"observation.{key}": value for key, value in obs.items() if key != "image.front"}
    if "image.front" in obs:
        batch[CAMERA] = obs["image.front"].float() / 255
    return batch
