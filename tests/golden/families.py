#!/usr/bin/env python3
"""Writes families.json and families.safetensors: small models of families, and what transformers computes with them.

    pip install torch transformers safetensors numpy
    python3 tests/golden/families.py                 # or: families.py OUTPUT_FOLDER
    python3 tests/golden/families.py --check FOLDER  # models that Fireclay saved, one in each folder of FOLDER

A case is a `config.json` as it is found on the hub, in the words of version 4 or 5 of transformers.
Weights are no file: `weight(i, k)` is element `i` of the tensor that is number `k` by name, and one
more for the scale of a norm, but for Gemma, whose norms add the one themselves.

families.json has, for each case, its config and the shapes of its tensors. families.safetensors has for each

    NAME.tokens [2, 16], NAME.logits [2, 16, 61]
    NAME.prompts [3, 6], padded on the right with 0, NAME.lengths [3], and NAME.greedy [3, 64]: the tokens that follow
    NAME.targets [2, 16], NAME.loss [1] and NAME.grad.TENSOR, for the first case of each family

and for encoders, whose rows are padded on the right in the file,

    NAME.tokens [3, 20], NAME.lengths [3], NAME.hidden [3, 20, d], zeros for padding
    NAME.grad_output like hidden, and NAME.grad.TENSOR, for the first case

Reference values come from the weights widened to float64. Prompts are such that the best logit leads the second by
more than 2e-3 at every step, and that decoding with transformers' cache agrees.

With --check, transformers loads each model, and must have the logits of its golden.safetensors, `tokens` and `logits`.
"""

import json
import sys
import tempfile
from pathlib import Path

import numpy
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

VOCAB, CONTEXT, LEAD, NEW = 61, 96, 2e-3, 64
SLIDING, FULL = "sliding_attention", "full_attention"
BASE = dict(
    vocab_size=VOCAB, hidden_size=24, intermediate_size=40, num_hidden_layers=3, num_attention_heads=3,
    num_key_value_heads=1, max_position_embeddings=CONTEXT, bos_token_id=1, eos_token_id=None, pad_token_id=None,
)
OTHER = BASE | dict(
    hidden_size=20, intermediate_size=28, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=4,
)
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 24}


def without(config, name):
    return {key: value for key, value in config.items() if key != name}


def cases():
    """Name, base, and what is added to it; those of a family follow each other."""
    yield "gemma3_text", BASE | dict(
        num_hidden_layers=4, head_dim=10, sliding_window=5, sliding_window_pattern=3, query_pre_attn_scalar=7,
        rope_parameters={
            FULL: {"rope_type": "linear", "factor": 4.0, "rope_theta": 1000.0},
            SLIDING: {"rope_type": "default", "rope_theta": 100.0},
        },
    )
    yield "gemma3_text", OTHER | dict(
        head_dim=6, sliding_window=4, layer_types=[FULL, SLIDING, FULL, SLIDING], query_pre_attn_scalar=6,
        rope_theta=2000.0, rope_local_base_freq=50.0, rope_scaling={"rope_type": "linear", "factor": 2.0},
        attention_bias=True, final_logit_softcapping=2.0, rms_norm_eps=1e-3, tie_word_embeddings=False,
    )
    yield "gemma2", BASE | dict(
        head_dim=6, num_key_value_heads=3, sliding_window=3, query_pre_attn_scalar=5, attn_logit_softcapping=1.5,
        final_logit_softcapping=2.5,
    )
    yield "gemma2", OTHER | dict(
        head_dim=8, sliding_window=7, layer_types=[FULL, SLIDING, SLIDING, FULL], query_pre_attn_scalar=8,
        attn_logit_softcapping=None, final_logit_softcapping=None, hidden_activation="gelu", rope_theta=300.0,
        attention_bias=True,
    )
    yield "smollm3", BASE | dict(num_hidden_layers=5, rope_theta=500.0)
    yield "smollm3", OTHER | dict(
        no_rope_layers=[0, 1, 1, 0, 1], use_sliding_window=True, sliding_window=4, attention_bias=True, mlp_bias=True,
        tie_word_embeddings=False, rope_theta=500.0, head_dim=6,
    )
    yield "phi3", BASE | dict(
        partial_rotary_factor=0.75, max_position_embeddings=4 * CONTEXT, original_max_position_embeddings=CONTEXT,
        rope_theta=400.0, tie_word_embeddings=True, resid_pdrop=0.0, embd_pdrop=0.0, sliding_window=262144,
        rope_scaling={"type": "longrope", "short_factor": [1.0, 1.2, 1.5], "long_factor": [1.0, 3.0, 9.0]},
    )
    yield "phi3", OTHER | dict(
        hidden_size=24, num_key_value_heads=4, sliding_window=5, rope_theta=300.0, rope_scaling=None,
        original_max_position_embeddings=CONTEXT,
    )
    yield "olmo2", BASE | dict(rope_theta=500.0, tie_word_embeddings=False)
    yield "olmo2", OTHER | dict(
        rope_parameters={"rope_type": "default", "rope_theta": 200.0}, attention_bias=True, head_dim=6,
    )
    yield "olmo3", BASE | dict(
        num_hidden_layers=4, sliding_window=5, rope_parameters={
            FULL: YARN | {"rope_theta": 500.0}, SLIDING: {"rope_type": "default", "rope_theta": 500.0},
        },
    )
    yield "olmo3", OTHER | dict(
        sliding_window=3, layer_types=[FULL, SLIDING, FULL, FULL], rope_theta=500000.0, rope_scaling=YARN,
        tie_word_embeddings=True, head_dim=6,
    )
    yield "granite", BASE | dict(
        embedding_multiplier=2.0, attention_multiplier=0.9, residual_multiplier=0.8, logits_scaling=0.5,
        tie_word_embeddings=True,
    )
    yield "granite", OTHER | dict(
        embedding_multiplier=0.7, attention_multiplier=1.3, residual_multiplier=1.7, logits_scaling=0.25, mlp_bias=True,
        attention_bias=True, rope_theta=300.0, head_dim=6,
    )
    yield "qwen2", BASE | dict(
        use_sliding_window=True, sliding_window=4, layer_types=[SLIDING, FULL, SLIDING], rope_theta=300.0,
    )
    yield "modernbert", without(BASE, "num_key_value_heads") | dict(
        num_hidden_layers=5, local_attention=6, global_rope_theta=300.0, local_rope_theta=50.0, norm_eps=1e-5,
        layer_norm_eps=1e-5, position_embedding_type="absolute", global_attn_every_n_layers=3,
    )
    yield "modernbert", without(OTHER, "num_key_value_heads") | dict(
        hidden_size=24, local_attention=9, layer_types=[SLIDING, FULL, SLIDING, SLIDING], norm_bias=True,
        attention_bias=True, mlp_bias=True, hidden_activation="silu", norm_eps=1e-3, rope_parameters={
            FULL: {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0},
            SLIDING: {"rope_type": "default", "rope_theta": 20.0},
        },
    )
    yield "mistral", OTHER | dict(
        head_dim=6, sliding_window=5, layer_types=[SLIDING, FULL, SLIDING, SLIDING], rope_theta=300.0,
    )


def weight(i, k):
    """A number from -0.2 to 0.2 for an index and a tensor's number, the same in any language."""
    x = (numpy.asarray(i, dtype=numpy.uint64) * 2654435761 + k * 40503 + 12345) % 2**32
    x ^= x >> 15
    x = x * 2246822519 % 2**32
    x ^= x >> 13
    return (x.astype(numpy.float64) / 2**32 - 0.5) * 0.4


def fill(model, family):
    """Gives a model its weights; their shapes by name."""
    shapes, is_gemma = {}, family.startswith("gemma")
    for k, (name, parameter) in enumerate(sorted(model.named_parameters())):
        values = weight(numpy.arange(parameter.numel()), k)
        if "norm" in name and name.endswith("weight") and not is_gemma:
            values += 1
        with torch.no_grad():
            parameter.copy_(torch.tensor(values.astype(numpy.float32)).reshape(parameter.shape))
        shapes[name] = list(parameter.shape)
    return shapes


def forward(model, tokens):
    return model(input_ids=tokens, use_cache=False).logits


@torch.no_grad()
def greedy(model, prompts):
    """The tokens after prompts of one length, and each row's smallest lead of the best logit."""
    tokens, leads = prompts, torch.full([len(prompts)], torch.inf, dtype=torch.float64)
    for _ in range(NEW):
        best = forward(model, tokens)[:, -1].topk(2)
        leads = torch.minimum(leads, best.values[:, 0] - best.values[:, 1])
        tokens = torch.cat([tokens, best.indices[:, :1]], 1)
    return tokens[:, prompts.shape[1]:], leads


def prompts_of(name, model, generator):
    """Of 64 prompts of each length, the one followed by the most distinct tokens."""
    lengths, rows, padded = [6, 4, 3], [], torch.zeros(3, 6, dtype=torch.long)
    for at, length in enumerate(lengths):
        most, tries = 0, 0
        while most < 4:
            tries += 1
            assert tries < 100, f"{name}: no prompt of {length} tokens will do"
            drawn = torch.randint(1, VOCAB, (64, length), generator=generator)
            tokens, leads = greedy(model, drawn)
            distinct = torch.tensor([len(row.unique()) for row in tokens])
            most, best = torch.where(leads > LEAD, distinct, 0).max(0)
        prompt = drawn[best][None]
        cached = model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=NEW)
        assert torch.equal(cached[0, length:], tokens[best]), f"{name}: decoding with a cache differs"
        padded[at, :length] = prompt[0]
        rows.append(tokens[best])
        print(f"  {name}: {most} distinct tokens, lead {leads[best]:.1e}")
    return {"prompts": padded, "lengths": torch.tensor(lengths), "greedy": torch.stack(rows)}


def built(config):
    """The model of a config, as transformers reads it from a file."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        loaded = AutoConfig.from_pretrained(folder)
    kind = AutoModel if config["model_type"] == "modernbert" else AutoModelForCausalLM
    return kind.from_config(loaded, attn_implementation="eager", dtype=torch.float32).eval()


def encoder(model, generator, with_gradients):
    """Hidden states of rows, each computed alone, so without padding; and gradients."""
    tokens = torch.randint(1, VOCAB, (3, 20), generator=generator)
    lengths = torch.tensor([20, 11, 5])
    real = torch.arange(20) < lengths[:, None]
    alone = [model(input_ids=row[None, :length]).last_hidden_state[0] for row, length in zip(tokens, lengths.tolist())]
    hidden = torch.stack([F.pad(row, (0, 0, 0, 20 - len(row))) for row in alone])
    own = {"tokens": tokens, "lengths": lengths, "hidden": hidden}
    if with_gradients:
        upstream = torch.randn(hidden.shape, generator=generator).double() * real[..., None]
        (hidden * upstream).sum().backward()
        own |= {"grad_output": upstream} | {f"grad.{key}": p.grad for key, p in model.named_parameters()}
    return own


def make(out):
    found, tensors, seen = [], {}, {}
    for number, (family, config) in enumerate(cases()):
        seen[family] = seen.get(family, 0) + 1
        name = f"{family}.{seen[family]}"
        config = {"model_type": family} | config
        model = built(config)
        shapes = fill(model, family)
        found.append({"name": name, "config": config, "shapes": shapes})
        model = model.double()
        generator = torch.Generator().manual_seed(number)
        if family == "modernbert":
            own = encoder(model, generator, seen[family] == 1)
            print(f"{name}: states of deviation {own['hidden'].std():.2f}")
            tensors |= {f"{name}.{key}": value for key, value in own.items()}
            continue
        tokens = torch.randint(0, VOCAB, (2, 17), generator=generator)
        tokens, targets = tokens[:, :-1], tokens[:, 1:].clone()
        targets[0, 3] = -100
        logits = forward(model, tokens)
        own = {"tokens": tokens, "logits": logits}
        if seen[family] == 1:
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)
            loss.backward()
            own |= {"targets": targets, "loss": loss.reshape(1)}
            own |= {f"grad.{key}": p.grad for key, p in model.named_parameters()}
        print(f"{name}: logits of deviation {logits.std():.2f}")
        own |= prompts_of(name, model, generator)
        tensors |= {f"{name}.{key}": value for key, value in own.items()}
    narrow = lambda t: t.detach().to(torch.float32 if t.is_floating_point() else torch.int32).contiguous()
    save_file({key: narrow(value) for key, value in tensors.items()}, out / "families.safetensors")
    lines = ",\n  ".join(json.dumps(case) for case in found)
    (out / "families.json").write_text(f"[\n  {lines}\n]\n")


def check(folder):
    for path in sorted(path for path in folder.iterdir() if path.is_dir()):
        golden = load_file(path / "golden.safetensors")
        kind = AutoModel if "hidden" in golden else AutoModelForCausalLM
        model, info = kind.from_pretrained(
            path, attn_implementation="eager", dtype=torch.float32, output_loading_info=True
        )
        unfit = {key: value for key, value in info.items() if value}
        assert not unfit, f"{path.name}: {unfit}"
        with torch.no_grad():
            output = model.eval()(input_ids=golden["tokens"].long())
        ours = golden["hidden"] if "hidden" in golden else golden["logits"]
        theirs = output.last_hidden_state if "hidden" in golden else output.logits
        off = (theirs - ours).abs().max().item()
        print(f"{path.name}: {type(model).__name__}, off by {off:.1e}")
        assert off < 1e-4, path.name


if len(sys.argv) > 2 and sys.argv[1] == "--check":
    check(Path(sys.argv[2]))
else:
    make(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent)
