"""mathruler's rule, by which AISBench and verl grade Geometry3K, without sympy.

mathruler compares two answers as strings under two normalisations, then asks sympy's parser, which
evaluates text, whether their difference simplifies to 0. Here the difference is parsed by a small
grammar of the same precedence and compared by eval.answers.numeric. docs/evaluation.md lists where
verdicts differ.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction

from eval.answers import numeric
from eval.answers.aisbench import full_fractions, plain_fraction
from eval.answers.expression import Node, is_too_high

NO_BOX = "None"  # mathruler's answer of a response without a box
BRACKETS = "()[]"
MAX_LETTERS = 2  # of an expression that is compared by value
MAX_DEPTH = 40
DIGITS = frozenset("0123456789")
UNITS = (
    "degree cm centimeter meter mile second minute hour day week month year foot feet inch yard"
).split()

_BRACE = re.compile(r"[{}]")
_TEXT = re.compile(r"\\text\{(.+?)\}")
_UNITS = [re.compile(unit + r"(?:es)?s? *(?:\^\d+)?", re.ASCII) for unit in UNITS]
_POWERS = re.compile(r"\^(?:\(|[0-9]+\^|[0-9][0-9])")  # that mathruler leaves to no parser
_FRACTION = re.compile(r"-?[0-9]+.?/0*[1-9][0-9]*.?")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))", re.ASCII)


def extract_mathruler(text: str) -> str:
    """Return the content of the last \\boxed{...}, or NO_BOX."""
    start = text.rfind("\\boxed{") + len("\\boxed{")
    if start < len("\\boxed{"):
        return NO_BOX
    depth = 1
    for brace in _BRACE.finditer(text, start):
        depth += 1 if brace.group() == "{" else -1
        if not depth:
            return text[start : brace.start()].strip()
    return NO_BOX


def is_same(part: str, wanted: str) -> bool:
    """True if two expressions, as `parse` reads them, have the same value."""
    found, expected = parse(part), parse(wanted)
    if found is None or expected is None:
        return False
    return numeric.is_same_value(found, expected)


def is_equal_mathruler(
    answer: str, gold: str, is_same_value: Callable[[str, str], bool] = is_same
) -> bool:
    """True if mathruler's grade_answer accepts the answer.

    Integers must be written as integers and fractions reduced; other values may be written in any
    form. `is_same_value` compares two expressions, the only step that is more than strings.
    """
    if _like_math(answer) == _like_math(gold):
        return True
    given, wanted = _normal(answer), _normal(gold)
    if given == wanted:
        return True
    if not given:
        return False
    parts, wanted_parts = _elements(given), _elements(wanted)
    if len(wanted_parts) > 1 and (given[0], given[-1]) != (wanted[0], wanted[-1]):
        return False
    if len(parts) != len(wanted_parts) or not parts:
        return False
    return all(_accepts(*pair, is_same_value) for pair in zip(parts, wanted_parts, strict=True))


def _accepts(part: str, wanted: str, is_same_value: Callable[[str, str], bool]) -> bool:
    if _FRACTION.fullmatch(part) and _FRACTION.fullmatch(wanted):
        return part == wanted
    if _is_whole(part) != _is_whole(wanted):
        return False
    unnamed = (part + wanted).replace("sqrt", "").replace("frac", "")
    if len({*filter(str.isalpha, unnamed)}) > MAX_LETTERS:
        return False
    return _POWERS.search(f"({wanted})-({part})") is None and is_same_value(part, wanted)


def _elements(text: str) -> list[str]:
    """Return the elements of a point or an interval, else the text itself."""
    text = _THOUSANDS.sub("", text)
    inner = text[1:-1]
    is_bracketed = len(text) > 2 and text[0] in BRACKETS and text[-1] in BRACKETS
    if is_bracketed and not any(bracket in inner for bracket in BRACKETS):
        return [each.strip() for each in inner.split(",")]
    return [text] if text else []


def _is_whole(text: str) -> bool:
    try:
        value = float(_THOUSANDS.sub("", text))
        return abs(value - round(value)) <= 1e-7
    except (ValueError, OverflowError):
        return False


def _like_math(text: str) -> str:
    """Normalise an answer as the grader of MATH does; where that fails, change nothing."""
    text = text.strip()
    enclosed = _TEXT.fullmatch(text)
    text = enclosed.group(1).strip() if enclosed else text
    normal = _stripped(text)
    return text if normal is None else normal


_SPELLINGS = (("\n", ""), ("\\!", ""), ("\\\\", "\\"), ("tfrac", "frac"), ("dfrac", "frac"))
_REMOVED = ("\\left", "\\right", "^{\\circ}", "^\\circ", "\\$")


def _stripped(text: str) -> str | None:
    """None where the grader of MATH fails: a root or fraction of nothing, two units."""
    for before, after in (*_SPELLINGS, *((each, "") for each in _REMOVED)):
        text = text.replace(before, after)
    value, *units = text.split("\\text{ ")
    if len(units) > 1:
        return None
    text = value.replace("\\%", "").replace("%", "").replace(" .", " 0.").replace("{.", "{0.")
    text = f"0{text}" if text.startswith(".") else text
    sides = text.split("=")
    text = sides[1] if len(sides) == 2 and len(sides[0]) <= 2 else text
    head, *roots = text.split("\\sqrt")
    if not all(roots):
        return None
    roots = [root if root[0] == "{" else f"{{{root[0]}}}{root[1:]}" for root in roots]
    text = "\\sqrt".join([head, *roots]).replace(" ", "")
    if not all(text.split("\\frac")[1:]):
        return None
    text = full_fractions(text)
    if text == "0.5":
        return "\\frac{1}{2}"
    return plain_fraction(text) or text


def _normal(text: str) -> str:
    """Return the string that mathruler compares after MATH's normalisation, and then parses."""
    enclosed = _TEXT.fullmatch(text)
    text = enclosed.group(1) if enclosed else text
    text = re.sub(r"\\?[$%]", "", text).replace(" or ", " , ").replace(" and ", " , ")
    for magnitude, zeros in (("million", 6), ("billion", 9), ("trillion", 12)):
        text = text.replace(magnitude, f"*10^{zeros}")
    for unit in _UNITS:
        text = unit.sub("", text)
    text = re.sub(r"\^ *\\circ", "", text)
    text = text[1:-1] if text.startswith("{") and text.endswith("}") else text
    text = re.sub(r",\\! *", "", text)
    text = _as_integer(text)
    if "\\" in text:
        text = from_latex(text)
    text = re.sub(r"- *", "-", text)
    text = re.sub(r"([0-9]) +([0-9])", r"\1+\2", text)  # mixed numbers
    text = re.sub(r"[ {}]", "", text).lower()
    return _as_integer(text.replace(",", "")) if _is_whole(text) else text


def _as_integer(text: str) -> str:
    """Write a number that is whole, or nearly, without decimals."""
    try:
        value = float(text)
        return str(round(value)) if abs(value - round(value)) <= 1e-7 else text
    except (ValueError, OverflowError):
        return text


_MACRO = re.compile(r"\\(?:([A-Za-z]+)\*?\s*|(.)|$)", re.DOTALL)
_SYMBOLS = dict(
    pair.split("=")
    for pair in """
    alpha=α beta=β gamma=γ delta=δ epsilon=ϵ varepsilon=ε zeta=ζ eta=η theta=θ kappa=κ lambda=λ mu=μ
    nu=ν xi=ξ pi=π rho=ρ sigma=σ tau=τ phi=ϕ varphi=φ chi=χ psi=ψ omega=ω Gamma=Γ Delta=Δ Theta=Θ
    Lambda=Λ Pi=Π Sigma=Σ Phi=Φ Psi=Ψ Omega=Ω infty=∞ cup=∪ cap=∩ times=× cdot=· div=÷ pm=± mp=∓
    circ=∘ textdegree=° angle=∠ measuredangle=∡ le=≤ leq=≤ ge=≥ geq=≥ leqslant=⩽
    geqslant=⩾ neq=≠ approx=≈ equiv=≡ in=∈
    notin=∉ to=→ rightarrow=→ leftarrow=← Rightarrow=⇒ perp=⊥ parallel=∥ cong=≅ sim=∼ prime=' mid=|
    vert=| lvert=| rvert=| dots=… ldots=… cdots=⋯ emptyset=∅ varnothing=∅ square=□ star=⋆ bullet=∙
    lfloor=⌊ rfloor=⌋ lceil=⌈ rceil=⌉ langle=⟨ rangle=⟩ subset=⊂ subseteq=⊆ setminus=∖ forall=∀
    exists=∃ wedge=∧ vee=∨ therefore=∴ because=∵ propto=∝ partial=∂ nabla=∇ sin=sin cos=cos tan=tan
    log=log ln=ln exp=exp max=max min=min lim=lim arcsin=arcsin arccos=arccos arctan=arctan
    """.split()
) | {"quad": "  ", "qquad": "    ", "lbrace": "{", "rbrace": "}"}
_ACCENTS = {"bar": "\u0305", "hat": "\u0302", "vec": "\u20d7"}  # of a letter; others are dropped
_WORDS = str.maketrans({"√": "sqrt", "π": "pi", "∞": "inf", "∪": "U", "·": "*", "×": "*"})
_CHARACTERS = {**dict.fromkeys(" ,;:/", " "), **dict.fromkeys("!()[]", ""), "\\": "\n"}
# with their next argument; so matrices are compared as the texts of their entries
_DROPPED = frozenset("mbox hspace vspace color textcolor begin end".split())


def from_latex(text: str) -> str:
    """Write LaTeX as plain text: fractions as a/b, roots as sqrt(a), groups without braces."""
    text = text.replace("tfrac", "frac").replace("dfrac", "frac").replace("\\frac", " \\frac")
    return _Latex(text).until_end().translate(_WORDS).strip()


class _Latex:
    def __init__(self, text: str) -> None:
        self.text = text
        self.position = 0
        self.depth = 0

    def until_end(self, closing: str = "") -> str:
        """The text up to the closing brace or the end."""
        pieces = []
        self.depth += 1
        while self.position < len(self.text):
            if self.text[self.position] == closing:
                self.position += 1
                break
            pieces.append(self.item())
        self.depth -= 1
        return "".join(pieces)

    def item(self) -> str:
        character = self.text[self.position]
        if character == "\\":
            return self.macro()
        self.position += 1
        if character == "{" and self.depth < MAX_DEPTH:
            return self.until_end("}")
        return {"{": "", "}": "", "~": "\xa0"}.get(character, character)

    def macro(self) -> str:
        match = _MACRO.match(self.text, self.position)
        assert match is not None
        self.position = match.end()
        name, character = match.groups()
        if name is None:
            if character == "\\":  # the space after a row
                self.skip_option()
            return _CHARACTERS.get(character or "\\", character or "")
        if name == "frac":
            above, below = self.argument(), self.argument()
            return f"{above}/{below}"
        if name == "sqrt":
            self.skip_option()  # mathruler drops the index of a root
            return f"sqrt({self.argument()})"
        if name in _ACCENTS:
            return self.argument() + _ACCENTS[name]
        if name in _DROPPED:
            self.argument()
        return _SYMBOLS.get(name, "")

    def skip_option(self) -> None:
        if self.text.startswith("[", self.position):
            self.position = self.text.find("]", self.position) + 1 or len(self.text)

    def argument(self) -> str:
        while self.text[self.position : self.position + 1].isspace():
            self.position += 1
        if self.position == len(self.text) or self.depth > MAX_DEPTH:
            return ""
        self.depth += 1
        found = self.item()
        self.depth -= 1
        return found


_TOKEN = re.compile(
    r"(?P<number>[0-9](?:_?[0-9])*(?:\.[0-9]*)?(?:e[+-]?[0-9]{1,3}(?![0-9]))?|\.[0-9]+)"
    r"|(?P<word>[^\W\d_]\w*)|(?P<sign>.)",
    re.DOTALL,
)
_IN_WORD = re.compile(r"[0-9]+|.", re.DOTALL)
_PADDED = re.compile(r"0+[1-9][0-9]*")  # to Python's tokenizer, 012 is 0 times 12
_FUNCTIONS = ("sqrt", "ln")
_NAMES = ("mu", "nu", "xi")  # of one letter, as pi is
_MEANT_OTHERWISE = frozenset("re im id li oo ff rf nan all".split())  # names in sympy or Python


class _NoExpressionError(ValueError):
    pass


def parse(text: str) -> Node | None:
    """Parse a normalised answer with Python's precedence and implicit products, else None.

    A word is a product of its letters, i and e among them, except for pi and for functions.
    """
    try:
        parser = _Parser(_tokens(text.replace("**", "^")))
        node = parser.sum()
        return node if parser.peek() == _END and not is_too_high(node) else None
    except ValueError:  # no expression, or a number of thousands of digits
        return None


_Token = tuple[str, str]
_END: _Token = ("end", "")


def _tokens(text: str) -> list[_Token]:
    tokens: list[_Token] = []
    for match in _TOKEN.finditer(text):
        kind, value = match.lastgroup or "", match.group()
        is_called = value in _FUNCTIONS and text.startswith("(", match.end())
        if kind != "word" or is_called or value == "pi":
            tokens.append((kind, value))
            continue
        if value in _MEANT_OTHERWISE:
            raise _NoExpressionError
        if value in _NAMES:
            tokens.append(("letter", value))
            continue
        for part in _IN_WORD.findall(value):
            tokens.append(("number" if part[0] in DIGITS else "letter", part))
    return tokens


class _Parser:
    def __init__(self, tokens: list[_Token]) -> None:
        self.tokens = tokens
        self.position = 0
        self.depth = 0

    def peek(self) -> _Token:
        return self.tokens[self.position] if self.position < len(self.tokens) else _END

    def accept(self, *signs: str) -> str | None:
        kind, value = self.peek()
        if kind == "sign" and value in signs:
            self.position += 1
            return value
        return None

    def sum(self) -> Node:
        node = self.product()
        while sign := self.accept("+", "-"):
            node = ("add" if sign == "+" else "sub", node, self.product())
        return node

    def product(self) -> Node:
        node = self.signed()
        while True:
            if operator := self.accept("*", "/"):
                node = ("mul" if operator == "*" else "div", node, self.signed())
            elif self.peek()[0] in ("number", "word", "letter") or self.peek()[1] == "(":
                node = ("mul", node, self.power())
            else:
                return node

    def signed(self) -> Node:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise _NoExpressionError
        sign = self.accept("+", "-")
        node = self.power() if sign is None else self.signed()
        self.depth -= 1
        return ("neg", node) if sign == "-" else node

    def power(self) -> Node:
        node = self.atom()
        while self.accept("!"):
            node = ("call", "factorial", node)
        return ("pow", node, self.signed()) if self.accept("^") else node

    def atom(self) -> Node:
        kind, value = self.peek()
        self.position += 1
        if kind == "number":
            value = "0" if _PADDED.fullmatch(value) else value.replace("_", "")
            return ("num", Fraction(value))
        if kind == "letter":
            return ("var", value)
        if value == "pi":
            return ("const", "pi")
        if kind == "word":
            node = self.atom()  # in parentheses
            is_root = value == "sqrt"
            return ("call", "root", node, ("num", Fraction(2))) if is_root else ("call", "ln", node)
        if value != "(" or kind != "sign":
            raise _NoExpressionError
        node = self.sum()
        if self.accept(")") is None:
            raise _NoExpressionError
        return node
