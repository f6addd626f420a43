"""The Open Inference Protocol (KServe v2), for tools that speak it: `GRPCInferenceService`.

    ModelInfer: text_input BYTES [1] or token_ids UINT32 [n], sampling in `parameters`
             -> text_output BYTES [1], token_ids UINT32 [n], finish_reason BYTES [1]

Tensors come and go typed or raw, the answer as the request. The protocol has no streams; a call
that is cancelled cancels its request. Names of tensors are those of Triton's LLM backends.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from contextlib import aclosing

import tknp
from tknp.errors import InvalidValue, ProtocolError
from tknp.gateway.gateway import Gateway
from tknp.gateway.generation import WHOLE, finish_name
from tknp.gateway.grpc_face import Metadata, tenant_of
from tknp.gateway.pools import UnknownModel
from tknp.model.stops import check_stops
from tknp.rpc.ids import pack_ids, unpack_ids
from tknp.v1 import open_inference_pb2 as pb
from tknp.v1.common_pb2 import Sampling
from tknp.v1.inference_pb2 import Finish

TEXT, IDS = "text_input", "token_ids"
_INPUTS = ((TEXT, "BYTES", 1), (IDS, "UINT32", -1))
_OUTPUTS = (("text_output", "BYTES", 1), (IDS, "UINT32", -1), ("finish_reason", "BYTES", 1))
_WHOLE = ("top_k", "seed", "max_tokens", "min_tokens")
_REAL = (
    "temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
)  # fmt: skip
_KNOWN = (*_WHOLE, *_REAL, "ignore_eos", "json_schema", "stop", "priority", "timeout_s")
_LENGTH = struct.Struct("<I")
_TensorMetadata = pb.ModelMetadataResponse.TensorMetadata
_Input = pb.ModelInferRequest.InferInputTensor
_Output = pb.ModelInferResponse.InferOutputTensor


class OpenInferenceFace:
    """Raises TknpError for everything that is refused or fails."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def server_live(self, _: pb.ServerLiveRequest, __: Metadata) -> pb.ServerLiveResponse:
        return pb.ServerLiveResponse(live=True)

    async def server_ready(self, _: pb.ServerReadyRequest, __: Metadata) -> pb.ServerReadyResponse:
        return pb.ServerReadyResponse(ready=self._gateway.ready)

    async def model_ready(
        self, request: pb.ModelReadyRequest, _: Metadata
    ) -> pb.ModelReadyResponse:
        serving = {u.model.name for u in self._gateway.pools.upstreams if u.ready and u.model}
        return pb.ModelReadyResponse(ready=request.name in serving)

    async def server_metadata(
        self, _: pb.ServerMetadataRequest, __: Metadata
    ) -> pb.ServerMetadataResponse:
        return pb.ServerMetadataResponse(name="tknp", version=tknp.__version__)

    async def model_metadata(
        self, request: pb.ModelMetadataRequest, metadata: Metadata
    ) -> pb.ModelMetadataResponse:
        tenant_of(self._gateway, metadata)
        model = self._gateway.pools.model(request.name)
        return pb.ModelMetadataResponse(
            name=model.name,
            platform=f"tknp_{model.family}",
            inputs=[_TensorMetadata(name=n, datatype=t, shape=[s]) for n, t, s in _INPUTS],
            outputs=[_TensorMetadata(name=n, datatype=t, shape=[s]) for n, t, s in _OUTPUTS],
        )

    async def model_infer(
        self, request: pb.ModelInferRequest, metadata: Metadata
    ) -> pb.ModelInferResponse:
        gateway, tenant = self._gateway, tenant_of(self._gateway, metadata)
        if request.model_version:
            raise UnknownModel(f"model_version={request.model_version!r}: models have none")
        options = {name: _value(name, given) for name, given in request.parameters.items()}
        stop = options.get("stop")
        stops = [] if stop is None else [_text("stop", stop)]
        check_stops(stops)
        prompt = _prompt(request)
        deadline_s = gateway.deadline_s(_number("timeout_s", options.get("timeout_s", 0)))
        ids = await gateway.encode(request.model_name, prompt, tenant, deadline_s)
        ask = gateway.ask(
            request.model_name, ids, _sampling(options), tenant, deadline_s, stop=stops,
            priority=int(_number("priority", options.get("priority", 0), whole=True)),
            request_id=request.id, interval=WHOLE,
        )  # fmt: skip
        text, out, finish = "", list[int](), None
        async with (
            gateway.admitted(tenant, [ask]),
            aclosing(gateway.run(ask)) as pieces,  # type: ignore[type-var]
        ):
            async for piece in pieces:
                text, finish = text + piece.text, piece.finish
                out += piece.token_ids
        if finish is None:
            raise ProtocolError("the stream ended without a finish reason")
        return _response(request, ask.request_id, text, out, finish)


def _prompt(request: pb.ModelInferRequest) -> str | list[int]:
    raw = request.raw_input_contents
    if len(request.inputs) != 1 or (raw and len(raw) != 1):
        names = [tensor.name for tensor in request.inputs]
        raise InvalidValue("inputs", names, f"give {TEXT} or {IDS}, and no other")
    tensor = request.inputs[0]
    kinds = {name: datatype for name, datatype, _ in _INPUTS}
    if tensor.name not in kinds:
        raise InvalidValue("inputs[0].name", tensor.name, f"give {TEXT} or {IDS}")
    if tensor.datatype != kinds[tensor.name]:
        raise InvalidValue(f"{tensor.name}.datatype", tensor.datatype, kinds[tensor.name])
    if tensor.name == IDS:
        return unpack_ids(IDS, raw[0]) if raw else list(tensor.contents.uint_contents)
    return _input_text(tensor, raw[0] if raw else None)


def _input_text(tensor: _Input, raw: bytes | None) -> str:
    if raw is not None:
        if len(raw) < _LENGTH.size or _LENGTH.unpack_from(raw)[0] != len(raw) - _LENGTH.size:
            raise InvalidValue(TEXT, f"{len(raw)} bytes", "one element: its length, then its bytes")
        data = raw[_LENGTH.size :]
    elif len(tensor.contents.bytes_contents) == 1:
        data = tensor.contents.bytes_contents[0]
    else:
        raise InvalidValue(TEXT, f"{len(tensor.contents.bytes_contents)} elements", "give one")
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise InvalidValue(TEXT, f"{len(data)} bytes", "must be UTF-8") from None


def _value(name: str, parameter: pb.InferParameter) -> object:
    if name not in _KNOWN:
        raise InvalidValue(f"parameters.{name}", "...", f"known are {', '.join(_KNOWN)}")
    kind = parameter.WhichOneof("parameter_choice")
    return None if kind is None else getattr(parameter, kind)


def _sampling(options: Mapping[str, object]) -> Sampling:
    sampling = Sampling(ignore_eos=bool(options.get("ignore_eos", False)))
    if (schema := options.get("json_schema")) is not None:
        sampling.json_schema = _text("json_schema", schema)
    for name in (*_WHOLE, *_REAL):
        if (given := options.get(name)) is not None:
            number = _number(name, given, whole=name in _WHOLE)
            try:
                setattr(sampling, name, int(number) if name in _WHOLE else float(number))
            except ValueError:
                raise InvalidValue(name, given, "is out of range") from None
    return sampling


def _number(name: str, value: object, *, whole: bool = False) -> float:
    fits = isinstance(value, int) if whole else isinstance(value, int | float)
    if isinstance(value, bool) or not fits or not isinstance(value, int | float):
        raise InvalidValue(name, value, "must be a whole number" if whole else "must be a number")
    return value


def _text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise InvalidValue(name, value, "must be text")
    return value


def _response(
    request: pb.ModelInferRequest, request_id: str, text: str, ids: list[int], finish: Finish
) -> pb.ModelInferResponse:
    """Every output, or those that the request names."""
    wanted = {output.name for output in request.outputs} or {name for name, _, _ in _OUTPUTS}
    unknown = sorted(wanted - {name for name, _, _ in _OUTPUTS})
    if unknown:
        raise InvalidValue("outputs", unknown, "known are " + ", ".join(n for n, _, _ in _OUTPUTS))
    texts = {"text_output": text, "finish_reason": finish_name(finish)}
    response = pb.ModelInferResponse(model_name=request.model_name, id=request_id)
    for name, datatype, _ in _OUTPUTS:
        if name not in wanted:
            continue
        data = texts[name].encode() if name in texts else b""
        output = _Output(name=name, datatype=datatype, shape=[len(ids) if name == IDS else 1])
        if request.raw_input_contents:
            whole = pack_ids(ids) if name == IDS else _LENGTH.pack(len(data)) + data
            response.raw_output_contents.append(whole)
        elif name == IDS:
            output.contents.uint_contents.extend(ids)
        else:
            output.contents.bytes_contents.append(data)
        response.outputs.append(output)
    return response
