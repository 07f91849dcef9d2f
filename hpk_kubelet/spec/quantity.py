"""Kubernetes quantities: `500m`, `1Gi`, `1e3` (apimachinery pkg/api/resource/quantity.go)."""

from __future__ import annotations

import re
from fractions import Fraction

from hpk_kubelet.errors import HPKError

_SUFFIXES = {
    "n": Fraction(1, 10**9),
    "u": Fraction(1, 10**6),
    "m": Fraction(1, 1000),
    "": Fraction(1),
    "k": Fraction(10**3),
    "M": Fraction(10**6),
    "G": Fraction(10**9),
    "T": Fraction(10**12),
    "P": Fraction(10**15),
    "E": Fraction(10**18),
    "Ki": Fraction(2**10),
    "Mi": Fraction(2**20),
    "Gi": Fraction(2**30),
    "Ti": Fraction(2**40),
    "Pi": Fraction(2**50),
    "Ei": Fraction(2**60),
}
_QUANTITY = re.compile(
    r"([+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+))(?:([eE][+-]?[0-9]{1,3})|([numkMGTPE]|[KMGTPE]i)?)"
)


def parse_quantity(text: object) -> Fraction:
    """The exact value; HPKError for what is no quantity. JSON numbers are taken as they are."""
    match = None if isinstance(text, bool) else _QUANTITY.fullmatch(str(text))
    if match is None:
        raise HPKError(f"{str(text)!r} is not a quantity such as 500m, 2 or 1.5Gi")
    number, exponent, suffix = match.groups()
    if exponent:
        return Fraction(number) * Fraction(10) ** int(exponent[1:])
    return Fraction(number) * _SUFFIXES[suffix or ""]


def ceil(value: Fraction) -> int:
    """The next whole number up, as Quantity.Value() rounds."""
    return -(-value.numerator // value.denominator)


def milli(value: Fraction) -> int:
    """In thousandths, rounded up, as Quantity.MilliValue() rounds."""
    return ceil(value * 1000)
