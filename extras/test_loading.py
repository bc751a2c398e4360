"""Tests of load_weights.py: snapshots in the forms in which people have them, templates, stop tokens, text."""

import json
import random
import re
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from extras.train_tiny import save_shards, save_tensors
from load_weights import CheckpointError, load

GOLDEN = Path(__file__).parent.parent / "golden"
IDS = [5, 300, 17, 42, 9, 100]
EMBEDDING = {"ouro-a": "model.embed_tokens.weight", "huginn-a": "transformer.wte.weight"}


def tensors_of(name: str) -> dict[str, torch.Tensor]:
    with safe_open(GOLDEN / name / "model.safetensors", "pt") as file:
        return {key: file.get_tensor(key) for key in file.keys()}


def edit(file: Path, changes: dict) -> None:
    """Other values in a JSON file. The value ... takes a key away."""
    content = (json.loads(file.read_text()) if file.exists() else {}) | changes
    file.write_text(json.dumps({key: value for key, value in content.items() if value is not ...}))


def snapshot(folder: Path, name="ouro-a", config=(), tensors=lambda t: t, shards=1, tokenizer=(), settings=()) -> Path:
    """A copy of a golden snapshot with other settings, other tensors, or cut into shards."""
    folder.mkdir(parents=True)
    for file in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        (folder / file).write_bytes((GOLDEN / name / file).read_bytes())
    for file, changes in (("config", config), ("tokenizer", tokenizer), ("tokenizer_config", settings)):
        edit(folder / f"{file}.json", dict(changes))
    if shards == 1:
        save_tensors(tensors(tensors_of(name)), folder / "model.safetensors")
    else:
        save_shards(tensors(tensors_of(name)), folder, shards)
    return folder


def logits_of(path, **options) -> torch.Tensor:
    return load(path, **options)[0](IDS)


def refused(path, words: str, **options) -> None:
    with pytest.raises(CheckpointError, match=words) as error:
        load(path, **options)
    assert "\n" not in str(error.value)


def template(folder: Path, source: str, **options):
    """The tokenizer of a snapshot with this chat template."""
    snapshot(folder, **options)
    (folder / "chat_template.jinja").write_text(source, encoding="utf-8")
    return load(folder)[1]


# ----------------------------------------------------------------------------------------------------------
# Settings and tensors


NESTED = {"rope_type": "default", "rope_theta": 1e6}


@pytest.mark.parametrize("name, config", [
    ("ouro-a", {"rope_theta": ..., "rope_parameters": NESTED}),
    ("ouro-a", {"rope_theta": ..., "rope_parameters": {"full_attention": NESTED, "sliding_attention": NESTED}}),
    ("ouro-a", {"rope_theta": ..., "rope_parameters": {"full_attention": NESTED, "sliding_attention": {"rope_theta": 9}}}),
    ("ouro-a", {"rope_scaling": {}, "partial_rotary_factor": 1.0}),
    ("ouro-a", {"num_key_value_heads": None, "total_ut_steps": ..., "head_dim": 16, "layer_types": ...}),
    ("huginn-a", {"n_embd": ..., "hidden_size": 64, "n_heads": ..., "num_attention_heads": 4}),
    ("huginn-a", {"rope_base": ..., "rope_parameters": {"rope_theta": 5e4}, "tie_embeddings": ...})])
def test_settings_old_and_new(tmp_path, name, config):
    assert torch.equal(logits_of(snapshot(tmp_path / "s", name, config)), logits_of(GOLDEN / name))


@pytest.mark.parametrize("config, words", [
    ({"model_type": "llama"}, "config.json: model_type is 'llama'"),
    ({"hidden_size": ...}, "config.json has no hidden_size"), ({"rope_theta": ...}, "no values of rope_theta"),
    ({"rope_parameters": {"rope_theta": 1e4}}, "different values of rope_theta"),
    ({"rope_theta": ..., "rope_parameters": {"a": NESTED, "b": {"rope_theta": 1e4}}}, "different values of rope_theta"),
    ({"rope_scaling": {"type": "yarn"}}, "'yarn'"), ({"rope_parameters": [1]}, "rope_parameters"),
    ({"rope_parameters": {"full_attention": NESTED | {"rope_type": "linear"}}}, "'linear'"),
    ({"rope_parameters": {"sliding_attention": NESTED | {"rope_type": "linear"}}}, "'linear'"),
    ({"rope_parameters": NESTED | {"partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"), ({"use_sliding_window": True}, "sliding"),
    ({"hidden_act": "gelu"}, "hidden_act"), ({"layer_types": ["sliding_attention"] * 3}, "layer_types"),
    ({"eos_token_id": "2"}, "eos_token_id is '2'"), ({"vocab_size": 2 ** 50}, r"embed_tokens.weight is \[512, 64\]")])
def test_settings_that_are_refused(tmp_path, config, words):
    refused(snapshot(tmp_path / "s", config=config), words)


@pytest.mark.parametrize("tensors, words", [
    (lambda t: {k: v for k, v in t.items() if k != "model.norm.weight"}, "lacks 1 tensors, .*model.norm.weight"),
    (lambda t: t | {"foo.bar": torch.zeros(1)}, "1 tensors too many, such as foo.bar"),
    (lambda t: t | {"model.layers.3.mlp.up_proj.weight": torch.zeros(1)}, "such as model.layers.3.mlp.up_proj"),
    (lambda t: t | {"model.norm.weight": t["model.norm.weight"][:63]}, r"model.norm.weight is \[63\] .* not \[64\]"),
    (lambda t: t | {"lm_head.weight": t["lm_head.weight"].to(torch.int8)}, "lm_head.weight .* in I8")])
def test_tensors_that_are_refused(tmp_path, tensors, words):
    refused(snapshot(tmp_path / "s", tensors=tensors), words)


@pytest.mark.parametrize("name", EMBEDDING)
def test_shards_buffers_and_prefixes(tmp_path, name):
    buffer = "freqs_cis" if name == "huginn-a" else "model.layers.0.self_attn.rotary_emb.inv_freq"
    expected = logits_of(GOLDEN / name)
    assert torch.equal(logits_of(snapshot(tmp_path / "shards", name, shards=3)), expected)
    for i, change in enumerate((lambda key: key, "module.".__add__, "_orig_mod.module.".__add__, "model.".__add__)):
        folder = snapshot(tmp_path / str(i), name, tensors=lambda t: {
            change(key): value for key, value in (t | {buffer: torch.zeros(3)}).items() if "early_exit" not in key})
        assert torch.equal(logits_of(folder), expected)


@pytest.mark.parametrize("name, tie", [("ouro-a", "tie_word_embeddings"), ("huginn-a", "tie_embeddings")])
def test_a_tied_head_may_be_there_or_not(tmp_path, name, tie):
    def without(*names):
        return lambda t: {key: value for key, value in t.items() if "lm_head" not in key and key not in names} | {
            "lm_head.weight": t[EMBEDDING[name]].clone() for _ in [0] if "lm_head.weight" not in names}
    both, embedding, head = (logits_of(snapshot(tmp_path / str(i), name, {tie: True}, without(*absent)))
                             for i, absent in enumerate(([], ["lm_head.weight"], [EMBEDDING[name]])))
    assert torch.equal(both, embedding) and torch.equal(both, head)
    other = snapshot(tmp_path / "untied", name, {tie: False}, lambda t: t | {"lm_head.weight": t[EMBEDDING[name]] + 1})
    assert not torch.equal(logits_of(other), both)


def test_grouped_query_attention_is_that_of_repeated_heads(tmp_path):
    def heads(chosen):
        rows = [16 * head + i for head in chosen for i in range(16)]
        return lambda t: {k: v[rows] if "k_proj" in k or "v_proj" in k else v for k, v in t.items()}
    grouped = snapshot(tmp_path / "grouped", config={"num_key_value_heads": 2}, tensors=heads([0, 1]))
    repeated = snapshot(tmp_path / "repeated", tensors=heads([0, 0, 1, 1]))
    assert (logits_of(grouped) - logits_of(repeated)).abs().max() < 1e-5


def test_dtypes(tmp_path):
    half = snapshot(tmp_path / "half", tensors=lambda t: {key: value.bfloat16() for key, value in t.items()})
    assert load(half)[0].head.weight.dtype == torch.bfloat16
    wide, _ = load(half, dtype=torch.float32)
    assert torch.equal(wide.head.weight, load(GOLDEN / "ouro-a")[0].head.weight.bfloat16().float())
    assert load(half, dtype=torch.float64)[0](IDS).dtype == torch.float64
    with pytest.warns(UserWarning, match="float16"):
        load(half, dtype=torch.float16)


def test_what_load_refuses():
    for options, words in (({"path": None}, "neither a folder"), ({"device": "abacus"}, "no device"),
                           ({"dtype": "float32"}, "dtype must"), ({"init_state": "ones"}, "init_state must")):
        with pytest.raises(ValueError, match=words):
            load(**{"path": GOLDEN / "ouro-a"} | options)


def test_initial_states():
    states = [load(GOLDEN / "huginn-a", **options)[0].state_table for options in ({}, {"seed": 1}, {"init_state": "zeros"})]
    assert not torch.equal(states[0], states[1]) and not states[2].any() and states[2].shape == (256, 64)


@pytest.mark.parametrize("name, table", [("ouro-a", 0), ("huginn-a", 256 * 64)])
def test_weights_and_states_that_do_not_fit_are_refused(monkeypatch, name, table):
    values = sum(p.numel() for p in load(GOLDEN / name)[0].parameters())
    monkeypatch.setattr("load_weights.available_memory", lambda device: 4 * values + 8 * table)
    load(GOLDEN / name)
    refused(GOLDEN / name, "take 0.0 GiB in torch.float64, but cpu has 0.0", dtype=torch.float64)
    monkeypatch.setattr("load_weights.available_memory", lambda device: 4 * values + 8 * table - 1)
    refused(GOLDEN / name, "take 0.0 GiB")


# ----------------------------------------------------------------------------------------------------------
# Files


def test_a_file_that_is_something_else_shows_how_it_starts(tmp_path):
    folder = snapshot(tmp_path / "s", shards=3)
    shard = "model-00002-of-00003.safetensors"
    whole = (folder / shard).read_bytes()
    for file in ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json", shard):
        before = (folder / file).read_bytes()
        for content, start in ((b"", "b''"), (b"version https://git-lfs.github.com/spec/v1\n", "b'version https://git-lfs"),
                               (b"<!DOCTYPE html>", "b'<!DOCTYPE html>'"), (whole[:-5], re.escape(repr(whole[:9])[:-1]))):
            (folder / file).write_bytes(content)
            refused(folder, f"{file} is not a complete .* file: it starts with {start}")
        (folder / file).write_bytes(before)
    (folder / "tokenizer.json").write_text("{}")
    refused(folder, "tokenizer.json can't be used")
    (folder / "tokenizer.json").unlink()
    refused(folder, "tokenizer.json is missing")


def test_all_missing_shards_are_named_and_an_index_names_files_of_its_folder_only(tmp_path):
    folder = snapshot(tmp_path / "s", shards=3)
    for i in (1, 3):
        (folder / f"model-0000{i}-of-00003.safetensors").rename(tmp_path / f"{i}")
    refused(folder, "lacks: model-00001-of-00003.safetensors, model-00003-of-00003.safetensors")
    edit(folder / "model.safetensors.index.json", {"weight_map": {"a": "../1"}})
    refused(folder, "lacks: ../1")


@pytest.mark.parametrize("files", [["pytorch_model-00001-of-00002.bin"], ["ouro-q4.gguf"], [],
                                   ["adapter_model.safetensors"], ["model-00001-of-00002.safetensors"]])
def test_folders_in_other_formats(tmp_path, files):
    for file in files:
        (tmp_path / file).write_bytes(b"x")
    (tmp_path / "adapter_config.json").write_text("{}")
    refused(tmp_path, f"holds {files[0] if files else 'no weights'}, but model.safetensors is needed")


def test_a_byte_order_mark_changes_nothing(tmp_path):
    folder = snapshot(tmp_path / "s", settings={"chat_template": ...})
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    for file in list(folder.glob("*.json")) + [folder / "chat_template.jinja"]:
        file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())
    _, tokenizer = load(folder)
    assert tokenizer.encode("Hi", chat=True) == tokenizer.encode("Hi") == [42, 75]


def test_a_hub_id_is_looked_up_in_the_local_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    refused("some/model", "hf download some/model")
    refused("no/such/folder", "neither a folder nor of the form")
    repo = tmp_path / "hub" / "models--some--model"
    blobs = snapshot(repo / "blobs")
    for revision in ("1a2b", "3c4d"):
        (repo / "snapshots" / revision).mkdir(parents=True)
        for file in blobs.iterdir():
            (repo / "snapshots" / revision / file.name).symlink_to(file)
    edit(repo / "snapshots" / "3c4d" / "config.json", {"total_ut_steps": 4})
    refused("some/model", "choose one of its revisions as some/model@REVISION: 1a2b, 3c4d")
    refused("some/model@9", "choose one")
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("3c4d\n")
    (repo / "refs" / "v1").write_text("1a2b")
    (repo / "snapshots" / "1a2b" / "config.json").unlink()
    (repo / "snapshots" / "1a2b" / "config.json").symlink_to(repo / "blobs" / "gone")
    assert load("some/model")[0].recurrences == load("some/model@3c")[0].recurrences == 4
    refused("some/model@v1", "1a2b/config.json links to .*blobs/gone, which is missing")
    monkeypatch.delenv("HF_HUB_CACHE")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    assert load("some/model")[0].recurrences == 4


# ----------------------------------------------------------------------------------------------------------
# Special tokens and stops. "As transformers" means that transformers 5.25 gives these ids for the same folder


def without(name: str, *words: str) -> dict:
    """Changes to a golden tokenizer.json that take special tokens away."""
    tokens = json.loads((GOLDEN / name / "tokenizer.json").read_text())["added_tokens"]
    return {"added_tokens": [token for token in tokens if token["content"] not in words]}


def test_special_tokens_that_only_a_file_beside_lists(tmp_path):
    listed = snapshot(tmp_path / "listed", tokenizer=without("ouro-a", "<|im_end|>"))
    assert load(listed)[1].encode("a<|im_end|>b") == [67, 2, 68]             # as transformers
    gap = snapshot(tmp_path / "gap", "huginn-a", tokenizer=without("huginn-a", "<|end_turn|>"))
    assert load(gap)[1].encode("a<|end_turn|>b<|pad|>") == [64, 484, 65, 485]
    for i, value in enumerate(("<|im_end|>", {"content": "<|im_end|>", "lstrip": False})):
        named = snapshot(tmp_path / f"named {i}", tokenizer=without("ouro-a", "<|im_end|>"),
                         settings={"added_tokens_decoder": ..., "eos_token": ..., "chat_template": ...})
        (named / "special_tokens_map.json").write_text(json.dumps({"eos_token": value}))
        _, tokenizer = load(named)
        assert tokenizer.encode("a<|im_end|>b") == [67, 2, 68] and tokenizer.eos_ids == {0, 2}


def test_special_tokens_without_an_id(tmp_path):
    def wider(t):
        return {k: torch.cat((v, v[:8])) if k in (EMBEDDING["ouro-a"], "lm_head.weight") else v for k, v in t.items()}
    more = {"additional_special_tokens": ["<|tool|>"], "image_token": "<|im_start|>"}
    folder = snapshot(tmp_path / "s", config={"vocab_size": 520}, tensors=wider, settings=more)
    with pytest.warns(UserWarning, match=re.escape("'<|tool|>', which tokenizer.json lacks")):
        _, tokenizer = load(folder)
    assert tokenizer.encode("a<|tool|>b") == [67, 512, 68]                   # as transformers
    with pytest.warns(UserWarning, match="pad_word"):                        # no room for it: plain text still works
        _, tokenizer = load(snapshot(tmp_path / "full", settings={"pad_token": "pad_word"}))
    assert tokenizer.encode("ab") == [392]


def test_the_stop_set_is_what_all_files_say(tmp_path):
    assert load(GOLDEN / "ouro-a")[1].eos_ids == {0, 2}                      # <|im_end|> only ends a turn of the template
    assert load(GOLDEN / "huginn-a")[1].eos_ids == {481, 484}
    folder = snapshot(tmp_path / "s", config={"eos_token_id": [7, 8]})
    edit(folder / "generation_config.json", {"eos_token_id": 9})
    edit(folder / "special_tokens_map.json", {"eos_token": "<|im_start|>"})  # older than added_tokens_decoder, so ignored
    assert load(folder)[1].eos_ids == {0, 2, 7, 8, 9}
    edit(folder / "generation_config.json", {"eos_token_id": None})
    edit(folder / "tokenizer_config.json", {"eos_token": {"content": "<|im_start|>"}})
    assert load(folder)[1].eos_ids == {1, 2, 7, 8}


def test_a_stop_token_that_does_not_exist_is_no_secret(tmp_path):
    with pytest.warns(UserWarning, match=re.escape("'<|nope|>', which tokenizer.json lacks")):
        load(snapshot(tmp_path / "word", settings={"eos_token": "<|nope|>"}))
    with pytest.warns(UserWarning, match="eos_token_id 600 is no token"):
        load(snapshot(tmp_path / "id", config={"eos_token_id": 600}))


@pytest.mark.parametrize("source", [
    "{{ 1 / 0 }}", "{{ raise_exception('no') }}", "{% unknown %}", "{% if", "{{ ''.__class__.__mro__[1] }}",
    "{% include '/etc/passwd' %}", "{{ messages.append(1) }}"])
def test_a_template_that_fails_prevents_neither_stops_nor_plain_text(tmp_path, source):
    tokenizer = template(tmp_path / "s", source, settings={"eos_token": "<|im_end|>"})
    assert tokenizer.eos_ids == {0, 2} and tokenizer.encode("Hi") == [42, 75]
    with pytest.raises(ValueError, match="the chat template of .* fails"):
        tokenizer.encode("Hi", chat=True)


def test_without_jinja2_only_chats_fail(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "jinja2", None)
    monkeypatch.setitem(__import__("sys").modules, "jinja2.ext", None)
    _, tokenizer = load(GOLDEN / "huginn-a")
    assert tokenizer.eos_ids == {481, 484} and tokenizer.encode("ab")
    with pytest.raises(ValueError, match="jinja2"):
        tokenizer.encode("Hi", chat=True)


def test_a_vocabulary_that_the_model_does_not_have(tmp_path):
    refused(snapshot(tmp_path / "s", config={"vocab_size": 400}), "tokenizer.json has a token 511, the model only 400")


# ----------------------------------------------------------------------------------------------------------
# Chat templates and text


TALK = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "say <|im_end|> </think>"},
        {"role": "assistant", "content": " Hello "}, {"role": "user", "content": "Bye"}]


def test_chats_are_rendered_by_the_snapshots_own_template():
    ouro, huginn = load(GOLDEN / "ouro-a")[1], load(GOLDEN / "huginn-a")[1]
    assert ouro.decode(ouro.encode(TALK, chat=True)) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nsay <|im_end|> </think><|im_end|>\n"
        "<|im_start|>assistant\n Hello <|im_end|>\n<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n")
    assert huginn.decode(ids := huginn.encode(TALK, chat=True)) == (
        "<|begin_text|><|begin_header|>system<|end_header|>\n\nBe brief.<|end_turn|><|begin_header|>user<|end_header|>"
        "\n\nsay <|im_end|> </think><|end_turn|><|begin_header|>Huginn<|end_header|>\n\nHello<|end_turn|>"
        "<|begin_header|>user<|end_header|>\n\nBye<|end_turn|><|begin_header|>Huginn<|end_header|>\n\n")
    assert ids.count(480) == 1 and ids[0] == 480
    assert ouro.encode("Hi", chat=True) == [1, 87, 487, 201, 42, 75, 2, 201, 1, 431, 85, 272, 86, 394, 201]
    assert ouro.encode(TALK, chat=True).count(2) == 5                        # as transformers: one of them is the user's


PARTS = ("{% for m in messages %}<|im_start|>{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% endif %}"
         "{% endfor %}<|im_end|>\n{% endfor %}")
EITHER = ("{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
          "{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}{% endfor %}")
GENERATION = ("{% for m in messages %}{% set x = 1 %}{% if m.role == 'assistant' %}\n  {% generation %}\n  "
              "{{- m.content }}<|im_end|>{% endgeneration %}\n{% else %}{{ m.role }}:{{ m.content }}<|im_end|>\n{% endif %}"
              "{% endfor %}{% if tools is none and documents is none %}none{% endif %}")
FEATURES = ("{% macro tag(x) %}[{{ x }}]{% endmacro %}{% set n = namespace(i=1) %}{% for m in messages[0:] if m.role != 'tool'"
            " %}{% set n.i = n.i + 2 * 3 %}{{ tag(m.role.title() ~ n.i ~ none) }}{{ m['content'] | trim | replace('a', 'b') }}"
            "{{ {'k': [1, 'é<']} | tojson }}{{ strftime_now('%Y')|length }}{% break %}{% endfor %}{{ eos_token }}")


@pytest.mark.parametrize("source, messages, text", [                         # all as transformers
    (PARTS, [{"type": "text", "text": "Hi"}, {"type": "text", "text": " you"}], "<|im_start|>Hi you<|im_end|>\n"),
    (EITHER, [{"type": "text", "text": "Hi"}, {"type": "text", "text": " you"}], "Hi you"), (EITHER, "Hi", "Hi"),
    (FEATURES, "Hi", '[User7None]Hi{"k": [1, "é<"]}4<|endoftext|>'),
    (GENERATION, TALK, "system:Be brief.<|im_end|>\nuser:say <|im_end|> </think><|im_end|>\n Hello <|im_end|>"
                       "user:Bye<|im_end|>\nnone")])
def test_what_chat_templates_may_use(tmp_path, source, messages, text):
    messages = messages if messages is TALK else [{"role": "user", "content": messages}]
    tokenizer = template(tmp_path / "s", source)
    assert tokenizer.encode(messages, chat=True) == tokenizer.encode(text)


def test_no_template_drops_what_the_user_says(tmp_path):
    parts = template(tmp_path / "parts", PARTS)
    assert parts.decode(parts.encode("Hi you", chat=True)) == "<|im_start|>Hi you<|im_end|>\n" and parts.eos_ids == {0, 2}
    deaf = template(tmp_path / "deaf", "Hello{% if messages|length > 1 %}{{ messages[0].content }}{% endif %}")
    with pytest.raises(ValueError, match="leaves out 'Hi you'"):
        deaf.encode("Hi you", chat=True)


@pytest.mark.parametrize("value, answer", [
    ([{"name": "tool_use", "template": "T {{ messages[0].content }}"}, {"name": "default", "template": "D {{ messages[0].content }}"}],
     "D Hi"), ("S {{ messages[0].content }}", "S Hi"), ("", None), (None, None),
    ([{"name": "tool_use", "template": "T"}], None)])                        # all as transformers, "" excepted
def test_where_templates_are_taken_from(tmp_path, value, answer):
    folder = snapshot(tmp_path / "s", settings={"chat_template": value})
    _, tokenizer = load(folder)
    if answer is None:
        with pytest.raises(ValueError, match="no chat template"):
            tokenizer.encode("Hi", chat=True)
    else:
        assert tokenizer.decode(tokenizer.encode("Hi", chat=True)) == answer
    (folder / "chat_template.jinja").write_text("J {{ messages[0].content }}")
    _, tokenizer = load(folder)
    assert tokenizer.decode(tokenizer.encode("Hi", chat=True)) == "J Hi"


def test_what_encode_refuses():
    _, tokenizer = load(GOLDEN / "ouro-a")
    for text, chat, words in ((TALK, False, "chat=True"), (["x"], True, "role"), ([{"content": "x"}], True, "role"),
                              ("\ud800", False, "surrogate"), ("\ud800", True, "surrogate")):
        with pytest.raises(ValueError, match=words):
            tokenizer.encode(text, chat=chat)


def test_prompts_of_the_golden_data_encode_and_decode():
    for name in EMBEDDING:
        _, tokenizer = load(GOLDEN / name)
        for prompt in json.loads((GOLDEN / name / "golden.json").read_text())["prompts"]:
            assert tokenizer.encode(prompt["text"]) == prompt["ids"]
            assert tokenizer.decode(prompt["ids"]) == prompt["text"]


def test_plain_text_is_encoded_as_the_post_processor_says_and_neither_cut_nor_padded(tmp_path):
    begin = {"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}
    post = {"type": "TemplateProcessing", "single": [begin, {"Sequence": {"id": "A", "type_id": 0}}], "pair": [],
            "special_tokens": {"<|im_start|>": {"id": "<|im_start|>", "ids": [1], "tokens": ["<|im_start|>"]}}}
    cut = {"max_length": 3, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}
    pad = {"strategy": {"Fixed": 50}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0,
           "pad_token": "<|endoftext|>"}
    plain = load(GOLDEN / "ouro-a")[1]
    _, tokenizer = load(snapshot(tmp_path / "s", tokenizer={"post_processor": post, "truncation": cut, "padding": pad}))
    text = "a text of more than three tokens"
    assert tokenizer.encode(text) == [1] + plain.encode(text)
    assert tokenizer.encode(text, chat=True) == plain.encode(text, chat=True)         # no second beginning


def test_a_stream_joins_to_the_text_and_never_splits_a_character():
    _, tokenizer = load(GOLDEN / "ouro-a")
    rng, text = random.Random(16), "naïve 日本 🜁 x"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    for ids in [tokenizer.encode(text)] + [[rng.randrange(600) for _ in range(60)] for _ in range(20)]:
        stream, pieces, rest = tokenizer.stream(), [], list(ids)
        while rest:
            n = rng.randint(1, 3)
            pieces.append(stream.push(rest[:n]))
            rest = rest[n:]
        assert not any(piece.endswith("\ufffd") for piece in pieces)
        assert "".join(pieces) + stream.end() == tokenizer.decode(ids)


def test_ids_that_no_token_has_have_no_text():
    _, tokenizer = load(GOLDEN / "ouro-a")
    assert tokenizer.decode([5, 512, 7, -1, 10 ** 20]) == tokenizer.decode([5, 7])
