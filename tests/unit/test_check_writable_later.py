"""A daemon that replaces another finds out later what the store guarantees."""

from trio.testing import MockClock

from cachefs.daemon.writing import check_writable_later
from cachefs.errors import OriginUnavailableError
from cachefs.origin.writable import UNCHECKED, Guarantees


class Store:
    """Is away twice."""

    def __init__(self) -> None:
        self.guarantees = UNCHECKED
        self.tries = 0

    async def check_writable(self, path: str = "") -> Guarantees:
        self.tries += 1
        if self.tries < 3:
            raise OriginUnavailableError("it is away")
        self.guarantees = Guarantees()
        return self.guarantees


async def test_the_store_is_asked_until_it_answers(autojump_clock: MockClock) -> None:
    store = Store()
    assert not store.guarantees.put_version
    await check_writable_later(store)  # type: ignore[arg-type] # no other method is called
    assert store.guarantees.put_version
    assert store.tries == 3
