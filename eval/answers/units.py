"""Units, counted things and magnitudes that follow a number."""

from __future__ import annotations

import re
from fractions import Fraction

_SPELLINGS = {
    "mm": "millimeter millimeters millimetre millimetres mm",
    "cm": "centimeter centimeters centimetre centimetres cm",
    "m": "meter meters metre metres m",
    "km": "kilometer kilometers kilometre kilometres km kms",
    "in": "inch inches in",
    "ft": "foot feet ft",
    "yd": "yard yards yd yds",
    "mi": "mile miles mi",
    "s": "second seconds sec secs s",
    "min": "minute minutes min mins",
    "h": "hour hours hr hrs h",
    "day": "day days",
    "week": "week weeks",
    "month": "month months",
    "year": "year years yr yrs",
    "g": "gram grams gm gms g",
    "kg": "kilogram kilograms kg kgs",
    "mg": "milligram milligrams mg",
    "lb": "pound pounds lb lbs",
    "oz": "ounce ounces oz",
    "l": "liter liters litre litres l",
    "ml": "milliliter milliliters ml",
    "gal": "gallon gallons gal",
    "dollar": "dollar dollars usd",
    "cent": "cent cents",
    "mph": "mph",
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
    "degree": "degree degrees",
}
_CANONICAL = {
    spelling: unit for unit, spellings in _SPELLINGS.items() for spelling in spellings.split()
}
_POWERS = {"square": "2", "sq": "2", "squared": "2", "cubic": "3", "cubed": "3", "cu": "3"}
_MAGNITUDES = {
    "dozen": 12,
    "hundred": 10**2,
    "thousand": 10**3,
    "million": 10**6,
    "billion": 10**9,
    "trillion": 10**12,
}
# A number followed by one of these words is not a number with a unit.
_MEANINGFUL = frozenset(
    """or and not no to more less least most than if when except only through between from below
    above under over times base plus minus per cent am pm o'clock infinite undefined does none all
    real where with for every is are any unless each half quarter third""".split()
)
# Units written without \text; single letters are variables.
_PLAIN_UNIT = re.compile(
    r"(?i)(?<=[\d)}⟧ ])\s*("
    + "|".join(
        sorted(
            (w for w in _CANONICAL if len(w) > 1 and w not in ("in", "mi", "sec", "min")),
            key=len,
            reverse=True,
        )
    )
    + r"|units?|square|sq|cubic|ways?|points?|people|students?)(?![A-Za-z])"
)
_CHINESE = re.compile(r"(?<=[\d)}%])\s*[\u4e00-\u9fff]+$")


# A speed or density in plain text, only after a number and a space: a/b stays mathematics.
_PLAIN_QUOTIENT = re.compile(
    r"(?<=[\d}]) "
    r"((?:(?:mm|cm|m|km|ft|ergs?)/s|(?:km|mi|miles)/(?:h|hr|hour)|g/(?:cm|mol)|kg/m)(?:\^\{?[23]\}?)?)$"
)


def split_unit(text: str) -> tuple[str, str, Fraction]:
    """Split a plain answer into (expression, unit, factor: 10**6 for "million")."""
    text = _PLAIN_QUOTIENT.sub(r' "\1"', _CHINESE.sub("", text))
    unit: list[str] = []
    factor = Fraction(1)
    plain = _PLAIN_UNIT.search(text)
    if plain and '"' not in text:
        text = f'{text[: plain.start()]} "{text[plain.start() :].strip()}"'
    elif re.fullmatch(r"-?[\d.,/ ]+ [A-Za-z][A-Za-z .]{2,}", text):
        number = re.match(r"-?[\d.,/ ]+", text)
        assert number is not None
        text = f'{number.group()} "{text[number.end() :]}"'
    while (
        match := re.search(
            r'\s*(?:\*\s*)?\(?\s*"([^"]*)"\s*\)?\s*(?:\^\s*\{?\s*(-?\d)\s*\}?)?(\s*/)?\s*$', text
        )
    ) is not None:
        words = re.sub(r"[()^.,*{}\\]", " ", match.group(1).lower()).split()
        if (
            not match.group(1).strip()
            or not text[: match.start()].strip()
            or _MEANINGFUL & set(words)
        ):
            break
        if words and words[0] in _MAGNITUDES:
            factor *= _MAGNITUDES[words.pop(0)]
        unit[:0] = [*words, *([f"^{match.group(2)}"] if match.group(2) else [])]
        text = text[: match.start()]
    return text.strip(), " ".join(unit), factor


def canonical_unit(words: str) -> tuple[str, str] | None:
    """Return (unit, power), ("cm", "2") for "square centimeters", or None for other words."""
    power = ""
    base = None
    for word in re.sub(r"\^", " ^", words).replace("-", " ").split():
        if word in _POWERS:
            power = _POWERS[word]
        elif word.startswith("^") or (word.isdigit() and base):
            power = word.lstrip("^")
        elif word in _CANONICAL and base is None:
            base = _CANONICAL[word]
        elif base is not None:
            return None  # compound: miles per hour, newton meters
    return None if base is None else (base, "" if power == "1" else power)


def is_unit_conflict(left: str, right: str) -> bool:
    """True if both are units of measure and differ; "units" matches any unit of the same power."""
    if "/" in left and "/" in right:
        quotients = [[canonical_unit(part) for part in side.split("/")] for side in (left, right)]
        return all(None not in parts for parts in quotients) and quotients[0] != quotients[1]
    units = canonical_unit(left), canonical_unit(right)
    if units[0] is None or units[1] is None:
        return False
    if "degree" in (units[0][0], units[1][0]) and {units[0][0], units[1][0]} & {
        "celsius",
        "fahrenheit",
    }:
        return False
    if "unit" in (units[0][0], units[1][0]):
        return bool(units[0][1] and units[1][1] and units[0][1] != units[1][1])
    return units[0] != units[1]
