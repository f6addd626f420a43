"""The gRPC face of a gateway: `tknp.v1.Inference`, as the coordinator's own port has it.

    GenerateRequest -> key and limits -> ids -> least loaded pool -> GenerateResponse ...

Free of Ray: whoever serves it hands in messages and metadata, and closes a stream whose call has
ended: on the gateway's own port at once, at Serve's proxies not always (see `serve_app`).
`timeout_s` of a request is kept here and by the pool besides. Where several models are
served, the metadatum `x-tknp-model` names one.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing

from tknp.gateway.gateway import Gateway, Prompt
from tknp.gateway.generation import Piece
from tknp.gateway.keys import Tenant
from tknp.model.stops import check_stops
from tknp.rpc.ids import pack_ids, unpack_ids
from tknp.v1 import inference_pb2 as pb

MODEL_KEY = "x-tknp-model"
KEY_KEY = "authorization"
Metadata = Mapping[str, str]


class InferenceFace:
    """Raises TknpError for everything that is refused or fails."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def generate(
        self, request: pb.GenerateRequest, metadata: Metadata
    ) -> AsyncIterator[pb.GenerateResponse]:
        """Messages of one stream; close it to cancel."""
        gateway, tenant = self._gateway, tenant_of(self._gateway, metadata)
        model = self._model(metadata)
        deadline_s = gateway.deadline_s(request.timeout_s)
        check_stops(request.stop)
        ids = await gateway.encode(model, _prompt(request), tenant, deadline_s)
        ask = gateway.ask(
            model, ids, request.sampling, tenant, deadline_s, stop=request.stop,
            priority=request.priority, request_id=request.request_id,
            interval=request.stream_interval,
        )  # fmt: skip
        async with gateway.admitted(tenant, [ask]):
            accepted = pb.Accepted(request_id=ask.request_id, prompt_tokens=len(ids))
            yield pb.GenerateResponse(accepted=accepted)
            async with aclosing(gateway.run(ask)) as pieces:  # type: ignore[type-var]
                async for piece in pieces:
                    yield _response(piece)

    async def get_model(self, _: pb.GetModelRequest, metadata: Metadata) -> pb.GetModelResponse:
        tenant_of(self._gateway, metadata)
        return self._gateway.pools.model(self._model(metadata))

    async def tokenize(
        self, request: pb.TokenizeRequest, metadata: Metadata
    ) -> pb.TokenizeResponse:
        gateway, tenant = self._gateway, tenant_of(self._gateway, metadata)
        special = request.add_special_tokens if request.HasField("add_special_tokens") else True
        ids = await gateway.encode(
            self._model(metadata), _prompt(request), tenant, gateway.deadline_s(), special=special
        )
        return pb.TokenizeResponse(token_ids=pack_ids(ids))

    async def detokenize(
        self, request: pb.DetokenizeRequest, metadata: Metadata
    ) -> pb.DetokenizeResponse:
        tenant_of(self._gateway, metadata)
        ids = unpack_ids("token_ids", request.token_ids)
        return pb.DetokenizeResponse(text=await self._gateway.decode(self._model(metadata), ids))

    def _model(self, metadata: Metadata) -> str:
        return self._gateway.pools.named(metadata.get(MODEL_KEY), f"metadatum {MODEL_KEY}")


def tenant_of(gateway: Gateway, metadata: Metadata) -> Tenant:
    """Who makes a call with `metadata`; raises Unauthenticated."""
    return gateway.keys.tenant(metadata.get(KEY_KEY))


def _prompt(request: pb.GenerateRequest | pb.TokenizeRequest) -> Prompt:
    kind = request.WhichOneof("prompt")
    if kind == "token_ids" and isinstance(request, pb.GenerateRequest):
        return unpack_ids("token_ids", request.token_ids)
    return list(request.chat.messages) if kind == "chat" else request.text


def _response(piece: Piece) -> pb.GenerateResponse:
    return pb.GenerateResponse(
        token_ids=pack_ids(piece.token_ids), text=piece.text, logprobs=piece.logprobs,
        finish=piece.finish,
    )  # fmt: skip
