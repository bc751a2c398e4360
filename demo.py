"""Wavefront decoding from the command line: continue a text plainly and as a wavefront, and compare.

    python demo.py
    python demo.py --model ByteDance/Ouro-2.6B --chat --prompt "Why is the sky blue?"
    python demo.py --bench                  every method side by side
    python demo.py --bench ouro-2.6b        what this machine would give, before the checkpoint is downloaded

Exit status: 0; 1 when the tokens differ from plain decoding; 2 for bad input; 130 when interrupted.
"""

import argparse
import os
import statistics
import sys
import time
import warnings
from functools import partial
from pathlib import Path

warnings.filterwarnings("ignore", message="Failed to initialize NumPy")      # torch says so, but nothing here needs it
# On AMD processors MKL multiplies small float32 batches almost twice as fast when this is set, to its own default.
os.environ.setdefault("MKL_CBWR", "AUTO")

import torch  # noqa: E402

from load_weights import load  # noqa: E402
from model import Config, Huginn, LoopedLM, Ouro  # noqa: E402
from wfd import KVShare, Result, Sampling, Wavefront, autoregressive, available_memory, draft_then_verify, wavefront  # noqa: E402

TINY = Path(__file__).parent / "tiny"
PROMPT = "It was a rainy afternoon in November, and Anne"

# ----------------------------------------------------------------------------------------------------------------------
# 1. Arguments


def parse_candidates(text: str) -> dict[int, int]:
    """'1:2,2:2,3:1' -> {1: 2, 2: 2, 3: 1}."""
    try:
        return {int(k): int(n) for k, n in (pair.split(":") for pair in text.split(",") if pair)}
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form DEPTH:NUMBER,DEPTH:NUMBER, as 1:2,2:2,3:1") from None


def parse_sharing(text: str) -> KVShare:
    """'1:32' -> KVShare(slots=1, window=32)."""
    try:
        return KVShare(*map(int, text.split(":")))
    except (ValueError, TypeError):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form SLOTS:WINDOW, as 1:32") from None


def parse_device(text: str) -> str:
    try:
        torch.empty(0, device=text).tolist()
    except (RuntimeError, AssertionError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no device of this machine ({str(error).splitlines()[0]})") from None
    return text


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], argument_default=argparse.SUPPRESS)
    parser.add_argument("--model", metavar="PATH_OR_ID", default=TINY / "ouro",
                        help="a snapshot folder, or a hub id in the local Hugging Face cache (default: tiny/ouro)")
    parser.add_argument("--prompt", metavar="TEXT", default=PROMPT)
    parser.add_argument("--chat", action="store_true", default=False,
                        help="take the prompt as a user's message, rendered by the model's chat template")
    parser.add_argument("--max-new-tokens", type=int, metavar="N", default=120, help="(default: 120)")
    parser.add_argument("--recurrences", type=int, metavar="T", help="depth to decode at (default: the model's own)")
    parser.add_argument("--candidates", type=parse_candidates, metavar="DEPTH:N,...",
                        help="candidates kept open at each depth, as 1:2,2:2,3:1; '' is plain (default: the model's own)")
    parser.add_argument("--max-rows", type=int, metavar="N", help="rows in a block call, at most (default: 32)")
    parser.add_argument("--lookup", type=int, metavar="N", help="tokens copied ahead where the text repeats (default: 0)")
    parser.add_argument("--kv-share", type=parse_sharing, metavar="SLOTS:WINDOW",
                        help="keep the keys and values of only SLOTS recurrences behind the last WINDOW positions, as 1:32")
    parser.add_argument("--pad-rows", type=int, metavar="N", help="bitwise mode: so many rows in every call")
    parser.add_argument("--temperature", type=float, metavar="X", default=0.0, help="0 is greedy (default)")
    parser.add_argument("--top-k", type=int, metavar="K", default=0, help="sample from the K best tokens (default: all)")
    parser.add_argument("--top-p", type=float, metavar="P", default=1.0, help="sample from this share of probability")
    parser.add_argument("--seed", type=int, metavar="N", default=0, help="of sampling and of Huginn's initial states")
    parser.add_argument("--device", type=parse_device, metavar="D", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float64"), default="float32")
    parser.add_argument("--bench", nargs="?", const="loaded", choices=("loaded", *SHAPES), metavar="SHAPE",
                        help="compare all methods, greedy, on texts of its own; or tell what to expect of "
                        f"{', '.join(SHAPES)}")
    return parser.parse_args()


def load_model(options: argparse.Namespace):
    model, tokenizer = load(options.model, options.device, getattr(torch, options.dtype), seed=options.seed)
    note = ""
    if "recurrences" in options:
        if options.recurrences > model.recurrences:
            note = f" (more than the {model.recurrences} it was trained for)"
        model.recurrences = options.recurrences
    name = os.path.relpath(options.model) if Path(options.model).is_dir() else options.model
    print(f"{name}, {model.recurrences} recurrences{note}, {options.dtype} on {machine(options.device)}\n")
    return model, tokenizer


def machine(device: str) -> str:
    """The device, the threads and the version of torch: without them no figure means anything."""
    name = torch.cuda.get_device_name(device) if device.startswith("cuda") else f"{device}, {torch.get_num_threads()} threads"
    return f"{name}, torch {torch.__version__}"


# ----------------------------------------------------------------------------------------------------------------------
# 2. Generate and compare


def timed(decode, *args, **options) -> tuple[Result, float]:
    """A decoder's result and the seconds it took. It ends with a transfer from the device, so the clock is right."""
    begin = time.perf_counter()
    return decode(*args, **options), time.perf_counter() - begin


def per_token(result: Result) -> float:
    """Block calls per token; the first token comes from the prefill and needs none."""
    return result.calls / max(len(result.tokens) - 1, 1)


def generate(options: argparse.Namespace) -> int:
    model, tokenizer = load_model(options)
    prompt = tokenizer.encode(options.prompt, chat=options.chat)
    common = {"sampling": Sampling(options.temperature, options.top_k, options.top_p, options.seed),
              "kv_share": getattr(options, "kv_share", None)}
    schedule = {name: getattr(options, name) for name in ("candidates", "max_rows", "lookup", "pad_rows") if name in options}
    stream, shown = tokenizer.stream(), 0

    def show(tokens: list[int]) -> None:
        nonlocal shown
        print(stream.push([t for t in tokens[shown:] if t not in tokenizer.eos_ids]), end="", flush=True)
        shown = len(tokens)

    for decode, settings in ((wavefront, schedule), (autoregressive, {})):   # warm-up
        decode(model, prompt, min(options.max_new_tokens, 8), **settings, **common)
    print(options.prompt, end="\n\n" if options.chat else "", flush=True)
    common["eos_ids"] = tokenizer.eos_ids
    ours, seconds = timed(wavefront, model, prompt, options.max_new_tokens, **schedule, **common,
                          on_call=lambda wave: show(wave.tokens))
    show(ours.tokens)
    print(stream.end() + "\n", flush=True)
    plain, plain_seconds = timed(autoregressive, model, prompt, options.max_new_tokens, **common)
    if "pad_rows" in options:                          # equal to the bit means: to plain decoding in the same mode
        reference = autoregressive(model, prompt, options.max_new_tokens, pad_rows=options.pad_rows, **common).tokens
    else:
        reference = plain.tokens

    print(f"{'':12}{'block calls':>12}{'per token':>12}{'rows':>8}{'rows per call':>15}{'tokens/s':>11}")
    for name, result, spent in (("plain", plain, plain_seconds), ("wavefront", ours, seconds)):
        print(f"{name:12}{result.calls:12}{per_token(result):12.2f}{result.rows:8}"
              f"{result.rows / max(result.calls, 1):15.2f}{len(result.tokens) / spent:11.1f}")
    stats = ours.stats
    print(f"\n{len(ours.tokens)} tokens ({ours.finish}); drafts accepted {stats['accepted']}, rejected {stats['rejected']}; "
          f"{plain.calls / max(ours.calls, 1):.2f}x fewer calls, {plain_seconds / seconds:.2f}x plain's speed")
    return report_identity(ours.tokens == reference, options)


def report_identity(identical: bool, options: argparse.Namespace) -> int:
    print(f"identical to plain decoding: {'yes' if identical else 'NO'}")
    if not identical and options.dtype == "bfloat16":
        print("(in bfloat16, rounding depends on the rows in a call and tips near ties, which are common; float32 is exact, "
              "and so is bfloat16 with --pad-rows)")
    return 0 if identical else 1


# ----------------------------------------------------------------------------------------------------------------------
# 3. --bench: every method on the loaded model


def ladder(depth: int) -> list[int]:
    """The depths worth a reading: all of them at first, then ever fewer. 1 2 3 4 6 8 12 16 24 ..."""
    return [k for k in (1, 2, *(m * 2 ** i for i in range(20) for m in (3, 4))) if k < depth]


def methods(model: LoopedLM, prompts: list[list[int]]) -> dict[str, partial]:
    """The decoders to compare. The baselines get the settings that need the fewest calls on a few of the prompts."""
    def fewest(decode, settings):
        return min(settings, key=lambda setting: sum(decode(model, prompt, 80, **setting).calls for prompt in prompts[::3]))
    depths = ladder(model.recurrences)
    if not depths:
        raise ValueError("with fewer than 2 recurrences there is nothing to draft from, and nothing to compare")
    drafting = fewest(draft_then_verify, [{"draft_depth": d, "draft_len": n} for d in depths for n in (1, 2, 3, 4, 6)])
    published = fewest(wavefront, [{"candidates": {d: 1}} for d in depths])
    [d] = published["candidates"]
    wide = {depths[0]: 4, **dict.fromkeys(depths[1:], 2)}
    return {
        "plain": partial(autoregressive, model),
        f"draft-then-verify, {drafting['draft_len']} at depth {drafting['draft_depth']}": partial(draft_then_verify, model, **drafting),
        f"published, draft depth {d}": partial(wavefront, model, **published),
        "early correction": partial(wavefront, model, candidates=dict.fromkeys(depths, 1)),
        "wavefront (default)": partial(wavefront, model),
        "wide tree, 16 rows": partial(wavefront, model, candidates=wide, max_rows=16),
        "default + look-ahead 4": partial(wavefront, model, lookup=4)}


def held_out_prompts(tokenizer, number: int, length: int = 48) -> list[list[int]]:
    """Stretches of the text that the tiny models were not trained on."""
    text = tokenizer.encode((TINY / "held_out.txt").read_text(encoding="utf-8"))
    return [text[start:start + length] for start in range(0, len(text) - length, len(text) // number)][:number]


def bench(options: argparse.Namespace, new: int = 200, number: int = 20, length: int = 48) -> int:
    model, tokenizer = load_model(options)
    prompts = held_out_prompts(tokenizer, number, length)
    decoders = methods(model, prompts)
    results = {name: [] for name in decoders}
    print(f"{len(prompts)} prompts of {length} tokens, {new} new tokens each; the methods take turns on every prompt\n")
    for prompt in prompts:
        for name, decode in decoders.items():
            results[name].append(timed(decode, prompt, new))
    plain = results["plain"]
    print(f"{'':34}{'calls/token':>12}{'rows/call':>11}{'tokens/s':>10}{'speed':>8}{'identical':>11}")
    same = True
    for name, runs in results.items():
        calls, rows = (sum(getattr(result, what) for result, _ in runs) for what in ("calls", "rows"))
        tokens = sum(len(result.tokens) for result, _ in runs)
        speed = statistics.median(one[1] / other[1] for one, other in zip(plain, runs))
        identical = sum(one[0].tokens == other[0].tokens for one, other in zip(plain, runs))
        same &= identical == len(runs)
        print(f"{name:34}{calls / (tokens - len(runs)):12.3f}{rows / calls:11.2f}{tokens / sum(spent for _, spent in runs):10.1f}"
              f"{speed:7.2f}x{identical:6} of {len(runs)}", flush=True)
    print("\nspeed: plain's seconds over the method's, median of the prompts; prefill included")
    return report_identity(same, options)


# ----------------------------------------------------------------------------------------------------------------------
# 4. --bench SHAPE: official sizes with random weights

SHAPES = {
    "ouro-1.4b": (Ouro, Config(width=2048, heads=16, kv_heads=16, head_dim=128, ffn=5632, vocab=49152, core=24, recurrences=4,
                               context=65536, rope_theta=1e6, norm_eps=1e-6, tied=False)),
    "ouro-2.6b": (Ouro, Config(width=2048, heads=16, kv_heads=16, head_dim=128, ffn=5632, vocab=49152, core=48, recurrences=4,
                               context=65536, rope_theta=1e6, norm_eps=1e-6, tied=False)),
    "huginn-3.5b": (Huginn, Config(width=5280, heads=55, kv_heads=55, head_dim=96, ffn=17920, vocab=65536, core=4, recurrences=32,
                                   context=4096, rope_theta=5e4, norm_eps=1e-6, tied=True, prelude=2, coda=2, qk_bias=True))}


def random_model(shape: str, device: str, layers: int) -> LoopedLM:
    """A model of official shape, but for the number of its core layers, with random weights, in bfloat16."""
    model_class, config = SHAPES[shape]
    with torch.device("meta"):
        model = model_class(Config(**vars(config) | {"core": layers}))
    noise = torch.randn(2 ** 24, dtype=torch.bfloat16, device=device)
    for name, parameter in list(model.named_parameters()):
        value = noise.repeat(-(-parameter.numel() // len(noise)))[:parameter.numel()].view(parameter.shape)
        value.mul_(parameter.shape[-1] ** -0.5).add_(1.0 if value.dim() == 1 else 0.0)
        model.assign(name, value)
    if isinstance(model, Huginn):
        model.state_table = torch.zeros(config.context, config.width, dtype=torch.bfloat16, device=device)
    return model


@torch.inference_mode()
def time_calls(model: LoopedLM, widths=(1, 2, 4, 8, 16), columns: int = 300, repeats: int = 9) -> dict[int, tuple[float, float]]:
    """Rows -> seconds of a block call and of a reading of their predictions, with so many positions finished.

    The rows are a chain with depths spread over all recurrences. Medians; widths take turns.
    """
    wave = Wavefront(model, [1] * columns, 64, {}, max_rows=max(widths), room=max(widths))
    wave.prefill()
    while len(wave.started) < max(widths):
        parent = wave.started[-1]
        wave.start(parent, parent.position + 1, 1, 1.0)
    wave.embed_started()
    seconds = {rows: ([], []) for rows in widths}
    for repeat in range(repeats + 1):
        for rows in widths:
            cells = wave.cells[:rows]
            for i, cell in enumerate(cells):
                cell.depth = model.recurrences - 1 - i * model.recurrences // rows
            _, call = timed(lambda: (wave.advance(cells), wave.x.sum().item()))
            columns, positions = wave.place(wave.cache.coda, cells, [0] * rows)
            _, reading = timed(lambda: model.predict(wave.x[columns], positions, wave.cache).argmax(-1).tolist())
            if repeat:                                 # the first round is the warm-up
                seconds[rows][0].append(call)
                seconds[rows][1].append(reading)
    return {rows: (statistics.median(calls), statistics.median(readings)) for rows, (calls, readings) in seconds.items()}


class Replay(Wavefront):
    """Computes everything, then believes a recorded prediction instead: random weights, realistic drafts."""
    record: list[dict[int, list[tuple[int, float]]]]   # depth - 1 -> predicted position -> best tokens with probabilities

    def read(self, cells):
        self.depths = [cell.depth for cell in cells]
        super().read(cells)

    def interpret(self, logits, positions, n):
        super().interpret(logits, positions, n)
        depths = getattr(self, "depths", [self.depth])                       # the prefill reads once, at depth T
        return [self.record[depth - 1][position][:n] for depth, position in zip(depths, positions)]


@torch.inference_mode()
def replay(model: LoopedLM, tiny: LoopedLM, prompt: list[int], new: int) -> dict[str, tuple[Result, float]]:
    """Decode as the tiny model would, with the cost of `model`."""
    text = prompt + autoregressive(tiny, prompt, new).tokens
    probabilities, tokens = tiny(text).softmax(-1).topk(8)                   # [T, n, 8] each
    Replay.record = [{position + 1: list(zip(*best)) for position, best in enumerate(zip(*depth))}
                     for depth in zip(tokens.tolist(), probabilities.tolist())]
    results = {}
    for name, candidates, rows in (("plain", {}, 1), ("published, draft depth 1", {1: 1}, 8), ("wavefront (default)", tiny.candidates, 8)):
        wave = Replay(model, prompt, new, candidates, max_rows=rows, room=2 * rows)
        wave.prefill()
        begin = time.perf_counter()
        while not wave.result.finish:
            wave.step(None)
        results[name] = wave.result, time.perf_counter() - begin
        assert wave.result.tokens == text[len(prompt):], "the replay went astray"
    return results


def bench_shape(options: argparse.Namespace) -> int:
    model_class, config = SHAPES[options.bench]
    with torch.device("meta"):
        model = model_class(config)
    size, layer = (2 * sum(p.numel() for p in part.parameters()) for part in (model, model.layers[0]))
    cache = 2 * 2 * config.core * config.recurrences * config.kv_heads * config.head_dim * 400
    needed, there = size + cache + 2 ** 30, available_memory(torch.device(options.device))
    layers = config.core - max(0, -(-(needed - there) // (layer + cache // config.core)))
    print(f"{options.bench}, random weights, bfloat16 on {machine(options.device)}\n"
          f"needs {needed / 2 ** 30:.1f} GiB of memory, {there / 2 ** 30:.1f} GiB are there")
    if layers < 1:
        raise ValueError(f"not even one layer of {options.bench} fits into memory: {needed / 2 ** 30:.1f} GiB are needed")
    if layers < config.core:
        print(f"so {layers} of {config.core} layers are measured, and the block calls scaled")
    model = random_model(options.bench, options.device, layers)
    scale = config.core / layers
    times = {rows: (call * scale, reading) for rows, (call, reading) in time_calls(model).items()}
    weights = layer * config.core + (2 * model.adapter.weight.numel() if model_class is Huginn else 0)
    print(f"\n{'rows':>6}{'block call':>13}{'of one row':>12}{'GB/s':>8}{'reading':>12}     (300 positions finished)")
    for rows, (call, reading) in times.items():
        print(f"{rows:6}{call * 1e3:10.1f} ms{call / times[1][0]:11.2f}x{weights / call / 1e9:8.1f}{reading * 1e3:9.1f} ms")
    if model_class is Ouro:
        expect(model, times, scale)
    return 0


def expect(model: LoopedLM, times: dict[int, tuple[float, float]], scale: float) -> None:
    """Speedups over plain decoding, from the call times above and the habits of tiny/ouro."""
    tiny, tokenizer = load(TINY / "ouro", dtype=torch.float32)
    prompt, new = tokenizer.encode(PROMPT), 60
    results = {name: result for name, (result, _) in replay(tiny, tiny, prompt, new).items()}
    published, ours = results["published, draft depth 1"], results["wavefront (default)"]
    kept = published.stats["accepted"] / (new - 2)
    missed = (per_token(ours) - kept) / (1 - kept)     # calls for a token whose first draft was wrong
    call, reading = times[1]
    plain = model.recurrences * call + reading
    (published_call, published_reading), (our_call, our_reading) = times[4], times[8]
    print("\nspeedup over plain decoding to expect, if the first draft is right for a share of"
          f"\n{'':26}{'0.80':>8}{'0.90':>8}{'0.95':>8}")
    for name, wrong, seconds in (("published, draft depth 1", model.recurrences, published_call + published_reading),
                                 ("wavefront (default)", missed, our_call + our_reading)):
        print(f"{name:26}" + "".join(f"{plain / ((share + (1 - share) * wrong) * seconds):7.2f}x" for share in (0.8, 0.9, 0.95)))
    print(f"(a wrong first draft costs {model.recurrences} calls in the published schedule, {missed:.2f} in ours, as on tiny/ouro; "
          "calls of 4 and 8 rows)")
    print(f"\nreplaying {new} tokens as tiny/ouro predicts them, where it is right for {kept:.2f}:")
    runs = replay(model, tiny, prompt, new)
    for name, (result, seconds) in runs.items():
        calls, speed = runs["plain"][0].calls / result.calls, runs["plain"][1] / seconds
        print(f"{name:26}{per_token(result):8.2f} calls per token, {calls:.2f}x fewer; {new / seconds / scale:.2f} tokens/s, "
              f"{speed:.2f}x plain's speed ({speed / calls:.2f} of the ratio of calls)", flush=True)


def main() -> int:
    options = parse_arguments()
    try:
        return generate(options) if "bench" not in options else bench(options) if options.bench == "loaded" else bench_shape(options)
    except ValueError as error:
        print(f"demo.py: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:                            # whoever read the output has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


if __name__ == "__main__":
    sys.exit(main())
