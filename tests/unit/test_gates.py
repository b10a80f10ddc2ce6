"""Gates: syntax, suggestions for misspelt names, and outcomes."""

import pytest

from eval.report.gates import Gate, GateError, check_gate, describe_gates, parse_gate

NAMES = ("math500", "gpqa-diamond")
COLUMNS = ("before", "qwen3-8", "last-night")
BEFORE = {
    "math500": (
        {"accuracy": 60.0, "tokens": 900.0},
        {"accuracy": 59.0, "tokens": 850.0, "truncated": 4.0},
    ),
    "pooled": ({"accuracy": 40.0}, {"accuracy": 40.0}),
}
MEASURED = {
    "before": BEFORE,
    "after": BEFORE,
    "qwen3-8": {"math500": ({"accuracy": 58.5}, {"accuracy": 59.0})},
}


def test_gates_may_name_benchmarks_of_other_programs_with_any_characters() -> None:
    names = ["math_500_Level 1", "inspect_evals/gsm8k", "v1.5"]
    for name in names:
        assert parse_gate(f"{name} >= before - 1", names, COLUMNS).name == name
        assert parse_gate(f"{name}.tokens<9", names, COLUMNS).metric == "tokens"


@pytest.mark.parametrize(
    ("text", "gate"),
    [
        ("math500 >= before - 1", ("math500", "accuracy", ">=", "before", -1.0)),
        ("math500>=before-1.5", ("math500", "accuracy", ">=", "before", -1.5)),
        ("gpqa-diamond.truncated <= 5", ("gpqa-diamond", "truncated", "<=", None, 5.0)),
        ("math500 >= qwen3-8", ("math500", "accuracy", ">=", "qwen3-8", 0.0)),
        ("math500 >= qwen3-8 + 2", ("math500", "accuracy", ">=", "qwen3-8", 2.0)),
        ("math500.tokens < 12000", ("math500", "tokens", "<", None, 12000.0)),
    ],
)
def test_gate_syntax(text: str, gate: tuple[str, str, str, str | None, float]) -> None:
    assert parse_gate(text, NAMES, COLUMNS) == Gate(text.strip(), *gate)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("math500 >= befor", "no column befor (did you mean before?)"),
        ("math50 >= before", "no benchmark math50 (did you mean math500?)"),
        ("math500.truncatd <= 5", "no metric truncatd (did you mean truncated?)"),
        ("pooled.truncated <= 5", "pooled has no truncated, only its accuracy"),
        ("math500 >= 60 %", "is not of the form NAME[.METRIC] >= NUMBER"),
        ("math500 == before", "is not of the form"),
        ("math500 >= before - ", "is not of the form"),
    ],
)
def test_an_invalid_gate_is_refused_with_a_suggestion(text: str, message: str) -> None:
    with pytest.raises(GateError) as error:
        parse_gate(text, NAMES, COLUMNS)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("text", "bound", "is_passed"),
    [
        ("math500 >= before - 1", 59.0, True),
        ("math500 > before - 1", 59.0, False),
        ("math500 >= 59", 59.0, True),
        ("math500.truncated <= 3.5", 3.5, False),
        ("math500 >= qwen3-8", 58.5, True),
        ("pooled >= before", 40.0, True),
    ],
)
def test_a_gate_compares_the_measured_values(text: str, bound: float, is_passed: bool) -> None:
    result = check_gate(parse_gate(text, NAMES, COLUMNS), MEASURED)
    assert (result.bound, result.is_passed, result.reason) == (bound, is_passed, None)


def test_a_missing_value_fails_its_gate_and_a_missing_column_leaves_it_unchecked() -> None:
    # The baseline was not evaluated on gpqa-diamond.
    result = check_gate(parse_gate("gpqa-diamond >= qwen3-8", NAMES, COLUMNS), MEASURED)
    assert (result.is_passed, result.reason) == (False, "gpqa-diamond has no accuracy for qwen3-8")
    first = check_gate(parse_gate("math500 >= last-night", NAMES, COLUMNS), MEASURED)
    assert (first.is_passed, first.reason) == (None, "there is no earlier night")
    other = check_gate(
        parse_gate("math500 >= last-night", NAMES, COLUMNS), {**MEASURED, "last-night": {}}
    )
    assert (other.is_passed, other.reason) == (None, "math500 has no accuracy for last-night")
    without = {"before": BEFORE, "after": BEFORE}
    gate = parse_gate("math500 >= qwen3-8", NAMES, COLUMNS)
    away = check_gate(gate, without, {"qwen3-8": "ServerUnreachable: it does not answer"})
    assert (away.is_passed, away.reason) == (None, "ServerUnreachable: it does not answer")
    assert check_gate(gate, without).reason == "qwen3-8 was not evaluated"
    assert describe_gates([result, first]) == [
        "GATES FAILED, 1 of 2: gpqa-diamond >= qwen3-8 (not measured: gpqa-diamond has no accuracy "
        "for qwen3-8).",
        "Gates not checked: math500 >= last-night (there is no earlier night).",
    ]
    passed = check_gate(parse_gate("math500 >= 59", NAMES, COLUMNS), MEASURED)
    assert describe_gates([passed, away]) == [
        "Gates: 1 of 2 passed.",
        "Gates not checked: math500 >= qwen3-8 (ServerUnreachable: it does not answer).",
    ]
    assert describe_gates([]) == []


def test_a_single_benchmark_answers_to_any_name() -> None:
    gate = parse_gate("arithmetic.truncated <= 5", (), ("before",))
    assert (gate.name, gate.metric) == ("pooled", "truncated")
