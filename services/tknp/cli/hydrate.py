"""`tknp hydrate`: copy a checkpoint from an object store to a volume, once.

    URI -> fsspec -> DIRECTORY/.incoming/... -> DIRECTORY/... -> marker, last

What was cut off is begun again: without the marker nothing counts. With the marker of the same URI
there is nothing to do. Credentials are those of the protocol's own library (AWS_*, Google's).
"""

from __future__ import annotations

import shutil
from pathlib import Path

import click

from tknp.errors import InvalidValue, TknpError, Unavailable

MARKER = ".tknp-complete"
_INCOMING = ".incoming"


def hydrate(uri: str, directory: Path) -> bool:
    """Copy all that is under `uri`; False where that has been done before.

    Raises InvalidValue for a URI that nothing can read, Unavailable where the store fails.
    """
    try:
        import fsspec
    except ModuleNotFoundError as error:
        raise TknpError("fsspec is not installed: pip install 'tknp[hydrate]'") from error
    marker = directory / MARKER
    if marker.exists() and marker.read_text() == uri:
        return False
    marker.unlink(missing_ok=True)
    incoming = directory / _INCOMING
    shutil.rmtree(incoming, ignore_errors=True)
    try:
        store, path = fsspec.core.url_to_fs(uri)
        if not store.exists(path):
            raise InvalidValue("uri", uri, "there is nothing: name a prefix that has objects")
        store.get(path.rstrip("/") + "/", str(incoming) + "/", recursive=True)
    except (ValueError, ImportError) as error:
        if isinstance(error, InvalidValue):
            raise
        raise InvalidValue("uri", uri, f"{error}; pip install 'tknp[hydrate]'") from error
    except OSError as error:
        raise Unavailable(f"{uri} can't be copied: {error}") from error
    for entry in incoming.iterdir():
        target = directory / entry.name
        if target.is_dir():
            shutil.rmtree(target)
        entry.replace(target)
    incoming.rmdir()
    marker.write_text(uri)
    return True


@click.command("hydrate")
@click.argument("uri")
@click.argument("directory", type=click.Path(path_type=Path, exists=True, file_okay=False))
def command(uri: str, directory: Path) -> None:
    """Copy the checkpoint under URI (s3://, gs://, https://) into DIRECTORY, once.

    Example: tknp hydrate s3://models/llama-3.1-8b /models
    """
    done = hydrate(uri, directory)
    click.echo(f"{uri}: {'copied' if done else 'is there already'}")
