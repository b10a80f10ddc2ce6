"""Verdicts and notes of a comparison: people quote these sentences, so they are verbatim."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from eval.answers.grading import AISBench
from eval.logs.exported import export_inspect
from eval.report.compare import compare, compare_evaluations
from eval.report.report import (
    SAME_MODEL,
    THESE_MODELS,
    make_report,
    notes,
    render_markdown,
    verdict,
)
from eval.report.suite_report import Models, write_suite_report
from eval.results.rows import Evaluation, load_evaluation, read_rows, write_rows
from eval.results.suite import Member, write_suite
from eval.results.summary import describe_unknown_reasons, summarise
from tests.evaluations import (
    compared,
    evaluation,
    make_items,
    make_rows,
    settings_of,
    write_report,
    write_results,
)

ITEMS = make_items(8)
AFTER = "rwrrwrrr"


def test_verdict_of_a_significant_change() -> None:
    # The reference table: n = 500, 28 gained, 10 lost.
    result = compared("w" * 28 + "r" * 472, "r" * 28 + "w" * 10 + "r" * 462)
    assert verdict(result) == (
        "Accuracy rose by 3.6 points (95 % interval of the change +1.1 to +6.3), from 94.4 % to "
        "98.0 % on the same 500 items: 28 gained, 10 lost, exact McNemar p = 0.0051."
    )
    assert notes(result) == [THESE_MODELS]
    assert verdict(compared("r" * 8, "w" * 8)).startswith("Accuracy fell by 100.0 points")


def test_verdict_of_an_insignificant_change_states_what_would_go_undetected() -> None:
    result = compared("w" * 58 + "r" * 442, "r" * 58 + "w" * 40 + "r" * 402)
    assert verdict(result) == (
        "No significant change in accuracy: 88.4 % before, 92.0 % after, +3.6 points (95 % "
        "interval -0.4 to +7.6) on the same 500 items: 58 gained, 40 lost, exact McNemar p = "
        "0.085. This does not show that nothing changed: with these items, a true change smaller "
        "than about 5.7 points goes undetected more than one time in five."
    )
    assert "with so few items, no change is detected reliably, however large." in verdict(
        compared("rwww", "wrrw")
    )


def test_notes_on_missing_log_probs_and_disagreeing_graders() -> None:
    def has_note(text: str, *sides: Evaluation) -> bool:
        return any(text in note for note in notes(compare_evaluations(*sides)))

    served = settings_of(ITEMS, served={"root": "m", "logprobs": None})
    blind = Evaluation.of(served, make_rows(ITEMS, AFTER))
    assert has_note(
        "The server returned no log-probs after training", evaluation(ITEMS, AFTER[::-1]), blind
    )
    first, *others = make_rows(ITEMS, "r" * 8)
    rows = [first, *(replace(row, aisbench=AISBench("-1", False, False)) for row in others)]
    after = Evaluation.of(settings_of(ITEMS), rows)
    assert has_note("under AISBench's rule the change is +12.5", evaluation(ITEMS, "w" * 8), after)
    # A grader that finds no answers at all is not reported as disagreeing.
    result = compared("w" * 20 + "r" * 20, "r" * 40)
    unread = replace(
        result, graders=replace(result.graders, before=0.0, after=0.0, difference=0.0, p=1.0)
    )
    assert any(
        "AISBench's rule marks no response right on either side" in note for note in notes(unread)
    )
    assert not any("The graders disagree" in note for note in notes(unread))


def test_unknown_finish_reasons_are_noted_with_their_side_and_count() -> None:
    rows = [replace(row, finish_reason="unheard_of") for row in make_rows(ITEMS, AFTER)]
    after = Evaluation.of(settings_of(ITEMS), rows)
    [note] = [
        note
        for note in notes(compare_evaluations(evaluation(ITEMS, "w" * 8), after))
        if "finish reasons" in note
    ]
    assert note.startswith("After: unknown finish reasons: 'unheard_of' (8 responses). Whether")
    many = {f"request {number} ended": 1 for number in range(500)}
    assert describe_unknown_reasons(many).endswith(
        "'request 4 ended' (1 responses) and 495 more. Whether these responses were cut off is "
        "decided by their text, as without a reason"
    )


SERVED = {"root": "/models/m", "logprobs": [{" a": -0.5, " an": -2.0}], "has_local_files": False}


@pytest.mark.parametrize(
    ("before", "after", "is_same"),
    [
        (SERVED, SERVED, True),
        # other weights under the same name
        (SERVED, {**SERVED, "logprobs": [{" a": -3.5, " an": -0.1}]}, False),
        (SERVED, {**SERVED, "root": "/models/other"}, False),
        (SERVED, {**SERVED, "logprobs": None}, False),
        (*2 * [{**SERVED, "logprobs": None}], False),  # only the name is known to be equal
        # the digest covers the files
        (*2 * [{**SERVED, "logprobs": None, "has_local_files": True}], True),
        (None, None, False),
    ],
)
def test_the_same_model_is_claimed_only_with_proof(
    before: Any, after: Any, is_same: bool, tmp_path: Path
) -> None:
    folders = []
    for name, served, letters in (("before", before, AFTER), ("after", after, AFTER[::-1])):
        folders.append(folder := tmp_path / name)
        for member in ("one", "two"):
            write_results(folder / member, letters, ITEMS, settings={"served": served})
        write_suite(folder, [Member("one"), Member("two")], "one")
    single = compare(*(folder / "one" for folder in folders))
    assert (SAME_MODEL in notes(single)) is is_same
    assert (SAME_MODEL in write_suite_report(Models(*folders), None, None)["notes"]) is is_same


@pytest.mark.parametrize("is_twice", [True, False])
def test_figures_of_aisbench_only_where_its_rule_was_applied(
    is_twice: bool, tmp_path: Path
) -> None:
    sides = [
        write_results(tmp_path / side, letters) for side, letters in (("b", "rw"), ("a", "tr"))
    ]
    for side in sides if not is_twice else ():
        rows = read_rows(side).values()
        write_rows(side, [replace(row, aisbench=None) for row in rows])
    report = write_report(Models(*sides), None, tmp_path / "report")
    assert (report["graders"] is not None) is is_twice
    texts = [(tmp_path / "report" / name).read_text() for name in ("report.md", "report.html")]
    assert ["AISBench" in text for text in texts] == [is_twice] * 2
    evaluation = load_evaluation(sides[1])
    summary = summarise(evaluation, lambda *_: False)
    assert (summary.aisbench is not None) is is_twice
    export_inspect(evaluation, path := tmp_path / "log.json")
    assert ("aisbench" in json.loads(path.read_text())["samples"][0]["scores"]) is is_twice


def test_note_on_a_token_limit_that_truncates_half_of_the_responses() -> None:
    found = notes(compared("tttw", "ttrr"))  # 3 and 2 of 4
    assert found[0].startswith("75.0 % of the responses before and 50.0 % after were truncated")
    assert not any("were truncated" in note for note in notes(compared("trrw", "trrr")))


def test_one_stored_evaluation_is_not_reported_as_two_measurements() -> None:
    result = compare_evaluations(*2 * [evaluation(ITEMS, AFTER)])
    assert verdict(result) == (
        "Both sides are the same stored evaluation, 75.0 % right on the same 8 items: with a "
        "single measurement, nothing can be said about a change."
    )
    assert notes(result) == []
    # Equal answers with other request times are a second measurement.
    again = [replace(row, seconds=0.6) for row in make_rows(ITEMS, AFTER)]
    result = compare_evaluations(evaluation(ITEMS, AFTER), Evaluation.of(settings_of(ITEMS), again))
    assert verdict(result).startswith("No significant change in accuracy: 75.0 % before")


def test_a_training_without_weight_updates_is_noted() -> None:
    def first_note(*kept: int) -> str:
        steps = [
            {"step": step, "sampler/kept_groups": groups} for step, groups in enumerate(kept, 1)
        ]
        return str(make_report(compared("rw", "rr"), steps)["notes"][0])

    assert first_note(0, 0).startswith("None of the 2 training steps found a group with signal")
    assert first_note(0, 8, 0).startswith("2 of 3 training steps found no group with signal")
    assert "training steps" not in first_note(8, 8)


def test_the_accuracy_of_no_finished_response_is_none() -> None:
    report = make_report(compared("tn", "rt"), [])
    assert report["before"]["finished_accuracy"] is None
    assert "| finished responses only | none | 100.0 % | |" in re.sub(
        " +", " ", render_markdown(report)
    )
