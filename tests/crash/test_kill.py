"""SIGKILL at random moments."""

from pathlib import Path

import pytest

from tests.crash.rounds import EXPECTED, Rounds, Server
from tests.sizes import size


@pytest.mark.timeout(3600)
@pytest.mark.expect_log(EXPECTED, required=False)
@pytest.mark.parametrize("seed", [1])
def test_kills(server: Server, tmp_path: Path, seed: int) -> None:
    rounds = Rounds(server, tmp_path, seed)
    while rounds.go_on(size(20, 60)):
        order = rounds.order()
        for _ in range(rounds.choose((1, 1, 2))):
            rounds.crash(order)
        rounds.verify(order)
    rounds.end()
