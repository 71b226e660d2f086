"""Random operations, with changes of the origin behind the mount, judged by a reference.

The examples are the same in every run (`derandomize`), so that CI fails for the change that broke
something. `CACHEFS_MODEL_EXAMPLES=5000 pytest tests/model` looks further, at random.
"""

import math
import os

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cachefs.namespace.namespace import Ttls
from tests.model.harness import PATHS, Operation, play
from tests.sizes import size

EXAMPLES = int(os.environ.get("CACHEFS_MODEL_EXAMPLES", "0"))
MIB = 1 << 20

LATE_LISTING = ("then", ("advance", 4), ("list", "", 9))

paths = st.sampled_from(PATHS)
sizes = st.sampled_from([0, 1, 100, 5000, MIB, MIB + 1, 2 * MIB + 100])
offsets = st.sampled_from([0, 1, 99, 4096, MIB - 10, MIB, 2 * MIB, 9 * MIB])
lengths = st.sampled_from([1, 100, 4096, 131_072, MIB, 2 * MIB])

mutations = st.one_of(
    st.tuples(st.just("put"), paths, sizes),
    st.tuples(st.just("put"), paths, sizes),
    st.tuples(st.just("put_beside"), st.just("a"), st.sampled_from([0, 10])),
    st.tuples(st.just("delete"), paths),
    st.tuples(st.just("advance"), st.sampled_from([1, 4, 11, 31])),
)
questions = st.one_of(
    st.tuples(st.just("lookup"), paths),
    st.tuples(st.just("cat"), paths, offsets, lengths),
    st.tuples(st.just("read"), st.integers(0, 7), offsets, lengths),
    st.tuples(st.just("list"), st.sampled_from(["", "", "a"]), st.sampled_from([1, 9, 9])),
    st.tuples(st.just("ls"), st.sampled_from(["", "", "a"])),
    st.tuples(st.just("ls"), st.sampled_from(["", "", "a"])),
)
interferences = st.lists(
    st.tuples(st.sampled_from(["stat", "page", "page", "read"]), mutations)
    | st.tuples(
        st.just("page"),
        st.tuples(st.just("lookup"), paths) | st.tuples(st.just("cat"), paths, offsets, lengths),
    )
    | st.tuples(
        st.just("page"), st.tuples(st.just("then"), mutations, st.tuples(st.just("lookup"), paths))
    )
    | st.tuples(st.just("stat"), st.tuples(st.just("then"), mutations, st.just(LATE_LISTING)))
    | st.tuples(st.just("stat"), st.tuples(st.just("then"), mutations, st.just(("ls", "")))),
    max_size=3,
)
operations = st.lists(
    st.tuples(mutations, st.just([]))
    | st.tuples(questions, interferences)
    | st.tuples(
        st.tuples(st.just("restart"), st.booleans())
        | st.tuples(st.just("commit"))
        | st.tuples(st.just("fail"))
        | st.tuples(st.just("outage"), st.booleans()),
        st.just([]),
    ),
    min_size=12,
    max_size=40,
)
ttls = st.builds(
    Ttls,
    attr_s=st.just(10.0),
    entry_s=st.sampled_from([10.0, 3.0, 0.0]),
    negative_s=st.sampled_from([3.0, 10.0, 0.0]),
    list_s=st.sampled_from([10.0, 30.0, 0.0]),
    stale_if_error_s=st.sampled_from([0.0, 5.0, math.inf]),
)


@pytest.mark.long
@pytest.mark.expect_log("the origin does not answer", required=False)
@given(
    operations=operations,
    ttls=ttls,
    page_size=st.sampled_from([1, 2, 1000]),
    is_outlived=st.booleans(),
    shows_trees=st.booleans(),
)
@settings(
    max_examples=EXAMPLES or size(100, 400),
    derandomize=not EXAMPLES,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@pytest.mark.timeout(3600)
def test_random_operations(
    operations: list[Operation], ttls: Ttls, page_size: int, is_outlived: bool, shows_trees: bool
) -> None:
    play(operations, ttls, page_size, is_outlived, shows_trees)


def test_regression_a_listing_joined_late_is_older_than_its_ttl() -> None:
    """Found by the test above: the reference knew no shared listings (SEMANTICS, S10)."""
    play(
        [
            (("lookup", "a"), [("stat", ("list", "", 9))]),
            (("lookup", "a"), []),
            (
                ("lookup", "a"),
                [
                    ("stat", ("list", "", 9)),
                    ("stat", ("put", "a", 0)),
                    ("page", ("advance", 11)),
                ],
            ),
        ],
        Ttls(attr_s=10, entry_s=10, negative_s=0, list_s=10),
        page_size=1,
    )


def test_regression_an_answer_overtaken_by_a_listing() -> None:
    """A look-up's answer that is older than a complete listing brought the name back."""
    ttls = Ttls(attr_s=10, entry_s=10, negative_s=3, list_s=10)
    play(
        [
            (("put", "a", 100), []),
            (("put", "b", 100), []),
            (("lookup", "a"), [("stat", ("then", ("delete", "a"), LATE_LISTING))]),
            (("advance", 7), []),
            (("lookup", "a"), []),
            (("list", "", 9), []),
        ],
        ttls,
    )


def test_regression_a_kernel_that_keeps_a_directory_whose_first_listing_a_crash_has_lost() -> None:
    """Without a row of a listing the mtime never moved, and the kernel never asked again."""
    play(
        [
            (("ls", ""), []),
            (("restart", True), []),
            (("put", "a", 1), []),
            (("advance", 11), []),
            (("ls", ""), []),
            (("advance", 11), []),
            (("ls", ""), []),
        ],
        Ttls(attr_s=10, entry_s=10, negative_s=3, list_s=10),
        is_outlived=True,
    )


def test_regression_a_file_found_just_before_a_crash_is_read_after_it() -> None:
    """The kernel outlives the crash, and sends no look-up for what it has open."""
    play(
        [
            (("put", "a", 5000), []),
            (("lookup", "a"), []),
            (("restart", True), []),
            (("read", 0, 0, 5000), []),
            (("put", "b", 100), []),
            (("list", "", 9), []),
            (("restart", True), []),
            (("lookup", "b"), []),
            (("read", 1, 0, 100), []),
        ],
        Ttls(attr_s=10, entry_s=10, negative_s=3, list_s=10),
        is_outlived=True,
    )
