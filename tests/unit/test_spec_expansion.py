from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpk_kubelet.errors import HPKError
from hpk_kubelet.spec.expansion import expand, lookup_in
from hpk_kubelet.spec.late import field, join
from hpk_kubelet.spec.quantity import ceil, milli, parse_quantity

VARIABLES = {"VAR_A": "A", "VAR_B": "B", "VAR_REF": "$(VAR_A)", "VAR_EMPTY": ""}


# the cases of third_party/forked/golang/expansion/expand_test.go
@pytest.mark.parametrize(
    ("text", "expanded"),
    [
        ("", ""),
        ("$(VAR_A)", "A"),
        ("___$(VAR_B)___", "___B___"),
        ("$(VAR_A)-1", "A-1"),
        ("$(VAR_REF)", "$(VAR_A)"),
        ("%%$(VAR_REF)--$(VAR_REF)%%", "%%$(VAR_A)--$(VAR_A)%%"),
        ("foo$(VAR_EMPTY)bar", "foobar"),
        ("foo$(VAR_Awhoops!", "foo$(VAR_Awhoops!"),
        ("f00__(VAR_A)__", "f00__(VAR_A)__"),
        ("$?_boo_$!", "$?_boo_$!"),
        ("$VAR_A", "$VAR_A"),
        ("$(VAR_DNE)", "$(VAR_DNE)"),
        ("$$$$$$$(BIG_MONEY)", "$$$$(BIG_MONEY)"),
        ("$$(VAR_A)", "$(VAR_A)"),
        ("$$$(VAR_A)", "$A"),
        ("$(VAR_A$(VAR_B)", "$(VAR_A$(VAR_B)"),
        ("$(foo$$var)", "$(foo$$var)"),
        ("$(VAR_A)$", "A$"),
        ("$", "$"),
        ("$(", "$("),
        ("$()", "$()"),
        ("\n$(VAR_A)é$é", "\nAé$é"),
    ],
)
def test_expansion(text: str, expanded: str) -> None:
    assert expand(text, lookup_in(VARIABLES)) == expanded


def test_the_first_context_wins() -> None:
    assert expand("$(X) $(Y)", lookup_in({"X": "1"}, {"X": "2", "Y": "3"})) == "1 3"


def test_late_values_pass_through() -> None:
    lookup = lookup_in({"IP": field("podIP"), "PORT": "80"})
    assert expand("http://$(IP):$(PORT)/$(IP)", lookup) == [
        "http://", "podIP", ":80/", "podIP", "",
    ]  # fmt: skip
    assert join(["a", field("hostIP"), field("podIP"), "b"]) == ["a", "hostIP", "", "podIP", "b"]


@given(st.text())
def test_a_text_whose_dollars_are_doubled_comes_back(text: str) -> None:
    assert expand(text.replace("$", "$$"), lookup_in({})) == text


@given(st.text(alphabet="$()AB").filter(lambda text: "$$" not in text))
def test_what_is_not_known_stays(text: str) -> None:
    assert expand(text, lookup_in({})) == text


@pytest.mark.parametrize(
    ("text", "whole", "thousandths"),
    [
        ("500m", 1, 500),
        ("1.5Gi", 1610612736, 1610612736000),
        ("1e3", 1000, 1000000),
        ("0", 0, 0),
        ("100u", 1, 1),
        ("-1", -1, -1000),
        ("1E", 10**18, 10**21),
        (".5", 1, 500),
        (2, 2, 2000),
    ],
)
def test_quantities(text: object, whole: int, thousandths: int) -> None:
    assert (ceil(parse_quantity(text)), milli(parse_quantity(text))) == (whole, thousandths)


@pytest.mark.parametrize("text", ["", "1 Gi", "1gi", "Gi", "1e", "--1", "ten", True, None, "١"])
def test_what_is_no_quantity(text: object) -> None:
    with pytest.raises(HPKError, match="is not a quantity"):
        parse_quantity(text)


@given(st.text())
def test_quantities_never_raise_anything_else(text: str) -> None:
    with contextlib.suppress(HPKError):
        parse_quantity(text)
