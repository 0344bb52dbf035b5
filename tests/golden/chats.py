#!/usr/bin/env python3
"""Writes chats/: what TRL makes of conversations, and conversations in Parquet.

    pip install torch transformers trl pyarrow
    python3 tests/golden/chats.py

tokenizer.json   byte pairs, with the control tokens of all templates
labels.json      for each template: the template, its special tokens, the conversations, and TRL's token ids and labels
messages.parquet two conversations, of which one message lacks a field
"""
import json
import pathlib
import tempfile

import pyarrow
import pyarrow.parquet
from datasets import Dataset
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

HERE = pathlib.Path(__file__).resolve().parent
OUT = HERE / "chats"
OUT.mkdir(exist_ok=True)
CONTROL = """<s> </s> <pad> <|start_header_id|> <|end_header_id|> <|eot_id|> <|im_start|> <|im_end|>
[INST] [/INST] <start_of_turn> <end_of_turn> <|system|> <|user|> <|assistant|> <|end|> <|start_of_role|>
<|end_of_role|> <|end_of_text|>""".split()
# Marks what the assistant writes, but for the header; the end of a turn is within.
GENERATION = """{%- for m in messages -%}
{{- '<|im_start|>' + m.role + '\\n' -}}
{%- if m.role == 'assistant' -%}{%- generation -%}{{- m.content + '<|im_end|>' -}}{%- endgeneration -%}
{%- else -%}{{- m.content + '<|im_end|>' -}}{%- endif -%}{{- '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"""


def turn(role, content):
    return {"role": role, "content": content}


SYSTEM, ASK = turn("system", "Be brief."), turn("user", "How hot is the kiln?  ")
ANSWER = turn("assistant", "About 1,260 °C — cone 10.\n")
AGAIN, LAST = turn("user", "And <b>then</b>?"), turn("assistant", "It cools.")
PAIRS = [
    {"prompt": [SYSTEM, ASK], "completion": [ANSWER]},
    {"prompt": [SYSTEM, ASK, ANSWER, AGAIN], "completion": [LAST]},
]
TEXT = " ".join(m["content"] for m in [SYSTEM, ASK, ANSWER, AGAIN, LAST])


def tokenizer():
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    made.train_from_iterator([TEXT] * 20, trainer)
    made.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in CONTROL])
    return made


def labels(template, rows, **options):
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer(), bos_token="<s>", eos_token="</s>", pad_token="<pad>", chat_template=template
    )
    config = LlamaConfig(
        vocab_size=len(wrapped), hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
    )
    with tempfile.TemporaryDirectory() as folder:
        arguments = SFTConfig(output_dir=folder, report_to=[], use_cpu=True, max_length=None, **options)
        trainer = SFTTrainer(
            LlamaForCausalLM(config), arguments, train_dataset=Dataset.from_list(rows), processing_class=wrapped
        )
        batch = [trainer.data_collator([row]) for row in trainer.train_dataset]
    return [{"ids": b["input_ids"][0].tolist(), "labels": b["labels"][0].tolist()} for b in batch]


families = json.loads((HERE / "templates.json").read_text())["families"]
cases = []
for name in ["llama3", "qwen", "gemma", "chatml", "zephyr", "granite", "phi"]:
    variables = {"date_string": "9 March 2025"} if name == "llama3" else {}
    rows = [pair | ({"chat_template_kwargs": variables} if variables else {}) for pair in PAIRS]
    cases.append({"name": name, "template": families[name], "rows": rows, "trl": labels(families[name], rows)})
rows = [{"messages": pair["prompt"] + pair["completion"]} for pair in PAIRS]
cases.append(
    {
        "name": "generation",
        "template": GENERATION,
        "rows": rows,
        "trl": labels(GENERATION, rows, assistant_only_loss=True),
    }
)
tokenizer().save(str(OUT / "tokenizer.json"))
lines = ",\n".join(json.dumps(case, ensure_ascii=False) for case in cases)
(OUT / "labels.json").write_text(f'{{"cases": [\n{lines}\n]}}\n')

parquet = [
    {"messages": [turn("user", "q") | {"name": "n"}, turn("assistant", "a") | {"name": None}]},
    {
        "messages": [
            turn(role, text) | {"name": None} for role, text in [("system", "s"), ("user", "r"), ("assistant", "b")]
        ]
    },
]
pyarrow.parquet.write_table(pyarrow.Table.from_pylist(parquet), OUT / "messages.parquet")
