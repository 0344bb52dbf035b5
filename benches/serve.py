"""The speed of a running `fireclay serve`, and of transformers' continuous batching on the same requests.

    python3 benches/serve.py http://127.0.0.1:8000 [--clients 32] [--prompt 512] [--tokens 128] [--requests 4]
    python3 benches/serve.py --peer MODEL_DIR [..]      # transformers' generate_batch in bf16; needs PyTorch

Each client asks for one answer after another; prompts are random tokens, each its own, and answers
have no end but their length where the model has random weights. Prints a JSON object: tokens
written a second over the whole time, and the time to the first token.
"""

import argparse
import asyncio
import json
import random
import time
from urllib.parse import urlsplit

parser = argparse.ArgumentParser()
parser.add_argument("url", nargs="?")
parser.add_argument("--peer")
parser.add_argument("--clients", type=int, default=32)
parser.add_argument("--prompt", type=int, default=512)
parser.add_argument("--tokens", type=int, default=128)
parser.add_argument("--requests", type=int, default=4)
parser.add_argument("--vocabulary", type=int, default=10000)
args = parser.parse_args()
draw = random.Random(3)
COUNT = args.clients * args.requests
PROMPTS = [[draw.randrange(args.vocabulary) for _ in range(args.prompt)] for _ in range(COUNT)]


def percentile(values, share):
    values = sorted(values)
    return values[min(len(values) - 1, int(share * len(values)))]


async def ask(prompt, tokens):
    """Tokens that came, and the time to the first piece of text and between the pieces."""
    target = urlsplit(args.url)
    body = json.dumps(
        {
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    )
    begun = time.perf_counter()
    reader, writer = await asyncio.open_connection(target.hostname, target.port, limit=1 << 20)
    writer.write((
        f"POST /v1/completions HTTP/1.1\r\nHost: {target.netloc}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n{body}"
    ).encode())
    times, written = [], 0
    async for line in reader:
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line[6:])
        if "error" in event:
            raise RuntimeError(event["error"]["message"])
        if event["choices"]:
            times.append(time.perf_counter())
        elif event.get("usage"):
            written = event["usage"]["completion_tokens"]
    writer.close()
    return written, times[0] - begun, [b - a for a, b in zip(times, times[1:])]


async def serve():
    async def client(at):
        return [await ask(prompt, args.tokens) for prompt in PROMPTS[at :: args.clients]]

    # Kernels are compiled.
    await asyncio.gather(*(ask(PROMPTS[at][::-1], 8) for at in range(args.clients)))
    begun = time.perf_counter()
    answers = sum(await asyncio.gather(*(client(at) for at in range(args.clients))), [])
    seconds = time.perf_counter() - begun
    firsts = [first for _, first, _ in answers]
    waits = [wait for _, _, waits in answers for wait in waits]
    return {
        "what": "serve", "tokens_per_second": sum(written for written, _, _ in answers) / seconds, "seconds": seconds,
        "first_token_p50": percentile(firsts, 0.5), "first_token_p99": percentile(firsts, 0.99),
        "longest_wait": max(waits), "tokens": sum(written for written, _, _ in answers),
    }


def peer():
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    model = AutoModelForCausalLM.from_pretrained(args.peer, dtype=torch.bfloat16, device_map="cuda").eval()
    config = GenerationConfig(max_new_tokens=args.tokens, do_sample=False, eos_token_id=args.vocabulary, pad_token_id=0)
    with torch.no_grad():
        model.generate_batch(inputs=[prompt[::-1] for prompt in PROMPTS[: args.clients]], generation_config=config)
        torch.cuda.synchronize()
        begun = time.perf_counter()
        answers = model.generate_batch(inputs=PROMPTS, generation_config=config)
        torch.cuda.synchronize()
    seconds = time.perf_counter() - begun
    tokens = sum(len(answer.generated_tokens) for answer in answers.values())
    return {
        "what": "transformers generate_batch",
        "tokens_per_second": tokens / seconds,
        "seconds": seconds,
        "tokens": tokens,
    }


shape = {"clients": args.clients, "prompt_tokens": args.prompt, "answer_tokens": args.tokens, "requests": COUNT}
print(json.dumps((peer() if args.peer else asyncio.run(serve())) | shape))
