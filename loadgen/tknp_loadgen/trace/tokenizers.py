"""Counting tokens: a tokenizer file, or the server's own tokenizer asked over the network.

DIRECTORY or tokenizer.json     read with the `tokenizers` library
grpc://HOST:PORT                TKNP's Inference.Tokenize
http://HOST:PORT[/v1]           POST /tokenize, as vLLM serves it
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Protocol

from tknp_loadgen.errors import InputError, TargetError

TIMEOUT_S = 30.0


class Tokenizer(Protocol):
    """What a trace needs to know of a tokenizer."""

    name: str

    def count(self, text: str) -> int:
        """Tokens of a prompt, whatever is added to every one (such as BOS) among them."""


class FileTokenizer:
    """A `tokenizer.json` of a published checkpoint."""

    def __init__(self, path: Path) -> None:
        from tokenizers import Tokenizer as Library

        file = path / "tokenizer.json" if path.is_dir() else path
        try:
            self._library = Library.from_file(str(file))
        except Exception as error:  # the library raises nothing narrower
            raise InputError("tokenizer", str(path), f"can't be read: {error}") from error
        self.name = path.name

    def count(self, text: str) -> int:
        return len(self._library.encode(text).ids)


class GrpcTokenizer:
    """The tokenizer of a TKNP pool."""

    def __init__(self, address: str) -> None:
        import grpc

        from tknp.v1.inference_pb2 import TokenizeRequest
        from tknp.v1.inference_pb2_grpc import InferenceStub

        self.name = f"grpc://{address}"
        self._request = TokenizeRequest
        self._error = grpc.RpcError
        self._stub = InferenceStub(
            grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)])
        )

    def count(self, text: str) -> int:
        try:
            answer = self._stub.Tokenize(
                self._request(text=text), timeout=TIMEOUT_S, wait_for_ready=True
            )
        except self._error as error:
            raise TargetError(f"{self.name} does not tokenize: {error}") from error
        return len(answer.token_ids) // 4


class HttpTokenizer:
    """The tokenizer of a server with vLLM's /tokenize."""

    def __init__(self, url: str) -> None:
        self.name = url
        self._url = url.removesuffix("/").removesuffix("/v1") + "/tokenize"

    def count(self, text: str) -> int:
        body = json.dumps({"prompt": text}).encode()
        request = urllib.request.Request(
            self._url, body, headers={"content-type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
                return int(json.load(answer)["count"])
        except (urllib.error.URLError, KeyError, TypeError, ValueError, TimeoutError) as error:
            raise TargetError(f"{self._url} does not tokenize: {error}") from error


def open_tokenizer(name: str) -> Tokenizer:
    """From what the user wrote: a path or a URL."""
    if name.startswith("grpc://"):
        return GrpcTokenizer(name.removeprefix("grpc://"))
    if name.startswith(("http://", "https://")):
        return HttpTokenizer(name)
    return FileTokenizer(Path(name))
