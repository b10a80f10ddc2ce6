"""Suite folders: their contents, and errors for damaged ones."""

from pathlib import Path

import pytest

from eval.problems.registry import SETS, SUITES
from eval.results.rows import ResultsError
from eval.results.suite import Member, describe_suite, read_suite, write_suite
from tests.evaluations import write_results


def make_suite(folder: Path) -> Path:
    """A suite of two benchmarks, one with twice the weight."""
    folder.mkdir()
    write_suite(folder, [Member("long", 2.0, "k1"), Member("short")], "short")
    write_results(folder / "long", "rrw")
    write_results(folder / "short", "rw")
    return folder


def test_a_suite_lists_its_folders_in_order_with_weights_and_headline(tmp_path: Path) -> None:
    folder = make_suite(tmp_path / "suite")
    assert list(read_suite(folder).items()) == [
        ("long", folder / "long"),
        ("short", folder / "short"),
    ]
    suite = describe_suite(folder)
    assert (suite.headline, suite.members) == (
        "short",
        (Member("long", 2.0, "k1"), Member("short", 1.0, None)),
    )


def test_a_single_benchmark_is_a_suite_of_one(tmp_path: Path) -> None:
    own, known = write_results(tmp_path / "a", "rw"), tmp_path / "b"
    write_results(known, "rw", settings={"benchmark": "math500"})
    assert (read_suite(own), read_suite(known)) == ({"own": own}, {"math500": known})
    with pytest.raises(
        ResultsError, match=r"holds the evaluation of one benchmark; choose another --output"
    ):
        write_suite(own, [Member("math500")], "math500")


def test_missing_and_damaged_suites_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ResultsError, match=r"has no settings\.json and no suite\.json"):
        read_suite(tmp_path / "none")
    folder = make_suite(tmp_path / "suite")
    (folder / "short" / "settings.json").unlink()
    with pytest.raises(ResultsError, match=r"lacks short: the evaluation did not finish"):
        read_suite(folder)
    (folder / "suite.json").write_text('{"benchmarks": [{"nam": "x"}]}')
    with pytest.raises(ResultsError, match=r"suite\.json cannot be read"):
        read_suite(folder)


def test_named_suites_contain_registered_sets_with_test_rows() -> None:
    for names in SUITES.values():
        assert all(SETS[name].test for name in names)
