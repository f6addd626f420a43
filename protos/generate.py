"""Generate services/tknp/v1 from protos/tknp/v1. Run by `make protos`; checked by a test.

The .proto files are compiled under the path tknp/v1, so the modules import one another as
`tknp.v1.common_pb2` and live inside the package `tknp`.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent
PLUGINS = ("protoc-gen-mypy", "protoc-gen-mypy_grpc")


def generate(out: Path) -> None:
    """Write messages, services and type stubs for every .proto below `out`/tknp/v1."""
    protos = sorted(str(p.relative_to(ROOT)) for p in ROOT.glob("tknp/v1/*.proto"))
    include = Path(protoc.__file__).parent / "_proto"
    out.mkdir(parents=True, exist_ok=True)
    code = protoc.main(
        [
            "protoc", *map(_plugin, PLUGINS), f"-I{ROOT}", f"-I{include}", f"--python_out={out}",
            f"--grpc_python_out={out}", f"--mypy_out={out}", f"--mypy_grpc_out={out}", *protos,
        ]
    )  # fmt: skip
    if code:
        raise SystemExit(f"protoc failed with exit code {code}")


def _plugin(name: str) -> str:
    """The option that names a plugin of this very environment, whether it is activated or not."""
    found = shutil.which(name, path=Path(sys.executable).parent) or shutil.which(name)
    if found is None:
        raise SystemExit(f"{name} is missing: install the extra dev, or run `make protos`")
    return f"--plugin={name}={found}"


if __name__ == "__main__":
    generate(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT.parent / "services")
