"""Damage snapshots in random ways, and see that each is refused in one sentence, or loads and decodes exactly.

    python extras/fuzz.py                          3000 cases
    python extras/fuzz.py --case 123 --show        one of them again, with what was done and what came of it

Every case damages one file of a copy of tiny/ouro or tiny/huginn (whole, or cut into shards), in a process of its own with
bounded memory and time. Allowed are a ValueError of one line that names the snapshot, or the text that plain decoding of the
same snapshot gives; where only a setting was changed that nothing reads, the text must be the original one.
"""

import argparse
import copy
import json
import math
import os
import random
import resource
import select
import signal
import struct
import sys
import tempfile
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import demo  # noqa: E402
import torch  # noqa: E402

import load_weights  # noqa: E402
from extras.train_tiny import save_shards  # noqa: E402
from test_wfd import tensors_in  # noqa: E402
from wfd import autoregressive, wavefront  # noqa: E402

PROMPT, NEW = "It was a fine morning, and", 8
SECONDS, MEMORY = 60, 3 * 2 ** 30                      # for a case
STRANGE = [None, True, False, 0, -1, 1, 3, 2 ** 31, 2 ** 63, 10 ** 400, -0.5, 1e308, math.nan, math.inf, "", "abc", "\ud800", "../x", "\0",
           "x" * 10 ** 5, [], [1], [[]], ["abc"], {}, {"": 0}, {"content": 7}, [None], "{{ 'a' * 10 ** 10 }}"]
TEMPLATES = ["{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}", "{{ 'a' * 10 ** 10 }}",
             "{{ 'a'.ljust(10 ** 10) }}", "{{ messages|tojson(indent=1000000000) }}", "{% for i in range(99999) %}{% for j in range(99999) %}"
             "{{ messages }}{% endfor %}{% endfor %}", "{{ ''.__class__.__mro__[1].__subclasses__() }}", "{% include '/etc/passwd' %}",
             "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "{{ raise_exception('a\nb') }}", "{% if %}", "{{ 1 // 0 }}", "{% for", "\0",
             "{{ cycler.__init__.__globals__.os.system('true') }}", "{{ ('a' * 9).replace('', 'b' * 9) }}", "plain text"]
IN_ITS_PLACE = [b"", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", b"<!DOCTYPE html><html></html>", b"{}", b"[]",
                b"null", b"\xff\xfe", b"[" * 10 ** 5, b"\x80PK"]


def paths(value, path=()) -> list[tuple]:
    """Where the values within a JSON value are."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path] * bool(path) + [found for key, part in inner for found in paths(part, (*path, key))]


def damage_json(content: bytes, rng: random.Random) -> tuple[bytes, str]:
    value = json.loads(content)
    *above, key = path = rng.choice(paths(value))
    if rng.random() < 0.6:                             # rather near the top, where settings are
        *above, key = path = (rng.choice(list(value)),)
    parent = value
    for step in above:
        parent = parent[step]
    old, kind = parent[key], rng.randrange(5)
    if kind == 0:
        del parent[key]
    elif kind == 1 and isinstance(old, (int, float)):
        parent[key] = rng.choice((old + 1, old - 1, 2 * old, -old, old / 2, str(old), [old]))
    elif kind == 2 and isinstance(old, str):
        parent[key] = rng.choice((old[:-1], old.upper(), old + "x", old * 2, [old], rng.choice(TEMPLATES)))
    elif kind == 3 and isinstance(parent, dict):
        parent[key], other = parent[rng.choice(list(parent))], copy.deepcopy(old)
        parent[rng.choice(list(parent))] = other
    else:
        parent[key] = rng.choice(STRANGE)
    return json.dumps(value).encode(), f"{path[0]}" if kind != 3 else ""


def damage_bytes(content: bytes, rng: random.Random, start: int = 0) -> bytes:
    """Bytes changed, removed or put in, from `start` on, or a cut."""
    data = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 10))):
        place = rng.randrange(start, max(start + 1, len(data)))
        kind = rng.randrange(4)
        if kind == 0:
            data[place:place + 1] = bytes([rng.randrange(256)])
        elif kind == 1:
            del data[place:place + rng.choice((1, 4, 100))]
        elif kind == 2:
            data[place:place] = rng.randbytes(rng.choice((1, 4, 100)))
        else:
            del data[place:]
    return bytes(data)


def damage_header(content: bytes, rng: random.Random) -> bytes:
    """Of a safetensors file: its length, its JSON, or its bytes."""
    [length] = struct.unpack("<Q", content[:8])
    header, data = content[8:8 + length], content[8 + length:]
    kind = rng.randrange(4)
    if kind == 0:
        return struct.pack("<Q", rng.choice((0, 1, length - 1, length + 1, 2 * length, len(content), 2 ** 31, 2 ** 63, 2 ** 64 - 1))) + header + data
    if kind == 1:
        header = damage_bytes(header, rng)
    else:
        header = damage_json(header, rng)[0]
    return struct.pack("<Q", len(header)) + header + data


def damage_weights(content: bytes, rng: random.Random) -> bytes:
    """A weight that is not a number, or huge."""
    [length] = struct.unpack("<Q", content[:8])
    place = 8 + length + 2 * rng.randrange((len(content) - 8 - length) // 2)
    return content[:place] + struct.pack("<H", rng.choice((0x7fc0, 0x7f80, 0xff80, 0x7f00))) + content[place + 2:]         # NaN, inf, -inf, 2e38


def damage(folder: Path, rng: random.Random) -> tuple[str, str]:
    """Damage a file of the snapshot. What kind of damage it was, and the setting that it changed if it was one."""
    file = rng.choice(sorted(f for f in folder.iterdir() if f.name != "README.md"))
    content, setting = file.read_bytes(), ""
    kinds = {".json": ("settings", "settings", "settings", "bytes", "replaced")}.get(
        file.suffix, ("header", "header", "weights", "bytes", "replaced"))
    kind = rng.choice((*kinds, "template") if file.name == "tokenizer_config.json" else kinds)
    if kind == "settings":
        content, setting = damage_json(content, rng)
    elif kind == "template":
        content = json.dumps(json.loads(content) | {"chat_template": rng.choice(TEMPLATES)}).encode()
    elif kind == "header":
        content = damage_header(content, rng)
    elif kind == "weights":
        content = damage_weights(content, rng)
    elif kind == "bytes":
        content = damage_bytes(content, rng)
    else:
        content = rng.choice(IN_ITS_PLACE)
    file.unlink()
    if rng.random() < 0.98:                            # otherwise it is missing
        file.write_bytes(content)
    else:
        kind = "missing"
    return f"{file.name if file.suffix == '.json' else 'safetensors'}: {kind}", setting


class Watched(dict):
    """A JSON object that knows which of its keys were asked for."""
    asked = set()

    def get(self, key, default=None):
        self.asked.add(key)
        return super().get(key, default)


def text_of(folder: Path) -> list:
    """Load and decode. Everything that a user could see."""
    model, tokenizer = load_weights.load(folder, dtype=torch.float32)
    model.recurrences = min(model.recurrences, 40)     # more of them are possible, and slow
    prompt = tokenizer.encode(PROMPT)
    try:
        chat = tokenizer.encode("Hi", chat=True)
    except ValueError as error:
        chat = one_sentence(error)
    plain, ours = (decode(model, prompt, NEW, eos_ids=tokenizer.eos_ids).tokens for decode in (autoregressive, wavefront))
    assert plain == ours, f"the wavefront returns {ours}, plain decoding {plain}"
    return [plain, tokenizer.decode(plain), chat, sorted(tokenizer.eos_ids)]


def one_sentence(error: ValueError) -> str:
    text = str(error)
    assert 10 < len(text) < 1100 and text.isprintable(), f"not one sentence: {text!r}"
    return text


def outcome(folder: Path, original: list) -> str:
    """What comes of a damaged snapshot: refused, same, or changed; FAULT if it is nothing of these."""
    try:
        return "same" if text_of(folder) == original else "changed"
    except load_weights.CheckpointError as error:
        assert str(folder) in one_sentence(error), f"names no file: {error}"
        return f"refused: {error}"
    except ValueError as error:                        # of a prompt or of logits
        return f"refused: {one_sentence(error)}"


def run_case(originals: dict, case: tuple[int, int], show: bool) -> tuple[str, str]:
    """(kind of damage, outcome). The snapshot is a folder of links, but for the damaged file."""
    rng = random.Random(f"{case}")
    name = rng.choice(sorted(originals))
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "snapshot"
        folder.mkdir()
        for file in originals[name][0].iterdir():
            (folder / file.name).symlink_to(file)
        kind, setting = damage(folder, rng)
        reading, writing = os.pipe()
        if (child := os.fork()) == 0:
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY + int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize(),) * 2)
            if not show:
                os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            try:
                result = outcome(folder, originals[name][1])
                config = "config.json: settings" in kind or "generation_config" in kind
                if setting and config and setting not in Watched.asked and result == "changed":
                    result = f"FAULT {setting} is read by nobody, but the text is another"
            except BaseException as error:             # whatever it is, it must not come out of load()
                result = f"FAULT {type(error).__name__}: {error}"
            os.write(writing, result.encode(errors="replace")[:4000])
            os._exit(0)
        os.close(writing)
        ready, _, _ = select.select([reading], [], [], SECONDS)
        if not ready:
            os.kill(child, signal.SIGKILL)
        result = os.read(reading, 4000).decode(errors="replace") or "FAULT it died" if ready else f"FAULT it took more than {SECONDS} s"
        os.close(reading)
        os.waitpid(child, 0)
        if show:
            print(f"{name}, {kind} {setting}\n{result}")
        return kind, result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cases", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", type=int, help="only this one")
    parser.add_argument("--show", action="store_true", help="print every case")
    options = parser.parse_args()
    torch.set_num_threads(1)                           # a fork has only one
    read_json = load_weights.read_json
    load_weights.read_json = lambda *args, **options: Watched(read_json(*args, **options))
    counts, faults = {}, []
    with tempfile.TemporaryDirectory() as place:
        originals = {}
        for name in ("ouro", "huginn"):
            whole, shards = demo.TINY / name, Path(place) / name
            shards.mkdir()
            save_shards(tensors_in(whole / "model.safetensors"), shards, 2)
            for file in whole.glob("*.json"):
                (shards / file.name).symlink_to(file)
            originals |= {name: (whole, text_of(whole)), f"{name} in shards": (shards, text_of(shards))}
            assert originals[name][1] == originals[f"{name} in shards"][1]
        for number in range(options.cases) if options.case is None else [options.case]:
            kind, result = run_case(originals, (options.seed, number), options.show)
            word = result.split(":")[0].split()[0]
            counts.setdefault(kind, Counter())[word] += 1
            if word == "FAULT":
                faults.append(f"case {number}, {kind}: {result}")
            demo.show_progress(f"{number + 1} cases, {len(faults)} faults")
    demo.show_progress("")
    print(f"{'':44}" + "".join(f"{word:>9}" for word in ("refused", "same", "changed", "FAULT")))
    for kind in sorted(counts):
        print(f"{kind:44}" + "".join(f"{counts[kind][word]:9}" for word in ("refused", "same", "changed", "FAULT")))
    total = sum(counts.values(), Counter())
    print(f"{sum(total.values())} cases: " + ", ".join(f"{number} {word}" for word, number in total.most_common()))
    print("\n".join(faults))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
