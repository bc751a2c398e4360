"""Exact sampling: every decoder returns the very tokens that plain sampling with the same seed returns.

The argmax of logits + Gumbel noise is a sample from their softmax. The noise here depends on nothing but the seed and
the position, so a sampled token is a function of its logits, just as a greedy one is. Drafts, verification and
corrections work unchanged, and the best few tokens of the same noisy scores are the candidates.

Fewer drafts are accepted than by the optimal rejection rule. In return the output can be reproduced token by token.
"""

import functools
import hashlib
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from wfd import check


@dataclass(frozen=True)
class Sampling:
    """Sample from softmax(logits / temperature) within the top_k tokens, and of those within top_p of probability.

    top_k 0 and top_p 1 are off; the token that crosses top_p stays; temperature 0 is greedy.
    Raises ValueError for values out of range.
    """
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self):
        check(0 <= self.temperature < math.inf and self.top_k >= 0 and 0 < self.top_p <= 1,
              f"sampling needs temperature >= 0, top_k >= 0 and 0 < top_p <= 1, not {self}")

    def scores(self, logits: Tensor, positions: list[int]) -> Tensor:
        """logits [rows, V], and the position that each row predicts -> scores [rows, V], whose argmax is the sample."""
        if self.temperature == 0:
            return logits
        scores = logits.double()
        scores = (scores - scores.max(-1, keepdim=True).values) / self.temperature            # no overflow
        if self.top_k:
            least = scores.topk(min(self.top_k, scores.shape[-1])).values[:, -1:]
            scores = scores.masked_fill(scores < least, -torch.inf)
        if self.top_p < 1:
            probabilities, order = scores.softmax(-1).sort(dim=-1, descending=True, stable=True)
            outside = probabilities.cumsum(-1) - probabilities >= self.top_p
            scores = scores.masked_fill(outside.gather(-1, order.argsort(-1)), -torch.inf)
        noise = [gumbel_noise(self.seed, position, scores.shape[-1]) for position in positions]
        return scores + torch.stack(noise).to(scores.device)


@functools.lru_cache(maxsize=64)
def gumbel_noise(seed: int, position: int, size: int) -> Tensor:
    """The noise of a position, [size]. Hashed: seed + position would give the next seed the same noise, shifted."""
    digest = hashlib.sha256(f"{seed} {position}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    return -torch.empty(size, dtype=torch.float64).exponential_(generator=generator).log()
