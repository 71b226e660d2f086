"""The programs that these tests use."""

import subprocess

import pytest

from deploy.tests.bare import TOP

_NEED = """
source deploy/packages/common.sh
need mmdebstrap=mmdebstrap umoci=umoci runc=runc
"""


@pytest.fixture(scope="session", autouse=True)
def _programs() -> None:
    subprocess.run(["bash", "-c", _NEED, "bash"], cwd=TOP, check=True)
