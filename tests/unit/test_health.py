"""Both sides of every rule in `cache_dir/health.py`: sick becomes unstable, busy stays normal."""

import errno
from collections.abc import Callable

import pytest

from cachefs.cache_dir.health import DiskHealth, Health
from cachefs.types import Medium

pytestmark = pytest.mark.real_disk_limits

KIB = 1 << 10
MIB = 1 << 20
DISKS = [Medium.SSD, Medium.HDD]
EIO = OSError(errno.EIO, "injected")


class Disk:
    """Feeds a `DiskHealth` as readers, writers, the watcher and the prober would."""

    def __init__(self, medium: Medium = Medium.SSD) -> None:
        self.health = DiskHealth(medium)
        self.now_s = 1000.0
        self.changes: list[tuple[Health, Health, str]] = []
        self.health.on_change = lambda *change: self.changes.append(change)

    @property
    def state(self) -> Health:
        assert self.health.usable == (self.health.state is Health.NORMAL)
        return self.health.state

    def reads(
        self,
        count: int,
        duration_s: float,
        threads: int = 1,
        size_bytes: int = 128 * KIB,
        error: OSError | None = None,
        write: bool = False,
    ) -> None:
        """By `threads` at a time, one after the other."""
        for number in range(count):
            if number % threads == 0:
                self.now_s += duration_s
            self.health.operation_done(duration_s, size_bytes, error, self.now_s, write=write)

    def watch(self, age_s: float, write: bool = False) -> None:
        """An operation begins, is reported every second, and never comes back."""
        for second in range(1, int(age_s) + 1):
            self.health.operation_overdue(second, self.now_s + second, write=write)
        self.now_s += age_s

    def fall(self) -> None:
        self.reads(1, 0.001, error=OSError(errno.EROFS, ""))
        assert self.state is Health.UNSTABLE

    def probe_until(self, done: Callable[[], bool], duration_s: float = 0.001) -> float:
        """Good probes, whenever they are due. Returns how long it took."""
        start_s = self.now_s
        while not done():
            self.now_s += 0.1
            assert self.now_s < start_s + 200
            if self.health.probe_due(self.now_s):
                self.health.probe_done(duration_s, None, self.now_s)
        return self.now_s - start_s

    def recover(self) -> float:
        return self.probe_until(lambda: self.state is Health.NORMAL)

    def probe(self, duration_s: float = 0.001, error: OSError | None = None) -> None:
        self.now_s += 30
        assert self.health.probe_due(self.now_s)
        self.health.probe_done(duration_s, error, self.now_s)


@pytest.fixture
def disk() -> Disk:
    return Disk()


def test_new(disk: Disk) -> None:
    assert disk.state is Health.NORMAL
    assert disk.health.reason == ""
    assert not disk.health.probe_due(disk.now_s)


# -- errors ------------------------------------------------------------------------------------


def test_a_few_errors(disk: Disk) -> None:
    disk.reads(50, 0.001)
    disk.reads(2, 0.001, error=EIO)
    assert disk.state is Health.NORMAL
    disk.reads(1, 0.001, error=EIO)
    assert disk.state is Health.UNSTABLE
    assert disk.health.reason == "3 errors in 30 s, the last: Input/output error"
    assert disk.changes == [(Health.NORMAL, Health.UNSTABLE, disk.health.reason)]


def test_one_error_in_ten_among_many_reads(disk: Disk) -> None:
    for _ in range(3):
        disk.reads(9, 0.001)
        disk.reads(1, 0.001, error=EIO)
    assert disk.state is Health.UNSTABLE


def test_a_bad_sector_among_thousands_of_reads(disk: Disk) -> None:
    for _ in range(100):
        disk.reads(200, 0.001)
        disk.reads(1, 0.001, error=EIO)
    assert disk.state is Health.NORMAL


def test_errors_far_apart(disk: Disk) -> None:
    for _ in range(20):
        disk.reads(1, 0.001, error=EIO)
        disk.now_s += 16
    assert disk.state is Health.NORMAL


@pytest.mark.parametrize("number", [errno.EROFS, errno.ENODEV, errno.ENXIO])
def test_gone_at_once(disk: Disk, number: int) -> None:
    disk.reads(1000, 0.001)
    disk.reads(1, 0.001, error=OSError(number, ""))
    assert disk.state is Health.UNSTABLE


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EUCLEAN])
def test_sickness(disk: Disk, number: int) -> None:
    disk.reads(3, 0.001, error=OSError(number, ""))
    assert disk.state is Health.UNSTABLE


@pytest.mark.parametrize(
    "number", [errno.ENOSPC, errno.EDQUOT, errno.ENOENT, errno.EMFILE, errno.ENFILE]
)
def test_full_is_not_sick(disk: Disk, number: int) -> None:
    disk.reads(1000, 0.001, error=OSError(number, ""), write=True)
    assert disk.state is Health.NORMAL


# -- latency -----------------------------------------------------------------------------------


@pytest.mark.parametrize("medium", DISKS)
@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("size_bytes", [4 * KIB, MIB])
def test_two_seconds_a_read(medium: Medium, threads: int, size_bytes: int) -> None:
    disk = Disk(medium)
    disk.reads(500, 0.001)
    disk.reads(1 * threads, 2, threads, size_bytes)
    assert disk.state is Health.NORMAL
    disk.reads(2 * threads, 2, threads, size_bytes)
    assert disk.state is Health.UNSTABLE
    assert disk.health.reason.startswith("operations take 2.0 s, reads usually ")


def test_sickness_is_seen_after_three_seconds(disk: Disk) -> None:
    disk.reads(100, 0.001)
    disk.reads(4, 2, threads=4)
    disk.watch(0.9)
    assert disk.state is Health.NORMAL
    disk.health.operation_overdue(1, disk.now_s + 0.1)
    assert disk.state is Health.UNSTABLE


def test_sick_among_reads_from_the_page_cache_and_buffered_writes(disk: Disk) -> None:
    for _ in range(4):
        disk.reads(200, 0.0005, write=True)
        disk.reads(200, 0.0001)
        disk.reads(4, 2, threads=4)
    assert disk.state is Health.UNSTABLE


def test_sick_after_keeping_all_threads_busy(disk: Disk) -> None:
    disk.reads(40_000, 0.001, threads=4)
    disk.reads(4 * 4, 2, threads=4)
    assert disk.state is Health.UNSTABLE


@pytest.mark.parametrize("duration_s", [0.1, 0.3, 0.45])
def test_busy_is_not_sick(disk: Disk, duration_s: float) -> None:
    disk.reads(500, 0.001)
    disk.reads(2000, duration_s, threads=4)
    assert disk.state is Health.NORMAL


def test_busy_hdd_with_long_waits_now_and_then() -> None:
    disk = Disk(Medium.HDD)
    for _ in range(200):
        disk.reads(16, 0.7, threads=16)
        disk.reads(1, 1.8)
    assert disk.state is Health.NORMAL


def test_one_stall_catches_all_threads(disk: Disk) -> None:
    disk.reads(1000, 0.0002, threads=8)
    for begun in range(8):
        disk.health.operation_overdue(2 - begun * 0.1, disk.now_s + 2)
    disk.reads(8, 4.5, threads=8)
    disk.reads(1000, 0.0002, threads=8)
    assert disk.state is Health.NORMAL


def test_pauses_of_an_ssd_that_collects_garbage(disk: Disk) -> None:
    for _ in range(50):
        disk.reads(4, 0.8, threads=4)
        disk.now_s += 2.5
    assert disk.state is Health.NORMAL


def test_a_large_transfer_takes_its_time(disk: Disk) -> None:
    disk.reads(20, 6, size_bytes=64 * MIB, write=True)
    disk.health.operation_overdue(12, disk.now_s + 12, 64 * MIB, write=True)
    assert disk.state is Health.NORMAL


def test_swamped_with_writes_is_not_sick(disk: Disk) -> None:
    disk.reads(100, 0.9, write=True)
    disk.watch(9, write=True)
    assert disk.state is Health.NORMAL


def test_writes_that_take_two_seconds(disk: Disk) -> None:
    disk.reads(3, 2, write=True)
    assert disk.state is Health.UNSTABLE


@pytest.mark.parametrize(("medium", "hung_s"), [(Medium.MEM, 5), (Medium.SSD, 5), (Medium.HDD, 10)])
def test_hung(medium: Medium, hung_s: int) -> None:
    disk = Disk(medium)
    disk.watch(hung_s - 1)
    assert disk.state is Health.NORMAL
    disk.health.operation_overdue(hung_s, disk.now_s)
    assert disk.state is Health.UNSTABLE
    assert disk.health.reason == f"a read is not back after {hung_s:.1f} s"


def test_hung_write(disk: Disk) -> None:
    disk.watch(10, write=True)
    assert disk.state is Health.UNSTABLE


def test_a_reader_who_gives_up_condemns_nothing(disk: Disk) -> None:
    for _ in range(20):
        disk.now_s += disk.health.patience_s + 2
        disk.health.operation_overdue(disk.health.patience_s, disk.now_s)
        disk.reads(1, 0.55)
    assert disk.state is Health.NORMAL


# -- what is usual -----------------------------------------------------------------------------


def test_patience_has_a_floor(disk: Disk) -> None:
    assert disk.health.patience_s == 0.5
    assert Disk(Medium.HDD).health.patience_s == 1.0
    disk.reads(100_000, 0.0001)
    assert disk.health.patience_s == 0.5


def test_patience_follows_a_slow_disk_up_to_a_ceiling(disk: Disk) -> None:
    disk.reads(20_000, 0.03, size_bytes=4 * KIB)
    assert 0.8 < disk.health.patience_s < 1
    disk.reads(20_000, 0.3, size_bytes=4 * KIB)
    assert disk.health.patience_s == 1.5
    disk.reads(12, 2, threads=4)
    assert disk.state is Health.UNSTABLE


def test_usual_is_learnt_slowly(disk: Disk) -> None:
    disk.reads(10_000, 0.3, threads=500)
    assert disk.health.patience_s == 0.5


def test_usual_is_per_size(disk: Disk) -> None:
    disk.reads(20_000, 0.03, size_bytes=MIB)
    assert disk.health.patience_s == 0.5


def test_sickness_teaches_nothing(disk: Disk) -> None:
    disk.reads(20_000, 0.02, size_bytes=4 * KIB)
    before_s = disk.health.patience_s
    assert before_s > 0.5
    for _ in range(20):
        disk.reads(1000, 2, threads=4)
        disk.recover()
    assert disk.health.patience_s == before_s


def test_errors_and_writes_teach_nothing(disk: Disk) -> None:
    disk.reads(20_000, 0.02, size_bytes=4 * KIB)
    before_s = disk.health.patience_s
    disk.reads(10_000, 0.4, write=True)
    disk.reads(10_000, 0.00001, error=OSError(errno.ENOENT, ""))
    assert disk.health.patience_s == before_s


# -- probes ------------------------------------------------------------------------------------


def test_back_after_three_good_probes(disk: Disk) -> None:
    disk.fall()
    assert not disk.health.probe_due(disk.now_s)
    assert disk.recover() == pytest.approx(3, abs=0.5)
    assert [change[:2] for change in disk.changes] == [
        (Health.NORMAL, Health.UNSTABLE),
        (Health.UNSTABLE, Health.NORMAL),
    ]
    assert not disk.health.probe_due(disk.now_s + 1000)


@pytest.mark.parametrize(("duration_s", "error"), [(2, None), (0.001, EIO)])
def test_a_bad_probe_starts_the_count_again(
    disk: Disk, duration_s: float, error: OSError | None
) -> None:
    disk.fall()
    for _ in range(2):
        disk.probe()
        disk.probe()
        disk.probe(duration_s, error)
    disk.probe()
    disk.probe()
    assert disk.state is Health.UNSTABLE
    disk.probe()
    assert disk.state is Health.NORMAL


def test_a_full_disk_passes_its_probes(disk: Disk) -> None:
    disk.fall()
    for _ in range(3):
        disk.probe(error=OSError(errno.ENOSPC, ""))
    assert disk.state is Health.NORMAL


def test_a_flapping_disk_comes_back_later_and_later(disk: Disk) -> None:
    times_s = []
    for _ in range(6):
        disk.fall()
        times_s.append(disk.recover())
    assert times_s == pytest.approx([3, 6, 12, 24, 30, 30], abs=0.5)


def test_falls_are_forgotten(disk: Disk) -> None:
    for _ in range(4):
        disk.fall()
        disk.recover()
    disk.now_s += 601
    disk.fall()
    assert disk.recover() == pytest.approx(3, abs=0.5)


def test_flapping_for_days(disk: Disk) -> None:
    for _ in range(3000):
        disk.fall()
        disk.recover()
    disk.fall()


def test_down_and_back(disk: Disk) -> None:
    disk.fall()
    for _ in range(4):
        disk.probe(error=EIO)
    assert disk.state is Health.UNSTABLE
    disk.probe(error=EIO)
    assert disk.state is Health.DOWN
    assert disk.health.reason == "5 probes failed, the last: Input/output error"
    disk.now_s += 29
    assert not disk.health.probe_due(disk.now_s)
    disk.now_s -= 29
    disk.probe(error=EIO)
    assert disk.state is Health.DOWN
    assert disk.recover() == pytest.approx(32, abs=0.5)
    assert len(disk.changes) == 3


def test_a_probe_that_hangs(disk: Disk) -> None:
    disk.fall()
    disk.now_s += 1
    disk.watch(9)
    assert disk.state is Health.UNSTABLE
    disk.health.operation_overdue(10, disk.now_s + 1)
    assert disk.state is Health.DOWN
    assert disk.health.reason == "a probe is not back after 10.0 s"
    disk.now_s += 60
    disk.health.probe_done(70, None, disk.now_s)
    assert disk.recover() == pytest.approx(32, abs=0.5)


def test_what_began_before_the_recovery_is_not_held_against_it(disk: Disk) -> None:
    begun_s = disk.now_s
    disk.watch(5)
    assert disk.state is Health.UNSTABLE
    disk.recover()
    for _ in range(30):
        disk.now_s += 1
        disk.health.operation_overdue(disk.now_s - begun_s, disk.now_s)
    for _ in range(10):
        disk.health.operation_done(disk.now_s - begun_s, 0, EIO, disk.now_s)
    assert disk.state is Health.NORMAL
    disk.watch(5)
    assert disk.state is Health.UNSTABLE


def test_old_errors_do_not_count_after_a_recovery(disk: Disk) -> None:
    disk.reads(3, 0.001, error=EIO)
    disk.recover()
    disk.reads(2, 0.001, error=EIO)
    assert disk.state is Health.NORMAL


def test_operations_while_unusable_change_nothing(disk: Disk) -> None:
    disk.fall()
    changes = len(disk.changes)
    disk.reads(100, 3, error=EIO)
    disk.reads(100, 3)
    assert len(disk.changes) == changes
    disk.recover()
    assert disk.state is Health.NORMAL
