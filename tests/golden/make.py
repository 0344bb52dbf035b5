#!/usr/bin/env python3
"""Writes the golden reference files that lie next to this script.

    pip install torch transformers safetensors numpy
    python3 tests/golden/make.py            # or: make.py OUTPUT_FOLDER

Needs transformers 5 or newer (configs are given as `rope_parameters`) and no
network: every model is built from a small config with random weights.
The run is deterministic on one machine and one set of package versions.

Weights are float32. Reference values come from the same weights widened to
float64 and are rounded to float32 when stored; transformers itself drops to
float32 inside some RMS norms, softmaxes and rotary tables.

    <model>/config.json, model.safetensors   as written by save_pretrained
    <model>/golden.safetensors               inputs and expected values
    gpt2/training.json, llama/training.json  hyper-parameters of the ten updates
    ops.safetensors                          single operations, <case>.<name>

Every causal model also has `greedy_prompts` [3, 6], padded on the right with 0,
their `greedy_lengths` [3], and `greedy_tokens` [3, 64]: what greedy decoding by
transformers, with a cache and one prompt at a time, appends to each prompt. The
model is the one that is saved, not the trained one. The prompts are chosen so
that at every step the best logit leads the second by more than 5e-3, that every
row has four distinct tokens or more, and that decoding without a cache agrees.

Constants that are not stored in ops.safetensors: layer_norm eps 1e-5, rms_norm
eps 1e-6, attention scale 1/sqrt(8), window 3, rotary base 10000 (half-split),
label smoothing 0.1, ignored target -100.

The loss does not depend on the key biases of an attention layer, so their
gradient is zero but for rounding, and Adam scales that rounding up: do not
compare `after.*` of GPT-2's key biases (the middle third of every c_attn.bias)
with a float32 implementation.
"""

import json
import math
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from transformers import (
    BertConfig, BertModel,
    GPT2Config, GPT2LMHeadModel,
    LlamaConfig, LlamaForCausalLM,
    MistralConfig, MistralForCausalLM,
    Qwen2Config, Qwen2ForCausalLM,
    Qwen3Config, Qwen3ForCausalLM,
)

OUT = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent
VOCAB = 61
CONTEXT = 80  # room for a prompt and the tokens of greedy decoding
LEAD = 5e-3  # of the best logit over the second, at every step of greedy decoding
IGNORED = -100


def store(path, tensors):
    """Saves tensors as F32 or I32."""
    def narrow(t):
        t = t.detach()
        dtype = torch.float32 if t.is_floating_point() else torch.int32
        return t.to(dtype).contiguous().clone()
    save_file({name: narrow(t) for name, t in tensors.items()}, path)


# ---------------------------------------------------------------- models

def build(folder, model_class, config, seed, **kwargs):
    """Makes a model with random weights, saves it, returns it in float64."""
    torch.manual_seed(seed)
    config._attn_implementation = "eager"
    model = model_class(config, **kwargs).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            is_norm_weight = p.dim() == 1 and name.endswith("weight")
            if is_norm_weight:
                p.normal_(1.0, 0.1)
            else:
                p.normal_(0.0, 0.08)
    (OUT / folder).mkdir(parents=True, exist_ok=True)
    model.save_pretrained(OUT / folder)
    (OUT / folder / "generation_config.json").unlink(missing_ok=True)
    return model.double()


def random_batch(batch, seq):
    """Random tokens and the tokens that follow them, about one in eight ignored."""
    tokens = torch.randint(0, VOCAB, (batch, seq + 1))
    targets = tokens[:, 1:].clone()
    targets[torch.rand(batch, seq) < 0.125] = IGNORED
    targets[0, 3] = IGNORED
    return tokens[:, :-1], targets


def forward(model, tokens):
    return model(input_ids=tokens, use_cache=False).logits


@torch.no_grad()
def greedy(model, prompts, new=64):
    """What greedy decoding appends to prompts of one length, and each row's smallest lead.

    The lead is -1 where decoding without a cache would choose otherwise.
    """
    whole = model.generate(prompts, attention_mask=torch.ones_like(prompts),
                           do_sample=False, max_new_tokens=new)
    tokens = whole[:, prompts.shape[1]:]
    assert tokens.shape[1] == new
    # The same steps again without a cache, in one pass.
    best = forward(model, whole[:, :-1])[:, -new:].topk(2)
    leads = (best.values[..., 0] - best.values[..., 1]).amin(1)
    agrees = (tokens == best.indices[..., 0]).all(1)
    return tokens, torch.where(agrees, leads, -1.0)


def greedy_goldens(folder, model, seed):
    """Of prompts drawn 256 at a time, takes the one with the most distinct tokens after it.

    Has a generator of its own, so that no other random number depends on it.
    """
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([6, 4, 3])
    prompts = torch.zeros(3, 6, dtype=torch.long)
    rows, report = [], []
    for prompt, length in zip(prompts, lengths.tolist()):
        for draws in range(256, 80 * 256 + 1, 256):
            drawn = torch.randint(0, VOCAB, (256, length), generator=generator)
            tokens, leads = greedy(model, drawn)
            distinct = torch.tensor([len(row.unique()) for row in tokens])
            most, at = torch.where(leads > LEAD, distinct, 0).max(0)
            if most >= 4:
                break
        else:
            raise RuntimeError(f"{folder}: no prompt of {length} tokens will do")
        row, lead = greedy(model, drawn[at][None])  # alone
        assert lead > LEAD and torch.equal(row[0], tokens[at]), folder
        prompt[:length] = drawn[at]
        rows.append(row[0])
        report.append(f"{most} distinct, lead {lead.item():.1e}, {draws} draws")
    print(f"{folder}: greedy {'; '.join(report)}")
    return {"greedy_prompts": prompts, "greedy_lengths": lengths, "greedy_tokens": torch.stack(rows)}


def mean_loss(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)


def learning_rate(step, h):
    """nanoGPT's schedule: linear warm-up, then a cosine."""
    if step < h["warmup_steps"]:
        return h["max_learning_rate"] * (step + 1) / (h["warmup_steps"] + 1)
    ratio = (step - h["warmup_steps"]) / (h["steps"] - h["warmup_steps"])
    span = h["max_learning_rate"] - h["min_learning_rate"]
    return h["min_learning_rate"] + 0.5 * (1 + math.cos(math.pi * ratio)) * span


def logits_model(folder, model_class, config, seed, batch=2, seq=16):
    model = build(folder, model_class, config, seed)
    tokens, _ = random_batch(batch, seq)
    with torch.no_grad():
        logits = forward(model, tokens)
    golden = {"tokens": tokens, "logits": logits} | greedy_goldens(folder, model, seed)
    store(OUT / folder / "golden.safetensors", golden)


def training_model(folder, model_class, config, seed, max_norm):
    model = build(folder, model_class, config, seed)
    params = dict(model.named_parameters())  # a tied head is listed once, as the embedding

    tokens, targets = random_batch(3, 16)
    logits = forward(model, tokens)
    loss = mean_loss(logits, targets)
    loss.backward()
    golden = {"tokens": tokens, "targets": targets, "logits": logits, "loss": loss.reshape(1)}
    golden |= {f"grad.{name}": p.grad.clone() for name, p in params.items()}
    golden |= greedy_goldens(folder, model, seed)  # before the weights change

    h = {
        "optimizer": "adamw",
        "beta1": 0.9,
        "beta2": 0.95,
        "eps": 1e-8,
        "weight_decay": 0.1,
        "weight_decay_min_dim": 2,
        "max_grad_norm": max_norm,
        "steps": 10,
        "warmup_steps": 3,
        "max_learning_rate": 1e-2,
        "min_learning_rate": 1e-3,
        "batch": 3,
        "sequence": 16,
        "ignore_index": IGNORED,
    }
    decayed = [p for p in params.values() if p.dim() >= h["weight_decay_min_dim"]]
    others = [p for p in params.values() if p.dim() < h["weight_decay_min_dim"]]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": h["weight_decay"]},
         {"params": others, "weight_decay": 0.0}],
        betas=(h["beta1"], h["beta2"]), eps=h["eps"],
    )
    batches = [random_batch(h["batch"], h["sequence"]) for _ in range(h["steps"])]
    losses, norms, rates = [], [], []
    for step, (tokens, targets) in enumerate(batches):
        rate = learning_rate(step, h)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.zero_grad()
        loss = mean_loss(forward(model, tokens), targets)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(params.values(), h["max_grad_norm"])
        optimizer.step()
        losses.append(loss.item())
        norms.append(norm.item())  # before clipping
        rates.append(rate)
    golden["train_tokens"] = torch.stack([b[0] for b in batches])
    golden["train_targets"] = torch.stack([b[1] for b in batches])
    golden["train_losses"] = torch.tensor(losses, dtype=torch.float64)
    golden["train_grad_norms"] = torch.tensor(norms, dtype=torch.float64)
    golden["train_learning_rates"] = torch.tensor(rates, dtype=torch.float64)
    golden |= {f"after.{name}": p for name, p in params.items()}
    store(OUT / folder / "golden.safetensors", golden)
    (OUT / folder / "training.json").write_text(json.dumps(h, indent=2) + "\n")

    clipped = sum(n > max_norm for n in norms)
    print(f"{folder}: clipping at {max_norm} bites in {clipped} of {len(norms)} steps")
    print("  losses", " ".join(f"{x:.4f}" for x in losses))
    print("  norms ", " ".join(f"{x:.4f}" for x in norms))


def bert_model(folder, seed):
    config = BertConfig(
        vocab_size=VOCAB, hidden_size=24, num_hidden_layers=2, num_attention_heads=3,
        intermediate_size=48, type_vocab_size=2, max_position_embeddings=32,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )
    model = build(folder, BertModel, config, seed, add_pooling_layer=False)
    tokens, _ = random_batch(3, 16)
    lengths = torch.tensor([16, 9, 5])
    first_part = torch.tensor([7, 4, 2])
    positions = torch.arange(16)
    token_types = (positions >= first_part[:, None]).long()
    mask = (positions < lengths[:, None]).long()
    with torch.no_grad():
        hidden = model(
            input_ids=tokens, token_type_ids=token_types, attention_mask=mask
        ).last_hidden_state
    store(OUT / folder / "golden.safetensors", {
        "tokens": tokens, "token_types": token_types, "lengths": lengths, "hidden": hidden,
    })


def make_models():
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    common = dict(
        vocab_size=VOCAB, hidden_size=24, intermediate_size=40, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, rms_norm_eps=1e-5,
        max_position_embeddings=CONTEXT, rope_parameters=rope, tie_word_embeddings=False,
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )

    gpt2 = GPT2Config(
        vocab_size=VOCAB, n_positions=CONTEXT, n_embd=24, n_layer=2, n_head=3,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        bos_token_id=None, eos_token_id=None,
    )
    training_model("gpt2", GPT2LMHeadModel, gpt2, 1, max_norm=1.0)
    training_model("llama", LlamaForCausalLM, LlamaConfig(**common), 2, max_norm=1.5)

    logits_model("mistral", MistralForCausalLM, MistralConfig(**common | {
        "sliding_window": 5, "head_dim": 6}), 3)
    logits_model("qwen2", Qwen2ForCausalLM, Qwen2Config(**common | {
        "tie_word_embeddings": True}), 4)
    logits_model("qwen3", Qwen3ForCausalLM, Qwen3Config(**common | {"head_dim": 8}), 5)

    llama3 = {
        "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0,
        "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    }
    logits_model("llama3", LlamaForCausalLM, LlamaConfig(**common | {
        "rope_parameters": llama3}), 6, seq=40)
    logits_model("llama_linear", LlamaForCausalLM, LlamaConfig(**common | {
        "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}}), 7)
    # Base 100 and head_dim 16 put one frequency on the slope between YaRN's two ends.
    yarn = {
        "rope_type": "yarn", "rope_theta": 100.0, "factor": CONTEXT / 16,
        "original_max_position_embeddings": 16,
    }
    logits_model("llama_yarn", LlamaForCausalLM, LlamaConfig(**common | {
        "head_dim": 16, "rope_parameters": yarn}), 8, seq=40)
    bert_model("bert", 9)


# ---------------------------------------------------------------- operations

def leaf(*shape, scale=1.0):
    """A float64 input whose values are exact in float32."""
    values = torch.randn(*shape, dtype=torch.float64) * scale
    return values.float().double().requires_grad_()


def case(goldens, name, inputs, output, constants=None, output_name="output"):
    """Stores one operation; `inputs` are those with a gradient, `constants` the others."""
    if output_name == "loss":
        upstream = torch.ones_like(output)
    else:
        upstream = torch.randn_like(output).float().double()
    grads = torch.autograd.grad(output, list(inputs.values()), upstream)
    entries = inputs | (constants or {}) | {output_name: output, "grad_output": upstream}
    entries |= {f"d_{key}": g for key, g in zip(inputs, grads)}
    goldens.update({f"{name}.{key}": value for key, value in entries.items()})


def attention(q, k, v, visible):
    """q [b, hq, s, d], k and v [b, hk, s, d], visible [b or 1, 1, s, s] -> [b, s, hq * d]."""
    repeats = q.shape[1] // k.shape[1]
    k = k.repeat_interleave(repeats, dim=1)
    v = v.repeat_interleave(repeats, dim=1)
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
    return (weights @ v).transpose(1, 2).flatten(2)


def rotary(x, positions, base):
    """x [batch, heads, seq, head_dim], positions [batch, seq]; Llama's rotate_half."""
    half = x.shape[-1] // 2
    inv_freq = base ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = positions[:, None, :, None].double() * inv_freq
    cos, sin = angles.cos(), angles.sin()
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def make_ops():
    torch.manual_seed(100)
    g = {}

    x, gamma, beta = leaf(2, 5, 24), leaf(24), leaf(24)
    case(g, "layer_norm", {"x": x, "gamma": gamma, "beta": beta},
         F.layer_norm(x, (24,), gamma, beta, 1e-5))

    x, gamma = leaf(2, 5, 24), leaf(24)
    case(g, "rms_norm", {"x": x, "gamma": gamma}, F.rms_norm(x, (24,), gamma, 1e-6))

    query, key = torch.arange(7)[:, None], torch.arange(7)[None, :]
    causal = (key <= query)[None, None]
    window = causal & (key > query - 3)
    for name, visible in [("attention_causal", causal), ("attention_window", window)]:
        q, k, v = leaf(2, 4, 7, 8), leaf(2, 2, 7, 8), leaf(2, 2, 7, 8)
        case(g, name, {"q": q, "k": k, "v": v}, attention(q, k, v, visible))

    # Queries at or beyond the length are computed too, and have upstream gradients.
    lengths = torch.tensor([7, 4])
    visible = (key < lengths[:, None, None])[:, None].expand(2, 1, 7, 7)
    q, k, v = leaf(2, 4, 7, 8), leaf(2, 4, 7, 8), leaf(2, 4, 7, 8)
    case(g, "attention_lengths", {"q": q, "k": k, "v": v}, attention(q, k, v, visible),
         {"lengths": lengths})

    for name, function in [
        ("gelu_erf", F.gelu),
        ("gelu_tanh", lambda t: F.gelu(t, approximate="tanh")),
        ("relu", F.relu),
        ("silu", F.silu),
    ]:
        x = leaf(3, 11, scale=2.0)
        case(g, name, {"x": x}, function(x))

    gate_up = leaf(3, 5, 22)
    gate, up = gate_up.chunk(2, dim=-1)
    case(g, "swiglu", {"gate_up": gate_up}, F.silu(gate) * up)

    x = leaf(2, 3, 9, 8)
    positions = torch.stack([torch.arange(9), torch.arange(9) * 3 + 5])
    case(g, "rotary", {"x": x}, rotary(x, positions, 10000.0), {"positions": positions})

    for name, smoothing in [("head_loss", 0.1), ("head_loss_plain", 0.0)]:
        hidden, weight = leaf(13, 24), leaf(VOCAB, 24, scale=0.3)
        targets = torch.randint(0, VOCAB, (13,))
        targets[[2, 9]] = IGNORED
        loss = F.cross_entropy(hidden @ weight.T, targets, ignore_index=IGNORED,
                               label_smoothing=smoothing)
        case(g, name, {"hidden": hidden, "weight": weight}, loss.reshape(1),
             {"targets": targets}, output_name="loss")

    store(OUT / "ops.safetensors", g)


if __name__ == "__main__":
    torch.set_num_threads(1)
    OUT.mkdir(parents=True, exist_ok=True)
    make_models()
    make_ops()
    for path in OUT.rglob("*.safetensors"):
        path.chmod(0o644)  # they are written readable by the owner alone
