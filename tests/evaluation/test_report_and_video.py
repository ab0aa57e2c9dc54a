"""Tests of the comparison, plots, video and report of evaluation results."""

import base64
import json
import math
import re
from contextlib import contextmanager

import numpy as np
import pytest
from matplotlib.axes import Axes
from PIL import Image

from robopolicy.errors import UserError
from robopolicy.evaluation import plots, video
from robopolicy.evaluation.actors import RandomActor
from robopolicy.evaluation.harness import evaluate
from robopolicy.evaluation.intervals import student_mean, wilson
from robopolicy.evaluation.report import Report, write_report
from robopolicy.evaluation.result import Cost, EvalResult, compare, format_p


def result(success, *, first_seed=0, returns=None, task="fake/point", seeded=True) -> EvalResult:
    n = len(returns if success is None else success)
    wins = None if success is None else np.asarray(success, dtype=bool)
    total = np.asarray(wins if returns is None else returns, dtype=float)
    cost = Cost(network_calls=4, decisions=10 * n, steps=40 * n, policy_calls=10, wall_s=1.0, latency_ms=2.0)
    lengths = np.full(n, 40)
    return EvalResult(task, np.arange(first_seed, first_seed + n), total, lengths, wins, cost, seeded)


def test_comparison_pairs_by_seed_on_the_common_seeds():
    a = result([1, 0, 0, 0], first_seed=0)
    b = result([1, 1, 0, 1], first_seed=1)  # common seeds 1, 2, 3: 0, 0, 0 against 1, 1, 0
    paired = compare(a, b)
    assert paired.seeds.tolist() == [1, 2, 3]
    assert (paired.success.wins, paired.success.losses, paired.success.ties) == (2, 0, 1)


def test_comparison_sentence_states_the_result():
    base, tuned = result([True] * 20 + [False] * 80), result([True] * 90 + [False] * 10)
    sentence = compare(base, tuned).sentence("base", "tuned")
    assert sentence.startswith("tuned is better than base: +70.0 points of success [")
    assert "better on 70, worse on 0, equal on 30 of 100 common seeds, p < 0.0001." in sentence
    assert "not distinguishable" in compare(base, base).sentence()
    high, low = ([1.0, 2.0, 3.0, 2.0], [0.0, 1.5, 2.0, 1.0])
    assert "not distinguishable" in compare(result(None, returns=high), result(None, returns=low)).sentence()
    only_returns = compare(result(None, returns=high * 2), result(None, returns=low * 2))
    assert only_returns.success is None and "is worse than" in only_returns.sentence()


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (result([1, 0], task="fake/other"), "one task"),
        (result([1, 0], first_seed=50), "found 0"),
        (result([1, 0], seeded=False), "no reproducible episodes"),
    ],
)
def test_results_that_cannot_be_paired_are_refused(other, message):
    with pytest.raises(UserError, match=message):
        compare(result([1, 0]), other)


def test_p_values_are_formatted_with_two_digits():
    assert [format_p(p) for p in (1.0, 0.5, 0.034, 0.0012, 1e-9)] == [
        "p = 1.00",
        "p = 0.50",
        "p = 0.034",
        "p = 0.0012",
        "p < 0.0001",
    ]


def test_plots_are_written(tmp_path):
    a, b = result([True] * 5 + [False] * 7), result([True] * 9 + [False] * 3)
    runs = {
        "one": [[{"update": 0}, {"update": 10, "eval/success": 0.2, "eval/low": 0.1, "eval/high": 0.4}]],
        "many": [[{"update": u, "eval/success": s} for u in (0, 10)] for s in (0.3, 0.5, 0.6)],
    }
    files = [
        plots.success_bars({"base": wilson(5, 12), "tuned": wilson(9, 12)}, tmp_path / "bars.png"),
        plots.paired_outcomes(compare(a, b), "base", "tuned", tmp_path / "paired.png"),
        plots.histogram(
            {"base": a.returns, "tuned": b.returns}, tmp_path / "hist.png", title="Return", xlabel="return"
        ),
        plots.learning_curves(runs, tmp_path / "curve.png"),
    ]
    for file in files:
        picture = np.asarray(Image.open(file).convert("RGB"))
        assert min(picture.shape[:2]) > 300 and picture.std() > 5
    with pytest.raises(ValueError, match="No row has both"):
        plots.learning_curves({"empty": [[{"update": 1}]]}, tmp_path / "none.png")


@pytest.mark.parametrize(("columns", "axes"), [(3, (2, 3)), (8, (2, 8)), (9, (4, 5))])
def test_many_columns_of_curves_wrap_to_a_second_band_with_shared_axes(tmp_path, monkeypatch, columns, axes):
    drawn: list[np.ndarray] = []
    panels = plots.panels

    @contextmanager
    def keep(*arguments):
        with panels(*arguments) as found:
            drawn.append(found)
            yield found

    monkeypatch.setattr(plots, "panels", keep)
    curves = [[[{"steps": u, "return": c * u} for u in (0, 10)]] for c in range(columns)]
    grid = {f"learner {c}": {task: {"own": curves[c]} for task in ("a", "b")} for c in range(columns)}
    plots.curve_grid(grid, tmp_path / "grid.png", x="steps", y="return", ylabel="return")
    (found,) = drawn
    assert found.shape == axes
    shown = [ax for ax in found.flat if ax.axison]
    assert len(shown) == 2 * columns
    assert [title for ax in shown if (title := ax.get_title("left"))] == list(grid)
    assert len({ax.get_ylim() for ax in found[::2, 0]}) == 1


@pytest.mark.parametrize(
    ("other", "steps", "means"),
    [
        ([(0, 4.0), (10, 0.0), (20, 8.0)], [0, 10, 20], [2.0, 1.0, 6.0]),  # equal steps
        ([(5, 3.0), (25, 7.0)], [10, 20], [3.0, 5.0]),  # different steps: 4 and 6 are interpolated
        ([(0, 0.0), (20, 4.0)], [0, 20], [0.0, 4.0]),  # equal end: the grid of the run with fewer rows
    ],
)
def test_runs_with_different_steps_are_averaged_over_their_common_range(tmp_path, monkeypatch, other, steps, means):
    drawn: list[np.ndarray] = []
    draw = Axes.plot

    def plot(self, *values, **options):
        drawn.extend(values)
        return draw(self, *values, **options)

    monkeypatch.setattr(Axes, "plot", plot)
    one = [(0, 0.0), (10, 2.0), (20, 4.0)]
    runs = [[{"update": u, "return": r} for u, r in run] for run in (one, other)]
    plots.learning_curves({"both": runs}, tmp_path / "curve.png", y="return", percent=False)
    assert [values.tolist() for values in drawn] == [steps, means]


@pytest.mark.parametrize(("percent", "most"), [(True, 1.0), (False, math.inf)])
def test_bands_over_runs_are_student_intervals_within_the_range_of_a_rate(tmp_path, monkeypatch, percent, most):
    drawn: list[np.ndarray] = []
    fill = Axes.fill_between

    def keep(self, steps, bottom, top, **options):
        drawn.extend((bottom, top))
        return fill(self, steps, bottom, top, **options)

    monkeypatch.setattr(Axes, "fill_between", keep)
    scores = (0.6, 0.7, 0.9, 0.95, 1.0)
    runs = [[{"update": 0, "eval/success": 0.5}, {"update": 10, "eval/success": score}] for score in scores]
    plots.learning_curves({"five": runs}, tmp_path / "curve.png", percent=percent)
    mean, scale = student_mean(scores), 100.0 if percent else 1.0
    assert [float(bound[-1]) for bound in drawn] == pytest.approx([scale * mean.low, scale * min(mean.high, most)])


def test_a_curve_of_one_evaluation_is_a_mark_with_its_interval(tmp_path, monkeypatch):
    drawn: dict[str, dict] = {}

    def keep(name):
        draw = getattr(Axes, name)

        def kept(self, *values, **options):
            drawn[name] = options
            return draw(self, *values, **options)

        monkeypatch.setattr(Axes, name, kept)

    for name in ("plot", "vlines", "fill_between"):
        keep(name)
    row = {"update": 5, "eval/success": 0.5, "eval/low": 0.2, "eval/high": 0.8}
    plots.learning_curves({"one": [[row]]}, tmp_path / "curve.png")
    assert drawn.keys() == {"plot", "vlines"} and drawn["plot"]["linestyle"] == "none" and drawn["plot"]["marker"]


@pytest.mark.parametrize("other", [[], [(30, 1.0), (40, 1.0)]])
def test_runs_that_share_no_range_are_refused(tmp_path, other):
    runs = [[{"update": u, "return": r} for u, r in run] for run in ([(0, 1.0), (20, 1.0)], other)]
    with pytest.raises(ValueError, match="share no range of 'update'"):
        plots.learning_curves({"apart": runs}, tmp_path / "none.png", y="return")
    assert not (tmp_path / "none.png").exists()


def test_recorded_episodes_repeat_the_evaluated_ones(make_sim, make_policy):
    policy = make_policy()
    whole = evaluate(policy, make_sim(6), episodes=4, seed=50)
    clips = video.record(policy, make_sim(4), range(50, 54), width=64, height=48).clips
    assert [clip.total_reward for clip in clips] == whole.returns.tolist()
    assert [clip.success for clip in clips] == whole.success.tolist()
    for clip, length in zip(clips, whole.lengths, strict=True):
        assert clip.frames.shape == (length, 48, 64, 3)  # one frame per control step at 10 Hz


def test_border_turns_green_when_success_is_known_and_red_at_a_failed_end(make_sim):
    frames = np.zeros((4, 48, 64, 3), np.uint8)
    won = video.EpisodeVideo(frames, decided=2, seed=1, success=True, total_reward=1.0)
    lost = video.EpisodeVideo(frames, decided=4, seed=2, success=False, total_reward=0.0)
    borders = [[tuple(video._tile(clip, t)[0, 0]) for t in range(5)] for clip in (won, lost)]
    assert borders[0] == [video.RUNNING] * 2 + [video.SUCCESS] * 3
    assert borders[1] == [video.RUNNING] * 4 + [video.FAILURE]


@pytest.mark.parametrize("suffix", [".mp4", ".gif"])
def test_video_grid_is_readable(make_sim, tmp_path, suffix):
    import av

    recording = video.record(RandomActor(), make_sim(3), [5, 9, 7], title="random", width=64, height=48)
    path = video.write_video([recording], tmp_path / f"grid{suffix}")
    assert path.suffix == suffix and [file.name for file in tmp_path.iterdir()] == [path.name]
    with av.open(str(path)) as container:
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    longest = max(len(clip.frames) for clip in recording.clips)
    tile = (48 + 2 * video.BORDER + video.CAPTION, 64 + 2 * video.BORDER)
    held = round(recording.fps) if suffix == ".mp4" else 1  # a gif shows its last frame once, with a long duration
    assert len(frames) == longest + held
    assert frames[0].shape == (*(2 * size + 3 * video.GAP for size in tile), 3)  # 2 x 2 grid


def test_long_episodes_become_a_time_lapse(make_sim, monkeypatch):
    monkeypatch.setattr(video, "MAX_FRAMES", 10)
    recording = video.record(RandomActor(), make_sim(1), [3], width=16, height=16)
    assert recording.speed == 3 and len(recording.clips[0].frames) <= 10


def test_missing_gl_yields_a_reason_instead_of_a_video(make_sim, monkeypatch):
    sim = make_sim(1)
    sim.reset(0)
    assert video.rendering_problem(sim) is None
    monkeypatch.setattr(sim, "render", lambda **_: (_ for _ in ()).throw(AttributeError("no GL\nsecond line")))
    assert video.rendering_problem(sim) == "No video: no GL"


def test_report_is_self_contained_and_machine_readable(make_sim, make_policy, tmp_path):
    sim = make_sim(5)
    results = {
        "random <0>": evaluate(RandomActor(), sim, episodes=12),
        "policy": evaluate(make_policy(), sim, episodes=12),
    }
    recording = video.record(make_policy(), make_sim(2), range(2), width=64, height=48)
    report = Report(
        title="A & B",
        results=results,
        comparison=compare(*results.values()),
        video=video.write_video([recording], tmp_path / "episodes.mp4"),
        strip=video.write_strip([recording], tmp_path / "strip.png"),
        notes=["A note."],
        facts={"task": "fake/point"},
        extra={"seconds": 1.5},
    )
    write_report(tmp_path, report)
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "random &lt;0&gt;" in page and "A &amp; B" in page and "<0>" not in page
    assert not re.search(r"(src|href)='(?!data:)", page)
    assert {base64.b64decode(data)[:4] for data in re.findall(r"image/png;base64,([^']+)'", page)} == {b"\x89PNG"}
    data = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert data["seconds"] == 1.5 and EvalResult.from_dict(data["results"]["policy"]).n == 12
    assert "Only 12 episodes" in " ".join(data["notes"]) and data["notes"][0] == "A note."
    text = (tmp_path / "report.md").read_text(encoding="utf-8")
    for picture in re.findall(r"\]\(([^)]+)\)", text):
        assert (tmp_path / picture).is_file()


def test_report_without_success_or_video(tmp_path):
    write_report(tmp_path, Report(title="Returns", results={"only": result(None, returns=np.linspace(0, 5, 100))}))
    assert "mean return" in (tmp_path / "report.html").read_text(encoding="utf-8")
    assert (tmp_path / "returns.png").is_file() and not (tmp_path / "success.png").exists()


def test_results_of_another_version_are_refused():
    data = result([1, 0]).to_dict() | {"version": 99}
    with pytest.raises(UserError, match="version 1, found 99"):
        EvalResult.from_dict(data)
