#!/usr/bin/env python3
"""The same work in PyTorch, as a peer for `fireclay bench`: one JSON line a measurement.

    fireclay bench train   --backend cuda --size gpt2-124m --peer "python3 benches/pytorch.py gpt2-124m"
    fireclay bench train   --backend cuda --size qwen3-0.6b-lora --peer "python3 benches/pytorch.py qwen3-0.6b-lora"
    fireclay bench decode  --backend cuda --peer "python3 benches/pytorch.py decode prefill"
                                                                # prefill:16384 for --length 16384
    fireclay bench decode  --backend cuda --size gemma-3-1b --peer "python3 benches/pytorch.py decode:gemma-3-1b"
    fireclay bench train   --backend cuda --size phi-4-mini --peer "python3 benches/pytorch.py phi-4-mini"
    fireclay bench kernels --backend cuda --peer "python3 benches/pytorch.py kernels"
    fireclay bench kernels --backend cuda --peer "python3 benches/pytorch.py experts"
    fireclay bench cpu     --size cpu-6x256 --peer "python3 benches/pytorch.py cpu-6x256"

Needs `pip install torch`, for fine-tuning also `transformers peft`. On a GPU training is bf16 under autocast with
torch.compile, decoding bf16 with a static cache and torch.compile's CUDA graphs; on a CPU training is f32, eager: what
a PyTorch user would do for speed.
"""

import json
import math
import statistics
import sys
import time
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
BF16 = torch.bfloat16
torch.set_float32_matmul_precision("high")


def show(what, case, value, unit):
    print(json.dumps({"what": what, "case": f"torch {case}", "value": value, "unit": unit}), flush=True)


def wait():
    if GPU:
        torch.cuda.synchronize()


def seconds(work, repeats=5 if GPU else 20):
    """Seconds of a call, timed as `fireclay bench` times ours: some calls first, then the median of
    runs of as many calls as take a quarter of a second, waited for once behind all. A GPU that
    computes for so long has another clock than one that rests between calls."""

    def run(calls):
        begin = time.perf_counter()
        for _ in range(calls):
            work()
        wait()
        return (time.perf_counter() - begin) / calls

    run(1)
    calls = max(1, math.ceil(0.25 / run(3)))
    return statistics.median(run(calls) for _ in range(repeats))


def sorted_slots(chosen, n_experts):
    """The slots of tokens' choices in the order of their experts, and the end of each expert's."""
    flat = chosen.flatten()
    ends = torch.bincount(flat, minlength=n_experts).cumsum(0).to(torch.int32)
    return flat.argsort(stable=True), ends


def grouped(x, weight, ends):
    """Rows of each expert times its matrix `[n_experts, d_input, d_output]`."""
    return torch._grouped_mm(x.to(BF16), weight.to(BF16), offs=ends)


class Mixture(nn.Module):
    """Experts with biases, as GPT-2's layers have, with torch._grouped_mm."""

    def __init__(self, d_model, d_ff, n_experts, k):
        super().__init__()
        self.n_experts, self.k = n_experts, k
        self.router = nn.Linear(d_model, n_experts, bias=False)
        self.up, self.down = (
            nn.Parameter(torch.empty(n_experts, *shape)) for shape in [(d_model, d_ff), (d_ff, d_model)]
        )
        self.up_bias, self.down_bias = (nn.Parameter(torch.zeros(n_experts, size)) for size in (d_ff, d_model))

    def forward(self, x):
        rows = x.flatten(0, -2)
        with torch.autocast(DEVICE, enabled=False):
            logits = F.linear(rows.float(), self.router.weight.float())
        best, chosen = logits.topk(self.k, -1)
        weights = best.softmax(-1).flatten()
        order, ends = sorted_slots(chosen, self.n_experts)
        own = chosen.flatten()[order]
        hidden = F.gelu(grouped(rows[order // self.k], self.up, ends) + self.up_bias[own], approximate="tanh")
        output = (grouped(hidden, self.down, ends) + self.down_bias[own]) * weights[order, None]
        output = torch.zeros(len(rows), x.shape[-1], device=x.device).index_add_(0, order // self.k, output.float())
        share = torch.bincount(chosen.flatten(), minlength=self.n_experts) / chosen.numel()
        balance = self.n_experts * (share * logits.softmax(-1).mean(0)).sum()
        return output.view_as(x), 0.01 * balance + 0.001 * logits.logsumexp(-1).square().mean()


class GptBlock(nn.Module):
    def __init__(self, d_model, n_heads, dropout, experts=None):
        super().__init__()
        self.n_heads, self.dropout = n_heads, dropout
        self.mixture = Mixture(d_model, *experts) if experts else None
        self.norm_1, self.norm_2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        self.qkv, self.project = nn.Linear(d_model, 3 * d_model), nn.Linear(d_model, d_model)
        if not experts:
            self.up, self.down = nn.Linear(d_model, 4 * d_model), nn.Linear(4 * d_model, d_model)

    def forward(self, x):
        """The residual stream, and the losses of a router."""
        heads = [
            part.unflatten(-1, (self.n_heads, -1)).transpose(1, 2) for part in self.qkv(self.norm_1(x)).chunk(3, -1)
        ]
        attended = F.scaled_dot_product_attention(*heads, is_causal=True, dropout_p=self.dropout)
        x = x + F.dropout(self.project(attended.transpose(1, 2).flatten(-2)), self.dropout)
        if self.mixture:
            output, loss = self.mixture(self.norm_2(x))
            return x + F.dropout(output, self.dropout), loss
        hidden = F.gelu(self.up(self.norm_2(x)), approximate="tanh")
        return x + F.dropout(self.down(hidden), self.dropout), 0.0


class Gpt(nn.Module):
    """GPT-2 with tied embeddings; its forward pass gives the loss."""

    def __init__(self, vocab_size, seq_length, d_model, n_layers, n_heads, dropout, experts=None):
        super().__init__()
        self.dropout = dropout
        self.embed, self.positions = nn.Embedding(vocab_size, d_model), nn.Embedding(seq_length, d_model)
        self.blocks = nn.ModuleList(GptBlock(d_model, n_heads, dropout, experts) for _ in range(n_layers))
        self.norm = nn.LayerNorm(d_model)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, ids, targets):
        x = F.dropout(self.embed(ids) + self.positions.weight[: ids.shape[1]], self.dropout)
        losses = 0.0
        for block in self.blocks:
            x, loss = block(x)
            losses = losses + loss
        logits = F.linear(self.norm(x), self.embed.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten()) + losses


# What is measured, its case, batch, and the model: vocabulary, sequence, d_model, layers, heads, dropout;
# of experts their width and number, and how many a token has.
TRAINING = {
    "gpt2-124m": ("train gpt2-124m", "", 16, (50_304, 1024, 768, 12, 12, 0.0)),
    "gpt2-124m-experts": (
        "train gpt2-124m",
        "2 of 16 experts ",
        16,
        (50_304, 1024, 768, 12, 12, 0.0, (1536, 16, 2)),
    ),
    "shakespeare-char": ("train step", "char 6x384 ", 64, (65, 256, 384, 6, 6, 0.2)),
    "cpu-4x128": ("train", "4 layers of 128 ", 12, (65, 64, 128, 4, 4, 0.0)),
    "cpu-6x384": ("train", "6 layers of 384 ", 8, (65, 256, 384, 6, 6, 0.0)),
    "cpu-6x256": ("train", "6 layers of 256, V=8192 ", 32, (8192, 64, 256, 6, 8, 0.0)),
}


def train(size, batch=None):
    what, label, own_batch, shape = TRAINING[size]
    batch = batch or own_batch
    vocab_size, seq_length = shape[:2]
    model = Gpt(*shape).to(DEVICE)
    train_model(what, label, model, vocab_size, batch, seq_length)


def train_model(what, label, model, vocab_size, batch, seq_length, rest=None):
    """Times steps of a model that gives the loss of ids and targets; `rest`: its positions and mask."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    run = torch.compile(model) if GPU else model
    ids, targets = torch.randint(vocab_size, (2, batch, seq_length), device=DEVICE)

    def step():
        with torch.autocast(DEVICE, BF16, enabled=GPU):
            loss = run(ids, rest[0], targets, rest[1]) if rest else run(ids, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    name = "compile" if GPU else "eager"
    if GPU:
        torch.cuda.reset_peak_memory_stats()
    show(what, f"{name} {label}B={batch} T={seq_length}", batch * seq_length / seconds(step), "tokens/s")
    if GPU:
        peak = torch.cuda.max_memory_allocated() / 1e9
        show(f"peak memory, {what}", f"{name} {label}B={batch} T={seq_length}", peak, "GB")


def fine_tuning(name, lora, batch, length=2048):
    """A model's shape, with all weights or a LoRA adapter on all linear layers: transformers and PEFT, in bf16."""
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

    config = {
        "qwen3 0.6b": lambda: Qwen3Config(
            vocab_size=151_936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
            num_key_value_heads=8, head_dim=128, tie_word_embeddings=True, rope_theta=1e6, use_cache=False,
        ),
        "llama 8b": lambda: LlamaConfig(
            vocab_size=128_256, hidden_size=4096, intermediate_size=14_336, num_hidden_layers=32,
            num_attention_heads=32, num_key_value_heads=8, rope_theta=5e5, use_cache=False,
        ),
    }[name]()  # fmt: skip
    torch.set_default_dtype(BF16)
    with torch.device(DEVICE):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    torch.set_default_dtype(torch.float32)
    if lora:
        from peft import LoraConfig, get_peft_model

        linears = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
        model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules=linears))
    model.train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
    run = torch.compile(model)
    ids = torch.randint(150_000, (batch, length), device=DEVICE)

    def step():
        run(input_ids=ids, labels=ids).loss.backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    torch.cuda.reset_peak_memory_stats()
    case = f"{'peft' if lora else 'transformers'} compile {name}, {'LoRA of rank 16' if lora else 'all weights'}"
    case = f"{case} B={batch} T={length}"
    show("train step", case, batch * length / seconds(step), "tokens/s")
    show("peak memory, train step", case, torch.cuda.max_memory_allocated() / 1e9, "GB")


class Shape(NamedTuple):
    """A decoder's shape. `window` is that of all layers but every `full_every`th."""

    vocab_size: int
    d_model: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    d_ff: int
    rotary_dim: int
    qk_norm: bool = False
    # Norms of the sub-layers' outputs, too.
    output_norms: bool = False
    gelu: bool = False
    window: int = 0
    full_every: int = 1


DECODERS = {
    "qwen3-0.6b": Shape(151_936, 1024, 28, 16, 8, 128, 3072, 128, qk_norm=True),
    "gemma-3-1b": Shape(
        262_144, 1152, 26, 4, 1, 256, 6912, 256, qk_norm=True, output_norms=True, gelu=True, window=512, full_every=6
    ),
    "phi-4-mini": Shape(200_064, 3072, 32, 24, 8, 128, 8192, 96),
}


class DecoderLayer(nn.Module):
    """A layer of a decoder; with a cache if it has a batch and a length."""

    def __init__(self, shape, index, batch=0, length=0):
        super().__init__()
        self.shape, self.windowed = shape, shape.window and (index + 1) % shape.full_every
        d_model, head_dim = shape.d_model, shape.head_dim
        self.norm_1, self.norm_2 = nn.RMSNorm(d_model, 1e-6), nn.RMSNorm(d_model, 1e-6)
        self.after_1, self.after_2 = (
            (nn.RMSNorm(d_model, 1e-6), nn.RMSNorm(d_model, 1e-6))
            if shape.output_norms
            else (nn.Identity(), nn.Identity())
        )
        self.norm_q, self.norm_k = (
            (nn.RMSNorm(head_dim, 1e-6), nn.RMSNorm(head_dim, 1e-6)) if shape.qk_norm else (nn.Identity(), nn.Identity())
        )
        self.qkv = nn.Linear(d_model, (shape.n_heads + 2 * shape.n_kv_heads) * head_dim, bias=False)
        self.project = nn.Linear(shape.n_heads * head_dim, d_model, bias=False)
        self.gate_up = nn.Linear(d_model, 2 * shape.d_ff, bias=False)
        self.down = nn.Linear(shape.d_ff, d_model, bias=False)
        if length:
            self.register_buffer("keys", torch.zeros(batch, shape.n_kv_heads, length, head_dim))
            self.register_buffer("values", torch.zeros(batch, shape.n_kv_heads, length, head_dim))

    def forward(self, x, at, angles, mask, window=None):
        """`mask` is a cache's; `window` the block mask of layers with a window, without a cache."""
        shape = self.shape
        heads, kv_heads = shape.n_heads * shape.head_dim, shape.n_kv_heads * shape.head_dim
        parts = self.qkv(self.norm_1(x)).split([heads, kv_heads, kv_heads], -1)
        q, k, v = (part.unflatten(-1, (-1, shape.head_dim)) for part in parts)
        q, k, v = self.norm_q(q).transpose(1, 2), self.norm_k(k).transpose(1, 2), v.transpose(1, 2)
        cos, sin = angles

        def rotary(z):
            turned, rest = z[..., : shape.rotary_dim], z[..., shape.rotary_dim :]
            low, high = turned.chunk(2, -1)
            return torch.cat((turned * cos + torch.cat((-high, low), -1) * sin, rest), -1).type_as(v)

        q, k = rotary(q), rotary(k)
        if mask is not None:
            self.keys[:, :, at], self.values[:, :, at] = k, v
            attended = F.scaled_dot_product_attention(q, self.keys, self.values, attn_mask=mask, enable_gqa=True)
        elif window is not None and self.windowed:
            attended = flex_attention(q, k, v, block_mask=window, enable_gqa=True)
        else:
            if hasattr(self, "keys"):
                length = x.shape[1]
                self.keys[:, :, :length], self.values[:, :, :length] = k, v
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.after_1(self.project(attended.transpose(1, 2).flatten(-2)))
        gate, up = self.gate_up(self.norm_2(x)).chunk(2, -1)
        gate = F.gelu(gate, approximate="tanh") if shape.gelu else F.silu(gate)
        return x + self.after_2(self.down(gate * up))


class Decoder(nn.Module):
    """A decoder with tied embeddings: gives the next token, greedily, or with targets the loss."""

    def __init__(self, shape, length, batch=0):
        super().__init__()
        self.embed = nn.Embedding(shape.vocab_size, shape.d_model)
        cache = (batch, length) if batch else (0, 0)
        self.layers = nn.ModuleList(DecoderLayer(shape, index, *cache) for index in range(shape.n_layers))
        self.norm = nn.RMSNorm(shape.d_model, 1e-6)
        frequencies = 1e6 ** (-torch.arange(0, shape.rotary_dim, 2) / shape.rotary_dim)
        angles = torch.outer(torch.arange(length), frequencies).tile(2)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())
        self.register_buffer("seen", torch.ones(length, length, dtype=torch.bool).tril())

    def forward(self, ids, at, targets=None, window=None):
        decoding = ids.shape[1] == 1
        seen = self.seen[at] if decoding else None
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, at, (self.cos[at], self.sin[at]), seen, window)
        if targets is not None:
            logits = F.linear(self.norm(x), self.embed.weight)
            return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return F.linear(self.norm(x[:, -1:]), self.embed.weight).argmax(-1)


def decoder(name, batch, length, **how):
    with torch.device(DEVICE):
        model = Decoder(DECODERS[name], length, batch).to(BF16).eval()
    return torch.compile(model, fullgraph=True, **how)


def train_decoder(name, batch, length=2048):
    shape = DECODERS[name]
    with torch.device(DEVICE):
        model = Decoder(shape, length)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.02)

    def seen(_batch, _head, query, key):
        return (key <= query) & (query - key < shape.window)

    window = create_block_mask(seen, None, None, length, length, device=DEVICE) if shape.window else None
    label = name.replace("-", " ")
    rest = torch.arange(length, device=DEVICE), window
    train_model("train step", f"{label} ", model, shape.vocab_size, batch, length, rest)


@torch.inference_mode()
def decode(name="qwen3-0.6b", tokens=128, warm_up=22):
    for batch in (1, 32):
        model = decoder(name, batch, 1024, mode="reduce-overhead")
        ids = torch.randint(150_000, (batch, 1), device=DEVICE)
        for position in range(warm_up + tokens):
            if position == warm_up:
                wait()
                begin = time.perf_counter()
            ids = model(ids, torch.tensor([position], device=DEVICE)).clone()
        wait()
        per_second = batch * tokens / (time.perf_counter() - begin)
        show(f"decode {name} bf16", f"compile+graphs B={batch}", per_second, "tokens/s")
        torch._dynamo.reset()


@torch.inference_mode()
def prefill(length=2048):
    model = decoder("qwen3-0.6b", 1, length)
    ids, at = torch.randint(150_000, (1, length), device=DEVICE), torch.arange(length, device=DEVICE)
    show("prefill qwen3-0.6b bf16", f"compile {length} tokens", length / seconds(lambda: model(ids, at)), "tokens/s")


def kernels():
    # The same numbers as ours: what a product draws of a card's power depends on them.
    def random(*shape, dtype=BF16):
        return torch.empty(*shape, device=DEVICE, dtype=dtype).uniform_(-1, 1)

    products = [
        (8192, 8192, 8192), (16384, 768, 2304), (16384, 768, 768), (16384, 768, 3072), (16384, 3072, 768),
        (65536, 768, 3072), (65536, 3072, 768), (16384, 768, 50304), (768, 16384, 3072), (3072, 16384, 768),
    ]  # fmt: skip
    for name, dtype, precision in [
        ("bf16", BF16, "high"),
        ("tf32", torch.float32, "high"),
        ("f32", torch.float32, "highest"),
    ]:
        torch.set_float32_matmul_precision(precision)
        for m, k, n in products:
            a, b = random(m, k, dtype=dtype), random(k, n, dtype=dtype)
            show(f"gemm {name}", f"cuBLAS {m}x{k}x{n}", 2e-12 * m * k * n / seconds(lambda: a @ b), "TFLOP/s")
    torch.set_float32_matmul_precision("high")
    for batch, heads, length, head_dim in [
        (16, 12, 1024, 64),
        (64, 12, 1024, 64),
        (4, 16, 4096, 128),
        (1, 16, 16384, 128),
    ]:
        case = f"{batch}x{heads}x{length}x{head_dim}"
        tflop = 2e-12 * batch * heads * length**2 * head_dim
        qkv = [random(batch, heads, length, head_dim).requires_grad_() for _ in range(3)]
        attended = F.scaled_dot_product_attention(*qkv, is_causal=True)
        upstream = random(*attended.shape)
        backward = seconds(lambda: torch.autograd.grad(attended, qkv, upstream, retain_graph=True))
        with torch.no_grad():
            forward = seconds(lambda: F.scaled_dot_product_attention(*qkv, is_causal=True))
        show("attention forward causal", case, tflop / forward, "TFLOP/s")
        show("attention backward causal", case, 2.5 * tflop / backward, "TFLOP/s")

    x, scale = random(65536, 1024), random(1024)
    norm = torch.compile(lambda x: F.rms_norm(x, (1024,), scale, 1e-6))
    show("rms_norm forward bf16", "compile 65536x1024", 4e-9 * x.numel() / seconds(lambda: norm(x)), "GB/s")

    weight = random(50_257, 2560)

    @torch.compile
    def sample(hidden):
        logits, ids = ((hidden @ weight.T).float() / 0.8).topk(50)
        shares = logits.softmax(-1)
        shares = shares.where(shares.cumsum(-1) - shares < 0.9, 0)
        return ids.gather(-1, torch.multinomial(shares, 1))

    for batch in (1, 32):
        hidden = random(batch, 2560)
        what = "head 2560x50257 + softmax + top-k 50 + top-p 0.9 + sample"
        show(what, f"compile B={batch}", 1e6 * seconds(lambda: sample(hidden)), "us")


def experts():
    """Gated experts with random routing, in steps as a user composes them, and the first product alone."""
    for tokens, d_model, d_ff, n_experts, k in [(16_384, 2048, 768, 128, 8), (65_536, 768, 1536, 16, 2)]:
        x = torch.randn(tokens, d_model, device=DEVICE, dtype=BF16)
        up = torch.randn(n_experts, d_model, 2 * d_ff, device=DEVICE, dtype=BF16)
        down = torch.randn(n_experts, d_ff, d_model, device=DEVICE, dtype=BF16)
        chosen = torch.rand(tokens, n_experts, device=DEVICE).topk(k).indices
        weights = torch.rand(tokens * k, device=DEVICE, dtype=BF16)

        @torch.compile
        def forward(x):
            order, ends = sorted_slots(chosen, n_experts)
            gate, other = grouped(x[order // k], up, ends).chunk(2, -1)
            output = grouped(F.silu(gate) * other, down, ends) * weights[order, None]
            return torch.zeros_like(x).index_add_(0, order // k, output)

        case = f"{tokens}x{d_model}x{d_ff}, {k} of {n_experts}"
        tflop = 2e-12 * tokens * k * d_model * 3 * d_ff
        show("experts bf16", f"compile {case}", tflop / seconds(lambda: forward(x)), "TFLOP/s")
        order, ends = sorted_slots(chosen, n_experts)
        rows = x[order // k]
        product = seconds(lambda: grouped(rows, up, ends))
        show("grouped product bf16", f"_grouped_mm {case}", tflop / 1.5 / product, "TFLOP/s")


PARTS = {
    "decode": decode,
    "prefill": prefill,
    "kernels": kernels,
    "experts": experts,
    "qwen3-0.6b-full": lambda: fine_tuning("qwen3 0.6b", False, 8),
    "qwen3-0.6b-lora": lambda: fine_tuning("qwen3 0.6b", True, 8),
    "llama-8b-lora": lambda: fine_tuning("llama 8b", True, 2),
}


def main():
    names = sys.argv[1:]
    known = [
        name
        for name in names
        if name in PARTS or name.partition(":")[0] in [*TRAINING, *DECODERS, "prefill", "decode"]
    ]
    if not names or known != names:
        sys.exit(
            f"usage: pytorch.py NAME..., of {', '.join([*TRAINING, *DECODERS, *PARTS])}; "
            "to train also NAME:BATCH, prefill:LENGTH, and decode:NAME"
        )
    for name in names:
        name, _, number = name.partition(":")
        if name in TRAINING:
            train(name, int(number or 0))
        elif name in DECODERS:
            train_decoder(name, int(number or 4))
        elif name == "decode" and number:
            decode(number)
        elif number:
            prefill(int(number))
        else:
            PARTS[name]()


if __name__ == "__main__":
    main()
