"""The HTTP face of a gateway: OpenAI's API, a page, metrics. An ASGI application, free of Ray.

Every answer that is not a stream of tokens is JSON. Errors have OpenAI's shape; a body that doesn't
fit its schema is 422 and names the field, a value that can't be served is 400.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import TypeVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException

import tknp
from tknp.errors import InvalidValue, TknpError, Unavailable
from tknp.gateway.access import CLIENT_GONE, REQUEST, Access
from tknp.gateway.gateway import Gateway
from tknp.gateway.generation import WHOLE, Ask
from tknp.gateway.keys import Tenant
from tknp.gateway.openai import convert, replies
from tknp.gateway.openai.body import BodyLimit
from tknp.gateway.openai.described import GENERATED, errors
from tknp.gateway.openai.errors import ErrorReply, reply_of
from tknp.gateway.openai.held import HeldStream
from tknp.gateway.openai.requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    SamplingFields,
    TokenizeRequest,
)
from tknp.gateway.openai.streaming import events, gathered, pieces
from tknp.gateway.page import page
from tknp.gateway.pool_view import pool_view
from tknp.v1.inference_pb2 import ChatMessage

log = logging.getLogger(__name__)
T = TypeVar("T")
Around = Callable[[FastAPI], AbstractAsyncContextManager[None]]


@asynccontextmanager
async def _nothing(_: FastAPI) -> AsyncIterator[None]:
    yield


def create_app(gateway: Gateway, *, named: bool = True, around: Around = _nothing) -> FastAPI:
    """The application of one replica; its lifespan starts and closes `gateway`.

    `named`: answers carry the request's id; a proxy of Ray Serve adds it by itself. `around` is
    entered with the application once `gateway` has started, and left before it is closed.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await gateway.start()
        try:
            async with around(app):
                yield
        finally:
            await gateway.close()

    app = FastAPI(title="TKNP", version=tknp.__version__, lifespan=lifespan)
    app.add_middleware(BodyLimit, max_bytes=gateway.settings.max_body_bytes)
    app.add_middleware(Access, answered=gateway.metrics.answered, named=named)
    _errors(app)
    api = Api(gateway)
    app.post("/v1/completions", responses=GENERATED)(api.completions)
    app.post("/v1/chat/completions", responses=GENERATED)(api.chat)
    app.get("/v1/models", responses=errors(401))(api.models)
    app.get("/v1/models/{name:path}", responses=errors(401, 404, 503))(api.model)
    app.post("/tokenize", responses=errors())(api.tokenize)
    app.post("/detokenize", responses=errors())(api.detokenize)
    app.get("/health")(api.health)
    app.get("/ready", responses=errors(503))(api.ready)
    app.get("/version")(api.version)
    app.get("/metrics", response_class=PlainTextResponse)(api.metrics)
    app.get("/pools", responses=errors(401))(api.pools)
    app.get("/", include_in_schema=False)(page)
    return app


class Api:
    """The endpoints."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._created = int(time.time())

    async def completions(self, request: Request, body: CompletionRequest) -> Response:
        prompts = convert.prompts_of(body)
        return await self._generate(request, body, prompts)

    async def chat(self, request: Request, body: ChatRequest) -> Response:
        return await self._generate(request, body, [convert.chat_of(body.messages)])

    async def models(self, request: Request) -> Response:
        self._tenant(request)
        return JSONResponse(replies.models(self._gateway.pools.models, self._created))

    async def model(self, request: Request, name: str) -> Response:
        self._tenant(request)
        return JSONResponse(replies.model(self._gateway.pools.model(name), self._created))

    async def tokenize(self, request: Request, body: TokenizeRequest) -> Response:
        tenant, deadline_s = self._tenant(request), self._gateway.deadline_s()
        model = self._gateway.pools.named(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise InvalidValue("prompt", body.prompt, "give either prompt or messages")
        prompt: str | list[ChatMessage] = body.prompt or ""
        if body.messages is not None:
            prompt = convert.chat_of(body.messages)
        special = body.add_special_tokens
        ids = await self._gateway.encode(model, prompt, tenant, deadline_s, special=special)
        longest = self._gateway.pools.model(model).max_model_len
        return JSONResponse({"tokens": ids, "count": len(ids), "max_model_len": longest})

    async def detokenize(self, request: Request, body: DetokenizeRequest) -> Response:
        self._tenant(request)
        text = await self._gateway.decode(self._gateway.pools.named(body.model), body.tokens)
        return JSONResponse({"prompt": text})

    async def health(self) -> Response:
        """Whether this replica answers."""
        return JSONResponse({"status": "ok"})

    async def ready(self) -> Response:
        """Whether requests are taken: by a pool, or to wait for one."""
        upstreams = self._gateway.pools.upstreams
        if not self._gateway.ready:
            raise Unavailable("; ".join(f"{u.target}: {u.error}" for u in upstreams) or "no pool")
        return JSONResponse({"status": "ready"})

    async def version(self) -> Response:
        return JSONResponse({"version": tknp.__version__})

    async def metrics(self) -> Response:
        registry = CollectorRegistry()
        registry.register(self._gateway.metrics.registry)
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    async def pools(self, request: Request) -> Response:
        """Pools, nodes and loads, as the page draws them."""
        self._tenant(request)
        return JSONResponse({"pools": [pool_view(u) for u in self._gateway.pools.upstreams]})

    def _tenant(self, request: Request) -> Tenant:
        return self._gateway.keys.tenant(request.headers.get("authorization"))

    async def _generate(
        self,
        request: Request,
        body: SamplingFields,
        prompts: Sequence[str | list[int] | list[ChatMessage]],
    ) -> Response:
        tenant, gateway = self._tenant(request), self._gateway
        deadline_s = gateway.deadline_s(body.timeout_s)
        chat = isinstance(body, ChatRequest)
        if body.stream_options is not None and not body.stream:
            raise InvalidValue("stream_options", "...", "needs stream: true")
        sampling, stops = convert.sampling_of(body), convert.stops_of(body)
        encoding = self._encoded(body.model, prompts, tenant, deadline_s)
        encoded = await _unless_gone(request, encoding)
        context = REQUEST.get()
        name = f"{'chatcmpl' if chat else 'cmpl'}-{context.request_id if context else uuid.uuid4()}"
        asks = [
            gateway.ask(
                body.model, ids, convert.choice(sampling, index), tenant, deadline_s,
                stop=stops, priority=body.priority,
                request_id=f"{name}-{place * body.n + index}", interval=0 if body.stream else WHOLE,
            )
            for place, ids in enumerate(encoded)
            for index in range(body.n)
        ]  # fmt: skip
        reply = replies.Reply(
            name, body.model, chat, sampling.HasField("logprobs"), sum(map(len, encoded))
        )
        async with AsyncExitStack() as held:
            await held.enter_async_context(gateway.admitted(tenant, asks))
            if not body.stream:
                choices = await _unless_gone(request, gathered(gateway, asks))
                return JSONResponse(reply.whole(choices))
            return await self._stream(request, body, reply, asks, held)

    async def _encoded(
        self, model: str, prompts: Sequence[str | list[int] | list[ChatMessage]], tenant: Tenant,
        deadline_s: float,
    ) -> list[list[int]]:  # fmt: skip
        encode = self._gateway.encode
        return [await encode(model, prompt, tenant, deadline_s) for prompt in prompts]

    async def _stream(
        self, request: Request, body: SamplingFields, reply: replies.Reply, asks: list[Ask],
        held: AsyncExitStack,
    ) -> Response:  # fmt: skip
        """Answer when the first piece is there, so that what fails before has a status."""
        usage = body.stream_options is not None and body.stream_options.include_usage
        found = pieces(self._gateway, asks)
        held.push_async_callback(found.aclose)  # type: ignore[attr-defined]
        first = await _unless_gone(request, anext(found))
        stream = events(reply, len(asks), first, found, include_usage=usage)
        return HeldStream(stream, held.pop_all(), asks[0].deadline_s)


async def _unless_gone(request: Request, work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled if the client goes away meanwhile."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait([task, gone], return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise HTTPException(CLIENT_GONE, "the client has gone away")
        return task.result()
    finally:
        for pending in (task, gone):
            pending.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        continue


def _errors(app: FastAPI) -> None:
    def answer(error: ErrorReply) -> Response:
        return JSONResponse(error.body, error.status, error.headers)

    @app.exception_handler(TknpError)
    async def ours(_: Request, error: TknpError) -> Response:
        return answer(reply_of(error))

    @app.exception_handler(RequestValidationError)
    async def schema(_: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"] if part != "body")
        return answer(ErrorReply(422, f"{place or 'body'}: {first['msg']}", param=place or None))

    @app.exception_handler(HTTPException)
    async def http(_: Request, error: HTTPException) -> Response:
        return answer(ErrorReply(error.status_code, str(error.detail)))

    @app.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> Response:
        log.error("%s failed", request.url.path, exc_info=error)
        return answer(ErrorReply(500, "the gateway failed; its log has it", "server_error"))
