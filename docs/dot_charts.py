"""The common style of charts with one dot and interval per row and column."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ROW = 0.19  # inches


def draw_dot(
    ax: Axes, y: float, value: float, low: float | None, high: float | None, colour: str, face: str = ""
) -> None:
    """Draw a value with its interval, if there is one; `face` fills the dot (default: its colour)."""
    if low is not None and high is not None:
        ax.hlines(y, low, high, color=colour, linewidth=1.8)
    ax.plot(value, y, "o", color=colour, markerfacecolor=face or colour, markersize=4.2)


def style_axis(ax: Axes, label: str, *, percent: bool) -> None:
    """Label the horizontal axis; shares of episodes have the same range in all charts."""
    ax.set_xlabel(label, fontsize=8)
    if percent:
        ax.set_xlim(-4, 104)
    ax.grid(axis="x")
    ax.tick_params(axis="x", labelsize=7)
    ax.spines["left"].set_visible(False)


def name_rows(ax: Axes, names: Sequence[str]) -> None:
    """Write the names of the rows, the first one at the bottom."""
    from robopolicy.evaluation.plots import INK

    ax.set_ylim(-0.8, len(names) - 0.2)
    ax.set_yticks(range(len(names)), names, fontsize=7.5, color=INK)
