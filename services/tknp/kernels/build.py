"""Compile csrc/ into a shared library, once per machine, or once for all in an image.

    key = hash(sources, compiler version, flags)     flags name the instruction set
    <prefix>/share/tknp/kernels/<key>/kernels.so     exists -> use it; there without the compiler
    <user cache>/tknp/kernels/<key>/kernels.so       exists -> use it
                              <key>/lock             held by the process that compiles

`python -m tknp.kernels.build` fills the first place, for every instruction set, so that an image
needs no compiler and its containers start at once.

Processes that start together wait for the lock and find the library done. It is written under
another name and renamed, so a process killed half-way leaves nothing that looks finished. Parts are
compiled in parallel. The library has a plain C interface and no torch in it, so it outlives torch
upgrades; it only expects torch's OpenMP runtime (libgomp) to be loaded first.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from tknp.errors import Unavailable
from tknp.kernels.isa import ISAS, Isa, chosen_isa

SOURCES = Path(__file__).parent / "csrc"
# No contraction: keys are rotated to the same bits as by torch.
FLAGS = (
    "-std=c++17",
    "-O2",
    "-ftree-vectorize",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fopenmp",
    "-fPIC",
    "-w",
)
_LINK_FLAGS = ("-shared", "-fopenmp")
PREBUILT = Path(sys.prefix) / "share" / "tknp" / "kernels"


def user_cache() -> Path:
    """Where libraries are kept: $XDG_CACHE_HOME/tknp/kernels, by default under ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "tknp" / "kernels"


def find_compiler() -> str:
    """Path of g++ ($CXX if that is GCC). Unavailable if there is none.

    Only GCC: clang links another OpenMP runtime, whose threads would compete with torch's.
    """
    for name in (os.environ.get("CXX"), "g++", "c++"):
        path = shutil.which(name) if name else None
        if path and "Free Software Foundation" in _output([path, "--version"]):
            return path
    raise Unavailable("no C++ compiler: install g++ (GCC 11 or later), or set CXX to one")


def prepare() -> Path:
    """Path of the library for this machine, compiled now unless an image or the cache has it.

    Needs no torch. Unavailable if this machine can't have the kernels.
    """
    isa = chosen_isa()
    prebuilt = PREBUILT / _key(isa, "", SOURCES) / "kernels.so"
    return prebuilt if prebuilt.exists() else build(isa, user_cache())


def build(isa: Isa, cache: Path, sources: Path = SOURCES) -> Path:
    """Path of the library of `sources` for `isa`, compiled now unless `cache` has it.

    Unavailable, with what the compiler said, if it can't be compiled or stored.
    """
    compiler = find_compiler()
    directory = cache / _key(isa, _output([compiler, "--version"]), sources)
    return _built(directory, compiler, isa, sources, 0o700)  # nobody else may put one there


def prebuild(directory: Path = PREBUILT, sources: Path = SOURCES) -> list[Path]:
    """Libraries of `sources` for every instruction set, compiled into `directory`.

    Unavailable as of `build`.
    """
    compiler = find_compiler()
    places = [(isa, directory / _key(isa, "", sources)) for isa in ISAS]
    return [_built(place, compiler, isa, sources, 0o755) for isa, place in places]


def _built(directory: Path, compiler: str, isa: Isa, sources: Path, mode: int) -> Path:
    library = directory / "kernels.so"
    if library.exists():
        return library
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=mode)
        with _locked(directory / "lock"):
            if not library.exists():
                print("tknp: building CPU kernels (up to a minute, once)...", file=sys.stderr)
                with tempfile.TemporaryDirectory(dir=directory) as scratch:
                    _compile(compiler, isa, sources, Path(scratch)).rename(library)
    except OSError as error:
        raise Unavailable(
            f"the kernel cache can't be written ({error}): set XDG_CACHE_HOME to a directory "
            "that can"
        ) from error
    return library


def _key(isa: Isa, compiler_version: str, sources: Path) -> str:
    digest = hashlib.sha256()
    for text in (compiler_version, *FLAGS, *_LINK_FLAGS, *isa.flags):
        digest.update(text.encode() + b"\0")
    for source in sorted(sources.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()[:16]


def _compile(compiler: str, isa: Isa, sources: Path, scratch: Path) -> Path:
    """Compile every .cpp at once and link; the library's path in `scratch`."""

    def compile_one(source: Path) -> Path:
        target = scratch / f"{source.stem}.o"
        _run([compiler, *FLAGS, *isa.flags, "-c", str(source), "-o", str(target)])
        return target

    with ThreadPoolExecutor() as pool:
        objects = [str(path) for path in pool.map(compile_one, sorted(sources.glob("*.cpp")))]
    library = scratch / "kernels.so"
    _run([compiler, *_LINK_FLAGS, *objects, "-o", str(library)])
    return library


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "error" in line] or [done.stderr]
        raise Unavailable(f"{Path(command[0]).name} can't compile the CPU kernels: {errors[0]}")


def _output(command: Sequence[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    print(*prebuild(), sep="\n")
