"""How else rows are to be scored or cut: the keys of `rollout` that the learner reads, and not the sampling side.

score_temperatures: {KEY: FACTOR}   extra[KEY] (N, T): log-probabilities at FACTOR times the temperature of the row
score_with: {KEY: teacher}          extra[KEY] (N, T): log-probabilities under the companion
reference: soup                     the reference is the mean of the weights of the start and of the companion
support: {top_p: P, refresh: U}     only what a copy of the policy, renewed every U updates, finds likely is chosen
support: {grammar: true}            only messages of the task's form are written
judge: policy                       who plays also judges what is said; judge: companion leaves that to the other one
layer: K, layer_updates: U          the first U updates learn what the output layer reads off hidden layer K
segments: {every: K, below: P}      a message is cut behind every K-th token less likely than P; units are such segments
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, get_type_hints

from robopolicy.core.options import checked, is_plain
from robopolicy.limits import Count, Natural, Positive, PositiveShare, Ranged


@dataclass(frozen=True)
class Views(Ranged):
    """What a recipe asks for."""

    score_temperatures: Mapping[str, Positive] = field(default_factory=dict[str, float])
    score_with: Mapping[str, str] = field(default_factory=dict[str, str])
    reference: str = ""  # "" | soup
    judge: str = ""  # "" | policy | companion
    layer: Natural = 0
    layer_updates: Natural = 0
    support: Mapping[str, Any] = field(default_factory=dict[str, Any])
    segments: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.reference not in ("", "soup"):
            raise ValueError(f"rollout.reference must be soup, got {self.reference!r}.")
        if self.judge not in ("", "policy", "companion"):
            raise ValueError(f"rollout.judge must be policy or companion, got {self.judge!r}.")
        if strangers := set(self.score_with.values()) - {"teacher"}:
            raise ValueError(f"rollout.score_with knows teacher, got {', '.join(sorted(strangers))}.")
        likely = self.support.keys() - {"grammar"}
        if likely not in (set(), {"top_p", "refresh"}) or self.support.get("grammar", True) is not True:
            raise ValueError(f"rollout.support takes top_p with refresh, and grammar: true; got {dict(self.support)}.")
        if self.segments and self.segments.keys() != {"every", "below"}:
            raise ValueError(f"rollout.segments takes every and below, got {dict(self.segments)}.")

    @classmethod
    def of(cls, rollout: Mapping[str, Any]) -> Views:
        """Those keys of a `rollout` section that are read here.

        Raises:
            ValueError: A value makes no sense; one line.
        """
        hints = get_type_hints(cls, include_extras=True)
        entries = {key: kind for key, kind in hints.items() if key in rollout}
        for key, kind in entries.items():
            if is_plain(kind):
                checked(f"rollout.{key}", kind, rollout[key])
            elif not isinstance(rollout[key], Mapping):
                raise ValueError(f"rollout.{key} must be a mapping, got {rollout[key]!r}.")
            else:
                for name, value in rollout[key].items():
                    kind = {"grammar": bool, "every": Count, "refresh": Count}.get(name, PositiveShare)
                    checked(f"rollout.{key}.{name}", kind, value)
        return cls(**{key: rollout[key] for key in entries})

    @property
    def companion(self) -> bool:
        """Whether a second policy is needed."""
        return bool(self.score_with) or self.reference == "soup" or self.judge == "companion"

    @property
    def guided(self) -> bool:
        """Whether only what a copy of the policy finds likely may be chosen."""
        return "top_p" in self.support

    @property
    def grammar(self) -> bool:
        """Whether only messages of the task's form can be written."""
        return "grammar" in self.support

    @property
    def top_p(self) -> float:
        """Probability of what may be chosen."""
        return float(self.support.get("top_p", 1.0))

    @property
    def refresh(self) -> int:
        """Updates after which the copy is renewed."""
        return int(self.support.get("refresh", 1))

    def layer_of(self, update: int) -> int | None:
        """The hidden layer that is scored in this update; None: the last one."""
        return self.layer if update < self.layer_updates else None
