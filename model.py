"""Looped language models: one block of layers, applied again and again to every token.

    tokens -> embed -> [prelude] -> recur, recur, ... recur -> [coda] -> head -> logits
                                    the same weights, T times

Two published families share the parts below and differ in how they are put together:

    Ouro     no prelude or coda; the final norm closes every recurrence, and its output starts the next
    Huginn   a prelude reads the token once; every recurrence sees the prelude's output again through an
             adapter, starts from a random state, and a coda of a few layers precedes the head

No tensor here has a batch axis. A **row** is one token at one position; what a row may attend to is the
business of `kv`, which a caller passes in. `forward` passes one that attends to the whole sequence: it is
the slow, obvious reference. `wfd.py` passes a cache, and its rows may sit at different depths.

    d width, H query heads, K key/value heads, h head size, T recurrences, V vocabulary
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass
class Config:
    width: int             # d
    heads: int             # H
    kv_heads: int          # K; H / K query heads share one key/value head
    head_dim: int          # h
    ffn: int               # hidden width of the gated MLP
    vocab: int             # V, rows of the embedding, padding included
    core: int              # layers of the looped block
    recurrences: int       # T, the depth the model was trained for
    context: int           # positions
    rope_theta: float
    norm_eps: float
    tied: bool             # the head is the embedding matrix
    prelude: int = 0       # layers before the loop (Huginn)
    coda: int = 0          # layers after the loop (Huginn)
    qk_bias: bool = False  # a bias on queries and keys, before they are rotated (Huginn)
    adapter_bias: bool = False
    init_std: float = 0.0  # spread of the random initial state, before its scaling by sqrt(d) (Huginn)


@dataclass
class KVSpec:
    """What a key/value cache for a model must hold."""
    prelude: int           # layers of each stage; attend() numbers them through: prelude, core, coda
    core: int
    coda: int
    heads: int             # key/value heads
    head_dim: int
    dtype: torch.dtype
    device: torch.device


class FullAttention:
    """The attention of whole sequences, without a cache: every row sees its sequence up to itself.

    Rows are sequences of `length` tokens, one after the other; nothing is kept between calls.
    """

    def __init__(self, length: int):
        self.length = length

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [rows, H, h], k and v [rows, K, h] -> [rows, H, h]."""
        q, k, v = (x.unflatten(0, (-1, self.length)).transpose(1, 2) for x in (q, k, v))  # [n, heads, length, h]
        gqa = q.shape[1] != k.shape[1]
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=gqa)
        return out.transpose(1, 2).flatten(0, 1)


class RMSNorm(nn.Module):
    """x / rms(x), computed in float32 or wider and rounded, then times the gain in the dtype of x."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], eps=self.eps) * self.weight


class Block(nn.Module):
    """Attention, then a gated MLP, each between two norms ("sandwich").

    `norm_sums` says what the second norm acts on: Huginn norms the residual sum, Ouro only what is added.
    """

    def __init__(self, config: Config, norm_sums: bool):
        super().__init__()
        d, self.heads, self.kv_heads = config.width, config.heads, config.kv_heads
        self.norm_sums = norm_sums
        self.norms = nn.ModuleList(RMSNorm(d, config.norm_eps) for _ in range(4))
        self.qkv = nn.Linear(d, (self.heads + 2 * self.kv_heads) * config.head_dim, bias=False)
        self.qk_bias = nn.Parameter(torch.zeros(self.heads + self.kv_heads, config.head_dim)) if config.qk_bias else None
        self.attention_out = nn.Linear(self.heads * config.head_dim, d, bias=False)
        self.gate_up = nn.Linear(d, 2 * config.ffn, bias=False)
        self.down = nn.Linear(config.ffn, d, bias=False)

    def attention(self, x: Tensor, layer: int, rotary, kv) -> Tensor:
        qkv = self.qkv(x).unflatten(-1, (self.heads + 2 * self.kv_heads, -1))  # [rows, H+K+K, h]
        qk, v = qkv.split((self.heads + self.kv_heads, self.kv_heads), dim=1)
        if self.qk_bias is not None:
            qk = qk + self.qk_bias
        q, k = rotary(qk).split((self.heads, self.kv_heads), dim=1)
        return self.attention_out(kv.attend(layer, q, k, v).flatten(1))

    def mlp(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)

    def add(self, x: Tensor, branch: Tensor, norm: RMSNorm) -> Tensor:
        return norm(x + branch) if self.norm_sums else x + norm(branch)

    def forward(self, x: Tensor, layer: int, rotary, kv) -> Tensor:
        x = self.add(x, self.attention(self.norms[0](x), layer, rotary, kv), self.norms[1])
        return self.add(x, self.mlp(self.norms[2](x)), self.norms[3])


def at_least_float32(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


class LoopedLM(nn.Module):
    """What both families share.

    `recurrences` may be set to fewer or more than the model was trained for. `candidates` is the schedule
    that wavefront decoding uses when none is asked for, see wfd.py.
    """

    def __init__(self, config: Config, norm_sums: bool):
        super().__init__()
        self.config, self.recurrences = config, config.recurrences
        self.layers = nn.ModuleList(Block(config, norm_sums) for _ in range(config.prelude + config.core + config.coda))
        self.embedding = nn.Embedding(config.vocab, config.width)
        self.final_norm = RMSNorm(config.width, config.norm_eps)
        self.head = nn.Linear(config.width, config.vocab, bias=False)
        if config.tied:
            self.head.weight = self.embedding.weight

    def assign(self, name: str, value: Tensor) -> None:
        """Make `value` the parameter of that name. A tied head goes with the embedding."""
        owner, _, attribute = name.rpartition(".")
        setattr(self.get_submodule(owner), attribute, nn.Parameter(value, requires_grad=False))
        if self.config.tied:
            self.head.weight = self.embedding.weight

    @property
    def context(self) -> int:
        """Positions available."""
        return self.config.context

    @property
    def vocab(self) -> int:
        return self.config.vocab

    @property
    def kv_spec(self) -> KVSpec:
        c, weight = self.config, self.embedding.weight
        return KVSpec(c.prelude, c.core, c.coda, c.kv_heads, c.head_dim, weight.dtype, weight.device)

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine of every rotary angle, [rows, 1, h/2] each, in float32 or wider."""
        h, dtype = self.config.head_dim, torch.promote_types(self.embedding.weight.dtype, torch.float32)
        even = torch.arange(0, h, 2, device=positions.device).to(dtype)
        angles = positions.to(dtype)[:, None, None] * (self.config.rope_theta ** (-even / h))
        return angles.cos(), angles.sin()

    def run(self, layers: range, x: Tensor, positions: Tensor, kv) -> Tensor:
        """The layers numbered `layers`, one after the other. x [rows, d] -> [rows, d]."""
        if layers:
            rotary = self.rotary(positions)
            for layer in layers:
                x = self.layers[layer](x, layer, rotary, kv)
        return x

    def forward(self, tokens: Tensor, state: Tensor | None = None) -> Tensor:
        """Logits after every recurrence, computed from scratch: the reference for everything else.

        tokens [n] (a list will do); state [n, d]: initial states other than the model's own.
        Returns [T, n, V].
        """
        tokens = torch.as_tensor(tokens, device=self.embedding.weight.device)
        positions, kv = torch.arange(len(tokens), device=tokens.device), FullAttention(len(tokens))
        e = self.embed(tokens, positions, kv)
        x = self.initial_state(e, positions) if state is None else state
        logits = []
        for _ in range(self.recurrences):
            x = self.recur(x, e, positions, kv)
            logits.append(self.predict(x, positions, kv))
        return torch.stack(logits)


class Ouro(LoopedLM):
    """Ouro-1.4B and 2.6B and their Thinking variants ("Scaling Latent Reasoning via Looped Language Models", 2025)."""

    def __init__(self, config: Config):
        super().__init__(config, norm_sums=False)
        # extras/tune.py --dtype bfloat16 finds {1: 2, 2: 2, 3: 3} for tiny/ouro, and this within two percent
        # of it.
        self.candidates = {1: 2, 2: 2, 3: 2}

    def rotary(self, positions: Tensor):
        """Rotates the halves of every head against each other, in the model's dtype."""
        cos, sin = (t.to(self.embedding.weight.dtype) for t in self.angles(positions))

        def rotate(x: Tensor) -> Tensor:  # [rows, heads, h]
            a, b = x.chunk(2, dim=-1)
            return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
        return rotate

    def embed(self, tokens: Tensor, positions: Tensor, kv) -> Tensor:
        return self.embedding(tokens)                                                         # [rows, d]

    def initial_state(self, e: Tensor, positions: Tensor) -> Tensor:
        return e

    def recur(self, x: Tensor, e: Tensor, positions: Tensor, kv) -> Tensor:
        return self.final_norm(self.run(range(self.config.core), x, positions, kv))

    def predict(self, x: Tensor, positions: Tensor, kv, select: Tensor | None = None) -> Tensor:
        return at_least_float32(self.head(x if select is None else x[select]))                # [selected, V]


class Huginn(LoopedLM):
    """Huginn-0125 ("Scaling up Test-Time Compute with Latent Reasoning", 2025).

    The published model draws its initial state anew in every call. Here position p always starts from row p
    of `state_table`, so that a token is the same function of its text however it is scheduled.
    """

    def __init__(self, config: Config):
        super().__init__(config, norm_sums=True)
        # For tiny/huginn, extras/tune.py finds one candidate at nearly every depth, two at depth 1 in
        # bfloat16, be it with the costs of its own calls or with those of the official size (--shape
        # huginn-3.5b), where a reading costs 0.7 of a call of one row. This is within 8 percent of that, with
        # half the readings. A second candidate at depth 1 costs a few rows; a wrong draft that is found at
        # depth 32 costs 32 calls.
        self.candidates = {1: 2, 2: 1, 4: 1, 8: 1}
        self.adapter = nn.Linear(2 * config.width, config.width, bias=config.adapter_bias)
        self.register_buffer("state_table", torch.zeros(config.context, config.width), persistent=False)

    def draw_states(self, seed: int) -> Tensor:
        """A table of initial states [context, d]: normal, cut at three sigma, float32, the same on every machine."""
        table, sigma = torch.empty(self.config.context, self.config.width), self.config.init_std
        if sigma == 0:
            return table.zero_()
        nn.init.trunc_normal_(table, std=sigma, a=-3 * sigma, b=3 * sigma, generator=torch.Generator().manual_seed(seed))
        return table * self.config.width ** 0.5

    @property
    def context(self) -> int:
        return min(self.config.context, len(self.state_table))

    def rotary(self, positions: Tensor):
        """Rotates neighbouring pairs in every head, in float32 or wider."""
        cos, sin = self.angles(positions)

        def rotate(x: Tensor) -> Tensor:  # [rows, heads, h]
            a, b = x[..., 0::2], x[..., 1::2]
            return torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2).to(x.dtype)
        return rotate

    def embed(self, tokens: Tensor, positions: Tensor, kv) -> Tensor:
        x = self.embedding(tokens) * self.config.width ** 0.5
        return self.run(range(self.config.prelude), x, positions, kv)                         # [rows, d]

    def initial_state(self, e: Tensor, positions: Tensor) -> Tensor:
        return self.state_table[positions].to(e.dtype)                                        # [rows, d]

    def recur(self, x: Tensor, e: Tensor, positions: Tensor, kv) -> Tensor:
        x = self.adapter(torch.cat((x, e), dim=-1))
        return self.run(range(self.config.prelude, self.config.prelude + self.config.core), x, positions, kv)

    def predict(self, x: Tensor, positions: Tensor, kv, select: Tensor | None = None) -> Tensor:
        # The final norm acts twice: on the state, and on what the coda makes of it.
        first = self.config.prelude + self.config.core
        x = self.run(range(first, len(self.layers)), self.final_norm(x), positions, kv)
        return at_least_float32(self.head(self.final_norm(x if select is None else x[select])))
