"""One error, told to HTTP clients and to gRPC clients."""

from __future__ import annotations

import pytest
from google.rpc.error_details_pb2 import BadRequest, RetryInfo
from google.rpc.status_pb2 import Status

from tknp.client import RequestFailed
from tknp.errors import CapacityError, DeadlineExceeded, InvalidValue, TknpError, Unavailable
from tknp.gateway.keys import Unauthenticated
from tknp.gateway.openai.errors import reply_of
from tknp.gateway.pools import UnknownModel
from tknp.gateway.rich_errors import trailers_of


@pytest.mark.parametrize(
    ("error", "status", "param"),
    [
        (InvalidValue("n", 0, "at least 1"), 400, "n"),
        (RequestFailed("INVALID_ARGUMENT", "top_p=2: at most 1"), 400, "top_p"),
        (RequestFailed("INVALID_ARGUMENT", "no field is at fault"), 400, None),
        (Unauthenticated("no key"), 401, None),
        (UnknownModel("model='a'"), 404, None),
        (DeadlineExceeded("late"), 408, None),
        (CapacityError("full"), 429, None),
        (RequestFailed("CANCELLED", "gone"), 499, None),
        (TknpError("broken"), 500, None),
        (Unavailable("away"), 503, None),
    ],
)
def test_every_status_has_one_of_http(error: TknpError, status: int, param: str | None) -> None:
    reply = reply_of(error)
    assert (reply.status, reply.param) == (status, param)
    assert ("Retry-After" in reply.headers) == (status in (429, 503))
    ((_, value),) = trailers_of(error)
    rich = Status.FromString(value)
    assert rich.message == reply.message
    kinds = {detail.TypeName() for detail in rich.details}
    assert ("google.rpc.BadRequest" in kinds) == (param is not None)
    assert ("google.rpc.RetryInfo" in kinds) == (status in (429, 503))
    for detail in rich.details:
        bad, retry = BadRequest(), RetryInfo()
        if detail.Unpack(bad):
            assert [v.field for v in bad.field_violations] == [param]
        elif detail.Unpack(retry):
            assert retry.retry_delay.seconds == int(reply.headers["Retry-After"])
