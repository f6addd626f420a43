"""Logs as JSON, one object a line, with the id of the request that a line belongs to."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from typing import Any

from tknp.errors import InvalidValue
from tknp.gateway.access import REQUEST

_OWN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JsonFormatter(logging.Formatter):
    """Time, level, logger, message, what `extra` has, and `request_id`, `trace_id` if known."""

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line: dict[str, Any] = {
            "time": time, "level": record.levelname.lower(), "logger": record.name,
            "message": record.getMessage(),
        }  # fmt: skip
        if (request := REQUEST.get()) is not None:
            line["request_id"] = request.request_id
            if request.trace.trace_id:
                line["trace_id"] = request.trace.trace_id
        line |= {name: value for name, value in vars(record).items() if name not in _OWN}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def start_logging(path: str | None) -> None:
    """JSON lines of our own loggers in this process, appended to `path` or to standard error.

    Raises InvalidValue where that can't be written.
    """
    try:
        handler = logging.FileHandler(path) if path else logging.StreamHandler()
    except OSError as error:
        raise InvalidValue("log_file", path, f"can't be written: {error.strerror}") from error
    handler.setFormatter(JsonFormatter())
    root = logging.getLogger("tknp")
    root.handlers = [handler]
    root.setLevel(logging.INFO)
    root.propagate = False
