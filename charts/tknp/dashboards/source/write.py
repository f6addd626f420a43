"""Writes the four dashboards beside this directory.

    pip install grafana-foundation-sdk
    python charts/tknp/dashboards/source/write.py [directory]

The JSON is committed: installing the chart needs neither Python nor the SDK.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import overview
import owners
import roots
import slo
from grafana_foundation_sdk.cog.encoder import JSONEncoder

BOARDS = {"overview": overview, "owners": owners, "roots": roots, "slo": slo}


def written(directory: Path) -> list[Path]:
    """Write every dashboard to `directory`; the files."""
    files = []
    for name, module in BOARDS.items():
        text = json.dumps(module.made().build(), cls=JSONEncoder, indent=1, sort_keys=True)
        file = directory / f"tknp-{name}.json"
        file.write_text(text + "\n")
        files.append(file)
    return files


if __name__ == "__main__":
    for path in written(Path(sys.argv[1]) if sys.argv[1:] else Path(__file__).parents[1]):
        print(path)
