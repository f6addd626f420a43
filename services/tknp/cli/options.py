"""Options that several commands share, and the environment variable of each."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, get_args

import click

from tknp.config import DataPlane, KvTransfer, Role, StrategyName, parse_bytes
from tknp.model.config import ITEM_BYTES

if TYPE_CHECKING:
    from tknp.client import Client

F = TypeVar("F", bound=Callable[..., Any])
Decorator = Callable[[F], F]


class Count(click.IntRange):
    """A whole number of at least one."""

    name = "n"

    def __init__(self) -> None:
        super().__init__(min=1)


POSITIVE = Count()
# Groups of rows whose exchange runs under the next one's attention, where that is asked for.
OVERLAP_GROUPS = 4
FILE = click.Path(dir_okay=False, resolve_path=True)


class Unsigned(click.ParamType[int]):
    """A whole number that fits `bits` unsigned bits, as protobuf will carry it."""

    name = "n"

    def __init__(self, bits: int) -> None:
        self._largest = 2**bits - 1

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        number: int = click.INT.convert(value, param, ctx)
        if not 0 <= number <= self._largest:
            self.fail(f"{number} is not in 0..{self._largest}", param, ctx)
        return number


UINT32, UINT64 = Unsigned(32), Unsigned(64)


class Bytes(click.ParamType[int]):
    """A size such as 512MiB."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        return parse_bytes(param.human_readable_name if param else "size", value)


class Roles(click.ParamType[tuple[str, ...]]):
    """What each node is, separated by commas."""

    name = "roles"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, ...]:
        if isinstance(value, tuple):
            return value
        roles = tuple(part.strip() for part in str(value).split(","))
        for role in roles:
            if role not in get_args(Role):
                self.fail(f"{role!r}: name one of {', '.join(get_args(Role))} a node", param, ctx)
        return roles


class TokenIds(click.ParamType[tuple[int, ...]]):
    """Token ids separated by commas."""

    name = "ids"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        try:
            return tuple(UINT32.convert(part.strip(), param, ctx) for part in value.split(","))
        except click.BadParameter as error:
            self.fail(f"{value!r}: write token ids as 1,2,3: {error.message}", param, ctx)


def variable(flag: str) -> str:
    """The environment variable of a flag: --kv-memory -> TKNP_KV_MEMORY."""
    return "TKNP_" + flag.partition("/")[0].removeprefix("--").replace("-", "_").upper()


def option(flag: str, *names: str, **settings: Any) -> Callable[[F], F]:
    """A click option that is also read from the environment."""
    return click.option(flag, *names, envvar=variable(flag), show_envvar=True, **settings)


def combined(*decorators: Callable[[F], F]) -> Callable[[F], F]:
    """Apply `decorators` so that help lists them in the order given."""

    def apply(function: F) -> F:
        for decorator in reversed(decorators):
            function = decorator(function)
        return function

    return apply


def _groups(context: click.Context, param: click.Parameter, overlap: bool | None) -> int | None:
    return None if overlap is None else OVERLAP_GROUPS if overlap else 1


# Flags that override the field of PoolConfig named like them (or in `name`).
_POOL_SETTINGS: dict[str, dict[str, Any]] = {
    "--dtype": {"type": click.Choice(list(ITEM_BYTES)), "help": "Of weights and KV cache."},
    "--device": {"type": click.Choice(["cpu", "cuda"]), "help": "Where ranks compute."},
    "--kv-memory": {"type": Bytes(), "name": "kv_memory_bytes", "help": "KV cache a rank."},
    "--max-model-len": {"type": POSITIVE, "help": "Prompt plus output of a request, in tokens."},
    "--page-size": {"type": POSITIVE, "help": "Tokens in a KV page."},
    "--kv-transfer": {"type": click.Choice(get_args(KvTransfer)), "help": "How prefill sends KV."},
    "--transport": {"type": click.Choice(get_args(DataPlane)), "help": "Data plane of decode."},
    "--strategy": {
        "type": click.Choice(get_args(StrategyName)),
        "help": "How the model and requests are divided; tknp unless given.",
    },
    "--copies": {"type": click.IntRange(1, 2), "help": "Of the weights (tknp): 2 for dual roots."},
    "--microbatches": {"type": POSITIVE, "help": "Batches under way at once (tknp, pp)."},
    "--width": {"type": POSITIVE, "help": "Most nodes that divide one request's KV (tknp)."},
    "--interleave": {"type": POSITIVE, "help": "Generated tokens a turn of several owners."},
    "--overlap/--no-overlap": {
        "default": None,
        "callback": _groups,
        "help": "Exchange under attention, group by group (helix).",
    },
    "--inside": {
        "is_flag": True,
        "default": None,
        "help": "Sequence shards stand in one machine, not across machines (dcp, helix).",
    },
    "--reserve-ratio": {
        "type": click.FloatRange(0, 1),
        "metavar": "RATIO",
        "help": "Part of the output reserved on placement; below 1 requests grow.",
    },
    "--prefill-chunk": {"type": POSITIVE, "help": "Prompt tokens computed at once."},
    "--max-batch": {"type": POSITIVE, "help": "Requests in a running batch."},
    "--max-queue": {"type": POSITIVE, "help": "Requests that may wait for pages."},
    "--timeout-s": {
        "type": float,
        "metavar": "SECONDS",
        "help": "Longest wait for a peer on the data plane.",
    },
    "--lease-s": {
        "type": float,
        "metavar": "SECONDS",
        "help": "Life of a reservation whose other side is silent.",
    },
    "--drain-s": {
        "type": float,
        "metavar": "SECONDS",
        "help": "How long open requests may go on after SIGTERM.",
    },
    "--record": {"type": FILE, "help": "Write every scheduling decision there; see replay."},
    "--epoch": {"type": POSITIVE, "help": "Number of this membership of the pool."},
    "--served-model-name": {"help": "What clients call the model."},
    "--interface": {"help": "Network interface of the data plane."},
    "--tls-cert": {"type": FILE, "help": "PEM certificate of every service."},
    "--tls-key": {"type": FILE, "help": "PEM key of that certificate."},
    "--tls-ca": {"type": FILE, "help": "PEM certificates that services trust."},
    "--token-file": {"type": FILE, "help": "Holds the bearer token of the services."},
    "--api-token-file": {"type": FILE, "help": "Holds another token that clients may use."},
    "--insecure": {
        "is_flag": True,
        "default": None,
        "help": "Let ports beyond loopback do without TLS and token.",
    },
}
# Resolved once by the process that writes a pool file; its children read that file alone.
POOL_VARIABLES = frozenset(
    variable(flag)
    for flag in ("--pool", "--model", "--node", "--replica", "--rank", *_POOL_SETTINGS)
)


def pool_settings(function: F) -> F:
    """Settings of PoolConfig, absent (None) unless given by flag or environment."""
    options = []
    for flag, settings in _POOL_SETTINGS.items():
        names = [settings["name"]] if "name" in settings else []
        rest = {key: value for key, value in settings.items() if key != "name"}
        options.append(option(flag, *names, **rest))
    return combined(*options)(function)


def target_options(function: F) -> F:
    """Which pool to talk to: the keywords that `client_for` takes."""
    return combined(
        option("--target", default="127.0.0.1:50051", show_default=True, metavar="HOST:PORT",
               help="Coordinator or gateway to talk to."),
        option("--tls-ca", type=FILE, help="Use TLS and trust these PEM certificates."),
        option("--token-file", type=FILE, help="Holds the bearer token to show."),
    )(function)  # fmt: skip


def client_for(target: str, tls_ca: str | None, token_file: str | None) -> Client:
    """A client; to be called in a running event loop. Raises InvalidValue for a bad file."""
    from tknp.client import Client
    from tknp.rpc.pem import read_token

    return Client(target, tls_ca, token_file and read_token("token_file", token_file))
