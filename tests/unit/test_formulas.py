"""Model output as HTML: formulas become MathML, and no text is executed or fetched by a browser."""

import re
import time
from xml.etree import ElementTree

import pytest

from eval.report.formulas import Formulas, mathml


def rendered(text: str, max_formulas: int = 100) -> str:
    return str(Formulas(max_formulas).render(text))


@pytest.mark.parametrize(
    ("text", "source", "elements"),
    [
        (r"so $\frac{1}{2}$.", r"\frac{1}{2}", {"mfrac", "mn"}),
        (r"\(x^2\)", "x^2", {"msup"}),
        ("\\[\n\\sqrt[3]{5}\n\\]", "\n\\sqrt[3]{5}\n", {"mroot"}),
        (r"$$\sum_{i=1}^n i$$", r"\sum_{i=1}^n i", {"munderover", "mo"}),
        (r"Answer: \boxed{\frac{1}{2}}", r"\boxed{\frac{1}{2}}", {"mfrac"}),
        (
            r"\begin{align*}a&=b\\c&=d\end{align*}",
            r"\begin{align*}a&=b\\c&=d\end{align*}",
            {"mtable", "mtr"},
        ),
        ("$a < b$", "a < b", {"mo"}),
    ],
)
def test_a_formula_becomes_mathml_with_its_source(
    text: str, source: str, elements: set[str]
) -> None:
    html = rendered(text)
    [formula] = re.findall(r"<math.*</math>", html, re.DOTALL)
    tree = ElementTree.fromstring(formula)
    assert elements <= {element.tag for element in tree.iter()} | (
        {"munderover"} if "msubsup" in formula else set()
    )
    assert tree.findtext("semantics/annotation") == source
    assert ('class="boxed"' in formula) == ("boxed" in source)


@pytest.mark.parametrize(
    "text",
    [
        "it costs $5 or $6",
        r"\$5 and \$6",
        r"$\undefined{x}$",
        r"\boxed{5",
        "$a\nb$",
        r"\[\def\a{\a\a}\a\]",
        r"$\newcommand{\a}{x}\a$",
        "$" + "x" * 2000 + "$",
    ],
)
def test_text_that_is_not_a_convertible_formula_stays_as_it_is(text: str) -> None:
    assert rendered(text) == text


HOSTILE = (
    "<script>hacked = 1</script>",
    "<img src=http://a/b onerror=alert(1)>",
    "</math><script>",
    "javascript:alert(1)",
    '" onload="hacked = 1',
    "url(http://a)",
    "&lt;script&gt;",
    "]]><svg onload=alert(1)>",
)
COMMANDS = (
    "{0}",
    "${0}$",
    r"$\text{{{0}}}$",
    r"$\href{{{0}}}{{x}}$",
    r"$\style{{{0}}}{{x}}$",
    r"$\class{{{0}}}{{x}}$",
    r"$\color{{{0}}}{{x}}$",
    r"$\mathrm{{{0}}}$",
    r"$\includegraphics{{{0}}}$",
    r"$\hspace{{{0}}}x$",
    r"\boxed{{\text{{{0}}}}}",
    r"$\operatorname{{{0}}}$",
    r"$\unicode{{{0}}}$",
    r"$\cssId{{{0}}}{{x}}$",
)


def test_hostile_text_adds_no_markup() -> None:
    allowed = set(
        "math semantics annotation mrow mi mn mo mtext mspace mstyle msub msup mpadded".split()
    )
    for hostile in HOSTILE:
        for command in COMMANDS:
            html = rendered(command.format(hostile))
            tree = ElementTree.fromstring(f"<p>{html}</p>")  # well-formed
            names = {element.tag for element in tree.iter()} - {"p"}
            attributes = {
                (key, value) for element in tree.iter() for key, value in element.attrib.items()
            }
            assert names <= allowed, (hostile, command)
            assert {key for key, _ in attributes} <= set(
                "encoding class stretchy mathvariant width displaystyle".split()
            )
            assert {value for key, value in attributes if key == "class"} <= {"boxed"}


def test_formula_count_and_conversion_time_are_bounded() -> None:
    html = rendered("$x_1$ $x_2$ $x_1$ $x_3$", max_formulas=2)
    assert (html.count("<math>"), html.endswith(" $x_3$")) == (3, True)
    assert mathml("(" * 1001) is None
    for text in (
        "\\[" * 3000,
        "$" * 6000,
        "\\boxed{" * 900,
        "\\(" * 3000,
        "\\begin{align}" * 500,
        "\\boxed{" + "{a" * 3000,
        "$" + "{" * 900 + "$",
        "$" + "\\sqrt{" * 150 + "$",
        "$" + "\\frac1" * 150 + "$",
    ):
        started = time.process_time()
        rendered(text)
        assert time.process_time() - started < 1.0, text[:12]
