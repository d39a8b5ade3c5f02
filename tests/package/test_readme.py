"""Numbers in README.md are those of the committed results."""

from __future__ import annotations

from pathlib import Path

from bench import tables

README = (Path(__file__).resolve().parents[2] / "README.md").read_text(encoding="utf-8")


def test_tables_are_those_of_the_results() -> None:
    """If not: python -m bench.tables."""
    assert tables.BEGIN in README
    assert tables.placed(README) == README


def test_changed_numbers_are_noticed() -> None:
    start = README.index("| nothing shared |")
    changed = README[:start] + README[start:].replace("1.00", "1.01", 1)
    assert tables.placed(changed) == README != changed


def test_readme_is_short() -> None:
    assert len(README.splitlines()) <= 200
