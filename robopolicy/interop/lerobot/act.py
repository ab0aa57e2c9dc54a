"""LeRobot's ACT as the head `act`, and the reverse; without the package `lerobot`.

    policy = read_act(open_source("lerobot/act_aloha_sim_transfer_cube_human"))
    write_act(policy, "runs/act_for_lerobot")  # config.json, model.safetensors, processors with their statistics

Weights and statistics are copied, so that both give the same chunks. LeRobot has one network for all cameras, one
vector `observation.state`, one `observation.environment_state` that it does not scale, and one observation per chunk.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from robopolicy.atomic import atomic_folder
from robopolicy.data.formats.lerobot.layout import feature_of
from robopolicy.errors import UserError
from robopolicy.files import check_new_folder
from robopolicy.interop.lerobot.source import ACTION, CONFIG, POSTPROCESSOR, PREPROCESSOR, WEIGHTS, SavedPolicy
from robopolicy.nets.act import sines
from robopolicy.nets.normalizer import Normalizer
from robopolicy.nets.resnet18 import ResNet18
from robopolicy.nets.vision import ImageEncoder, VisionConfig
from robopolicy.policies.base import PolicySpec
from robopolicy.policies.heads.act import STATE, ACTConfig, ACTPolicy
from robopolicy.spec import IMAGE_PREFIX

KIND = "act"
ENVIRONMENT = "environment_state"
EPSILON = 1e-8  # that LeRobot adds to standard deviations
POSITIONS = "model.vae_encoder_pos_enc"
SETTINGS = {  # LeRobot's setting -> ours
    "dim_model": "width",
    "n_heads": "attention_heads",
    "dim_feedforward": "feedforward",
    "n_encoder_layers": "encoder_layers",
    "n_decoder_layers": "decoder_layers",
    "n_vae_encoder_layers": "posterior_layers",
    "latent_dim": "latent_dim",
    "dropout": "dropout",
    "kl_weight": "kl_weight",
}
FIXED = {  # settings with one value that the head has, too
    "n_obs_steps": 1,
    "use_vae": True,
    "pre_norm": False,
    "feedforward_activation": "relu",
    "vision_backbone": "resnet18",
    "replace_final_stride_with_dilation": False,
}
PREFIXES = {  # prefix of our weights -> LeRobot's
    "transformer.encoder.": "model.encoder.layers.",
    "transformer.decoder.": "model.decoder.layers.",
    "transformer.norm.": "model.decoder.norm.",
    "transformer.latent_in.": "model.encoder_latent_input_proj.",
    f"transformer.vectors_in.{STATE}.": "model.encoder_robot_state_input_proj.",
    f"transformer.vectors_in.{ENVIRONMENT}.": "model.encoder_env_state_input_proj.",
    "transformer.maps_in.512.": "model.encoder_img_feat_input_proj.",
    "transformer.position": "model.encoder_1d_feature_pos_embed.weight",
    "transformer.action_position": "model.decoder_pos_embed.weight",
    "posterior.token": "model.vae_encoder_cls_embed.weight",
    "posterior.state_in.": "model.vae_encoder_robot_state_input_proj.",
    "posterior.action_in.": "model.vae_encoder_action_input_proj.",
    "posterior.output.": "model.vae_encoder_latent_output_proj.",
    "posterior.layers.": "model.vae_encoder.layers.",
    "output.": "model.action_head.",
}
BACKBONE = "model.backbone."


def unlike_ours(source: SavedPolicy) -> str:
    """Describe why the head `act` cannot have the network or scaling of an ACT of LeRobot; "" if it can."""
    for name, value in FIXED.items():
        if source.config.get(name, value) != value:
            return f"{name}={source.config[name]}"
    vectors = {key: feature for key, feature in source.inputs.items() if not key.startswith(IMAGE_PREFIX)}
    for key, feature in vectors.items():
        if key not in (STATE, ENVIRONMENT):
            return f"the input {feature}"
    modes = {feature: scaling.mode for feature, scaling in source.normalization.items()}
    for feature, mode in modes.items():
        if mode != ("IDENTITY" if feature == vectors.get(ENVIRONMENT) else "MEAN_STD"):
            return f"the scaling {mode} of {feature}"
    return ""


def read_act(source: SavedPolicy, action_horizon: int | None = None) -> ACTPolicy:
    """Convert an ACT of LeRobot; `action_horizon` None keeps its number of executed actions.

    Raises:
        UserError: The network or the scaling has no counterpart, or weights are missing or do not fit.
    """
    if reason := unlike_ours(source):
        raise UserError(f"{source.name} has {reason}, which the policy act lacks.")
    horizon = source.number("chunk_size")
    executed = source.number("n_action_steps") if action_horizon is None else action_horizon
    if not 1 <= executed <= horizon:
        raise UserError(f"{source.name} plans {horizon} actions, so action_horizon must lie in [1, {horizon}].")
    images = [feature for key, feature in source.inputs.items() if key.startswith(IMAGE_PREFIX)]
    scaling = [source.normalization[feature].statistics for feature in images]
    same = all(torch.equal(each[name], scaling[0][name]) for each in scaling for name in ("mean", "std"))
    config = ACTConfig(
        vision=VisionConfig(kind="resnet18", crop=1.0, shared=same),
        **{ours: source.config[theirs] for theirs, ours in SETTINGS.items() if theirs in source.config},
    )
    policy = ACTPolicy(config, PolicySpec(source.shapes, source.action_dim, horizon, executed))
    _copy_weights(policy, source)
    _copy_statistics(policy, source)
    return policy.eval()


def write_act(policy: ACTPolicy, folder: str | Path, *, overwrite: bool = False) -> None:
    """Write `policy` as a policy that LeRobot loads; `overwrite` replaces an earlier one.

    Raises:
        UserError: The policy has observations, networks or scalings that LeRobot's ACT lacks, or `folder` exists.
    """
    _check_exportable(policy)
    folder = Path(folder)
    check_new_folder(folder, "a LeRobot policy", CONFIG, overwrite=overwrite)
    spec, config = policy.spec, policy.config
    features = {feature_of(key): _feature(key, shape) for key, shape in spec.observation.items()}
    action = {ACTION: {"type": "ACTION", "shape": [spec.action_dim]}}
    modes = dict.fromkeys(("VISUAL", "STATE", "ACTION"), "MEAN_STD")
    settings = {
        "type": KIND,
        **FIXED,
        "input_features": features,
        "output_features": action,
        "device": "cpu",
        "push_to_hub": False,
        "chunk_size": spec.horizon,
        "n_action_steps": spec.action_horizon,
        "normalization_mapping": modes,
        "pretrained_backbone_weights": None,
        **{theirs: getattr(config, ours) for theirs, ours in SETTINGS.items()},
    }
    scaled = {"eps": EPSILON, "norm_map": modes}
    with atomic_folder(folder) as temporary:
        _write_json(temporary / CONFIG, settings)
        save_file(_their_weights(policy), temporary / WEIGHTS, metadata={"format": "pt"})
        device = {"registry_name": "device_processor", "config": {"device": "cpu", "float_dtype": None}}
        before = [
            {"registry_name": "rename_observations_processor", "config": {"rename_map": {}}},
            {"registry_name": "to_batch_processor", "config": {}},
            device,
            {"registry_name": "normalizer_processor", "config": {**scaled, "features": features | action}},
        ]
        after = [{"registry_name": "unnormalizer_processor", "config": {**scaled, "features": action}}, device]
        for name, steps, index in ((PREPROCESSOR, before, 3), (POSTPROCESSOR, after, 0)):
            title = name.removesuffix(".json")
            file = f"{title}_step_{index}_{steps[index]['registry_name']}.safetensors"
            steps[index]["state_file"] = file
            _write_json(temporary / name, {"name": title, "steps": steps})
            save_file(_their_statistics(policy), temporary / file)


def _pairs(policy: ACTPolicy) -> Iterator[tuple[str, str]]:
    """Our and LeRobot's names of all weights, each camera of ours with the one network of LeRobot."""
    for name in policy.state_dict():
        if name.startswith("encoder.cameras.") and not name.endswith((".body.mean", ".body.std")):
            yield name, BACKBONE + name.partition(".body.")[2]
        for ours, theirs in PREFIXES.items():
            if name.startswith(ours):
                yield name, theirs + name.removeprefix(ours)


def _order(policy: ACTPolicy) -> list[int]:
    """Row of our positions for every row of LeRobot's: latent variables, state, environment."""
    keys = list(policy.encoder.layout.normalized)
    return [0, *(1 + keys.index(key) for key in (STATE, ENVIRONMENT) if key in keys)]


def _copy_weights(policy: ACTPolicy, source: SavedPolicy) -> None:
    file, own = source.folder / WEIGHTS, policy.state_dict()
    try:
        theirs = load_file(file)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{file} cannot be read ({error}); copy the policy again.") from error
    used = {POSITIONS}
    for name, other in _pairs(policy):
        if other not in theirs:
            raise UserError(f"{file} lacks weight '{other}' of LeRobot's '{KIND}'; save the policy again.")
        value = theirs[other].float()
        if name == "transformer.position":
            value = torch.empty_like(value).index_copy_(0, torch.tensor(_order(policy)), value)
        if value.numel() != own[name].numel() or not bool(value.isfinite().all()):
            raise UserError(f"Weight '{other}' of {file} does not fit its config.json or is not finite.")
        own[name].copy_(value.view_as(own[name]))
        used.add(other)
    if unknown := sorted(set(theirs) - used):
        raise UserError(f"{file} has weight '{unknown[0]}', which is unknown to LeRobot's '{KIND}'.")


def _copy_statistics(policy: ACTPolicy, source: SavedPolicy) -> None:
    offset, scale = torch.zeros(policy.encoder.vector_dim), torch.ones(policy.encoder.vector_dim)
    for key, columns in policy.encoder.columns().items():
        scaling = source.normalization[source.inputs[key]]
        if scaling.mode == "MEAN_STD":
            offset[columns], scale[columns] = _transform(scaling.statistics)
    _set(policy.encoder.normalizer, offset, scale)
    _set(policy.action_normalizer, *_transform(source.normalization[ACTION].statistics))
    for key, body in _bodies(policy).items():
        mean, std = _transform(source.normalization[source.inputs[key]].statistics)
        body.mean.copy_(mean)
        body.std.copy_(std)


def _transform(statistics: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    return statistics["mean"].float(), statistics["std"].float() + EPSILON


def _set(normalizer: Normalizer, offset: Tensor, scale: Tensor) -> None:
    normalizer.set_transform(offset, scale)
    normalizer.fitted.fill_(True)


def _bodies(policy: ACTPolicy) -> dict[str, ResNet18]:
    """Network of every camera."""
    encoders = {key: policy.encoder.encoder_of(key) for key in policy.maps}
    return {key: cast(ResNet18, cast(ImageEncoder, encoder).network(key).body) for key, encoder in encoders.items()}


def _check_exportable(policy: ACTPolicy) -> None:
    observed = set(policy.spec.observation)
    vectors = {key for key in observed if not key.startswith(IMAGE_PREFIX)}
    vision = policy.config.vision
    bodies = list(_bodies(policy).values())
    scalings = policy.encoder.normalizer.mode, policy.action_normalizer.mode
    columns = policy.encoder.columns().get(ENVIRONMENT)
    scale = policy.encoder.normalizer
    reasons = {
        "observes several steps; train with obs_horizon=1": policy.spec.obs_horizon > 1,
        f"observes {', '.join(sorted(vectors))}, not state and environment_state": not vectors <= {STATE, ENVIRONMENT},
        "observes neither a camera nor environment_state": not bodies and ENVIRONMENT not in vectors,
        "lacks the observation state": STATE not in vectors,
        f"has cameras of kind {vision.kind}; train with vision.kind=resnet18": bodies and vision.kind != "resnet18",
        "crops images; train with vision.crop=1": bodies and vision.crop != 1,
        "has a network per camera; train with vision.shared=true": any(
            not torch.equal(value, bodies[0].state_dict()[name])
            for body in bodies[1:]
            for name, value in body.state_dict().items()
            if name not in ("mean", "std")
        ),
        "is scaled by another rule than meanstd": set(scalings) != {"meanstd"},
        "scales environment_state, which LeRobot does not": columns is not None
        and not (bool((scale.offset[columns] == 0).all()) and bool((scale.scale[columns] == 1).all())),
    }
    for reason, holds in reasons.items():
        if holds:
            raise UserError(f"LeRobot's ACT cannot be this policy, which {reason}.")


def _their_weights(policy: ACTPolicy) -> dict[str, Tensor]:
    own, found = policy.state_dict(), dict[str, Tensor]()
    for name, other in _pairs(policy):
        value = own[name].cpu()
        if name == "transformer.position":
            value = value[_order(policy)]
        if name == "transformer.maps_in.512.weight":
            value = value[:, :, None, None]
        found[other] = value.contiguous()
    found[POSITIONS] = sines(policy.posterior.positions.shape[0], policy.config.width)[None]
    return found


def _their_statistics(policy: ACTPolicy) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for key, columns in policy.encoder.columns().items():
        found |= _statistics(key, policy.encoder.normalizer.offset[columns], policy.encoder.normalizer.scale[columns])
    for key, body in _bodies(policy).items():
        found |= _statistics(key, body.mean, body.std)
    normalizer = policy.action_normalizer
    return found | {f"{ACTION}.mean": normalizer.offset.cpu(), f"{ACTION}.std": (normalizer.scale - EPSILON).cpu()}


def _statistics(key: str, mean: Tensor, std: Tensor) -> dict[str, Tensor]:
    name = feature_of(key)
    return {f"{name}.mean": mean.cpu().clone(), f"{name}.std": std.cpu() - EPSILON}


def _feature(key: str, shape: tuple[int, ...]) -> dict[str, Any]:
    kind = "VISUAL" if key.startswith(IMAGE_PREFIX) else "ENV" if key == ENVIRONMENT else "STATE"
    return {"type": kind, "shape": list(shape)}


def _write_json(file: Path, content: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=4) + "\n", encoding="utf-8")
