"""Writes tests/golden/tagger: a small encoder for utterances with types of words and a convolution over the embeddings,
its logits, losses and gradients by PyTorch. `pip install torch safetensors && python3 tests/golden/tagger.py`."""

import json
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file

VOCAB, TYPES, WIDTH, D, HEADS, INTENTS, TAGS, CONTEXT = 23, 3, 5, 12, 2, 4, 7, 16
BASE, IGNORED = 100.0, -100
FOLDER = Path(__file__).parent / "tagger"


def encoder(p, ids, types, lengths):
    """Hidden states `[rows, columns, D]`."""
    rows, columns = ids.shape
    within = torch.arange(columns)[None] < lengths[:, None]
    x = p["embedding"][ids] + p["token_type_embedding"][types]
    # Beyond the ends of a row comes token 0, of type 0.
    half = WIDTH // 2
    outside = lambda of: F.pad(torch.where(within, of, 0), (half, half))
    around = p["embedding"][outside(ids)] + p["token_type_embedding"][outside(types)]
    kernel = p["convolution"].view(D, WIDTH, D).transpose(1, 2)
    x = x + F.conv1d(around.transpose(1, 2), kernel).transpose(1, 2)

    block = "blocks.0."
    norm = lambda x, name: F.layer_norm(x, (D,), p[name + ".gamma"], p[name + ".beta"], 1e-5)
    y = norm(x, block + "attention_norm")
    qkv = F.linear(y, p[block + "attention.qkv"], p[block + "attention.qkv_bias"])
    q, k, v = (part.view(rows, columns, HEADS, D // HEADS).transpose(1, 2) for part in qkv.split(D, -1))
    half = D // HEADS // 2
    angles = torch.arange(columns)[:, None] * BASE ** (-torch.arange(half) / half)
    turn = lambda z: torch.cat(
        [
            z[..., :half] * angles.cos() - z[..., half:] * angles.sin(),
            z[..., half:] * angles.cos() + z[..., :half] * angles.sin(),
        ],
        -1,
    )
    y = F.scaled_dot_product_attention(turn(q), turn(k), v, attn_mask=within[:, None, None])
    y = y.transpose(1, 2).reshape(rows, columns, D)
    x = x + F.linear(y, p[block + "attention.output"], p[block + "attention.output_bias"])
    y = norm(x, block + "feed_forward_norm")
    y = F.gelu(F.linear(y, p[block + "feed_forward.up"], p[block + "feed_forward.up_bias"]), approximate="tanh")
    x = x + F.linear(y, p[block + "feed_forward.down"], p[block + "feed_forward.down_bias"])
    return norm(x, "final_norm")


def main():
    torch.manual_seed(5)
    block = "blocks.0."
    shapes = {
        "embedding": (VOCAB, D),
        "token_type_embedding": (TYPES, D),
        "convolution": (D, WIDTH * D),
        block + "attention.qkv": (3 * D, D),
        block + "attention.qkv_bias": (3 * D,),
        block + "attention.output": (D, D),
        block + "attention.output_bias": (D,),
        block + "feed_forward.up": (4 * D, D),
        block + "feed_forward.up_bias": (4 * D,),
        block + "feed_forward.down": (D, 4 * D),
        block + "feed_forward.down_bias": (D,),
        "heads.intent": (INTENTS, D),
        "heads.tag": (TAGS, D),
    }
    p = {name: 0.3 * torch.randn(shape) for name, shape in shapes.items()}
    for name in [block + "attention_norm", block + "feed_forward_norm", "final_norm"]:
        p[name + ".gamma"] = 1 + 0.2 * torch.randn(D)
        p[name + ".beta"] = 0.2 * torch.randn(D)

    lengths = torch.tensor([9, 4, 1, 7])
    ids = torch.randint(1, VOCAB, (4, 9))
    types = torch.randint(0, TYPES, (4, 9))
    # What pads a row must not matter.
    within = torch.arange(9)[None] < lengths[:, None]
    tags = torch.where(within, torch.randint(0, TAGS, (4, 9)), IGNORED)
    tags[:, 0] = IGNORED
    intents = torch.full((4, 9), IGNORED)
    intents[:, 0] = torch.tensor([2, 0, 3, 1])

    p = {name: value.requires_grad_() for name, value in p.items()}
    hidden = encoder(p, ids, types, lengths)
    intent_logits, tag_logits = hidden[:, 0] @ p["heads.intent"].T, hidden @ p["heads.tag"].T
    mean = lambda logits, targets: F.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=IGNORED)
    loss = 0.3 * mean(intent_logits, intents[:, 0]) + mean(tag_logits, tags)
    loss.backward()

    FOLDER.mkdir(exist_ok=True)
    config = {
        "architectures": ["Transformer"],
        "model_type": "fireclay",
        "fireclay": {
            "vocab_size": VOCAB, "context_length": CONTEXT, "d_model": D, "n_layers": 1, "n_heads": HEADS,
            "n_kv_heads": HEADS, "head_dim": D // HEADS, "d_ff": 4 * D, "norm": "layer_norm", "norm_epsilon": 1e-5,
            "norm_bias": True, "norm_placement": "pre", "positions": {"rotary": {"base": BASE}},
            "token_types": TYPES, "convolution": WIDTH, "attention": "bidirectional", "sliding_window": None,
            "qk_norm": False, "qkv_bias": True, "output_bias": True, "feed_forward_bias": True,
            "activation": "gelu_tanh", "gated": False, "tied_embeddings": True, "dropout": 0.0,
            "init_deviation": 0.02, "residual_scaling": True, "intents": INTENTS, "tags": TAGS,
        },
    }
    (FOLDER / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    save_file({name: value.detach() for name, value in p.items()}, FOLDER / "model.safetensors")
    golden = {"ids": ids, "types": types, "lengths": lengths, "tag_targets": tags, "intent_targets": intents}
    golden = {name: value.int() for name, value in golden.items()}
    # Rows of padding have states of their own, which nobody reads.
    golden["hidden"] = torch.where(within[..., None], hidden, 0).detach()
    golden["intents"] = intent_logits.detach()
    golden["tags"] = torch.where(within[..., None], tag_logits, 0).detach()
    golden["loss"] = loss.detach().reshape(1)
    golden |= {"grad." + name: value.grad for name, value in p.items()}
    assert all(math.isfinite(value.double().sum()) for value in golden.values())
    save_file({name: value.contiguous() for name, value in golden.items()}, FOLDER / "golden.safetensors")


main()
