"""Tests of external engines: behaviour log-probabilities come from the engine, and one weight corrects the mismatch."""

import sys
from types import SimpleNamespace

import pytest
import torch
from text_forms import SPEC

from robopolicy.core.ratios import importance_weight
from robopolicy.errors import UserError
from robopolicy.recipe_files import read_recipe
from robopolicy.sim.registry import SimOptions
from robopolicy.spec import PolicySpec
from robopolicy.text.engines import ENGINES, VLLM, with_importance_cap
from robopolicy.text.policy import TextConfig, TextPolicy
from robopolicy.text.recipe_trainer import TextRecipe, TextRecipeConfig
from robopolicy.text.sim import TextSim
from robopolicy.training.text_rollout_source import TextRolloutSource
from robopolicy_tasks.text.arithmetic import Arithmetic

SHIFT = 1.1  # [nats] by which the stand-in lowers the log-probability of every second token


class StandIn:
    """The policy's own generator with log-probabilities that are off by a known amount."""

    def __init__(self, policy):
        self.policy, self.loads = policy, 0

    def load(self, policy):
        self.loads += 1

    def generate(self, prompts, generator, *, temperature):
        made = self.policy.generate(prompts, generator, temperature=temperature)
        made.logp[:, ::2] -= SHIFT * made.mask[:, ::2]
        made.entropy.zero_()
        return made


@pytest.fixture
def learner(monkeypatch):
    monkeypatch.setitem(ENGINES, "stand_in", StandIn)
    torch.manual_seed(0)
    policy = TextPolicy(TextConfig(width=16, layers=1, heads=2), PolicySpec({"text": (16,)}, 6))
    config = TextRecipeConfig(prompts_per_update=4, group_size=2, num_prompts=8, engine="stand_in", importance_cap=2.0)
    return TextRecipe(config, policy, total_updates=4)


def test_engine_mismatch_is_corrected_by_a_truncated_importance_weight(learner):
    feed = TextRolloutSource(TextSim(Arithmetic(), SimOptions(num_envs=1)), learner, seed=0)
    batch = learner._preprocess(feed.next(learner))
    valid = batch.valid()
    expected = torch.where(torch.arange(batch.shape[1]) % 2 == 0, SHIFT, 0.0).expand(batch.shape)
    torch.testing.assert_close((batch.logp_old - batch.logp_behaviour)[valid], expected[valid], rtol=0, atol=3e-5)
    cap = learner.recipe.estimator.config.importance_cap
    weight = importance_weight(batch, "token", cap)
    torch.testing.assert_close(weight[valid], expected.exp().clamp(max=2.0)[valid], rtol=1e-4, atol=0)
    assert (batch.entropy[valid] > 0).all(), "the engine tells no entropies, the policy does"
    feed.close()


def test_engine_loads_the_weights_of_every_update(learner):
    feed = TextRolloutSource(TextSim(Arithmetic(), SimOptions(num_envs=1)), learner, seed=0)
    for _ in range(3):
        learner.update(feed.next(learner))
    assert feed.env.engine.loads == 2 == feed.env.version
    feed.close()


def test_recipes_keep_their_own_importance_cap():
    assert with_importance_cap(read_recipe("grpo"), 3.0)["estimator"]["importance_cap"] == 3.0
    own = read_recipe("grpo")
    own["estimator"]["importance_cap"] = 2.0
    assert with_importance_cap(own, 3.0)["estimator"]["importance_cap"] == 2.0
    dpo = read_recipe("dpo")
    assert with_importance_cap(dpo, 3.0) == dpo or dpo.get("estimator", {}) is not None


class FakeLLM:
    """The part of vLLM's interface that the engine uses; every answer is `7` and the end token."""

    def __init__(self, **settings):
        self.settings, self.asked, self.resets = settings, None, 0

    def generate(self, prompts, settings, use_tqdm):
        self.asked = (prompts, settings)
        steps = [{55: SimpleNamespace(logprob=-0.5)}, {258: SimpleNamespace(logprob=-0.25)}]
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=(55, 258), logprobs=steps)]) for _ in prompts]

    def apply_model(self, function):
        loaded = []
        function(SimpleNamespace(load_weights=lambda items: loaded.extend(name for name, _ in items)))
        self.loaded = loaded

    def reset_prefix_cache(self):
        self.resets += 1


def test_vllm_returns_tokens_with_their_sampling_log_probabilities(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=FakeLLM, SamplingParams=SimpleNamespace))
    policy = TextPolicy(TextConfig(width=16, layers=1, heads=2), SPEC)
    engine = VLLM(policy)
    assert engine._llm.settings["logprobs_mode"] == "processed_logprobs"
    made = engine.generate([[257, 49], [257]], torch.Generator().manual_seed(0), temperature=torch.tensor([0.5, 2.0]))
    prompts, settings = engine._llm.asked
    assert prompts == [{"prompt_token_ids": [257, 49]}, {"prompt_token_ids": [257]}]
    assert [item.temperature for item in settings] == [0.5, 2.0] and settings[0].seed != settings[1].seed
    assert settings[0].stop_token_ids == [258] and settings[0].max_tokens == 12
    assert (
        made.completions() == [[55, 258]] * 2 and made.logp.tolist() == [[-0.5, -0.25]] * 2 and not made.truncated.any()
    )
    engine.load(policy)
    assert "model.embed_tokens.weight" in engine._llm.loaded and engine._llm.resets == 1


def test_missing_or_unknown_engines_raise(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(UserError, match=r"pip install 'robopolicy\[vllm\]'"):
        VLLM(TextPolicy(TextConfig(width=16, layers=1, heads=2), SPEC))
    with pytest.raises(UserError, match=r"Unknown engine 'vlm'\. Did you mean 'vllm'"):
        TextRecipeConfig(engine="vlm")
