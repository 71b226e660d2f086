"""Bytes of the databases change at random while nothing is mounted."""

from pathlib import Path

import pytest

from tests.crash.damage import DamagedCache, make_origin
from tests.sizes import size


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", ["namespace", "index"])
def test_random_damage_of_a_database(tmp_path: Path, name: str) -> None:
    """No wrong byte, no wrong name, and at most one death: the next daemon reads everything
    right."""
    cache = DamagedCache(tmp_path, make_origin(), name)
    deaths = 0
    for seed in range(size(20, 2000)):
        outcome = cache.try_damage(seed)
        assert not outcome.wrong
        assert outcome.deaths <= 1, f"seed {seed}: {outcome.deaths} daemons died"
        deaths += outcome.deaths
    print(f"{name}: {deaths} daemons died")
