"""What gRPC clients read beside a status: google.rpc.Status with BadRequest or RetryInfo.

It travels in the trailer KEY, as gRPC's richer error model has it. Without googleapis-common-protos
a server sends plain statuses.
"""

from __future__ import annotations

KEY = "grpc-status-details-bin"
RETRY_AFTER_S = 1
_AGAIN = ("RESOURCE_EXHAUSTED", "UNAVAILABLE")
_LONGEST = 1024  # the message goes out twice, and headers have room for 8 KiB


def details_of(status: str, message: str, field: str | None) -> bytes | None:
    """Value of the trailer. `field`: what of the request is at fault, if anything."""
    try:
        from google.protobuf.duration_pb2 import Duration
        from google.rpc.code_pb2 import Code
        from google.rpc.error_details_pb2 import BadRequest, RetryInfo
        from google.rpc.status_pb2 import Status
    except ImportError:
        return None
    told = Status(code=Code.Value(status), message=message[:_LONGEST])
    if field is not None:
        violation = BadRequest.FieldViolation(field=field, description=told.message)
        told.details.add().Pack(BadRequest(field_violations=[violation]))
    if status in _AGAIN:
        told.details.add().Pack(RetryInfo(retry_delay=Duration(seconds=RETRY_AFTER_S)))
    return bytes(told.SerializeToString())
