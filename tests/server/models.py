"""Makes small models with random weights, in the hub's layout: one that converses and calls tools, the
same with room for long conversations, and an encoder.

    python3 tests/server/models.py FOLDER    # makes FOLDER/chat, FOLDER/agent and FOLDER/encoder

They need nothing but Python. The chat model is a Llama of bytes whose template is in the manner of
Qwen's; what it says makes no sense, but its tokens, its template and its grammar are those of a
real one.
"""

import json
import random
import struct
import sys
from pathlib import Path

SPECIAL = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "[CLS]", "[SEP]"]
TAGS = ["<tool_call>", "</tool_call>"]
TEMPLATE = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- '# Tools\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
    {{- '\\n</tools>\\nFor each call write <tool_call>{"name": .., "arguments": ..}</tool_call>.<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- elif not (loop.first and message.role == 'system') %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- (call.function.arguments | tojson) + '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""


def tokenizer(post_processor=None):
    """A token for each byte, under GPT-2's names, and some more."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    names = {byte: chr(byte) for byte in printable} | {byte: chr(256 + at) for at, byte in enumerate(others)}
    added = [
        {"id": 256 + at, "content": name, "special": name in SPECIAL, "normalized": False, "lstrip": False,
         "rstrip": False, "single_word": False}
        for at, name in enumerate(SPECIAL + TAGS)
    ]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
        "pre_tokenizer": level, "post_processor": post_processor, "decoder": level,
        "model": {"type": "BPE", "vocab": {names[byte]: byte for byte in range(256)}, "merges": []},
    }


def save(folder, config, tensors, tokenizer, settings):
    folder.mkdir(parents=True, exist_ok=True)
    header, data = {}, b""
    for name, (shape, values) in tensors.items():
        end = len(data) + 4 * len(values)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [len(data), end]}
        data += struct.pack(f"<{len(values)}f", *values)
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(head)) + head + data)
    for name, value in [("config", config), ("tokenizer", tokenizer), ("tokenizer_config", settings)]:
        (folder / f"{name}.json").write_text(json.dumps(value))


def drawn(seed, shapes, spread):
    """Normal weights; ones for norms and zeros for biases."""
    draw = random.Random(seed)
    tensors = {}
    for name, shape in shapes.items():
        count = 1
        for size in shape:
            count *= size
        if name.endswith("bias"):
            values = [0.0] * count
        elif "norm" in name.lower():
            values = [1.0] * count
        else:
            values = [draw.gauss(0, spread) for _ in range(count)]
        tensors[name] = (shape, values)
    return tensors


def chat(folder, width=32, layers=2, hidden=64, heads=4, vocab=264, context=1024):
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": width, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": 2, "head_dim": width // heads,
        "intermediate_size": hidden, "vocab_size": vocab, "max_position_embeddings": context, "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": False, "attention_bias": False,
        "mlp_bias": False, "bos_token_id": None, "eos_token_id": 257, "torch_dtype": "float32",
    }
    shapes = {
        "model.embed_tokens.weight": [vocab, width],
        "model.norm.weight": [width],
        "lm_head.weight": [vocab, width],
    }
    for layer in range(layers):
        block = f"model.layers.{layer}"
        shapes |= {
            f"{block}.input_layernorm.weight": [width], f"{block}.post_attention_layernorm.weight": [width],
            f"{block}.self_attn.q_proj.weight": [width, width], f"{block}.self_attn.o_proj.weight": [width, width],
            f"{block}.self_attn.k_proj.weight": [width // 2, width],
            f"{block}.self_attn.v_proj.weight": [width // 2, width],
            f"{block}.mlp.gate_proj.weight": [hidden, width], f"{block}.mlp.up_proj.weight": [hidden, width],
            f"{block}.mlp.down_proj.weight": [width, hidden],
        }
    settings = {"chat_template": TEMPLATE, "eos_token": "<|im_end|>", "bos_token": None}
    save(folder, config, drawn(1, shapes, 0.3), tokenizer(), settings)


def encoder(folder, width=32, layers=2, hidden=64, vocab=264, context=128):
    config = {
        "architectures": ["BertModel"], "model_type": "bert", "hidden_size": width, "num_hidden_layers": layers,
        "num_attention_heads": 4, "intermediate_size": hidden, "vocab_size": vocab, "max_position_embeddings": context,
        "type_vocab_size": 2, "layer_norm_eps": 1e-12, "hidden_act": "gelu", "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0, "position_embedding_type": "absolute", "torch_dtype": "float32",
    }
    norm = lambda name: {f"{name}.weight": [width], f"{name}.bias": [width]}
    dense = lambda name, out, into: {f"{name}.weight": [out, into], f"{name}.bias": [out]}
    shapes = {
        "embeddings.word_embeddings.weight": [vocab, width], "embeddings.position_embeddings.weight": [context, width],
        "embeddings.token_type_embeddings.weight": [2, width], **norm("embeddings.LayerNorm"),
    }
    for layer in range(layers):
        block = f"encoder.layer.{layer}"
        for part in ["query", "key", "value"]:
            shapes |= dense(f"{block}.attention.self.{part}", width, width)
        shapes |= dense(f"{block}.attention.output.dense", width, width)
        shapes |= norm(f"{block}.attention.output.LayerNorm")
        shapes |= dense(f"{block}.intermediate.dense", hidden, width)
        shapes |= dense(f"{block}.output.dense", width, hidden)
        shapes |= norm(f"{block}.output.LayerNorm")
    around = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "[CLS]", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
            {"SpecialToken": {"id": "[SEP]", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {
            name: {"id": name, "ids": [id], "tokens": [name]} for name, id in [("[CLS]", 259), ("[SEP]", 260)]
        },
    }
    save(folder, config, drawn(2, shapes, 0.2), tokenizer(around), {})


if __name__ == "__main__":
    chat(Path(sys.argv[1]) / "chat")
    chat(Path(sys.argv[1]) / "agent", context=16384)
    encoder(Path(sys.argv[1]) / "encoder")
