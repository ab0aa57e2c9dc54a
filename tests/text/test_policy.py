"""Tests of the text policy: checkpoints, pretrained folders, chat templates, LoRA, imitation, shared prompts."""

import subprocess
import sys
from typing import Any

import pytest
import torch
from text_forms import CHAT, SPEC

from robopolicy.errors import UserError
from robopolicy.spec import PolicySpec
from robopolicy.text.policy import TextConfig, TextPolicy
from robopolicy.text.task import TURN, pack, unpack
from robopolicy.training.checkpoint import load_policy, save_checkpoint, verify_checkpoint

TEXTS = ("1+1=", "grüß", f"a{TURN}b{TURN}c", "")


def observed(texts=TEXTS):
    return {"text": pack(texts, 48)[:, None]}


def test_texts_round_trip_through_packing():
    assert unpack(pack(TEXTS, 48)) == list(TEXTS)
    assert unpack(pack(["grüß"], 3)) == ["gr"]  # an incomplete character is dropped


@pytest.mark.parametrize("source", ["bytes", "folder"])
def test_checkpoint_restores_the_policy(source, policy, folder, tmp_path):
    if source == "folder":
        policy = TextPolicy(TextConfig(pretrained=str(folder), template="chat"), SPEC)
    save_checkpoint(tmp_path / "c", policy, task="text/arithmetic", obs_sample=observed())
    if source == "folder":
        policy.config.architecture["_name_or_path"] = "gone"  # type: ignore[index]
    loaded: Any
    loaded, manifest = load_policy(tmp_path / "c")
    assert manifest.policy == "text"
    assert torch.equal(loaded.act(observed(), deterministic=True), policy.act(observed(), deterministic=True))
    assert loaded.prompts(observed()) == policy.prompts(observed())
    assert verify_checkpoint(tmp_path / "c").ok


def test_loading_is_strict(policy, tmp_path):
    from safetensors.torch import load_file, save_file

    from robopolicy.training.manifest import read_manifest, sha256, write_manifest

    save_checkpoint(tmp_path / "c", policy, task="t", obs_sample=observed())
    weights = load_file(tmp_path / "c" / "model.safetensors")
    weights.pop("model.model.norm.weight")
    save_file(weights, tmp_path / "c" / "model.safetensors")
    manifest = read_manifest(tmp_path / "c")
    manifest.files["model.safetensors"] = sha256(tmp_path / "c" / "model.safetensors")
    write_manifest(tmp_path / "c", manifest)
    with pytest.raises(UserError, match=r"lacks weight 'model\.model\.norm\.weight'"):
        load_policy(tmp_path / "c")


def test_pretrained_folder_loads_without_dropout(folder):
    policy = TextPolicy(TextConfig(pretrained=str(folder)), SPEC).train()
    sample = policy.sample(observed(), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(policy.decisions(observed(), sample.record).logp, sample.logp, rtol=0, atol=2e-5)


def test_chat_template_formats_the_messages(folder):
    policy = TextPolicy(TextConfig(pretrained=str(folder), template="chat"), SPEC)
    inner: Any = policy.tokenizer.inner  # type: ignore[attr-defined]

    def shown(tokens):
        return inner.decode(tokens)

    assert shown(policy.tokenizer.prompt(["hi"])) == "<|user|>hi<|end|><|assistant|>"
    assert shown(policy.tokenizer.prompt(["a", "b", "c"])).endswith("b<|end|><|user|>c<|end|><|assistant|>")
    assert shown(policy.tokenizer.reply("next")) == "<|user|>next<|end|><|assistant|>"
    whole = [*policy.tokenizer.prompt(["a"]), *policy.tokenizer.encode("b"), policy.tokenizer.eos]
    assert whole + policy.tokenizer.reply("c") == policy.tokenizer.prompt(["a", "b", "c"])


def test_chat_templates_may_trim_the_messages_but_not_replace_them(folder):
    policy = TextPolicy(TextConfig(pretrained=str(folder), template="chat"), SPEC)
    tokenizer: Any = policy.tokenizer
    tokenizer.inner.chat_template = CHAT.replace("message.content", "message.content | trim")  # as Llama 3
    assert tokenizer.inner.decode(tokenizer.reply(" 4=")) == "<|user|>4=<|end|><|assistant|>"
    tokenizer.inner.chat_template = CHAT.replace("message.content", "message.content | length")
    with pytest.raises(UserError, match=r"changes the messages of the assistant.*set policy\.template=plain"):
        tokenizer.reply("4=")


def test_invalid_folders_and_settings_are_refused(tmp_path, folder):
    with pytest.raises(UserError, match="is not a folder of a causal language model"):
        TextPolicy(TextConfig(pretrained=str(tmp_path)), SPEC)
    with pytest.raises(UserError, match="template must be one of plain, chat"):
        TextConfig(template="jinja")
    with pytest.raises(UserError, match="multiple of twice the 4 heads, got 12"):
        TextConfig(width=12, heads=4)
    with pytest.raises(UserError, match="'text' as its only observation"):
        TextPolicy(TextConfig(), PolicySpec({"state": (3,)}, 2))
    with pytest.raises(UserError, match="cannot build a causal model of type 'nothing'"):
        TextPolicy(TextConfig(architecture={"model_type": "nothing"}), SPEC)


def test_a_conversation_longer_than_the_context_is_refused(policy):
    with pytest.raises(UserError, match="exceed the model's context of 96"):
        policy.generate([[1] * 90])


def test_lora_trains_only_its_own_weights(folder):
    policy = TextPolicy(TextConfig(pretrained=str(folder), lora_rank=2), SPEC)
    before = {key: value.clone() for key, value in policy.state_dict().items()}
    optimizer = torch.optim.SGD(policy.trainable(), lr=1.0)
    for _ in range(2):  # the first step moves only the factor that begins at 0
        loss, _ = policy.imitation_loss(observed(), pack(["2", "x", "y", "z"], 12)[:, None])
        optimizer.zero_grad()
        loss.mean().backward()
        optimizer.step()
    changed = {key for key, value in policy.state_dict().items() if not torch.equal(value, before[key])}
    assert changed and all("lora_" in key for key in changed)
    assert sum(p.numel() for p in policy.trainable()) < 0.2 * sum(p.numel() for p in policy.parameters())


def test_lora_checkpoints_verify(folder, tmp_path):
    policy = TextPolicy(TextConfig(pretrained=str(folder), lora_rank=2), SPEC)
    save_checkpoint(tmp_path / "c", policy, task="t", obs_sample=observed())
    assert verify_checkpoint(tmp_path / "c").ok


def test_gradient_checkpointing_changes_no_gradient(folder):
    gradients = []
    for flag in (False, True):
        policy = TextPolicy(TextConfig(pretrained=str(folder), gradient_checkpointing=flag), SPEC).train()
        loss, _ = policy.imitation_loss(observed(), pack(["2", "x", "y", "z"], 12)[:, None])
        loss.mean().backward()
        gradients.append([parameter.grad for parameter in policy.parameters() if parameter.grad is not None])
    for plain, saved in zip(*gradients, strict=True):
        torch.testing.assert_close(saved, plain)


def test_the_imitation_loss_is_the_mean_over_the_tokens_of_the_message(policy):
    chunk = pack(["42", "7"], 12)[:, None]
    loss, _ = policy.imitation_loss(observed(["1+1=", "x"]), chunk, torch.tensor([1.0, 2.0]))
    tokens = torch.tensor([[257, *b"1+1=", *b"42", 258]])
    log_p = policy.model(input_ids=tokens).logits.log_softmax(-1)[0]
    expected = -torch.stack([log_p[4 + i, token] for i, token in enumerate([*b"42", 258])]).mean()
    torch.testing.assert_close(loss[0], expected)
    single, _ = policy.imitation_loss(observed(["x"]), chunk[1:])
    torch.testing.assert_close(loss[1], 2 * single[0])


def test_one_prompt_can_be_learned(policy):
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    obs, chunk = observed(["2+3=", "2+4="]), pack(["5", "6"], 12)[:, None]
    for _ in range(40):
        loss, _ = policy.imitation_loss(obs, chunk)
        optimizer.zero_grad()
        loss.mean().backward()
        optimizer.step()
    assert unpack(policy.act(obs, deterministic=True)[:, 0]) == ["5", "6"]


def grouped(policy, groups=3, size=4) -> tuple[Any, torch.Tensor]:
    """Returns rows with shared prompts of several lengths, and a temperature for each row."""
    texts = ["1+1=", "a longer one", "22+3="][:groups]
    prompts = [policy.tokenizer.prompt([text]) for text in texts for _ in range(size)]
    rng = torch.Generator().manual_seed(5)
    lengths = torch.randint(1, 6, (len(prompts),), generator=rng).tolist()
    written = [torch.randint(97, 123, (length,), generator=rng).tolist() for length in lengths]
    return policy.pad_rows(prompts, written), torch.linspace(0.5, 2.0, len(prompts))


@pytest.mark.parametrize("kind", ["llama", "gpt2", "lora"])
def test_shared_prompts_change_neither_scores_nor_gradients(policy, folder, kind):
    if kind != "llama":
        torch.manual_seed(0)
        policy = TextPolicy(TextConfig(pretrained=str(folder), lora_rank=2 * (kind == "lora")), SPEC)
    assert policy._shares_prompts
    record, temperatures = grouped(policy)
    found = []
    for shared in (True, False):
        vars(policy)["_shares_prompts"] = shared
        policy.zero_grad()
        out = policy.score(**record, temperature=temperatures)
        (out.logp.sum() + 0.3 * out.entropy.square().sum()).backward()
        found.append((out, [parameter.grad.clone() for parameter in policy.trainable() if parameter.grad is not None]))
    (one, mine), (two, plain) = found
    torch.testing.assert_close(one.logp, two.logp, rtol=0, atol=5e-5)
    torch.testing.assert_close(one.entropy, two.entropy, rtol=0, atol=5e-5)
    assert len(mine) == len(plain)
    for first, second in zip(mine, plain, strict=True):
        torch.testing.assert_close(first, second, rtol=2e-3, atol=2e-4)


def test_shared_prompts_may_fill_the_context_of_learned_positions(folder):
    policy = TextPolicy(TextConfig(pretrained=str(folder)), SPEC)
    prompts = [[1] * 100, [1] * 100, [2] * 10, [2] * 10]
    record = policy.pad_rows(prompts, [[3] * 5, [4] * 28, [5] * 40, [6] * 40])  # 140 places after the longest prompt
    assert record["tokens"].shape[1] == policy.context == 128
    found = []
    for shared in (True, False):
        vars(policy)["_shares_prompts"] = shared
        found.append(policy.score(**record, temperature=torch.ones(4)).logp)
    assert policy.locate(record["tokens"], record["start"], record["mask"]).shared is None
    torch.testing.assert_close(*found, rtol=0, atol=5e-5)


def test_shared_prompts_are_encoded_once_when_that_saves_enough(policy, monkeypatch):
    from robopolicy.text import scored_tokens

    sizes, inner = [], scored_tokens.run_body

    def watched(model, tokens, *args, **named):
        sizes.append(tuple(tokens.shape))
        return inner(model, tokens, *args, **named)

    assert policy._shares_prompts
    monkeypatch.setattr(scored_tokens, "run_body", watched)
    monkeypatch.setattr("robopolicy.text.policy.run_body", watched)
    record, temperatures = grouped(policy)
    policy.score(**record, temperature=temperatures)
    assert sizes[0][0] == 3 and sizes[1] == (12, record["mask"].shape[1] - 1)
    sizes.clear()
    monkeypatch.setattr(scored_tokens, "MIN_SAVING", 1)  # the saving is too small
    policy.score(**record, temperature=temperatures)
    assert sizes == [(12, record["tokens"].shape[1] - 1)]
    sizes.clear()
    record, temperatures = grouped(policy, size=1)  # all prompts differ
    policy.score(**record, temperature=temperatures)
    assert sizes == [(3, record["tokens"].shape[1] - 1)]


def test_sliding_window_models_have_no_plain_cache(tmp_path):
    from transformers import AutoModelForCausalLM, MistralConfig

    from robopolicy.text.generation import has_plain_cache

    shape: Any = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    for window, plain in ((None, True), (4, False)):
        config = MistralConfig(**shape, intermediate_size=32, vocab_size=40, sliding_window=window)
        assert has_plain_cache(AutoModelForCausalLM.from_config(config)) is plain


def test_device_blocks_include_all_factories_after_a_pretrained_model_has_been_loaded(folder):
    script = (
        "import sys, torch\n"
        "from robopolicy.text.model import load_pretrained\n"
        "load_pretrained(sys.argv[1], 'float32')\n"
        "with torch.device('meta'):\n"
        "    print(torch.linspace(0.0, 1.0, 3).device)\n"
    )
    found = subprocess.run([sys.executable, "-c", script, folder], capture_output=True, text=True, check=True)
    assert found.stdout.split()[-1] == "meta"
