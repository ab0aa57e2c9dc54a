"""Report of an evaluation: `report.json` for programs, `report.md` and a single-file `report.html` for readers."""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from robopolicy.evaluation import plots
from robopolicy.evaluation.intervals import Interval
from robopolicy.evaluation.result import Comparison, EvalResult
from robopolicy.plurals import counted

Table = tuple[list[str], list[list[str]]]  # header and rows of text cells
EMBED_LIMIT = 12_000_000  # largest video in the HTML [bytes]; a larger one remains a separate file
_MIME = {".png": "image/png", ".gif": "image/gif", ".mp4": "video/mp4"}


@dataclass(frozen=True)
class Report:
    """Content of a report."""

    title: str
    results: Mapping[str, EvalResult]  # by the name of the policy, baseline first
    comparison: Comparison | None = None  # of the first two results
    verdicts: Sequence[str] = ()  # further comparisons, as sentences
    video: Path | None = None  # inside the report folder
    strip: Path | None = None  # image of moments, inside the report folder
    notes: Sequence[str] = ()  # remarks for the reader: why there is no video, what was compared
    facts: Mapping[str, str] = field(default_factory=dict[str, str])  # task, backend, versions, ...
    curves: Mapping[str, Path] = field(default_factory=dict[str, Path])  # caption -> additional plot in the folder
    tables: Mapping[str, Table] = field(default_factory=dict[str, Any])  # caption -> additional table
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])  # added to the top level of report.json


def write_report(folder: Path, report: Report) -> None:
    """Draw the plots and write the three files into `folder`, which the caller creates atomically."""
    figures = _draw(folder, report) | dict(report.curves)
    (folder / "report.json").write_text(json.dumps(to_dict(report), indent=2, allow_nan=False) + "\n", encoding="utf-8")
    (folder / "report.md").write_text(markdown(report, figures), encoding="utf-8")
    (folder / "report.html").write_text(html_page(report, figures), encoding="utf-8")


def to_dict(report: Report) -> dict[str, Any]:
    """JSON-ready form."""
    return {
        "title": report.title,
        "facts": dict(report.facts),
        "notes": all_notes(report),
        "results": {label: result.to_dict() for label, result in report.results.items()},
        "comparison": report.comparison.to_dict() if report.comparison else None,
        "verdicts": list(report.verdicts),
        **report.extra,
    }


def all_notes(report: Report) -> list[str]:
    """Return the notes of the report and the warnings of its results, without duplicates."""
    warnings = [text for result in report.results.values() for text in result.warnings()]
    return list(dict.fromkeys([*report.notes, *warnings]))


def table(results: Mapping[str, EvalResult]) -> Table:
    """Return the summary table of the command line, Markdown and HTML."""
    header = ["policy", "success [95 %]", "return [95 %]", "calls/action", "ms/action", "ms/decision p95"]
    rows: list[list[str]] = []
    for label, result in results.items():
        success, ret, cost = result.success_interval(), result.return_interval(), result.cost
        timed = cost.latency_ms > 0
        rows.append(
            [
                label,
                percent(success) if success else "-",
                f"{ret:.4g}" if result.n > 1 else f"{ret.estimate:.4g}",
                f"{cost.network_calls_per_action:.2f}",
                f"{cost.ms_per_action:.2f}" if timed else "-",
                f"{cost.latency_p95_ms:.2f}" if timed else "-",
            ]
        )
    return header, rows


def markdown(report: Report, figures: Mapping[str, Path]) -> str:
    """Return the report as Markdown, with images as separate files."""
    lines = [f"# {report.title}", ""]
    lines += [" · ".join(f"{key}: {value}" for key, value in report.facts.items()), ""] if report.facts else []
    lines += [*_rows(table(report.results)), ""]
    for sentence in _sentences(report):
        lines += [f"**{sentence}**", ""]
    lines += [f"> {note}" for note in all_notes(report)]
    for caption, content in report.tables.items():
        lines += [f"\n## {caption}\n", *_rows(content)]
    lines += [f"\n![{caption}]({path.name})" for caption, path in figures.items()]
    lines += [f"\n![Moments of the first episode]({report.strip.name})"] if report.strip else []
    lines += [f"\n[Video]({report.video.name})"] if report.video else []
    return "\n".join(lines) + "\n"


def html_page(report: Report, figures: Mapping[str, Path]) -> str:
    """Return the report as one self-contained HTML page."""
    facts = "".join(f"<span><b>{_safe(key)}</b> {_safe(value)}</span>" for key, value in report.facts.items())
    cards = "".join(_card(label, result) for label, result in report.results.items())
    tables = {"Numbers": table(report.results), **report.tables}
    numbers = "".join(f"<h2>{_safe(caption)}</h2>{_html_table(content)}" for caption, content in tables.items())
    notes = "".join(f"<p class=note>{_safe(note)}</p>" for note in all_notes(report))
    verdict = "".join(f"<p class=verdict>{_safe(sentence)}</p>" for sentence in _sentences(report))
    pictures = "".join(f"<figure><img src='{_embed(p)}' alt='{_safe(c)}'></figure>" for c, p in figures.items())
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>"
        f"<title>{_safe(report.title)}</title><style>{_CSS}</style><main><h1>{_safe(report.title)}</h1>"
        f"<p class=facts>{facts}</p><section class=cards>{cards}</section>{verdict}{notes}"
        f"{numbers}<h2>Plots</h2><section class=plots>{pictures}</section>{_video(report)}</main></html>\n"
    )


def aligned(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a table as plain text, with the first column left-aligned and the others right-aligned."""
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    lines = [
        "  ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        ).rstrip()
        for row in [header, *rows]
    ]
    return "\n".join(lines)


def percent(interval: Interval) -> str:
    """Format a rate and its interval as a table cell."""
    rate, low, high = (f"{100 * value:.1f}" for value in (interval.estimate, interval.low, interval.high))
    return f"{rate} % [{low}, {high}]"


def _draw(folder: Path, report: Report) -> dict[str, Path]:
    figures: dict[str, Path] = {}
    rates = {label: interval for label, r in report.results.items() if (interval := r.success_interval()) is not None}
    if rates:
        figures["Success with Wilson 95 % intervals"] = plots.success_bars(rates, folder / "success.png")
    if report.comparison is not None and report.comparison.outcomes is not None:
        first, second = list(report.results)[:2]
        figures["Outcome per seed"] = plots.paired_outcomes(report.comparison, first, second, folder / "paired.png")
    if all(r.success is not None and np.array_equal(r.returns, r.success) for r in report.results.values()):
        lengths = {label: result.lengths for label, result in report.results.items()}
        figures["Lengths"] = plots.histogram(
            lengths, folder / "lengths.png", title="Length of an episode", xlabel="control steps"
        )
    else:
        returns = {label: result.returns for label, result in report.results.items()}
        figures["Returns"] = plots.histogram(
            returns, folder / "returns.png", title="Return of an episode", xlabel="return"
        )
    return figures


def _sentences(report: Report) -> list[str]:
    first = [] if report.comparison is None else [report.comparison.sentence(*list(report.results)[:2])]
    return [*first, *report.verdicts]


def _card(label: str, result: EvalResult) -> str:
    success, ret = result.success_interval(), result.return_interval()
    big = f"{100 * success.estimate:.1f}<small> %</small>" if success else f"{ret.estimate:.4g}"
    low, high = (100 * success.low, 100 * success.high) if success else (ret.low, ret.high)
    span = (f"95 % interval {low:.4g} to {high:.4g}, " if result.n > 1 else "") + counted(result.n, "episode")
    what = "success" if success else "mean return"
    return f"<div class=card><h3>{_safe(label)}</h3><p class=big>{big}</p><p>{what}</p><p class=muted>{span}</p></div>"


def _video(report: Report) -> str:
    if report.video is None:
        return ""
    source = _embed(report.video) if report.video.stat().st_size <= EMBED_LIMIT else report.video.name
    tag = (
        f"<video src='{source}' controls loop muted autoplay playsinline></video>"
        if report.video.suffix == ".mp4"
        else f"<img src='{source}' alt='episodes'>"
    )
    return f"<h2>Episodes</h2><figure class=wide>{tag}</figure>"


def _embed(path: Path) -> str:
    return f"data:{_MIME[path.suffix]};base64,{base64.b64encode(path.read_bytes()).decode()}"


def _html_table(content: Table) -> str:
    header, rows = content
    head = "".join(f"<th>{_safe(cell)}</th>" for cell in header)
    body = "".join("<tr>" + "".join(f"<td>{_safe(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<div class=scroll><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"


def _rows(content: Table) -> list[str]:
    header, rows = content
    return [_row(header), _row(["---"] * len(header)), *(_row(row) for row in rows)]


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _safe(text: str) -> str:
    return html.escape(text, quote=True)


_CSS = """
:root{--ink:#1d2530;--muted:#6a7482;--line:#e4e8ee;--accent:#1f9d8f}
*{box-sizing:border-box}body{margin:0;background:#f6f7f9;color:var(--ink);
font:15px/1.55 system-ui,-apple-system,'Segoe UI',Roboto,sans-serif}
main{max-width:1040px;margin:0 auto;padding:40px 24px 64px}h1{font-size:26px;margin:0 0 6px;letter-spacing:-.01em}
h2{font-size:17px;margin:36px 0 12px}
h3{font-size:13px;margin:0;color:var(--muted);font-weight:600;overflow-wrap:anywhere}
.facts{color:var(--muted);margin:0 0 24px;font-size:13px}.facts span{margin-right:18px;display:inline-block}
.facts b{font-weight:600;color:var(--ink);margin-right:2px}
.cards{display:flex;flex-wrap:wrap;gap:16px}.card{flex:1 1 220px;background:#fff;border:1px solid var(--line);
border-radius:12px;padding:18px 20px}.card p{margin:0}.big{font-size:44px;font-weight:650;line-height:1.2;
font-variant-numeric:tabular-nums}.big small{font-size:22px;color:var(--muted)}.muted{color:var(--muted);font-size:13px}
.card:last-child .big{color:var(--accent)}
.verdict{background:#e8f5f2;border-left:4px solid var(--accent);border-radius:6px;padding:12px 16px;margin:20px 0 0}
.note{background:#fff7e8;
border-left:4px solid #d9a42b;border-radius:6px;padding:10px 16px;margin:12px 0 0;font-size:14px}
.scroll{overflow-x:auto;background:#fff;border:1px solid var(--line);border-radius:12px}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums;font-size:14px}
th,td{padding:10px 14px;text-align:right;white-space:nowrap}th{color:var(--muted);font-weight:600;font-size:12.5px}
th:first-child,td:first-child{text-align:left}tbody tr{border-top:1px solid var(--line)}
.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(420px,1fr));gap:16px}
.plots figure{display:flex;align-items:center;justify-content:center}
.plots figure:last-child:nth-child(odd){grid-column:1/-1}
figure{margin:0;background:#fff;border:1px solid var(--line);border-radius:12px;padding:14px}
figure img,figure video{display:block;max-width:100%;height:auto}.plots img{max-height:330px}
.wide{padding:0;overflow:hidden;background:#161a20}.wide video,.wide img{width:100%}
"""
