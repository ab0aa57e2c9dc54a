"""The bibliography: complete, in order, and cited as a reader expects."""

import pytest

from docs.generate_methods import load
from docs.references import FILE, Reference, parse, plain, references

ENTRIES = parse(FILE.read_text(encoding="utf-8"))


def test_entries_are_sorted_different_and_filled_in():
    keys = [entry.key for entry in ENTRIES]
    assert keys == sorted(set(keys)) and len(keys) >= 180
    assert all({"author", "title", "year"} <= entry.fields.keys() for entry in ENTRIES)
    assert sum("eprint" in entry.fields or "doi" in entry.fields for entry in ENTRIES) >= 150


def test_every_source_is_a_paper_of_its_own():
    found = [method.reference for method in load().methods]
    assert len(set(found)) == len(found) and set(found) <= references().keys()


def test_a_paper_is_cited_by_authors_year_title_and_link():
    fields = {"author": r"{\"O}zalp, U{\u g}urcan", "title": r"A {Stochastic} $\pi_0$", "year": "2026", "eprint": "1.2"}
    assert Reference("x", fields).cite() == "Özalp 2026, *A Stochastic π_0*, [arXiv:1.2](https://arxiv.org/abs/1.2)"
    assert Reference("x", {**fields, "author": "A, B and C, D"}).authors == "A and C"
    assert Reference("x", {**fields, "author": "A, B and others"}).authors == "A et al."
    assert plain(r"Gallou{\'e}dec, Nu{\~n}ez, Arta{\u g}") == "Gallouédec, Nuñez, Artağ"


@pytest.mark.parametrize(
    "text", ["@article{a,\n  title = {x\n  y},\n}\n", "title = {x},\n", "@article{a,\n  x = {1},\n  x = {2},\n}"]
)
def test_what_is_no_entry_is_refused_with_its_line(text: str):
    with pytest.raises(ValueError, match="is no part of an entry"):
        parse(text)
