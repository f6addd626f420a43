"""Who may call whom, and what nobody else may read: TLS and bearer tokens.

    pool file (paths) --read_security--> Security --> connect(address, security)
                                                  \\-> Server(address, names, security)

    port          without TLS     with TLS                     with a token
    internal      loopback only   both sides show a            the services' token
                                  certificate of tls_ca
    coordinator   loopback only   the server shows one         the services' or the API token

Health is answered without a token, so that probes need none. Files are read once, when a process
starts; what they hold appears in no log, message or repr.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import grpc

from tknp.config import PoolConfig
from tknp.rpc.pem import read_ca, read_pair, read_token


@dataclass(frozen=True)
class Tls:
    """PEM of one process: what it shows, its key, and whose certificates it trusts."""

    cert: bytes = field(repr=False)
    key: bytes = field(repr=False)
    ca: bytes = field(repr=False)


@dataclass(frozen=True)
class Security:
    """What one process shows and asks for. Without values: plain text, open to loopback."""

    tls: Tls | None = None
    token: str | None = field(default=None, repr=False)
    api_token: str | None = field(default=None, repr=False)

    def accepted(self, public: bool) -> tuple[str, ...]:
        """Tokens that a port takes; none: it is open."""
        given = (self.token, self.api_token if public else None)
        return tuple(token for token in given if token is not None)

    def server_credentials(self, public: bool) -> grpc.ServerCredentials | None:
        """None without TLS. An internal port takes only clients with a certificate of the CA."""
        if self.tls is None:
            return None
        pair = [(self.tls.key, self.tls.cert)]
        if public:
            return grpc.ssl_server_credentials(pair)
        return grpc.ssl_server_credentials(pair, self.tls.ca, require_client_auth=True)

    def channel_credentials(self) -> grpc.ChannelCredentials | None:
        """None without TLS. Shows this process's certificate, trusts those of the CA."""
        if self.tls is None:
            return None
        return grpc.ssl_channel_credentials(self.tls.ca, self.tls.key, self.tls.cert)


PLAINTEXT = Security()


def read_security(config: PoolConfig) -> Security:
    """Read the files that `config` names. Raises InvalidValue naming the field and the remedy."""
    tls = None
    if config.tls_cert and config.tls_key and config.tls_ca:
        tls = Tls(*read_pair(config.tls_cert, config.tls_key), read_ca("tls_ca", config.tls_ca))
    return Security(
        tls,
        config.token_file and read_token("token_file", config.token_file),
        config.api_token_file and read_token("api_token_file", config.api_token_file),
    )
