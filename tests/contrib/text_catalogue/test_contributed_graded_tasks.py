"""Tasks that grade more than success, judges among them, and the recipes that ask for these grades."""

import pytest

pytest.importorskip("transformers")

import torch

from robopolicy.contrib.text_catalogue.judge import Judge
from robopolicy.errors import UserError
from robopolicy.policies.base import PolicySpec
from robopolicy.sim.registry import SimOptions, make_sim
from robopolicy.text.policy import TextConfig, TextPolicy
from robopolicy.text.recipe_trainer import TextRecipe, TextRecipeConfig
from robopolicy.text.task import Inquiry
from robopolicy.training.text_file_source import recipe_source
from robopolicy_tasks.text.arithmetic import Arithmetic

ASKING = {
    "craft_gui": "critique",
    "mashost": "grid",
    "fate": "pits",
    "hila": "calculator",
    "videochat_m1": "critique",
    "urpo": "critique",
    "retroformer": "review",
    "daslam": "decompose",
    "gui_critic_r1": "review",
    "docthinker": "calculator",
    "xiangqi_r1": "nim",
    "read": "grid",
    "critique_rl": "review",
    "hiper": "waypoints",
    "a2p": "grid",
    "search_r2": "calculator",
}


def small(seed=0):
    torch.manual_seed(seed)
    return TextPolicy(TextConfig(width=16, layers=1, heads=2, context=256), PolicySpec({"text": (104,)}, 10))


def test_a_judge_compares_two_messages():
    policy = small()
    judge = Judge(policy, torch.Generator().manual_seed(0))
    asked = [Inquiry("1+1=2?", "y", "n"), Inquiry("1+1=3?", "y", "n"), Inquiry("1+1=2?", "n", "y")]
    sure = judge(asked)
    assert sure[0] + sure[2] == pytest.approx(1.0) and all(0.0 < one < 1.0 for one in sure) and judge([]) == []
    last = policy.tokenizer.prompt(["1+1=2?"])
    logits = policy.model(torch.tensor([last])).logits[0, -1].log_softmax(0)
    y, n = (policy.message(word)[0] for word in "yn")
    # both messages have one letter, and end alike or nearly so
    ratio = torch.stack([logits[y], logits[n]]).softmax(0)[0]
    assert sure[0] == pytest.approx(float(ratio.detach()), abs=0.05)


def test_who_cannot_be_judged_is_refused():
    algorithm = TextRecipe(TextRecipeConfig(recipe="urpo"), small(), total_updates=4)
    with pytest.raises(UserError, match=r"text/arithmetic does not say how to ask one"):
        recipe_source(make_sim("text/arithmetic", SimOptions(num_envs=1)), algorithm, seed=0)
    with pytest.raises(UserError, match="players=0 for its judge"):
        TextRecipe(TextRecipeConfig(recipe="urpo", players=2), small(), total_updates=4)
    with pytest.raises(UserError, match="players must be at most 256"):
        TextRecipeConfig(players=2000)
    external = TextRecipe(TextRecipeConfig(recipe="craft_gui"), small(), total_updates=4)
    with pytest.raises(UserError, match="needs a second policy"):
        recipe_source(make_sim("text/critique", SimOptions(num_envs=1)), external, seed=0)
    assert Arithmetic().inquiry(0, ["1"]) is None


@pytest.mark.parametrize("recipe", ASKING)
def test_recipes_play_the_task_that_grades_what_they_ask_for(recipe):
    policy, companion = small(), small(1)
    config = TextRecipeConfig(recipe=recipe, prompts=4, problems=40, group_size=2)
    algorithm = TextRecipe(config, policy, total_updates=4)
    algorithm.accompany(companion)
    source = recipe_source(make_sim(f"text/{ASKING[recipe]}", SimOptions(num_envs=1)), algorithm, seed=0)
    metrics = algorithm.update(source.next(algorithm)) | source.metrics()
    assert all(torch.isfinite(torch.tensor(number)) for number in metrics.values())
    source.close()
