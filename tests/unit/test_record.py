from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import pytest

from cachefs.config.fields import count
from cachefs.config.record import CheckWithOthers, Field, FieldError, Record


def _at_most_first(value: int, others: Mapping[str, Any]) -> int:
    if value > others["first"]:
        raise ValueError(f"{value} is too much")
    return value


class Base(Record):
    kind: ClassVar[str] = "none"

    first: Annotated[int, count(1, 9)]


class Pair(Base):
    second: Annotated[int, CheckWithOthers(_at_most_first)] = Field(
        default_factory=lambda others: others["first"], alias="next", description="The other one."
    )
    third: int = 7

    def _check_together(self) -> None:
        if self.third < self.second:
            raise ValueError("the third is the largest")


def test_values_are_checked_in_order_and_the_rest_are_defaults() -> None:
    pair = Pair({"first": "3"})
    assert (pair.first, pair.second, pair.third, pair.kind) == (3, 3, 7, "none")
    assert pair.given == {"first"}
    assert (pair.values(), pair.given_values()) == (
        {"first": 3, "next": 3, "third": 7},
        {"first": 3},
    )
    assert pair == Pair({"first": 3, "next": 3}) != Pair({"first": 3, "next": 2})
    assert Pair.fields["second"].description == "The other one."
    with pytest.raises(AttributeError, match="Pair can't be changed"):
        pair.first = 1


@pytest.mark.parametrize(
    ("values", "place", "said"),
    [
        ({"first": 0}, ("first",), "0 is not a whole number from 1 to 9"),
        ({}, ("first",), "it is missing"),
        ({"first": 1, "next": 2}, ("next",), "2 is too much"),
        ({"first": 1, "second": 1}, ("second",), "there is no such field"),
        ({"first": 9}, (), "the third is the largest"),
        ([1], (), "a table is wanted"),
    ],
)
def test_an_error_names_its_place(values: object, place: tuple[str, ...], said: str) -> None:
    with pytest.raises(FieldError, match=said) as caught:
        Pair(values)
    assert caught.value.place == place
