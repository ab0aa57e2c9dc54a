"""The language-model adapter: a transformers model, causal or masked diffusion, as a `Policy`, its tokens as decisions.

Importing the package makes policy and algorithms known, so that checkpoints and runs may name them; `transformers` is
imported when it is used.
"""

from robopolicy.algorithms import ALGORITHMS
from robopolicy.policies.registry import POLICIES
from robopolicy.text.diffusion import DiffusionTextConfig, DiffusionTextPolicy
from robopolicy.text.imitation import TextSFT, TextSFTConfig
from robopolicy.text.learner import TextRecipe, TextRecipeConfig
from robopolicy.text.policy import TextConfig, TextPolicy
from robopolicy.text.program import ProgramConfig, ProgramPolicy

__all__ = ["DiffusionTextConfig", "DiffusionTextPolicy", "ProgramConfig", "ProgramPolicy", "TextConfig", "TextPolicy"]

POLICIES["text"] = (TextConfig, TextPolicy)
POLICIES["text_diffusion"] = (DiffusionTextConfig, DiffusionTextPolicy)
POLICIES["program"] = (ProgramConfig, ProgramPolicy)
ALGORITHMS["text_recipe"] = (TextRecipeConfig, TextRecipe)
ALGORITHMS["text_sft"] = (TextSFTConfig, TextSFT)
