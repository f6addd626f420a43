"""README.md of this chart, from values.yaml: each value, its default, the comment above it.

python charts/tknp/readme.py > charts/tknp/README.md
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import yaml

HERE = Path(__file__).parent
_INTRO = """\
# The chart `tknp`

<!-- Made by `python charts/tknp/readme.py`; edit values.yaml or readme.py instead. -->

Installs the operator of TokenParallelServices, and a service from values if asked for. How to use
it is in [docs/deploy.md](../../docs/deploy.md); what a service can say, in
[docs/tokenparallelservice.md](../../docs/tokenparallelservice.md).

```sh
helm install tknp charts/tknp -n tknp-system --create-namespace          # the operator alone
helm install demo charts/tknp -f charts/tknp/values-cpu.yaml             # and a small model, no GPU
helm test demo
helm upgrade tknp charts/tknp -n tknp-system --reset-then-reuse-values
```

Helm installs CustomResourceDefinitions and never upgrades them: set `crds.upgrade`, or run
`kubectl apply --server-side --force-conflicts -f charts/tknp/crds` before an upgrade.
`helm uninstall` leaves them, and so every service.

| value | default | |
|---|---|---|
"""


def rows(text: str) -> Iterator[tuple[str, str, str]]:
    """Path, default and description of each value that has one, in the order of the file."""
    path: list[tuple[int, str]] = []
    said: list[str] = []
    for line in text.splitlines():
        bare = line.strip()
        if bare.startswith("#"):
            said.append(bare.removeprefix("#").strip())
            continue
        found = re.match(r"( *)([A-Za-z]+):(.*)", line)
        if found is None:
            said = said if bare else []
            continue
        indent, key, value = len(found[1]), found[2], found[3].strip()
        path = [*((depth, name) for depth, name in path if depth < indent), (indent, key)]
        name = ".".join(name for _, name in path)
        if value or said:
            default = f"`{json.dumps(yaml.safe_load(value))}`" if value else ""
            yield name, default, " ".join(said)
        said = []


def text() -> str:
    """The whole page."""
    lines = [
        f"| `{name}` | {default} | {description.replace('|', chr(92) + '|')} |"
        for name, default, description in rows((HERE / "values.yaml").read_text())
    ]
    return _INTRO + "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(text(), end="")
