"""What both faces of the gateway do with a request: check it, admit it, run it, count it.

deadline -> ids at the pool (its tokenizer, off its event loop) -> lengths known
       -> tenant and replica limits -> `Generations.run` -> limits given back
"""

from __future__ import annotations

import math
import secrets
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager

from tknp.client import Client
from tknp.client.channel import CALL_TIMEOUT_S
from tknp.errors import CapacityError, DeadlineExceeded, InvalidValue, TknpError
from tknp.gateway.access import REQUEST
from tknp.gateway.generation import Ask, Generations, Piece
from tknp.gateway.holding import Holding
from tknp.gateway.keys import Keys, Tenant, read_keys
from tknp.gateway.ledger import Use
from tknp.gateway.limits import Limits, SharedLedger, SharedLimits
from tknp.gateway.metrics import GatewayMetrics
from tknp.gateway.pools import Pools
from tknp.gateway.settings import GatewaySettings
from tknp.rpc.pem import read_token
from tknp.v1.common_pb2 import Sampling
from tknp.v1.inference_pb2 import ChatMessage, GetModelResponse

Prompt = str | Sequence[int] | Sequence[ChatMessage]
_SEED_BITS = 63


class Gateway:
    """One replica. `start` before, `close` after.

    `connect`: makes the client of a pool. `ledger`: what all replicas share; None: there is one.
    """

    def __init__(
        self, settings: GatewaySettings, connect: Callable[[str], Client] | None = None,
        ledger: SharedLedger | None = None,
    ) -> None:  # fmt: skip
        self.settings = settings
        self.keys: Keys = read_keys(settings.keys_file)
        self.metrics = GatewayMetrics(self)
        token = settings.token_file and read_token("token_file", settings.token_file)

        def client(target: str) -> Client:
            return Client(target, settings.tls_ca, token or None)

        self.pools = Pools(settings.pools, connect or client)
        self.holding = Holding(self.pools, settings.max_held, settings.hold_s)
        self._generations = Generations(
            self.pools, settings.replays, settings.replay_wait_s, self.metrics.replayed
        )
        self._limits = SharedLimits(self.keys.tenants, ledger) if ledger else Limits()
        self.inflight = 0
        self.leaving = False  # set once this replica takes no more requests

    async def start(self) -> None:
        await self.pools.start()
        self._limits.start()

    async def close(self) -> None:
        await self._limits.close()
        await self.pools.close()

    @property
    def ready(self) -> bool:
        """Whether a request that comes now is taken: by a pool, or to wait for one."""
        return not self.leaving and self.holding.open

    def deadline_s(self, timeout_s: float | None = None) -> float:
        """When a request that comes now has to be done, on the clock of `time.monotonic`.

        `timeout_s`: what it asks for; None or 0: the longest allowed. Raises InvalidValue.
        """
        longest_s = self.settings.timeout_s
        if timeout_s is not None and not (math.isfinite(timeout_s) and timeout_s >= 0):
            raise InvalidValue("timeout_s", timeout_s, "a number of seconds, 0 for the longest")
        return time.monotonic() + min(timeout_s or longest_s, longest_s)

    async def encode(
        self, model: str, prompt: Prompt, tenant: Tenant, deadline_s: float, *,
        special: bool = True,
    ) -> list[int]:  # fmt: skip
        """Ids of a prompt, by the tokenizer of `model`. Here requests come in.

        One that comes while no pool takes any waits as `holding` allows, or is refused. One that
        has been let in and loses its pool waits as its stream would. Neither outlasts `deadline_s`:
        raises DeadlineExceeded then.
        """
        upstream = await self.holding.pick(model, tenant, deadline_s)
        if not isinstance(prompt, str) and all(isinstance(item, int) for item in prompt):
            return [item for item in prompt if isinstance(item, int)]
        text = prompt if isinstance(prompt, str) else [p for p in prompt if not isinstance(p, int)]
        losses = self._generations.losses(model, deadline_s)
        while True:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise DeadlineExceeded("the prompt had not been tokenized when the time was up")
            try:
                with upstream.taken():
                    return await upstream.client.tokenize(
                        text, min(left_s, CALL_TIMEOUT_S), add_special_tokens=special
                    )
            except TknpError as error:
                upstream = await losses.next(upstream, error, brought=False)

    async def decode(self, model: str, ids: Sequence[int]) -> str:
        """Text of `ids`, by the tokenizer of `model`."""
        upstream = self.pools.pick(model)
        with upstream.taken():
            return await upstream.client.detokenize(ids)

    def ask(
        self, model: str, prompt: Sequence[int], sampling: Sampling, tenant: Tenant,
        deadline_s: float, *, stop: Sequence[str] = (), priority: int = 0, request_id: str = "",
        interval: int = 0,
    ) -> Ask:  # fmt: skip
        """A checked request. Fills in what the client left open: seed and longest output.

        Raises InvalidValue for what no pool of `model` could take.
        """
        known = self.pools.model(model)
        chosen = Sampling()
        chosen.CopyFrom(sampling)
        if not chosen.HasField("seed"):
            chosen.seed = secrets.randbits(_SEED_BITS)
        if not chosen.HasField("max_tokens"):
            room = known.max_model_len - len(prompt)
            chosen.max_tokens = max(1, min(self.settings.max_output_tokens, room))
        self._check_lengths(known, prompt, chosen)
        if priority > tenant.priority:
            raise InvalidValue("priority", priority, f"{tenant.name} may ask for {tenant.priority}")
        context = REQUEST.get()
        return Ask(
            request_id or f"gw-{uuid.uuid4().hex}", model, prompt, chosen, tuple(stop), priority,
            deadline_s, context.trace.metadata if context is not None else (), interval,
        )  # fmt: skip

    @asynccontextmanager
    async def admitted(self, tenant: Tenant, asks: Sequence[Ask]) -> AsyncIterator[None]:
        """Count `asks` as in flight; raises CapacityError where a limit is reached."""
        limit = self.settings.max_inflight
        if self.inflight + len(asks) > limit:
            raise CapacityError(f"{self.inflight} requests are in flight, max_inflight={limit}")
        self.inflight += len(asks)
        try:
            whole = Use(len(asks), sum(len(a.prompt) + a.sampling.max_tokens for a in asks))
            async with self._limits.admitted(tenant, whole):
                yield
        finally:
            self.inflight -= len(asks)

    async def run(self, ask: Ask) -> AsyncIterator[Piece]:
        """Pieces of an admitted request; close it to cancel."""
        began_s = time.monotonic()
        async with aclosing(self._generations.run(ask)) as pieces:  # type: ignore[type-var]
            watch = self.metrics.watch(began_s, gaps=ask.interval <= 1)
            async for piece in pieces:
                watch.piece(piece)
                yield piece

    def _check_lengths(
        self, model: GetModelResponse, prompt: Sequence[int], sampling: Sampling
    ) -> None:
        longest = self.settings.max_prompt_tokens
        if longest is not None and len(prompt) > longest:
            raise InvalidValue("prompt", f"{len(prompt)} tokens", f"at most {longest} are taken")
        if not prompt:
            raise InvalidValue("prompt", "", "must have at least one token")
        whole = len(prompt) + sampling.max_tokens
        if whole > model.max_model_len:
            raise InvalidValue(
                "max_tokens", sampling.max_tokens,
                f"{len(prompt)} tokens of prompt leave room for {model.max_model_len - len(prompt)}"
                f": {model.name} takes {model.max_model_len} in all",
            )  # fmt: skip
