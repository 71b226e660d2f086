from collections.abc import Iterator

import pytest

from tests.crash.rounds import Server


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.close()
