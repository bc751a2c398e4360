"""Is a difference from plain decoding a near tie, which rounding explains, or a fault?

The rows of a matrix product round differently when the product has another number of rows. So plain decoding
itself, with its calls padded to 1, 2, ... max_rows rows, gives logits that differ a little. The largest
difference among these passes is the rounding. A differing token is a near tie if plain decoding's gap to it
is at most twice that.
"""

import dataclasses

import torch

from extras import bitwise
from wfd import autoregressive


class Dictated:
    """In place of a Sampling: every position gets the token of a given text. Keeps the last logits that it overruled."""

    def __init__(self, text: list[int]):
        self.text = text

    def scores(self, logits: torch.Tensor, positions: list[int]) -> torch.Tensor:
        self.last = logits[-1]
        scores = torch.zeros_like(logits)
        scores[range(len(logits)), [self.text[position] for position in positions]] = 1
        return scores


def near_tie(model, prompt: list[int], plain: list[int], ours: list[int], max_rows: int, *, sampling=None,
             kv_share=None) -> str:
    """"" where the two token lists are equal, else a sentence that starts with "near tie: " or "no near tie: "."""
    if plain == ours:
        return ""
    i = next((i for i, (a, b) in enumerate(zip(plain, ours)) if a != b), None)
    if i is None:
        return f"no near tie: the texts are equal, but one ends after {len(ours)} tokens, plain decoding's after {len(plain)}"
    text, position, pair = Dictated(prompt + plain[:i] + [0]), len(prompt) + i, [plain[i], ours[i]]
    everything = sampling and dataclasses.replace(sampling, top_k=0, top_p=1.0)
    gap, rounding, allowed = None, 0.0, set()
    for rows in range(max_rows + 1):                   # 0: not padded
        decode, pad = (bitwise.autoregressive, {"pad_rows": rows}) if rows else (autoregressive, {})
        decode(model, prompt, i + 1, sampling=text, kv_share=kv_share, **pad)
        logits = text.last[None]
        scores = everything.scores(logits, [position])[0] if sampling else logits[0]
        if sampling:                                   # whether top_k and top_p leave the two tokens in
            allowed.add(tuple(sampling.scores(logits, [position])[0, pair].isfinite().tolist()))
        if gap is None:
            gap, low, high = (scores[pair[0]] - scores[pair[1]]).item(), scores, scores
        low, high = low.minimum(scores), high.maximum(scores)
        rounding = (high - low).max().item()
        if len(allowed) > 1 or abs(gap) <= 2 * rounding:
            break
    kind = "near tie" if len(allowed) > 1 or abs(gap) <= 2 * rounding else "no near tie"
    return (f"{kind}: token {i + 1} is the first that differs; plain decoding has the two tokens {gap:.3g} apart there, "
            f"and rounding moves a score by {rounding:.3g}")
