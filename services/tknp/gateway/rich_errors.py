"""Errors as gRPC clients read them: google.rpc.Status with BadRequest or RetryInfo."""

from __future__ import annotations

from google.protobuf.duration_pb2 import Duration
from google.rpc.code_pb2 import Code
from google.rpc.error_details_pb2 import BadRequest, RetryInfo
from google.rpc.status_pb2 import Status

from tknp.client import RequestFailed
from tknp.errors import TknpError
from tknp.gateway.openai.errors import RETRY_AFTER_S, reply_of

DETAILS_KEY = "grpc-status-details-bin"
_AGAIN = ("RESOURCE_EXHAUSTED", "UNAVAILABLE")


def message_of(error: TknpError) -> str:
    """What a client is told: of a pool's refusal the pool's own words."""
    return error.message if isinstance(error, RequestFailed) else str(error)


def details_of(error: TknpError) -> bytes:
    """The value of the trailer DETAILS_KEY."""
    status = Status(code=Code.Value(error.status), message=message_of(error))
    field = reply_of(error).param
    if field is not None:
        violation = BadRequest.FieldViolation(field=field, description=status.message)
        status.details.add().Pack(BadRequest(field_violations=[violation]))
    if error.status in _AGAIN:
        status.details.add().Pack(RetryInfo(retry_delay=Duration(seconds=RETRY_AFTER_S)))
    return bytes(status.SerializeToString())
