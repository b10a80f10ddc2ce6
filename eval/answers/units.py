"""Units, counted things and magnitudes that follow a number."""

from __future__ import annotations

import re
from collections import Counter
from fractions import Fraction
from functools import lru_cache

from eval.answers.latex import FUNCTIONS

_ONES = """zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen
fifteen sixteen seventeen eighteen nineteen""".split()
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()
NUMBER_WORDS = {
    **{word: value for value, word in enumerate(_ONES)},
    **{word: 10 * value for value, word in enumerate(_TENS, 2)},
    **{
        f"{ten}{joint}{one}": 10 * tens + ones
        for tens, ten in enumerate(_TENS, 2)
        for ones, one in enumerate(_ONES[1:10], 1)
        for joint in "- "
    },
}

_SPELLINGS = {
    "mm": "millimeter millimeters millimetre millimetres mm 毫米",
    "cm": "centimeter centimeters centimetre centimetres cm 厘米",
    "m": "meter meters metre metres m 米",
    "km": "kilometer kilometers kilometre kilometres km kms 千米 公里",
    "in": "inch inches in",
    "ft": "foot feet ft",
    "yd": "yard yards yd yds",
    "mi": "mile miles mi",
    "s": "second seconds sec secs s 秒",
    "min": "minute minutes min mins 分钟",
    "h": "hour hours hr hrs h 小时",
    "day": "day days 天",
    "week": "week weeks",
    "month": "month months",
    "year": "year years yr yrs 年",
    "g": "gram grams gm gms g 克",
    "kg": "kilogram kilograms kg kgs 千克 公斤",
    "mg": "milligram milligrams mg",
    "lb": "pound pounds lb lbs",
    "oz": "ounce ounces oz",
    "l": "liter liters litre litres l 升",
    "ml": "milliliter milliliters ml 毫升",
    "gal": "gallon gallons gal",
    "dollar": "dollar dollars usd",
    "cent": "cent cents",
    "euro": "euro euros",
    "yuan": "yuan rmb 元",
    "K": "kelvin kelvins",
    "J": "joule joules",
    "N": "newton newtons",
    "W": "watt watts",
    "hz": "hertz hz",
    "pa": "pascal pascals",
    "volt": "volt volts",
    "ohm": "ohm ohms",
    "erg": "erg ergs",
    "mol": "mole moles mol",
    "celsius": "celsius c",
    "fahrenheit": "fahrenheit f",
    "radian": "radian radians rad",
    "unit": "unit units",
    "percent": "percent",
    "degree": "degree degrees 度",
}
_CANONICAL = {
    spelling: unit for unit, spellings in _SPELLINGS.items() for spelling in spellings.split()
}
_RATES = {"mph": "mi / h", "kph": "km / h", "kmh": "km / h"}
_MONEY = frozenset("dollar cent euro yuan".split())
_SCALES = frozenset("celsius fahrenheit K".split())
_POWERS = {"square": 2, "sq": 2, "cubic": 3, "cu": 3, "平方": 2, "立方": 3}
_MAGNITUDES = {
    "dozen": 12,
    "hundred": 10**2,
    "thousand": 10**3,
    "million": 10**6,
    "billion": 10**9,
    "trillion": 10**12,
    "万": 10**4,
    "亿": 10**8,
}
# A number is no number with a unit if one of these words follows it anywhere,
_MEANINGFUL = frozenset(
    """or and not no than least most if when except through between below under over plus minus
    base am pm o'clock infinite undefined does none where is are unless half remainder negative
    以上 以下""".split()
    + [word for word in [*NUMBER_WORDS, *_MAGNITUDES] if word not in ("one", "dozen")]
)
# or follows it directly.
_MEANINGFUL_FIRST = frozenset("to all any with squared cubed factorial".split())
_PARTS = {
    "half": 2,
    "third": 3,
    "quarter": 4,
    **dict(zip("fourth fifth sixth seventh eighth ninth tenth".split(), range(4, 11), strict=True)),
    "hundredth": 100,
    "thousandth": 1000,
}
_PARTS |= {"halves": 2} | {f"{word}s": parts for word, parts in _PARTS.items()}
_WRITTEN = sorted((word for word in [*_CANONICAL, *_RATES] if word.isascii()), key=len)[::-1]
# Units written without \text; single letters are variables.
_PLAIN_UNIT = re.compile(
    r"(?i)(?<=[\d)}⟧ ])\s*("
    + "|".join(w for w in _WRITTEN if len(w) > 1 and w not in ("in", "mi", "sec", "min"))
    + r"|units?|square|sq|cubic|ways?|points?|people|students?)(?![A-Za-z])"
)
_PLAIN_WORDS = re.compile(r"(-?[\d.,/ ]+) \(?([A-Za-z]{2,})((?:[ ./'-]+[A-Za-z]+)*)\.?\)?")
# A speed or density in plain text, only after a number and a space: a/b stays mathematics.
_PLAIN_QUOTIENT = re.compile(
    r"(?<=[\d}])(?: ((?:(?:mm|cm|m|km|ft|ergs?)/s|(?:km|mi|miles)/(?:h|hr|hour)|g/(?:cm|mol)|kg/m)"
    r"(?:\^\{?[23]\}?)?)|\s*(/ ?(?:hour|hr|day|week|month|year|pound|lb|kg|ounce|oz|gallon)))$"
)
# A unit above another one: \frac{\text{miles}}{\text{hour}}.
_FRACTION = re.compile(
    r'(?<=[\d)}⟧])\s*\\frac\s*\{\s*("[^"{}]+")\s*\}\s*\{\s*"?([A-Za-z]+)"?\s*(\^\s*\{?\d\}?)?\s*\}$'
)
_CHINESE = re.compile(r"(?<=[\d)}%])\s*([\u4e00-\u9fff]+(?:/[\u4e00-\u9fff]+)?)$")
_QUOTED = re.compile(r'\s*([*/]?)\s*\(?\s*"([^"]*)"\s*\)?\s*(?:\^\s*\{?\s*(-?\d)\s*\}?)?\s*$')
_WORD = re.compile(r"平方|立方|[万亿]|[\u4e00-\u9fff]+|[a-z']+(?:\s*\^[\s{]*-?\d+|\d(?!\d))?|/|\d+")


def split_unit(text: str) -> tuple[str, str, Fraction]:
    """Split a plain answer into (expression, unit, factor: 10**6 for "million")."""
    text = _with_quotes(text)
    unit: list[str] = []
    factor = Fraction(1)
    while (match := _QUOTED.search(text)) is not None:
        operator, quoted, power = match.groups()
        words, magnitude = _words(quoted), Fraction(1)
        while words and words[0] in _MAGNITUDES:
            magnitude *= _MAGNITUDES[words.pop(0)]
        expression = text[: match.start()]
        if not expression.strip() or not quoted.strip() or _is_meaningful(words):
            break
        factor *= magnitude
        if words and power:
            words[-1] += f"^{power}"
        unit[:0] = ["/", *words] if operator == "/" else words
        text = expression
    return text.strip(), " ".join(unit), factor


def _with_quotes(text: str) -> str:
    """Quote a unit written without \\text."""
    text = _CHINESE.sub(r' "\1"', text)
    text = _FRACTION.sub(r' \1 / "\2" \3', text)
    text = _PLAIN_QUOTIENT.sub(lambda match: f' "{match.group(1) or match.group(2)}"', text)
    if '"' in text:
        return text
    match = _PLAIN_WORDS.fullmatch(text)
    if match and (len(match.group(2)) > 2 or match.group(2) in _CANONICAL):
        number, first, further = match.groups()
        return text if first in FUNCTIONS else f'{number} "{first}{further}"'
    match = _PLAIN_UNIT.search(text)
    return f'{text[: match.start()]} "{text[match.start() :].strip()}"' if match else text


def _words(text: str) -> list[str]:
    """Return the words of a unit with their powers: "cm^2", "/", "s"."""
    text = re.sub(r"\bin (?:all|total)\b|\baltogether\b", " ", text.lower().replace("-", " "))
    return [re.sub(r"[\s{]*\^[\s{]*|(?<=[a-z])(?=\d)", "^", word) for word in _WORD.findall(text)]


def _is_meaningful(words: list[str]) -> bool:
    """True if the words change a number's value."""
    return bool(
        _MEANINGFUL & set(words)
        or any(word.isdigit() for word in words)
        or (words and (words[0] in _MEANINGFUL_FIRST or words[0] in _PARTS))
    )


def digits(text: str) -> str | None:
    """Return `five apples` as `5 "apples"` and `two thirds` as `2/3`; None without a number."""
    words = text.lower().replace("-", " ").split() if text[:1].isalpha() else []
    if words and words[0] in ("a", "an", "half"):
        rest = words[1:] if words[0] != "half" else words
        words = ["one", *rest] if rest and rest[0] in (*_PARTS, "dozen") else rest[:0]
    length = next((length for length in (2, 1) if " ".join(words[:length]) in NUMBER_WORDS), 0)
    if not length:
        return None
    value, words = str(NUMBER_WORDS[" ".join(words[:length])]), words[length:]
    if words and words[0] in _PARTS:
        value += f"/{_PARTS[words.pop(0)]}"
    return f'{value} "{" ".join(words)}"' if words else value


_QUANTITIES = re.compile(r"\s*(?:\d+(?:\.\d+)?\s*[A-Za-z]{2,}(?:[\s,.]+(?:and\s+)?|$)){2,}")


def quantities(plain: str) -> list[tuple[Fraction, str | None]]:
    """Return the parts of `2 hours and 30 minutes`, in canonical units, or an empty list."""
    text = plain.replace('"', " ") if plain[:1].isdigit() else ""
    if not _QUANTITIES.fullmatch(text):
        return []
    parts = re.findall(r"(\d+(?:\.\d+)?)\s*([A-Za-z]+)", text)
    return [(Fraction(number), _CANONICAL.get(unit.lower())) for number, unit in parts]


_PER = re.compile(r"/|\b(?:per|an?|each|every)\b")


@lru_cache(maxsize=4096)
def _factors(unit: str) -> tuple[dict[str, int], dict[str, int]]:
    """Return the powers of a unit's factors above and below the line; unknown words are dropped."""
    above, *below = _PER.split(" ".join(_RATES.get(word, word) for word in unit.split()))
    powers = _powers(above)
    for part in below:
        powers.subtract(_powers(part))
    if _SCALES & set(powers):
        del powers["degree"]
    return +powers, -powers


def _powers(product: str) -> Counter[str]:
    powers: Counter[str] = Counter()
    power, last = 1, ""
    for index, word in enumerate(product.split()):
        name, _, exponent = word.partition("^")
        if name in _POWERS:
            power = _POWERS[name]
        elif last and name in ("squared", "cubed"):
            powers[last] *= 2 if name == "squared" else 3
        elif name in _CANONICAL and (name != "in" or index == 0 or power > 1):
            last = _CANONICAL[name]
            powers[last] += power * int(exponent or 1)
            power = 1
        elif last:
            break  # "feet above the ground"
    return powers


def is_unit_conflict(left: str, right: str) -> bool:
    """True if both are units of measure and differ; a price may omit what it is for."""
    (above, below), (other_above, other_below) = _factors(left), _factors(right)
    if above and other_above:
        if _is_different(above, other_above):
            return True
        if not below or not other_below:
            return below != other_below and not _MONEY & set(above)
    return bool(below and other_below and below != other_below)


def _is_different(left: dict[str, int], right: dict[str, int]) -> bool:
    """True unless equal; "units" equals any unit, of the same power if both have one."""
    if "unit" in left or "unit" in right:
        powers = {*left.values(), *right.values()} - {1}
        return len(powers) > 1
    if "degree" in {*left, *right} and _SCALES & {*left, *right}:
        return False
    return left != right
