#!/usr/bin/env python3
"""Writes classifiers/: small sequence classifiers with random weights, and what transformers computes with them.

    pip install torch transformers safetensors numpy
    python3 tests/golden/classifiers.py                 # or: classifiers.py OUTPUT_FOLDER
    python3 tests/golden/classifiers.py --check FOLDER  # classifiers that Fireclay saved, one in each folder of FOLDER

Each case is a folder with a model as transformers saves it, and golden.safetensors:

    tokens [4, 12], padded on the right with 0, lengths [4], labels [4]
    logits [4, LABELS], loss [1] (of the labels) and grad.TENSOR for every parameter

and labelled.parquet, as Hugging Face's datasets (`pip install datasets`) write a label with names.

Reference values come from the weights widened to float64. With --check, transformers loads each model, and must have
the logits of its golden.safetensors and the labels of its labels.json.
"""

import json
import sys
from pathlib import Path

import datasets
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification, BertConfig, BertForSequenceClassification, ModernBertConfig
from transformers import ModernBertForSequenceClassification

# More than ten in one case: their numbers are not in the order of text.
LABELS = {
    "bert": [f"glaze {number}" for number in (7, 3, 11, 1, 0, 5, 2, 9, 4, 8, 10, 6)],
    "modernbert_mean": ["wet", "dry", "fired"],
    "modernbert_cls": ["no", "yes"],
}
SHARED = dict(vocab_size=61, num_attention_heads=3, max_position_embeddings=40, pad_token_id=0, initializer_range=0.3)
LENGTHS = [12, 5, 9, 1]


def models():
    yield "bert", BertForSequenceClassification(BertConfig(
        **SHARED, hidden_size=18, num_hidden_layers=2, intermediate_size=28, hidden_act="gelu", num_labels=12,
        hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1,
    ))
    modernbert = SHARED | dict(
        hidden_size=24, num_hidden_layers=4, intermediate_size=20, local_attention=6, global_attn_every_n_layers=3,
        bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2,
    )
    yield "modernbert_mean", ModernBertForSequenceClassification(ModernBertConfig(
        **modernbert, num_labels=3, classifier_pooling="mean", classifier_bias=True, norm_bias=True,
        classifier_activation="silu", classifier_dropout=0.2, attn_implementation="eager",
    ))
    yield "modernbert_cls", ModernBertForSequenceClassification(ModernBertConfig(
        **modernbert, num_labels=2, classifier_pooling="cls", attn_implementation="eager",
    ))


def forward(model, tokens, lengths):
    """Logits of rows, each computed alone, so without padding."""
    return torch.cat([model(input_ids=row[None, :length]).logits for row, length in zip(tokens, lengths.tolist())])


def make(out):
    torch.manual_seed(23)
    out.mkdir(parents=True, exist_ok=True)
    write_parquet(out / "labelled.parquet")
    for name, model in models():
        folder = out / name
        folder.mkdir(parents=True, exist_ok=True)
        names = LABELS[name]
        model.config.id2label = dict(enumerate(names))
        model.config.label2id = {label: at for at, label in enumerate(names)}
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:  # norms and biases, which begin as ones and zeros
                    parameter.add_(0.3 * torch.randn_like(parameter))
        model.save_pretrained(folder)
        model = model.eval().double()
        tokens, lengths = torch.randint(3, 61, (4, 12)), torch.tensor(LENGTHS)
        mask = torch.arange(12) < lengths[:, None]
        tokens = torch.where(mask, tokens, 0)
        labels = torch.tensor([1, 0, len(names) - 1, 1])
        logits = forward(model, tokens, lengths)
        loss = F.cross_entropy(logits, labels)
        loss.backward()
        golden = {"tokens": tokens, "lengths": lengths, "labels": labels, "logits": logits, "loss": loss.reshape(1)}
        golden |= {f"grad.{key}": parameter.grad for key, parameter in model.named_parameters()}
        narrow = lambda t: t.detach().to(torch.float32 if t.is_floating_point() else torch.int32).contiguous()
        save_file({key: narrow(value) for key, value in golden.items()}, folder / "golden.safetensors")
        print(f"{name}: logits of deviation {logits.std():.2f}, loss {loss:.3f}")


def write_parquet(path):
    rows = {"text": ["well made", "broken", None, "it arrived in time"], "label": [1, 0, 1, 1]}
    label = datasets.ClassLabel(names=["negative", "positive"])
    features = datasets.Features(text=datasets.Value("string"), label=label)
    datasets.Dataset.from_dict(rows, features=features).to_parquet(path)


def check(folder):
    for path in sorted(path for path in folder.iterdir() if path.is_dir()):
        golden = load_file(path / "golden.safetensors")
        model, info = AutoModelForSequenceClassification.from_pretrained(
            path, attn_implementation="eager", dtype=torch.float32, output_loading_info=True
        )
        unfit = {key: value for key, value in info.items() if value}
        assert not unfit, f"{path.name}: {unfit}"
        labels = json.loads((path / "labels.json").read_text())
        assert [model.config.id2label[at] for at in range(len(labels))] == labels, path.name
        assert all(model.config.label2id[label] == at for at, label in enumerate(labels)), path.name
        tokens = golden["tokens"].long()
        with torch.no_grad():
            logits = forward(model.eval(), tokens, golden["lengths"].long())
        off = (logits - golden["logits"]).abs().max().item()
        print(f"{path.name}: {type(model).__name__}, {len(labels)} labels, off by {off:.1e}")
        assert off < 1e-4, path.name


if len(sys.argv) > 2 and sys.argv[1] == "--check":
    check(Path(sys.argv[2]))
else:
    make(Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).resolve().parent) / "classifiers")
