"""Tests of pretrained world models on tiny diffusers classes: actions, independent rows, caches, refusals."""

import json
import shutil
from dataclasses import replace

import pytest
import tiny_diffusers as tiny
import torch
from small_world import small_run
from torch import nn
from torch.nn import functional

from robopolicy.errors import UserError
from robopolicy.training.model_runs import resume_world, start_world, with_settings
from robopolicy.training.world_sims import load_world
from robopolicy.worldmodel.pretrained.codec import FrameCodec, cached_latents
from robopolicy.worldmodel.pretrained.families import ActionConditionedTransformer
from robopolicy.worldmodel.pretrained.learner import (
    PretrainedLearner,
    PretrainedLearnerConfig,
    PretrainedTrainConfig,
    VideoLatentBatch,
    flow_loss,
)
from robopolicy.worldmodel.pretrained.model import AdapterConfig, PretrainedWorldModel, open_pretrained

SPEC = tiny.SPEC
SMALL = AdapterConfig(action_width=16, steps=3, rows=2)
ENTRIES = [(name, how) for name in tiny.TRANSFORMERS for how in ("modulation", "channels")]
ENTRIES += [("wan", "tokens"), ("skyreels", "tokens")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A saved Wan transformer with a tiny autoencoder."""
    return tiny.write(tmp_path_factory.mktemp("wan"))


@pytest.fixture(scope="module")
def world(folder) -> PretrainedWorldModel:
    """Returns a model with random action conditioning."""
    torch.manual_seed(0)
    model = open_pretrained(folder, SPEC, SMALL)
    randomize_conditioning(model.told)
    for parameter in model.state.parameters():
        nn.init.normal_(parameter, std=0.1)
    return model


def randomize_conditioning(conditioned: ActionConditionedTransformer) -> None:
    nn.init.normal_(conditioned.told[-1].weight, std=0.5)


def transformer(name: str, how: str) -> ActionConditionedTransformer:
    torch.manual_seed(0)
    return ActionConditionedTransformer(tiny.build(tiny.TRANSFORMERS[name]), how, action_dim=2, width=16).eval()


def model_inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns latents, frame times, and actions."""
    torch.manual_seed(1)
    return torch.randn(2, 4, 4, 8, 8), torch.rand(2, 4), torch.randn(2, 4, 2)


def begin(model: PretrainedWorldModel, rows: list[int], seeds: list[int]):
    """Returns a world state that starts with the pictures `rows` of eight."""
    pictures = torch.randint(0, 256, (8, 2, 3, 16, 16), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    return model.reset({"top": pictures[rows]}, torch.zeros(len(rows), 2, 3), seeds=torch.tensor(seeds))


@pytest.mark.parametrize(("name", "how"), ENTRIES)
def test_action_changes_mainly_its_own_frame_and_nothing_before_training(name, how):
    conditioned, (x, time, actions) = transformer(name, how), model_inputs()
    before = conditioned.velocity(x, time, actions, given=2)
    assert torch.allclose(before, conditioned.velocity(x, time, None, given=2), atol=2e-6)
    before.pow(2).mean().backward()
    assert conditioned.told[-1].weight.grad.abs().sum() > 0
    randomize_conditioning(conditioned)
    changed = actions.clone()
    changed[:, 2] += 1
    with torch.no_grad():
        moved = conditioned.velocity(x, time, changed, given=2) - conditioned.velocity(x, time, actions, given=2)
    others, own = moved[:, [0, 1, 3]].abs().mean(), moved[:, 2].abs().mean()
    assert own > 3 * others
    assert not any(module._forward_hooks for module in conditioned.network.modules())


def diffusers_output(name: str, x: torch.Tensor, time: float) -> torch.Tensor:
    """Returns the output of diffusers' own call, with one time for all frames and one zero text embedding."""
    network = tiny.build(tiny.TRANSFORMERS[name])
    timestep, text = torch.full((len(x),), (1 - time) * (1.0 if name == "cosmos" else 1000.0)), torch.zeros(2, 1, 8)
    if name == "ltx":
        size = {"num_frames": 4, "height": 8, "width": 8, "encoder_attention_mask": None}
        out = network(x.permute(0, 1, 3, 4, 2).flatten(1, 3), text, timestep, **size).sample
        return out.unflatten(1, (4, 8, 8)).permute(0, 1, 4, 2, 3)
    return network(x.transpose(1, 2), timestep=timestep, encoder_hidden_states=text).sample.transpose(1, 2)


@pytest.mark.parametrize("name", ["wan", "skyreels", "ltx", "cosmos"])
@torch.no_grad()
def test_velocity_is_the_negative_diffusers_output(name):
    x, _, actions = model_inputs()
    velocity = transformer(name, "modulation").velocity(x, torch.full((2, 4), 0.3), actions)
    assert torch.allclose(velocity, -diffusers_output(name, x, 0.3), atol=2e-6)


@torch.no_grad()
def test_channels_match_a_widened_patch_embedding():
    conditioned, (x, time, actions) = transformer("wan", "channels"), model_inputs()
    randomize_conditioning(conditioned)
    features, last = conditioned.told[:-1](actions), conditioned.told[-1]  # (B, T, 16)
    narrow = conditioned.network.patch_embedding
    wide = nn.Conv3d(4 + 16, narrow.out_channels, narrow.kernel_size, narrow.stride)
    cells = narrow.kernel_size[1] * narrow.kernel_size[2]
    shared = last.weight[:, :, None, None, None].expand(-1, -1, *narrow.kernel_size) / cells
    wide.weight.copy_(torch.cat([narrow.weight, shared], 1))
    wide.bias.copy_(narrow.bias + last.bias)
    expected = conditioned.velocity(x, time, actions)
    conditioned.network.patch_embedding = wide
    maps = features[..., None, None].expand(-1, -1, -1, 8, 8)
    assert torch.allclose(conditioned.velocity(torch.cat([x, maps], 2), time, None), expected, atol=1e-5)


@torch.no_grad()
def test_cosmos_masks_mark_given_frames_and_no_padding():
    masked, (x, time, _) = transformer("cosmos_masks", "modulation"), model_inputs()
    weight = masked.network.patch_embed.proj.weight.unflatten(1, (6, 4))  # four latents, given mask, padding mask
    one, two = (masked.velocity(x, time, None, given=given) for given in (1, 2))
    assert not torch.equal(one, two)
    weight[:, 5] += 1.0
    assert torch.equal(masked.velocity(x, time, None, given=2), two)
    weight[:, 4] = 0.0
    one, two = (masked.velocity(x, time, None, given=given) for given in (1, 2))
    assert torch.equal(one, two)


def test_euler_steps_reach_the_end_of_a_straight_path(world, monkeypatch):
    target, given = torch.randn(2, 2, 4, 8, 8), torch.randn(2, 2, 4, 8, 8)

    def straight(seen, time, actions):
        assert torch.equal(seen[:, :2], given) and bool((time[:, :2] == 1).all())
        velocity = (target - seen[:, 2:]) / (1 - time[:, 2:, None, None, None])
        return torch.cat([given, velocity], 1)

    monkeypatch.setattr(world, "velocity", straight)
    assert torch.allclose(world.sample(torch.randn(2, 2, 4, 8, 8), given, torch.zeros(2, 3, 2)), target, atol=1e-5)


def test_rows_do_not_depend_on_their_neighbours(world):
    actions = torch.randn(5, 4, 2)
    alone = world.step(begin(world, [4], [13]), actions[2:3])[1]
    among = world.step(begin(world, [0, 7, 4, 2, 4], [3, 9, 13, 5, 6]), actions)[1]
    assert torch.equal(among.images["top"][2:3], alone.images["top"])
    assert torch.equal(among.proprio[2:3], alone.proprio)
    assert alone.images["top"].shape == (1, 4, 3, 16, 16) and alone.proprio.shape == (1, 4, 3)


def test_frames_depend_on_the_seed_and_not_on_chunking(world):
    actions = torch.randn(2, 4, 2)
    start = begin(world, [0, 0], [1, 2])
    whole = world.step(start, actions)[1]
    assert not torch.equal(whole.images["top"][0], whole.images["top"][1])
    state, first = world.step(start, actions[:, :2])
    state, second = world.step(state, actions[:, 2:])
    assert torch.equal(torch.cat([first.images["top"], second.images["top"]], 1), whole.images["top"])
    assert state.steps.tolist() == [4, 4] and torch.equal(world.step(start, actions)[1].proprio, whole.proprio)


def test_a_context_of_one_frame_and_several_samples(folder):
    adapter = replace(SMALL, samples=2)
    model = open_pretrained(folder, replace(SPEC, context=1, frames_per_call=1, proprio_dim=0), adapter)
    pictures = {"top": torch.zeros(2, 1, 3, 16, 16, dtype=torch.uint8)}
    state = model.reset(pictures, torch.zeros(2, 1, 0), seeds=torch.tensor([1, 2]))
    state, frames = model.step(state, torch.randn(2, 3, 2))
    assert state.memory["actions"].shape == (2, 0, 2) and bool((frames.uncertainty > 0).all())


@pytest.mark.parametrize("name", tiny.AUTOENCODERS)
def test_cameras_are_encoded_separately_and_scaled(name):
    network = tiny.build(tiny.AUTOENCODERS[name])
    codec = FrameCodec(network, ("left", "right"), 16)
    torch.manual_seed(0)
    views = {camera: torch.randint(0, 256, (2, 3, 16, 16), dtype=torch.uint8) for camera in ("left", "right")}
    latents = codec.encode(views)
    upper, lower = codec.encode({"left": views["right"], "right": views["left"]}).chunk(2, 2)
    assert torch.allclose(torch.cat([lower, upper], 2), latents, atol=1e-5)
    decoded = codec.decode(latents)
    assert list(decoded) == ["left", "right"] and decoded["left"].shape == (2, 3, 16, 16)
    spread = {"wan": [1.0, 2.0, 0.5, 4.0], "kl": [2.0] * 4}.get(name, [1.0] * 4)
    assert codec.std.flatten().tolist() == spread


def test_latents_are_computed_once(tmp_path, monkeypatch):
    codecs = [FrameCodec(tiny.build(tiny.AUTOENCODERS["tiny"], seed), ("top",), 16) for seed in (0, 1)]
    images = {"top": torch.arange(5 * 768).remainder(251).to(torch.uint8).reshape(5, 3, 16, 16)}
    fresh = cached_latents(codecs[0], images, None, size=2)
    assert torch.equal(cached_latents(codecs[0], images, tmp_path / "kept", size=2), fresh)
    cached_latents(codecs[1], images, tmp_path / "kept")
    cached_latents(codecs[0], {"top": images["top"].flip(0)}, tmp_path / "kept")
    assert len(list((tmp_path / "kept").iterdir())) == 3
    monkeypatch.setattr(FrameCodec, "encode", None)
    assert torch.equal(cached_latents(codecs[0], images, tmp_path / "kept"), fresh)
    for file in (tmp_path / "kept").iterdir():
        file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(UserError, match="is damaged; delete it"):
        cached_latents(codecs[0], images, tmp_path / "kept")


def batch(seed: int = 0, size: int = 8) -> VideoLatentBatch:
    """Returns videos whose latents grow by the action: a model that ignores actions cannot predict them."""
    generator = torch.Generator().manual_seed(seed)
    actions = torch.randn(size, 3, 2, generator=generator)
    height = functional.pad(actions[..., 0].cumsum(1), (1, 0))[..., None, None, None]
    latents, proprio = height.expand(-1, -1, 4, 8, 8).clone(), functional.pad(actions.cumsum(1), (0, 1, 1, 0))
    real = torch.ones(size, 2, dtype=torch.bool)
    real[0, 1] = False
    outcome = (latents[:, -1, :2, 0, 0] > 0).float()
    return VideoLatentBatch(latents, proprio, actions, real, latents[:, -1], proprio[:, -1], outcome)


@pytest.mark.parametrize("rank", [0, 2])
def test_training_lowers_the_loss_and_keeps_frozen_weights(folder, rank):
    torch.manual_seed(0)
    model = open_pretrained(folder, SPEC, replace(SMALL, lora_rank=rank))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    learner = PretrainedLearner(PretrainedLearnerConfig(updates=1000, lr=1e-2), model)
    noise = learner.generator.get_state()
    losses = []
    for _ in range(8):  # on one batch, with the same noise
        learner.generator.set_state(noise)
        losses.append(learner.update(batch()))
    assert losses[1]["flow/loss"] < losses[0]["flow/loss"] and losses[-1]["flow/loss"] < losses[1]["flow/loss"]
    assert losses[-1]["state/loss"] < losses[0]["state/loss"]
    moved = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert any(name.startswith("told.told.0") for name in moved)
    assert not any(name.startswith("codec") for name in moved)
    network = {name for name in moved if name.startswith("told.network")}
    assert network and (all("lora_" in name for name in network) if rank else any("ffn" in name for name in network))


@torch.no_grad()
def test_padding_frames_do_not_affect_the_loss(world, monkeypatch):
    monkeypatch.setattr(world, "velocity", lambda latents, time, actions: torch.zeros_like(latents))
    videos, losses = batch(), []
    for value in (0.0, 50.0):
        latents, proprio = videos.latents.clone(), videos.proprio.clone()
        latents[0, 3], proprio[0, 3] = value, value
        changed = replace(videos, latents=latents, proprio=proprio)
        losses.append(flow_loss(world, changed, torch.Generator().manual_seed(0), 0.1)[0])
    assert losses[0] == losses[1]


def test_trained_model_depends_on_its_actions(folder):
    """With three seeds, actions of other videos gave 4.4 to 6.4 times the loss; tokens 2.4 to 3.0."""
    torch.manual_seed(0)
    config = PretrainedLearnerConfig(updates=120, lr=1e-2)
    learner = PretrainedLearner(config, open_pretrained(folder, SPEC, SMALL))
    for seed in range(120):
        learner.update(batch(seed))
    held = batch(1000, 64)
    others = replace(held, actions=held.actions.roll(1, 0))
    with torch.no_grad():
        noise = [torch.Generator().manual_seed(0) for _ in range(2)]
        pairs = zip((held, others), noise, strict=True)
        true, wrong = (flow_loss(learner.model, videos, draws, 0.0)[1]["flow/loss"] for videos, draws in pairs)
    assert wrong > 2 * true


def test_training_resumes_bit_identically(folder):
    def fresh() -> PretrainedLearner:
        torch.manual_seed(0)
        return PretrainedLearner(PretrainedLearnerConfig(updates=10), open_pretrained(folder, SPEC, SMALL), seed=3)

    whole, broken = fresh(), fresh()
    whole.model.fit_vectors(action=torch.randn(9, 2))
    broken.model.load_state_dict(whole.model.state_dict())
    for seed in range(4):
        whole.update(batch(seed))
    for seed in range(2):
        broken.update(batch(seed))
    resumed = fresh()
    resumed.load_state_dict(broken.state_dict())
    for seed in range(2, 4):
        resumed.update(batch(seed))
    found = resumed.model.state_dict()
    assert all(torch.equal(value, found[key]) for key, value in whole.model.state_dict().items())
    with pytest.raises(ValueError, match="belongs to another model"):
        resumed.load_state_dict(broken.state_dict() | {"learning": {}})


@pytest.mark.parametrize("rank", [0, 2])
def test_interrupted_run_resumes_bit_identically_and_loads_without_its_base(tmp_path, rank):
    base = tiny.write(tmp_path / "base", "wan", "wan")
    adapter = replace(SMALL, conditioning="tokens", steps=1, rows=4)
    learner = PretrainedLearnerConfig(updates=6, batch_size=2)
    pretrained = PretrainedTrainConfig(str(base), adapter=adapter, learner=learner, cache=str(tmp_path / "latents"))
    config = with_settings(
        replace(small_run(tmp_path / "whole"), pretrained=pretrained), [f"pretrained.adapter.lora_rank={rank}"]
    )
    start_world(config).train()
    assert len(list((tmp_path / "latents").iterdir())) == 1
    broken = start_world(replace(config, out=str(tmp_path / "broken")))
    while broken.update <= 4:
        broken._iterate()
    broken.close()
    resume_world(tmp_path / "broken" / "run").train()
    shutil.rmtree(base)
    places = [tmp_path / name / "run" / "checkpoints" / "last" for name in ("whole", "broken")]
    whole, again = (load_world(place)[0] for place in places)
    found = again.state_dict()
    assert isinstance(whole, PretrainedWorldModel) and whole.config.adapter == replace(adapter, lora_rank=rank)
    assert all(torch.equal(value, found[key]) for key, value in whole.state_dict().items())
    pictures = {"top": torch.zeros(1, 4, 3, 16, 16, dtype=torch.uint8)}
    state = whole.reset(pictures, torch.zeros(1, 4, whole.spec.proprio_dim), seeds=torch.tensor([1]))
    assert whole.step(state, torch.zeros(1, 1, 2))[1].images["top"].shape == (1, 1, 3, 16, 16)


@pytest.mark.parametrize("name", tiny.TRANSFORMERS)
def test_every_family_is_rebuilt_from_its_configuration(tmp_path, name):
    torch.manual_seed(0)
    model = open_pretrained(tiny.write(tmp_path, name), SPEC, SMALL)
    randomize_conditioning(model.told)
    again = PretrainedWorldModel(model.config, SPEC).eval()
    again.load_state_dict(model.state_dict())
    actions = torch.randn(1, 2, 2)
    first, second = (one.step(begin(one, [3], [4]), actions)[1].images["top"] for one in (model, again))
    assert torch.equal(first, second)


def edit(folder, part: str, **changes) -> None:
    file = folder / part / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_mismatched_settings_and_files_are_refused(tmp_path, folder, world):
    with pytest.raises(UserError, match=r"no transformer/config\.json"):
        open_pretrained(tmp_path / "nothing", SPEC)
    with pytest.raises(UserError, match="is not hub:OWNER/NAME"):
        open_pretrained("hub:nothing", SPEC)
    with pytest.raises(UserError, match=r"shape \(1, a multiple of 2, 2\), got \(1, 2, 3\)"):
        world.step(begin(world, [0], [1]), torch.zeros(1, 2, 3))
    with pytest.raises(UserError, match="expects the cameras"):
        world.reset({"side": torch.zeros(1)}, torch.zeros(1, 2, 3), seeds=torch.tensor([1]))
    with pytest.raises(UserError, match="do not divide into patches"):
        open_pretrained(folder, replace(SPEC, size=18))
    with pytest.raises(UserError, match="Unknown conditioning"):
        open_pretrained(folder, SPEC, AdapterConfig(conditioning="prayer"))
    other = tiny.write(tmp_path / "ltx", "ltx")
    with pytest.raises(UserError, match="by modulation or channels, not by tokens"):
        open_pretrained(other, SPEC, AdapterConfig(conditioning="tokens"))
    edit(other, "transformer", _class_name="CogVideoXTransformer3DModel")
    with pytest.raises(UserError, match="is a CogVideoXTransformer3DModel; the video transformer must be one of"):
        open_pretrained(other, SPEC)
    with pytest.raises(UserError, match="is Cosmos 1, trained with EDM"):
        old = {**tiny.TRANSFORMERS["cosmos"][1], "extra_pos_embed_type": "learnable"}
        ActionConditionedTransformer(tiny.build(("CosmosTransformer3DModel", old)), "modulation", 2, 16)
    with pytest.raises(UserError, match="has 9 input channels, but predicts 4"):
        wide = {**tiny.TRANSFORMERS["wan"][1], "in_channels": 9}
        ActionConditionedTransformer(tiny.build(("WanTransformer3DModel", wide)), "modulation", 2, 16)
    noisy = {**tiny.AUTOENCODERS["ltx"][1], "timestep_conditioning": True}
    with pytest.raises(UserError, match="adds noise in decoding"):
        FrameCodec(tiny.build(("AutoencoderKLLTXVideo", noisy)), ("top",), 16)
    merged = tiny.write(tmp_path / "merged")
    edit(merged, "transformer", num_layers=3)
    with pytest.raises(UserError, match="do not fit its configuration"):
        open_pretrained(merged, SPEC)
    weights = merged / "vae" / "diffusion_pytorch_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    with pytest.raises(UserError, match="cannot be loaded"):
        open_pretrained(folder, SPEC, autoencoder=merged)
