"""Runs in a new Python whose only packages are the mounted ones:

    python -I -S imported.py MOUNT WIDTH

Imports pydantic and rich, and most of the standard library that they need, from the mount. This
reads Python sources, and maps and executes shared libraries. The last line of the output is JSON
for the demo.
"""

import sys

mount = sys.argv[1]
sys.path[:] = [f"{mount}/stdlib", f"{mount}/stdlib/lib-dynload", f"{mount}/site-packages"]

import json  # noqa: E402
from datetime import date  # noqa: E402

import pydantic  # noqa: E402
import pydantic_core  # noqa: E402
import rich.console  # noqa: E402
import rich.table  # noqa: E402


class Sample(pydantic.BaseModel):
    """One record of a training set's index."""

    path: str
    label: pydantic.PositiveInt
    recorded: date


RECORDS = [
    '{"path": "frames/000017.jpg", "label": 3, "recorded": "2024-02-29"}',
    '{"path": "frames/000018.jpg", "label": "7", "recorded": "2024-03-01"}',
    '{"path": "frames/000019.jpg", "label": -1, "recorded": "2024-03-01"}',
]


def main() -> None:
    table = rich.table.Table(title="pydantic checks records, rich draws the table")
    for column in ("record", "label", "recorded", "verdict"):
        table.add_column(column)
    verdicts = []
    for record in RECORDS:
        try:
            sample = Sample.model_validate_json(record)
        except pydantic.ValidationError as error:
            verdicts.append(False)
            table.add_row(json.loads(record)["path"], "", "", error.errors()[0]["msg"])
        else:
            verdicts.append(True)
            table.add_row(sample.path, str(sample.label), f"{sample.recorded:%d %b %Y}", "valid")
    rich.console.Console(width=int(sys.argv[2])).print(table)
    assert verdicts == [True, True, False]
    files = [getattr(module, "__file__", None) or "" for module in list(sys.modules.values())]
    mounted = [file for file in files if file.startswith(f"{mount}/")]
    print(
        json.dumps(
            {
                "files": [
                    module.__file__
                    for module in (json, rich, pydantic, pydantic_core._pydantic_core)
                ],
                "modules": len(mounted),
                "libraries": sum(file.endswith(".so") for file in mounted),
                "elsewhere": [f for f in files if "-packages/" in f and f not in mounted],
            }
        )
    )


main()
