"""Every op and implementation has a replay test, and the gate that says so can fail."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from tests.package import manifest

WANTED = {"ops": {"sp_compile::a", "sp_compile::a_backward"}, "implementations": {"a.reference"}}
WHOLE = {
    "ops": {"sp_compile::a": "t.py::test[a]", "sp_compile::a_backward": "t.py::test[a]"},
    "implementations": {"a.reference": "t.py::test[a]"},
}
TESTS = {"t.py::test[a]"}


@pytest.fixture(scope="module")
def tests() -> set[str]:
    named = (test for section in manifest.read().values() for test in section.values())
    return manifest.collected(test.split("::")[0] for test in named)


def test_every_registered_op_and_implementation_is_replayed(tests: set[str]) -> None:
    wanted = manifest.registered()
    assert wanted["ops"], "no op is registered"
    assert wanted["implementations"], "no implementation is registered"
    assert manifest.gaps(wanted, manifest.read(), tests) == []


def test_gate_notices_a_new_op_and_a_lost_test(tests: set[str]) -> None:
    wanted = {section: names | {"new"} for section, names in manifest.registered().items()}
    assert manifest.gaps(wanted, manifest.read(), tests) == ["[ops] has no line for new", "[implementations] has no line for new"]
    lost = manifest.read()["ops"]["sp_compile::attention"]
    assert f"[ops] sp_compile::attention names {lost}, which does not exist" in manifest.gaps(wanted, manifest.read(), tests - {lost})


def test_gate_passes_a_whole_manifest() -> None:
    assert manifest.gaps(WANTED, WHOLE, TESTS) == []


@pytest.mark.parametrize(
    ("section", "name", "said"),
    [
        ("ops", "sp_compile::a_backward", "[ops] has no line for sp_compile::a_backward"),
        ("implementations", "a.reference", "[implementations] has no line for a.reference"),
    ],
)
def test_gate_notices_a_missing_line(section: str, name: str, said: str) -> None:
    changed: Mapping[str, Mapping[str, str]] = WHOLE | {section: {key: test for key, test in WHOLE[section].items() if key != name}}
    assert manifest.gaps(WANTED, changed, TESTS) == [said]


def test_gate_notices_a_misspelt_section() -> None:
    changed = {"op": WHOLE["ops"], "implementations": WHOLE["implementations"]}
    assert manifest.gaps(WANTED, changed, TESTS)[0] == "unknown section [op]"


def test_collection_knows_parameters_and_missing_files(tests: set[str]) -> None:
    assert "tests/determinism/test_replay.py::test_replay[attention-reference]" in tests
    assert "tests/determinism/test_replay.py::test_replay[attention-none]" not in tests
    assert manifest.collected(["tests/determinism/test_nothing.py"]) == set()
