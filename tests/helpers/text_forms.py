"""Constants of the tests of text policies."""

from robopolicy.spec import PolicySpec

SPEC = PolicySpec({"text": (48,)}, 12)
CHAT = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
