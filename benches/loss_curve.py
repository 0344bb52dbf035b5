#!/usr/bin/env python3
"""Compares losses of bf16 and f32 training step by step: of two runs of ours, or of PyTorch's autocast and its f32.

    fireclay train gpt2-124m --backend cuda --json --data TEXT --set tokenizer=TOKENIZER \\
        --set accumulation=1 --set warmup_steps=20 --set valid_every=100000 \\
        --steps 200 --seed S --precision bf16 > bf16.jsonl      # and f32
    python3 benches/loss_curve.py ours bf16.jsonl f32.jsonl
    python3 benches/loss_curve.py torch TEXT TOKENIZER [--seeds 1,2,3] [--steps 200]

PyTorch's runs have the same shape, rates, decay and clipping, with weights and batches of their
own, alike in both dtypes; it needs torch and tokenizers. A JSON line for each pair: the mean and
the largest magnitude of a step's difference, and the mean of the last quarter's.
"""

import argparse
import json
import math

parser = argparse.ArgumentParser()
parser.add_argument("kind", choices=["ours", "torch"])
parser.add_argument("files", nargs=2)
parser.add_argument("--seeds", default="1,2,3")
parser.add_argument("--steps", type=int, default=200)
args = parser.parse_args()
RATE, LEAST_RATE, WARM_UP, BATCH, LENGTH, LAYERS = 6e-4, 6e-5, 20, 16, 1024, 12


def show(name, half, full):
    differences = [a - b for a, b in zip(half, full, strict=True)]
    magnitudes, last = [abs(difference) for difference in differences], differences[-max(1, len(differences) // 4):]
    print(
        json.dumps(
            {
                "what": f"loss in bf16 against f32, {name}",
                "steps": len(differences),
                "mean": sum(magnitudes) / len(magnitudes),
                "largest": max(magnitudes),
                "last_quarter": sum(last) / len(last),
            }
        ),
        flush=True,
    )


def ours(path):
    events = [json.loads(line) for line in open(path) if line.startswith("{")]
    return [event["loss"] for event in events if event.get("event") == "train"]


def losses(ids, half, seed):
    import torch
    from pytorch import Gpt

    torch.set_float32_matmul_precision("highest")
    torch.manual_seed(seed)
    model = Gpt(50_304, LENGTH, 768, LAYERS, 12, 0.0).to("cuda")
    for name, parameter in model.named_parameters():
        if name.endswith(("project.weight", "down.weight")):
            torch.nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * LAYERS))
        elif name.endswith("bias"):
            torch.nn.init.zeros_(parameter)
    groups = [
        {"params": [p for p in model.parameters() if (p.dim() > 1) == decays], "weight_decay": 0.1 * decays}
        for decays in (True, False)
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)
    run = torch.compile(model)
    draw = torch.Generator(device="cuda").manual_seed(1000 + seed)
    result = []
    for step in range(1, args.steps + 1):
        fallen = (step - WARM_UP) / max(1, args.steps - WARM_UP)
        cosine = LEAST_RATE + 0.5 * (RATE - LEAST_RATE) * (1 + math.cos(math.pi * fallen))
        for group in optimizer.param_groups:
            group["lr"] = RATE * step / WARM_UP if step <= WARM_UP else cosine
        begin = torch.randint(0, len(ids) - LENGTH - 1, (BATCH, 1), generator=draw, device="cuda")
        rows = ids[begin + torch.arange(LENGTH + 1, device="cuda")]
        with torch.autocast("cuda", torch.bfloat16, enabled=half):
            loss = run(rows[:, :-1].contiguous(), rows[:, 1:].contiguous())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        result.append(loss.detach())
    return [float(loss) for loss in result]


def main():
    if args.kind == "ours":
        return show("ours", *map(ours, args.files))
    import torch
    from tokenizers import Tokenizer

    text, tokenizer = open(args.files[0]).read(), Tokenizer.from_file(args.files[1])
    parts = tokenizer.encode_batch([text[at:at + 200_000] for at in range(0, len(text), 200_000)])
    ids = torch.tensor([token for part in parts for token in part.ids], device="cuda")
    for seed in map(int, args.seeds.split(",")):
        show(f"torch, seed {seed}", losses(ids, True, seed), losses(ids, False, seed))


if __name__ == "__main__":
    main()
