"""What a start must not import: each of these takes as long as many modules of cachefs."""

import subprocess
import sys

import pytest

_SERVERS = "starlette hypercorn h2 anyio prometheus_client"
_ORIGINS = "obstore botocore fsspec s3fs hdfs_native pyarrow aiohttp asyncio"
_COMMANDS = "rich http.client email cachefs.config cachefs.writes"


@pytest.mark.parametrize(
    ("imported", "heavy"),
    [
        (
            "cachefs.daemon.supervised cachefs.daemon.live_changes cachefs.daemon.run",
            f"pydantic click rich {_SERVERS} {_ORIGINS}",
        ),
        ("cachefs.supervisor.supervisor", f"pydantic trio pyfuse3 lmdb {_SERVERS} {_ORIGINS}"),
        ("cachefs.cli.mount", f"pydantic trio pyfuse3 lmdb rich {_SERVERS} {_ORIGINS}"),
        ("cachefs.cli.umount", f"pydantic trio pyfuse3 lmdb {_COMMANDS} {_SERVERS} {_ORIGINS}"),
        ("cachefs.cli.status", f"pydantic trio pyfuse3 lmdb rich {_SERVERS} {_ORIGINS}"),
    ],
)
def test_a_start_imports_nothing_that_it_can_do_without(imported: str, heavy: str) -> None:
    code = (
        "import importlib, sys\n"
        f"for name in {imported!r}.split(): importlib.import_module(name)\n"
        f"print(*sorted(set({heavy!r}.split()) & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "\n"
