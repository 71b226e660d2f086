"""Imports a large tree of packages, in a separate process. Run as a script:

    python -I -S -B import_reader.py SITE_PACKAGES [--list]

It imports moto with the models of all its services, some 1,000 modules. It prints how many came
from SITE_PACKAGES, and the seconds. With `--list` it instead prints their top-level packages and
modules.
"""

import contextlib
import importlib
import os
import sys
import time


def main() -> None:
    root = os.path.abspath(sys.argv[1])
    sys.path.insert(0, root)
    began = time.perf_counter()
    index = importlib.import_module("moto.backend_index")
    for service in sorted({name for name, _ in index.backend_url_patterns}):
        with contextlib.suppress(ImportError):  # some need packages that aren't installed
            importlib.import_module(f"moto.{service}.models")
    seconds = time.perf_counter() - began
    names = [
        name
        for name, module in sys.modules.items()
        if (getattr(module, "__file__", None) or "").startswith(root + os.sep)
    ]
    if sys.argv[2:] == ["--list"]:
        for top in sorted({name.partition(".")[0] for name in names}):
            file = str(sys.modules[top].__file__)
            print(os.path.dirname(file) if file.endswith("/__init__.py") else file)
    else:
        print(len(names), seconds)


if __name__ == "__main__":
    main()
