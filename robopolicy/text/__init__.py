"""The language-model adapter: a transformers causal model as a `Policy`, its tokens as decisions.

Importing the package makes the policy known, so that checkpoints may name it; `transformers` is imported when it is
used.
"""

from robopolicy.policies.registry import POLICIES
from robopolicy.text.policy import TextConfig, TextPolicy

__all__ = ["TextConfig", "TextPolicy"]

POLICIES["text"] = (TextConfig, TextPolicy)
