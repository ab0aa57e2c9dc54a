"""Tests of `robopolicy view`: its targets, refusals, and training runs."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from robopolicy.cli.main import main
from robopolicy.viewer.training_run import NewestPolicy, read_metrics

RUN = ["train", "task=lift", "algorithm=ppo", "policy=gaussian", "sim.num_envs=2", "algorithm.num_steps=4"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training run of two updates."""
    out = tmp_path_factory.mktemp("runs")
    settings = ["budget.updates=2", "evaluation.episodes=0", "logging.every=1", f"out={out}", "name=run"]
    assert main([*RUN, *settings]) == 0
    return out / "run"


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list:
    """Sources and metrics that the command opens instead of showing them."""
    pytest.importorskip("mjviser", reason="needs robopolicy[viewer]")
    found: list = []

    class PageServer:
        def __init__(self, title, port):
            self.url, self.title = f"http://127.0.0.1:{port}", title

        def close(self):
            pass

    class Page:
        def __init__(self, server, source, metrics):
            found.extend((source, server.title, metrics))

        def run(self):
            found.append(list(found[0].frames(0)))

        def close(self):
            pass

    monkeypatch.setattr("robopolicy.viewer.page.PageServer", PageServer)
    monkeypatch.setattr("robopolicy.viewer.page.Page", Page)
    return found


def test_a_task_is_shown_by_its_expert(opened: list, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["view", "lift", "--seed", "3", "--port", "9"]) == 0
    source, title, metrics, frames = opened
    assert (source.title, title, metrics) == ("expert in manipulation/lift", "lift", None)
    assert frames[-1].success and source.label(0) == "seed 3"
    assert capsys.readouterr().out == "lift: http://127.0.0.1:9\nCtrl-C stops\n"


def test_a_training_run_is_shown_by_its_newest_policy_and_metrics(opened: list, run: Path) -> None:
    assert main(["view", str(run), "--seed", "0"]) == 0
    source, _, metrics, frames = opened
    assert source.title == "run, training" and len(frames) > 1
    np.testing.assert_array_equal(metrics()["critic/loss"][0], [1, 2])


def test_a_checkpoint_is_shown_in_its_task(opened: list, run: Path) -> None:
    assert main(["view", str(run / "checkpoints/last")]) == 0
    assert opened[0].title == "run/last in manipulation/lift"


def test_a_policy_is_loaded_again_after_its_manifest_has_changed(tmp_path: Path) -> None:
    manifest, loads = tmp_path / "manifest.json", []
    manifest.write_text("{}")
    newest = NewestPolicy(manifest, lambda: loads.append(0) or object())  # type: ignore[arg-type, return-value]
    assert newest() is newest() and len(loads) == 1
    import os

    os.utime(manifest, ns=(1, 1))
    newest()
    assert len(loads) == 2


def test_metrics_start_with_success_and_return(tmp_path: Path) -> None:
    assert read_metrics(tmp_path) == {}
    rows = '{"update": 1, "loss": 3, "note": "x"}\n{"update": 4, "rollout/return": 2.5, "loss": 1}\n'
    (tmp_path / "metrics.jsonl").write_text(rows)
    found = {name: [values.tolist() for values in curve] for name, curve in read_metrics(tmp_path).items()}
    assert list(found.items()) == [("rollout/return", [[4.0], [2.5]]), ("loss", [[1.0, 4.0], [3.0, 1.0]])]


def test_what_cannot_be_shown_is_refused(refused, tmp_path: Path, run: Path) -> None:
    assert "Unknown task" in refused("view", "nothing")
    (tmp_path / "episodes.npz").touch()
    assert "'robopolicy data convert' makes one" in refused("view", tmp_path / "episodes.npz")
    assert "--episodes has no effect without --out" in refused("view", "lift", "--episodes", 3)
    assert "--policy has no effect on checkpoints" in refused("view", run / "checkpoints/last", "--policy", "random")
    assert "--policy has no effect on training runs" in refused("view", run, "--policy", "random")
    assert "--port must be at most 65535, got 99999" in refused("view", "lift", "--port", 99999)
    assert "--port must be at least 0" in refused("view", "lift", "--port", -1)
    (tmp_path / "config.yaml").touch()
    assert "has no checkpoint yet" in refused("view", tmp_path)


def test_targets_are_recognised_by_the_files_of_their_formats() -> None:
    from robopolicy.cli import view
    from robopolicy.data.formats.lerobot import layout
    from robopolicy.training.manifest import MANIFEST

    assert (view.CHECKPOINT, view.DATASET) == (MANIFEST, layout.INFO)


def test_the_page_is_served_before_torch_is_imported() -> None:
    """Browsers load the page meanwhile."""
    pytest.importorskip("mjviser", reason="needs robopolicy[viewer]")
    program = """
import sys
import robopolicy.viewer.page as page
from robopolicy.cli.main import main
def stop(title, port):
    print({"torch", "mjviser", "trimesh"} & sys.modules.keys())
    raise SystemExit
page.PageServer = stop
main(["view", "lift"])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "set()\n", done.stderr
