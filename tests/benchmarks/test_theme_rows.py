"""Tests of benchmark rows that contrib themes add."""

import pytest

from benchmarks import themes
from robopolicy import plugins


@pytest.fixture
def contrib(tmp_path, monkeypatch):
    """Function that adds the `benchmarks.toml` of a theme."""
    monkeypatch.setattr(plugins, "CONTRIB", tmp_path)

    def add(name: str, content: str) -> None:
        (tmp_path / name).mkdir()
        (tmp_path / name / "theme.toml").write_text("")
        (tmp_path / name / "benchmarks.toml").write_text(content)
        plugins.themes.cache_clear()

    yield add
    plugins.themes.cache_clear()


def test_rows_of_all_themes_are_read_by_benchmark_and_table(contrib):
    contrib("one", '[control.methods]\nstac2 = {family = "off-policy"}\n[offline.methods]\nprdc2 = ["x=1"]\n')
    contrib("other", "[text.recipes]\ngrid = ['a', 'b']\n[control.methods.harpg2]\nfamily = 'on-policy'\n")
    found = themes.contributed("control", "methods")
    assert found == {"stac2": {"family": "off-policy"}, "harpg2": {"family": "on-policy"}}
    assert themes.contributed("text", "recipes") == {"grid": ["a", "b"]}
    assert themes.contributed("text", "claims") == themes.contributed("pendulum", "rows") == {}


def test_duplicate_rows_are_refused(contrib):
    contrib("one", "[text.claims]\nx = {quantity = 'entropy'}\n")
    contrib("other", "[text.claims]\nx = {quantity = 'tokens'}\n")
    with pytest.raises(ValueError, match=r"other adds 'x' to text\.claims as another theme does"):
        themes.contributed("text", "claims")
