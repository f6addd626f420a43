"""How the command line speaks: consoles, the one-line error, units."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from tknp.errors import CheckpointError, InvalidValue

if TYPE_CHECKING:
    from google.protobuf.descriptor import Descriptor
    from google.protobuf.message import Message

    from tknp.v1.common_pb2 import Block

    # Messages carry the C implementation's own descriptors.
    from google._upb._message import Descriptor as NativeDescriptor  # isort: skip

    AnyDescriptor = Descriptor | NativeDescriptor

KEPT_CONTROLS = "\n\t"
NOTHING = "-"


def out() -> Console:
    """Results: standard output."""
    return Console(highlight=False)


def err() -> Console:
    """Progress, asides and errors: standard error."""
    return Console(stderr=True, highlight=False)


def report(error: BaseException, prefix: str = "") -> None:
    """One red line on standard error, then what the error's notes add, dimly."""
    line = Text(f"error: {prefix}", style="bold red").append(f"{error}", style="not bold")
    console = err()
    console.print(line, soft_wrap=True)
    for note in getattr(error, "__notes__", ()):
        for part in note.splitlines():
            console.print(Text(f"  {part}", style="dim"), soft_wrap=True)


def exit_code(error: BaseException) -> int:
    """2 for what the user can change before anything runs, as click does for usage; else 1."""
    return 2 if isinstance(error, InvalidValue | CheckpointError) else 1


def printable(text: str) -> str:
    """`text` without the control characters by which a model could drive a terminal."""
    return "".join(c for c in text if c in KEPT_CONTROLS or c.isprintable() or ord(c) >= 0xA0)


def size_text(count: int) -> str:
    """Bytes in binary units, three digits or more: 98.0 MiB, 300 MiB."""
    value, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return (
        f"{value:.1f} {units[0]}" if value < 100 and units[0] != "B" else f"{value:.0f} {units[0]}"
    )


def seconds_text(value: float | None) -> str:
    """Seconds at a readable scale: 12.3 ms, 1.23 s."""
    if value is None:
        return NOTHING
    return f"{value * 1e3:.1f} ms" if value < 1 else f"{value:.2f} s"


def plural(count: int, noun: str, nouns: str = "") -> str:
    return f"{count:,} {noun if count == 1 else nouns or noun + 's'}"


def roots_text(layer_start: int, layer_stop: int, embedding: bool, head: bool) -> str:
    """What a node holds of one block: `embedding, layers 0-14`."""
    parts = ["embedding"] if embedding else []
    if layer_stop > layer_start:
        parts.append(f"layers {layer_start}-{layer_stop - 1}")
    parts += ["head"] if head else []
    return ", ".join(parts) or "attention only"


def blocks_text(blocks: Iterable[Block]) -> str:
    """What a node holds: its blocks, or that it has none."""
    texts = [roots_text(b.layer_start, b.layer_stop, b.embedding, b.head) for b in blocks]
    return " + ".join(texts) or roots_text(0, 0, embedding=False, head=False)


def plain(message: Message) -> dict[str, Any]:
    """`message` for JSON: every field, snake case, 64-bit integers as numbers and not as text."""
    from google.protobuf.json_format import MessageToDict

    data = MessageToDict(
        message, always_print_fields_with_no_presence=True, preserving_proto_field_name=True
    )
    return _in_order(message.DESCRIPTOR, data)


def _in_order(descriptor: AnyDescriptor, data: dict[str, Any]) -> dict[str, Any]:
    """`data` in the order of the fields' declaration, its integers restored."""
    result: dict[str, Any] = {}
    for field in descriptor.fields:
        if field.name not in data:
            continue
        values = data[field.name] if field.is_repeated else [data[field.name]]
        if field.message_type:
            values = [_in_order(field.message_type, value) for value in values]
        elif field.cpp_type in (field.CPPTYPE_INT64, field.CPPTYPE_UINT64):
            values = [int(value) for value in values]
        result[field.name] = values if field.is_repeated else values[0]
    return result
