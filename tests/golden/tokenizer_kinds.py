#!/usr/bin/env python3
"""Writes tokenizer_kinds.json: tokenizers of 40 kinds, their ids for some strings, and how strings
continue after a prompt.

    pip install tokenizers
    python3 tests/golden/tokenizer_kinds.py         # or: tokenizer_kinds.py OUTPUT_FILE

A kind is one of the `bases` with some parts of its `tokenizer.json` replaced. `ids` are those of each text. `continued`
are strings cut behind each of their first tokens: what is decoded of all tokens behind what is decoded of those before.
"""

import json
import sys
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

OUT = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent / "tokenizer_kinds.json"
TRAINED_ON = [
    "the king attacked the castle at dawn, and the kiln was hot.",
    "Don't heat clay too fast; it cracks. 42 bricks, 7 pots!",
    "fire water earth clay glaze ash kiln brick wheel hand",
]
SAMPLES = [
    "the king attacked", " leading space", "trailing ", "two  spaces", "line\nbreak\n\nand\ttab", "Don't stop; 42!",
    "clay", "kilnkiln", "caf\u00e9 \u706b \U0001f525 ash", "UPPER lower",
]


def state(tokenizer):
    return json.loads(tokenizer.to_str())


def trained(model, trainer, pre_tokenizer=None, normalizer=None):
    tokenizer = Tokenizer(model)
    if pre_tokenizer:
        tokenizer.pre_tokenizer = pre_tokenizer
    if normalizer:
        tokenizer.normalizer = normalizer
    tokenizer.train_from_iterator(TRAINED_ON, trainer)
    return tokenizer


def bases():
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=330, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    yield "byte-level", trained(models.BPE(), trainer, level)
    metaspace = pre_tokenizers.Metaspace(prepend_scheme="always")
    trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=["<unk>", "<s>", "</s>"] + bytes_, show_progress=False)
    tokenizer = trained(models.BPE(unk_token="<unk>", byte_fallback=True), trainer, metaspace)
    own = state(tokenizer)
    own["added_tokens"] = own["added_tokens"][:3]
    own["model"]["fuse_unk"] = True
    yield "byte-fallback", Tokenizer.from_str(json.dumps(own))
    trainer = trainers.UnigramTrainer(vocab_size=110, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False)
    yield "unigram", trained(models.Unigram(), trainer, metaspace)
    trainer = trainers.WordPieceTrainer(vocab_size=110, special_tokens=["[UNK]", "[CLS]", "[SEP]"], show_progress=False)
    bert = trained(
        models.WordPiece(unk_token="[UNK]"), trainer, pre_tokenizers.BertPreTokenizer(), normalizers.BertNormalizer()
    )
    yield "wordpiece", bert
    trainer = trainers.WordLevelTrainer(special_tokens=["<unk>"], show_progress=False)
    yield "words", trained(models.WordLevel(unk_token="<unk>"), trainer, pre_tokenizers.Whitespace())
    trainer = trainers.BpeTrainer(
        vocab_size=130, end_of_word_suffix="</w>", special_tokens=["<unk>"], show_progress=False
    )
    suffix = trained(
        models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"),
        trainer,
        pre_tokenizers.BertPreTokenizer(),
        normalizers.Lowercase(),
    )
    yield "suffixes", suffix


def level(**more):
    return json.loads(pre_tokenizers.ByteLevel(**more).__getstate__())


def part(made):
    return json.loads(made.__getstate__())


def kinds():
    """A base, and what is replaced in it."""
    split = pre_tokenizers.Split
    from tokenizers import Regex
    llama3 = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    of_bytes = {"decoder": part(decoders.ByteLevel())}
    for more in [{}, {"add_prefix_space": True}, {"use_regex": False}, {"trim_offsets": False}]:
        yield "byte-level", of_bytes | {
            "pre_tokenizer": part(pre_tokenizers.ByteLevel(**({"add_prefix_space": False} | more)))
        }
    for normalizer in [normalizers.NFC(), normalizers.NFKC(), normalizers.NFD(), normalizers.Lowercase()]:
        yield "byte-level", of_bytes | {"normalizer": part(normalizer)}
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for pattern, behaviour in [
        (llama3, "isolated"), (r"\d", "isolated"), (r"\s+", "merged_with_next"), (r" ", "removed"),
    ]:
        cut = split(Regex(pattern), behaviour)
        yield "byte-level", of_bytes | {"pre_tokenizer": part(pre_tokenizers.Sequence([cut, plain]))}
    digits = pre_tokenizers.Digits(individual_digits=True)
    yield "byte-level", of_bytes | {"pre_tokenizer": part(pre_tokenizers.Sequence([digits, plain]))}
    yield "byte-level", of_bytes | {"decoder": part(decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()]))}

    strip = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    prepend = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    replace = normalizers.Replace(" ", "\u2581")
    llama2 = {"normalizer": part(prepend), "pre_tokenizer": None, "decoder": part(decoders.Sequence(strip))}
    yield "byte-fallback", llama2
    yield "byte-fallback", llama2 | {"normalizer": part(replace), "decoder": part(decoders.Sequence(strip[:3]))}
    yield "byte-fallback", llama2 | {"decoder": part(decoders.Sequence(strip[:3]))}
    yield "byte-fallback", llama2 | {"normalizer": part(replace)}
    for scheme in ["always", "first", "never"]:
        for cut in [True, False]:
            metaspace = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=cut)
            decoder = decoders.Metaspace(prepend_scheme=scheme)
            yield "byte-fallback", {"pre_tokenizer": part(metaspace), "decoder": part(decoder)}
            if cut:
                yield "unigram", {"pre_tokenizer": part(metaspace), "decoder": part(decoder)}
    both = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    yield "byte-fallback", {"decoder": part(both)}
    for normalizer in [normalizers.NFKC(), normalizers.Lowercase(), normalizers.StripAccents(), normalizers.Strip()]:
        yield "unigram", {"normalizer": part(normalizer), "decoder": part(decoders.Metaspace())}

    for clean in [True, False]:
        yield "wordpiece", {"decoder": part(decoders.WordPiece(cleanup=clean))}
    for more in [{"lowercase": False}, {"strip_accents": True}, {"handle_chinese_chars": False}]:
        yield "wordpiece", {
            "normalizer": part(normalizers.BertNormalizer(**more)),
            "decoder": part(decoders.WordPiece()),
        }
    yield "words", {}
    yield "words", {"pre_tokenizer": part(pre_tokenizers.WhitespaceSplit())}
    yield "suffixes", {"decoder": part(decoders.BPEDecoder())}


def continued(tokenizer, text):
    """The cut text: tokens before, tokens behind, and what these decode to."""
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    whole = tokenizer.decode(ids)
    for cut in range(1, min(len(ids), 6)):
        before = tokenizer.decode(ids[:cut]).rstrip("\ufffd")
        # Some decoders correct earlier text, and some strings end within a character.
        if whole.startswith(before) and not whole.endswith("\ufffd"):
            yield [cut, whole[len(before):]]


def main():
    made = dict(bases())
    cases = []
    for base, replaced in kinds():
        own = state(made[base]) | replaced
        tokenizer = Tokenizer.from_str(json.dumps(own))
        ids = [tokenizer.encode(text, add_special_tokens=False).ids for text in SAMPLES]
        continuations = [list(continued(tokenizer, text)) for text in SAMPLES]
        cases.append({"base": base, "replaced": replaced, "ids": ids, "continued": continuations})
    print(len(cases), "kinds,", sum(len(found) for case in cases for found in case["continued"]), "continuations")
    states = {base: state(tokenizer) for base, tokenizer in made.items()}
    lines = ",\n  ".join(json.dumps(case, separators=(",", ":")) for case in cases)
    bases_ = ",\n  ".join(
        f"{json.dumps(name)}: {json.dumps(own, separators=(',', ':'))}" for name, own in states.items()
    )
    OUT.write_text(f'{{"samples": {json.dumps(SAMPLES)},\n "bases": {{\n  {bases_}}},\n "cases": [\n  {lines}]}}\n')


main()
