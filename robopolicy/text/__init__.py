"""The language-model adapter: a transformers causal model as a `Policy`, its tokens as decisions.

Importing the package makes policy and algorithms known, so that checkpoints and runs may name them; `transformers` is
imported when it is used.
"""

from robopolicy.algorithms import ALGORITHMS
from robopolicy.policies.registry import POLICIES
from robopolicy.text.learner import TextRecipe, TextRecipeConfig, TextSFT, TextSFTConfig
from robopolicy.text.policy import TextConfig, TextPolicy

__all__ = ["TextConfig", "TextPolicy"]

POLICIES["text"] = (TextConfig, TextPolicy)
ALGORITHMS["text_recipe"] = (TextRecipeConfig, TextRecipe)
ALGORITHMS["text_sft"] = (TextSFTConfig, TextSFT)
