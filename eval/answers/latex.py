"""Normalises answers as models type them (LaTeX, Markdown, plain text, Unicode, Chinese) to one
plain notation.

In plain notation every operator is one character (`≤ ∪ ∈ ± ∞ ° *`), set braces are `⦃⦄`, matrices
`⟦a&b⏎c&d⟧`, text is quoted, and only meaningful commands remain (`\\frac \\sqrt \\pi`). Nothing is
computed here.
"""

from __future__ import annotations

import re
import unicodedata

MAX_ANSWER_CHARS = 4000

_SUPERSCRIPTS = {ord(c): p for c, p in zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁽⁾ⁿⁱ", "0123456789+-()ni", strict=True)}
_SUBSCRIPTS = {ord(c): p for c, p in zip("₀₁₂₃₄₅₆₇₈₉", "0123456789", strict=True)}
_VULGAR = re.compile("[¼½¾⅐-⅞]")
# Characters by what they are read as; the marks of plain notation itself are dropped.
_CHARACTERS = {
    "-": "−–—‐﹣",
    "*": "×·⋅∙∗",
    "/": "÷∕⁄",
    "≤": "≦⩽",
    "≥": "≧⩾",
    ",": "，、",
    ";": "；",
    ":": "：∶",
    ".": "。．",
    "(": "（",
    ")": "）",
    "[": "【",
    "]": "】",
    "⦃": "｛",
    "⦄": "｝",
    "⟨": "〈",
    "⟩": "〉",
    "'": "‘’′",
    "''": "″",
    "°": "º˚℃",
    "|": "∣",
    "~": "∼〜",
    "≈": "≃≅",
    "∅": "Ø",
    "\\sqrt ": "√",
    "": '“”"\u200b\ufeff\x00�⦃⦄⟦⟧⏎€£¥￥',
}
_GREEK = {
    "αβγδεζηθ": "alpha beta gamma delta epsilon zeta eta theta",
    "ικλμνξπρ": "iota kappa lambda mu nu xi pi rho",
    "στυφχψω": "sigma tau upsilon phi chi psi omega",
    "ΓΔΘΛΞΠΣΦΨΩ": "Gamma Delta Theta Lambda Xi Pi Sigma Phi Psi Omega",
}
_UNICODE = {ord(c): plain for plain, characters in _CHARACTERS.items() for c in characters} | {
    ord(letter): f"\\{name} "
    for letters, names in _GREEK.items()
    for letter, name in zip(letters, names.split(), strict=True)
}

# Commands by what they are replaced with: one character, a shorter command, or nothing.
_REPLACEMENTS = {
    "≤": "le leq leqslant leqq",
    "≥": "ge geq geqslant geqq",
    "<": "lt",
    ">": "gt",
    "≠": "ne neq",
    "≈": "approx simeq cong",
    "≡": "equiv",
    "∪": "cup bigcup",
    "∩": "cap",
    "∈": "in",
    "∖": "setminus backslash smallsetminus",
    "∅": "emptyset varnothing",
    "∞": "infty",
    "±": "pm",
    "∓": "mp",
    "*": "times cdot ast centerdot bullet star",
    "/": "div",
    "|": "mid vert lvert rvert lVert rVert Vert |",
    "⦃": "lbrace {",
    "⦄": "rbrace }",
    "⟨": "langle",
    "⟩": "rangle",
    "⌊": "lfloor",
    "⌋": "rfloor",
    "⌈": "lceil",
    "⌉": "rceil",
    "[": "lbrack",
    "]": "rbrack",
    "…": "ldots dots cdots dotsc dotsb",
    "°": "degree textdegree",
    "'": "prime",
    ":": "colon",
    "→": "to rightarrow Rightarrow implies",
    ' "or" ': "lor vee",
    ' "and" ': "land wedge",
    "and": "&",
    "mod": "bmod",
    "e": "euler",
    "%": "%",
    "_": "_",
    "\\frac": "dfrac tfrac cfrac",
    "\\binom": "dbinom tbinom",
    "\\phi": "varphi",
    "\\epsilon": "varepsilon",
    "\\theta": "vartheta",
    "\\tan": "tg",
    "\\cot": "ctg",
    "\\Re": "Re",
    " ": ", ; : > \\ quad qquad thinspace medspace newline",
    "": """$ # ( ) [ ] ! ' / pounds euro textdollar displaystyle textstyle limits left right middle
    mathstrut nonumber hfill hline rm bf it big Big bigg Bigg bigl bigr Bigl Bigr biggl biggr Biggl
    Biggr tiny small normalsize large Large LARGE huge Huge""",
}
_COMMANDS = {name: plain for plain, names in _REPLACEMENTS.items() for name in names.split()}
_COMMANDS |= {" ": " ", "\n": " "}
_COMMAND = re.compile(r"\\([A-Za-z]+|[^A-Za-z0-9])", re.DOTALL)
_TEXT = frozenset(
    "text textbf textit textrm textsf texttt textnormal mbox hbox emph textup textsc".split()
)
_STYLE = frozenset(
    """mathbf boldsymbol bm mathit mathsf mathcal mathfrak mathscr mathbb vec overrightarrow hat
    widehat boxed fbox tilde underline framebox ensuremath mathop pmb""".split()
)
_UPRIGHT = frozenset(("mathrm", "operatorname"))
_DROPPED = frozenset("phantom hspace vspace label tag hphantom vphantom color textcolor".split())
FUNCTIONS = frozenset(
    """sin cos tan cot sec csc arcsin arccos arctan arccot sinh cosh tanh ln log lg exp max min gcd
    lcm det sgn""".split()
)
_WRITTEN_FUNCTIONS = FUNCTIONS - {"min", "sec"}  # in \text, these are minutes and seconds
_NUMBER_SETS = {"R": "ℝ", "N": "ℕ", "Z": "ℤ", "Q": "ℚ", "C": "ℂ"}
_ENVIRONMENT = re.compile(
    r"\\(begin|end)\s*\{\s*([a-zA-Z]*matrix|array|aligned|align|cases|gathered|split)\*?\s*\}"
)
_SYSTEM = re.compile(
    r"""(?xs)\\left\s*\\(?:\{|lbrace)\s*\\begin\s*\{(?P<inner>array|aligned)\}
        (?:\s*\{[^{}]*\})?(?P<rows>.*?)
        \\end\s*\{(?P=inner)\}\s*\\right\s*\.
    | \\begin\s*\{(?P<name>[dr]?cases|aligned)\}(?P<lines>.*?)\\end\s*\{(?P=name)\}"""
)
_LINE_BREAK = re.compile(r"\\\\(?:\[[^\]]*\])?(?![A-Za-z])")
_DOUBLED = re.compile(r"\\\\(?=[A-Za-z{}%$!,;|])")
_GROUPED_SPACES = re.compile(r"(?<![\d.\w}])(\d{1,3})((?:(?:\\[,;:! ]|~| |\{ \})\d{3})+)(?![\d\w])")
_RAISED = re.compile(f"[{''.join(map(chr, _SUPERSCRIPTS))}]+")
_LOWERED = re.compile(f"[{''.join(map(chr, _SUBSCRIPTS))}]+")
_FULL_WIDTH = re.compile("[\uff00-\uffef\u3000]")
_UNESCAPED = re.compile(r"(?<!\\)\\[A-Za-z]")
_CHOOSE = re.compile(r"\{?([^{}]*?)\\choose([^{}]*)\}?")
_NEXT_NAME = re.compile(r"(?<=[\w}])\s*\\q?quad\s*(?=[A-Za-z](?:_\{?\w+\}?)?\s*=)")


def _rules(*rules: tuple[str, str]) -> list[tuple[re.Pattern[str], str]]:
    return [(re.compile(pattern), plain) for pattern, plain in rules]


_PUNCTUATION = _rules(
    (r",\s*\\!\s*(?=\d)|\{,\}\s*(?=\d{3})|\{\\,\}(?=\d{3})", ""),  # 10,\!080 10{,}080
    (r"(?<=[\w)])\*\*(?=[\w(])", "^"),
    (r"\\\$|(?<!\\)\$|\*\*|`", " "),
    (r"\{([:=<>])\}", r"\1"),
)
_SYMBOLS = _rules(
    (r"\\(?:left|right|middle)\s*\.", " "),
    (r"\^\s*(\{\s*)?\\(?:circ|degree)(?![A-Za-z])(?(1)\s*\})", "°"),
    (r"\\circ(?![A-Za-z])\s*(?=[,)]|$)|\^\s*°", "°"),
    (r"\^\s*\{?\s*\\(?:text|mathrm)\s*\{o\}\s*\}?", "°"),
    (r"(?<=\d)[\s~]*(?:\\[,;: ])?[\s~]*\\Omega\s*$", r" \\text{ohm}"),
    (r"\\mu *\\(?:mathrm|text)\{[~ ]*(?=[A-Za-z]{1,2} *\})", r"\\text{micro"),
)
_PLAIN_SYMBOLS = _rules(
    (r"(?<=\d)\s*x\s*(?=10\s*\^)", "*"),
    (r"°\s*([CF])(?![A-Za-z])", r'° "\1"'),
    (r'\^\s*\{\s*"(?:st|nd|rd|th)"\s*\}', ""),
    (r"\\(max|min|gcd|lcm)\s*⦃([^⦃⦄]*)⦄", r"\\\1(\2)"),
)
# Combinations and permutations: 5C2, {}_5P_2, A_5^2; with other letters, C_2 is a constant.
_COUNTS = re.compile(r"[-+*/=\d\s(){}!^_CPA]+")
_COUNT = re.compile(
    r"""(?x)(?: (?:\{\s*\})?[\^_]\{?(\d+)\}?\s* | (\d+)(?=[CP]\d) )([CP])_?\{?(\d+)\}?
    | [AP]_\{?(\d+)\}?\s*\^\s*\{?(\d+)\}?"""
)


def _apply(rules: list[tuple[re.Pattern[str], str]], text: str) -> str:
    for pattern, plain in rules:
        text = pattern.sub(plain, text)
    return text


def clean(text: str) -> str:
    """Return the answer in plain notation, or '' if it is too long to parse."""
    if len(text) > MAX_ANSWER_CHARS:
        return ""
    text = "∅" if re.fullmatch(r"\s*\{\s*\}\s*", text) else without_outer_braces(text.strip())
    text = _VULGAR.sub(lambda m: _vulgar(m.group()), text)
    text = _RAISED.sub(lambda m: f"^{{{m.group().translate(_SUPERSCRIPTS)}}}", text)
    text = _LOWERED.sub(lambda m: f"_{{{m.group().translate(_SUBSCRIPTS)}}}", text)
    text = text.translate(_UNICODE)
    text = _FULL_WIDTH.sub(lambda m: unicodedata.normalize("NFKC", m.group()), text)
    if not _UNESCAPED.search(text):
        text = _DOUBLED.sub(r"\\", text)  # some models escape their backslashes
    text = _apply(_PUNCTUATION, text)
    text = _GROUPED_SPACES.sub(lambda m: m.group(1) + re.sub(r"\D", "", m.group(2)), text)
    if "\\begin" in text:
        text = _environments(_SYSTEM.sub(_system, text))
    text = _LINE_BREAK.sub(" ", _NEXT_NAME.sub(", ", text))
    if "\\choose" in text:
        text = _CHOOSE.sub(r"\\binom{\1}{\2}", text)
    text = _words(_apply(_PLAIN_SYMBOLS, _commands(_apply(_SYMBOLS, text))))
    for written, plain in (("<=", "≤"), (">=", "≥"), ("!=", "≠"), ("\n", " ")):
        text = text.replace(written, plain)
    if _COUNTS.fullmatch(text):
        text = _COUNT.sub(_count, text)
    return _trim(text)


def _count(match: re.Match[str]) -> str:
    """Write a number of combinations or permutations as a binomial or with factorials."""
    total, chosen = match[1] or match[2] or match[5], match[4] or match[6]
    is_binomial = match[3] == "C"
    return (
        f"\\binom{{{total}}}{{{chosen}}}"
        if is_binomial
        else f"\\frac{{{total}!}}{{({total}-{chosen})!}}"
    )


def without_outer_braces(text: str) -> str:
    """Strip braces around the whole text."""
    while text.startswith("{"):
        inner, end = _argument(text, 0)
        if end < len(text) or not text.endswith("}"):
            break
        text = inner.strip()
    return text


def _trim(text: str) -> str:
    text = re.sub(r"\s+", " ", text.replace("~", " ")).strip()
    while text and text[-1] in ".,;:":
        text = text[:-1].rstrip()
    while text and text[0] in ",;:=≈":
        text = text[1:].lstrip()
    return text


def _vulgar(character: str) -> str:
    above, _, below = unicodedata.normalize("NFKC", character).partition("⁄")
    return f"\\frac{{{above}}}{{{below}}}"


def _system(match: re.Match[str]) -> str:
    """Write rows of equations as a list, and rows `value & condition` as a set."""
    body = match.group("rows") or match.group("lines")
    rows = [row.strip(" \n,;.") for row in re.split(r"\\\\(?:\[[^\]]*\])?", body)]
    rows = [re.sub(r"&\s*(?=[=<>]|\\[gl]e)", "", row).strip() for row in rows]
    is_list = all(re.match(r"[^=&]+=|$", row) for row in rows)
    if "\\begin" in body or (match.group("name") == "aligned" and not is_list):
        return match.group()
    condition = r"[,;\s]*&\s*(?:\\(?:text|mbox)\s*\{\s*(?:if|for|when)\s*\})?"
    listed = ", ".join(re.sub(condition, " & ", row) for row in rows if row)
    return f"\\{{{listed}\\}}" if "&" in listed else listed


def _environments(text: str) -> str:
    """Write matrices as `⟦a&b⏎c&d⟧` without brackets around an array; drop other alignments."""
    pieces: list[str] = []
    position = 0
    for match in _ENVIRONMENT.finditer(text):
        pieces.append(text[position : match.start()])
        position = match.end()
        name = match.group(2)
        is_matrix = name.endswith("matrix") or name == "array"
        if is_matrix and name[0] not in "vV":
            pieces.append("⟦" if match.group(1) == "begin" else "⟧")
        elif is_matrix:
            pieces.append("|⟦" if match.group(1) == "begin" else "⟧|")
        columns = (
            re.match(r"\s*\{[^{}]*\}", text[position:])
            if match.group(1) == "begin" and name == "array"
            else None
        )
        position += columns.end() if columns else 0
    text = "".join([*pieces, text[position:]])
    if "⟦" in text:
        text = re.sub(r"\\\\(?:\[[^\]]*\])?|\\cr(?![a-z])|\\newline", "⏎", text)
        text = re.sub(r"(?:\\left)?\s*[(\[]\s*⟦([^⟦⟧]*)⟧\s*(?:\\right)?\s*[)\]]", r"⟦\1⟧", text)
        text = re.sub(r"⏎\s*⟧", "⟧", text)
    return text


def _commands(text: str) -> str:
    """Replace commands by characters and quote text, in one pass."""
    pieces: list[str] = []
    position = 0
    while (match := _COMMAND.search(text, position)) is not None:
        name = match.group(1)
        pieces.append(text[position : match.start()])
        position = match.end()
        if name in _TEXT or name in _STYLE or name in _UPRIGHT or name in _DROPPED:
            inner, position = _argument(text, position)
            after_number = re.search(r"[\d\"]\s*$", "".join(pieces[-2:])) is not None
            pieces.append(
                _quoted(inner) if _is_unit(name, inner, after_number) else _styled(name, inner)
            )
        elif name in _COMMANDS:
            pieces.append(_COMMANDS[name])
        else:
            pieces.append(f"\\{name} " if name[0].isalpha() else name)
    return "".join([*pieces, text[position:]])


def _is_unit(name: str, inner: str, after_number: bool) -> bool:
    """True for \\mathrm{~m}, and for \\mathrm{m} after a number."""
    if name != "mathrm":
        return False
    letter = re.sub(r"\\[,; ]|~|\s", "", inner)
    return len(letter) == 1 and letter in "mshgNJWKVALl" and (after_number or letter != inner)


def _argument(text: str, position: int) -> tuple[str, int]:
    """Return (content, position after it) of a braced argument or single character."""
    while position < len(text) and text[position] == " ":
        position += 1
    if position >= len(text):
        return "", position
    if text[position] != "{":
        return text[position], position + 1
    depth = 0
    for brace in re.finditer(r"(?<!\\)[{}]", text[position:]):
        depth += 1 if brace.group() == "{" else -1
        if depth == 0:
            return text[position + 1 : position + brace.start()], position + brace.end()
    return text[position + 1 :], len(text)


def _styled(name: str, inner: str) -> str:
    if name in _DROPPED:
        return ""
    if name == "mathbb" and inner in _NUMBER_SETS:
        return _NUMBER_SETS[inner]
    if name in _STYLE:
        if name in ("mathbf", "boldsymbol") and re.fullmatch(r"\(?[A-Z]\)?|[A-Za-z ]{4,}", inner):
            return _quoted(inner)
        return _commands(inner)
    if name in _UPRIGHT:
        word = re.sub(r"\\[,; ]|~|\s", " ", inner).strip()
        if word in FUNCTIONS:
            return f"\\{word} "
        return word if len(word) < 2 or not re.fullmatch(r"[A-Za-z. /]+", word) else _quoted(word)
    if inner.strip().lower() in _WRITTEN_FUNCTIONS:
        return f"\\{inner.strip().lower()} "
    return _quoted(_commands(inner))


def _quoted(inner: str) -> str:
    words = re.sub(r"\s+", " ", inner.replace('"', "").replace("~", " ")).strip()
    if re.fullmatch(r"(?i)per ?cent(age)?|pct\.?|%", words):
        return "%"
    if re.fullmatch(r"(?i)degrees?|deg|°", words):
        return "°"
    return f' "{words}" ' if words else " "


_PLAIN_FUNCTION = re.compile(
    r"(?<![A-Za-z\\])(sqrt|pi|infinity|infty|inf|oo|theta|alpha|beta|phi|omega|lambda)(?![a-zA-Z])"
)
_PLAIN = {"infinity": "∞", "infty": "∞", "inf": "∞", "oo": "∞"}
_JOINING = re.compile(r'(?<![A-Za-z\\"])(and|or)(?![a-z"])|([或和与及]|以及)')


def _words(text: str) -> str:
    """Translate unquoted words: sqrt, pi and infinity are mathematics, and/or join answers."""
    parts = text.split('"')
    for index in range(0, len(parts), 2):
        part = _PLAIN_FUNCTION.sub(
            lambda m: _PLAIN.get(m.group(1), f"\\{m.group(1)} "), parts[index]
        )
        part = re.sub(r"(?i)(?<=[\d)}])\s*(per ?cent|pct)\b", "%", part)
        part = re.sub(r"(?i)(?<=[\d)}])\s*(degrees?|deg|度)(?![a-z])", "°", part)
        parts[index] = _JOINING.sub(
            lambda m: f' "{"or" if m.group() in ("或", "or") else "and"}" ', part
        )
    return '"'.join(parts)
