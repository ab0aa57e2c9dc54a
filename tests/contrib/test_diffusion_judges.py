"""Test of a text judge that uses a masked-diffusion policy of another theme."""

import pytest

pytest.importorskip("transformers")

import torch

from robopolicy.contrib.text_catalogue.judge import PolicyJudge
from robopolicy.contrib.text_diffusion.policy import DiffusionTextConfig, DiffusionTextPolicy
from robopolicy.policies.base import PolicySpec
from robopolicy.text.task import JudgePrompt


@pytest.mark.parametrize("likelihood", ["chain", "elbo"])
def test_a_masked_diffusion_policy_works_as_a_judge(likelihood):
    torch.manual_seed(0)
    shape = {"width": 16, "layers": 1, "heads": 2, "context": 64, "samples": 64}
    policy = DiffusionTextPolicy(DiffusionTextConfig(likelihood=likelihood, **shape), PolicySpec({"text": (16,)}, 3))
    judge = PolicyJudge(policy, torch.Generator().manual_seed(0))
    probabilities = judge([JudgePrompt("1+1=2?", "y", "n"), JudgePrompt("1+1=2?", "n", "y")])
    assert sum(probabilities) == pytest.approx(1.0, abs=0.2) and all(0.0 < one < 1.0 for one in probabilities)
