"""The bibliography parses, its pages are up to date, and every entry that a page names exists."""

import re

import pytest
from source_tree import project_files, read

from docs.generate_methods import load
from docs.markdown import cite
from docs.references import Reference, pages, references, render
from robopolicy.citations import citation

BIBLIOGRAPHY = references()
LINK = re.compile(r"\[([^]\[]+)\]\([\w./]*references\.md#([\w-]+)\)")
LINKS = [
    (path, text, key)
    for path in project_files()
    if path.suffix == ".md" and path.name != "references.md"
    for text, key in LINK.findall(read(path))
]


def test_the_bibliography_is_complete():
    assert len(BIBLIOGRAPHY) >= 180
    assert all(entry.authors and entry.title and re.fullmatch(r"\d{4}", entry.year) for entry in BIBLIOGRAPHY.values())
    assert list(BIBLIOGRAPHY) == sorted(BIBLIOGRAPHY), "entries stand in the order of their keys"


def test_most_entries_can_be_looked_up():
    found = [entry for entry in BIBLIOGRAPHY.values() if re.match(r"https://(arxiv|doi)\.org/", entry.link)]
    assert len(found) >= 150


def test_sources_have_entries_of_their_own():
    keys = [method.reference for method in load().methods]
    assert set(keys) <= BIBLIOGRAPHY.keys() and len(set(keys)) == len(keys)


def test_links_on_pages_lead_to_the_entry_they_cite():
    assert LINKS
    for path, text, key in LINKS:
        assert key in BIBLIOGRAPHY, f"{path}: no entry {key}"
        assert text == BIBLIOGRAPHY[key].citation, f"{path}: {key} is {BIBLIOGRAPHY[key].citation}, not {text}"


@pytest.mark.parametrize("file", pages(), ids=lambda file: file.name)
def test_what_is_made_of_the_bibliography_is_up_to_date(file):
    assert file.read_text(encoding="utf-8") == pages()[file], "Run `python -m docs.references`."


def test_names_are_short_in_citations_and_whole_on_the_page(tmp_path):
    (tmp_path / "some.bib").write_text(
        r"""@article{werra2020trl,
  author = {von Werra, Leandro and {\"O}zalp, U{\u g}urcan},
  title = {A {LaTeX} Title},
  year = {2020},
  doi = {10.1/2},
  note = {ICML 2021},
}
"""
    )
    entry = references(tmp_path / "some.bib")["werra2020trl"]
    assert entry.citation == "von Werra and Özalp 2020"
    assert render([entry]).endswith(
        '- <a id="werra2020trl"></a>Leandro von Werra and Uğurcan Özalp (2020). '
        "[A LaTeX Title](https://doi.org/10.1/2). ICML 2021. `werra2020trl`\n"
    )


@pytest.mark.parametrize(("count", "short"), [(1, "B 2020"), (2, "B and B 2020"), (3, "B et al. 2020")])
def test_a_citation_names_at_most_two_authors(count, short):
    assert Reference("b", ["A B"] * count, ["B"] * count, "t", "2020", "", "").citation == short


def test_the_package_cites_without_the_bibliography():
    assert citation("zhang2025reinflow") == "Zhang et al. 2025"
    assert cite("zhang2025reinflow") == "[Zhang et al. 2025](references.md#zhang2025reinflow)"
    assert cite("zhang2025reinflow", "../") == "[Zhang et al. 2025](../references.md#zhang2025reinflow)"
    assert citation("of the user") == "of the user"
