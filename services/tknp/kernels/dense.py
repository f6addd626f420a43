"""Dense operations of one shard by the CPU kernels, bfloat16.

Construction packs every matrix into one arena in the layout that the kernels stream; the
`ShardWeights` are not kept and may be dropped. Tied, the embedding is read from the packed head, so
the matrix is stored once.

Any number of threads may call one instance at a time: it never changes after construction.
"""

from __future__ import annotations

from collections.abc import Iterator
from ctypes import byref

import torch
from torch import Tensor

from tknp.errors import InvalidValue
from tknp.kernels.arena import Arena
from tknp.kernels.library import Layer, Shape, load, threads
from tknp.model.config import ModelConfig
from tknp.model.dense import check_whole, held
from tknp.model.shard import Shard
from tknp.model.weights import LayerWeights, ShardWeights

_PANELS = 64  # columns, whole panels of every instruction set
_ITEM_BYTES = 2


class KernelDense:
    """Implements `tknp.model.dense.Dense`; see there for shapes.

    Raises Unavailable where there are no kernels and InvalidValue for other families than Llama's
    and weights that aren't bfloat16 on the CPU.
    """

    def __init__(self, weights: ShardWeights) -> None:
        self.shard: Shard = weights.shard
        config = self.shard.config
        check_family(config)
        self._library = load()
        self._shape = Shape(
            config.hidden_size,
            self.shard.projected_width,
            len(self.shard.output_columns),
            len(self.shard.mlp_columns),
            len(self.shard.vocab),
            config.norm_eps,
        )
        tied = weights.head is not None and weights.head is weights.embedding
        matrices = [weights.embedding, None if tied else weights.head]
        for layer in weights.layers.values():
            matrices += [layer.qkv, layer.output, layer.down]
        sizes = [self._library.packed_elements(*m.shape) for m in matrices if m is not None]
        mlp = (self._shape.mlp_columns, config.hidden_size)
        sizes += [self._library.packed_gate_up_elements(*mlp)] * len(weights.layers)
        self._arena = Arena(sum(map(Arena.rounded, sizes)))

        self._norms: list[Tensor] = []
        self._embedding = self._packed(weights.embedding)
        self._head = self._embedding if tied else self._packed(weights.head)
        self._final_norm = self._norm(weights.final_norm)
        self._layers = {index: self._layer(layer) for index, layer in weights.layers.items()}

    @property
    def size_bytes(self) -> int:
        """Bytes of all weights as packed, padding included."""
        return self._arena.nbytes + sum(norm.nbytes for norm in self._norms)

    @property
    def shape(self) -> Shape:
        """Sizes as the kernels take them."""
        return self._shape

    def packed(self, layer: int) -> Layer:
        """Weights of `layer` as the kernels take them; stays where it is."""
        return self._layers[layer]

    def embed(self, ids: Tensor) -> Tensor:
        table = held(self._embedding, "embedding")
        local = (ids.long() - self.shard.vocab.start).contiguous()
        x = torch.empty(local.shape[0], self._shape.hidden)
        self._library.embed(
            table, byref(self._shape), local.data_ptr(), local.shape[0], x.data_ptr(), threads()
        )
        return x

    def project(self, layer: int, x: Tensor) -> Tensor:
        x = self._residual(x)
        qkv = x.new_empty(x.shape[0], self._shape.qkv_width, dtype=torch.bfloat16)
        status = self._library.project(
            byref(self._layers[layer]), byref(self._shape), x.data_ptr(), x.shape[0],
            qkv.data_ptr(), threads(),
        )  # fmt: skip
        self._library.check(status)
        return qkv

    def finish(self, layer: int, x: Tensor, attention: Tensor) -> Tensor:
        check_whole(self.shard)
        x = self._residual(x)
        attention = self._attention(attention, x.shape[0])
        status = self._library.finish(
            byref(self._layers[layer]), byref(self._shape), x.data_ptr(), attention.data_ptr(),
            x.shape[0], threads(),
        )  # fmt: skip
        self._library.check(status)
        return x

    def output(self, layer: int, attention: Tensor) -> Tensor:
        rows = attention.shape[0]
        attention = self._attention(attention, rows)
        partial = attention.new_empty(rows, self._shape.hidden)
        status = self._library.output(
            byref(self._layers[layer]), byref(self._shape), attention.data_ptr(), rows,
            partial.data_ptr(), threads(),
        )  # fmt: skip
        self._library.check(status)
        return partial

    def mlp(self, layer: int, x: Tensor) -> Tensor:
        x = self._residual(x)
        partial = x.new_empty(x.shape, dtype=torch.bfloat16)
        status = self._library.mlp(
            byref(self._layers[layer]), byref(self._shape), x.data_ptr(), x.shape[0],
            partial.data_ptr(), threads(),
        )  # fmt: skip
        self._library.check(status)
        return partial

    def head(self, x: Tensor) -> Tensor:
        matrix, norm = held(self._head, "head"), held(self._final_norm, "head")
        x = self._residual(x)
        return self._logits(norm, matrix, self._shape, x)

    def head_parts(self, x: Tensor) -> Iterator[Tensor]:
        """Parts that take about as long as a layer."""
        matrix, norm = held(self._head, "head"), held(self._final_norm, "head")
        x, whole = self._residual(x), self._shape
        layer = whole.qkv_width + whole.q_width + 3 * whole.mlp_columns
        columns = -(-layer // _PANELS) * _PANELS
        for start in range(0, max(whole.vocabulary, 1), columns):
            part = Shape.from_buffer_copy(whole)
            part.vocabulary = min(columns, whole.vocabulary - start)
            before = self._library.packed_elements(start, whole.hidden)
            yield self._logits(norm, matrix + before * _ITEM_BYTES, part, x)

    def _logits(self, norm: int, matrix: int, shape: Shape, x: Tensor) -> Tensor:
        logits = x.new_empty(x.shape[0], shape.vocabulary)
        status = self._library.head(
            norm, matrix, byref(shape), x.data_ptr(), x.shape[0], logits.data_ptr(), threads()
        )
        self._library.check(status)
        return logits

    def _residual(self, x: Tensor) -> Tensor:
        if x.dtype != torch.float32 or x.shape[1:] != (self._shape.hidden,):
            remedy = f"the residual stream is float32 [B, {self._shape.hidden}]"
            raise InvalidValue("x", (x.dtype, tuple(x.shape)), remedy)
        return x.contiguous()

    def _attention(self, attention: Tensor, rows: int) -> Tensor:
        shape = (rows, self._shape.q_width)
        if attention.dtype != torch.bfloat16 or attention.shape != shape:
            remedy = f"attention output is bfloat16 {list(shape)}"
            raise InvalidValue("attention", (attention.dtype, tuple(attention.shape)), remedy)
        return attention.contiguous()

    def _layer(self, layer: LayerWeights) -> Layer:
        return Layer(
            self._norm(layer.input_norm),
            self._packed(layer.qkv),
            self._packed(layer.output),
            self._norm(layer.mlp_norm),
            self._packed_gate_up(layer.gate_up),
            self._packed(layer.down),
        )

    def _packed(self, matrix: Tensor | None) -> int | None:
        """Pack [N, K]; the address, None for None."""
        if matrix is None:
            return None
        _check_matrix(matrix)
        target = self._arena.take(self._library.packed_elements(*matrix.shape))
        matrix = matrix.contiguous()
        self._library.pack(matrix.data_ptr(), *matrix.shape, target.data_ptr(), threads())
        return target.data_ptr()

    def _packed_gate_up(self, matrix: Tensor) -> int:
        _check_matrix(matrix)
        mlp = (self._shape.mlp_columns, self._shape.hidden)
        target = self._arena.take(self._library.packed_gate_up_elements(*mlp))
        matrix = matrix.contiguous()
        self._library.pack_gate_up(matrix.data_ptr(), *mlp, target.data_ptr(), threads())
        return target.data_ptr()

    def _norm(self, weight: Tensor | None) -> int | None:
        if weight is None:
            return None
        self._norms.append(weight.detach().float().contiguous())
        return self._norms[-1].data_ptr()


def check_family(config: ModelConfig) -> None:
    """InvalidValue unless the kernels have the norm and the MLP of `config`."""
    if config.family != "llama":
        remedy = "the CPU kernels have RMSNorm and SwiGLU only"
        raise InvalidValue("family", config.family, remedy)


def _check_matrix(matrix: Tensor) -> None:
    if matrix.dtype != torch.bfloat16 or matrix.device.type != "cpu":
        found = f"{matrix.dtype} on {matrix.device}"
        raise InvalidValue("weights", found, "the CPU kernels take bfloat16 on the CPU")
