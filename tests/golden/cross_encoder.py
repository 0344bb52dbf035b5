"""Makes tests/golden/cross_encoder: a small BERT with random weights and a head of one class, and
transformers' scores of pairs.

    python3 tests/golden/cross_encoder.py     # needs torch, transformers and tokenizers
"""

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

OUT = Path(__file__).parent / "cross_encoder"
WORDS = [
    "[PAD]", "[UNK]", "[CLS]", "[SEP]",
    *"clay kiln pot glaze red blue fire heat wheel slow fast cold hot a the is of in".split(),
]
PAIRS = [
    ("the clay is hot", "fire in the kiln"),
    ("the clay is hot", "a blue glaze"),
    ("glaze", "glaze"),
    ("glaze", "glaze glaze of glaze"),
    ("slow wheel", "a fast wheel is hot in the cold fire of the kiln"),
    ("unheard", "words"),
]


def main():
    OUT.mkdir(exist_ok=True)
    tokenizer = Tokenizer(models.WordPiece({word: at for at, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    tokenizer.add_special_tokens(WORDS[:4])
    tokenizer.save(str(OUT / "tokenizer.json"))
    torch.manual_seed(10)
    config = BertConfig(
        vocab_size=len(WORDS), hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24,
        type_vocab_size=2, max_position_embeddings=40, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        num_labels=1, initializer_range=0.4,
    )
    model = BertForSequenceClassification(config).eval()
    model.save_pretrained(OUT)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, cls_token="[CLS]", sep_token="[SEP]", pad_token="[PAD]", unk_token="[UNK]",
    )
    scores = []
    for first, second in PAIRS:
        with torch.no_grad():
            encoded = fast(first, second, return_tensors="pt", return_token_type_ids=True)
            scores.append(torch.sigmoid(model(**encoded).logits).item())
    (OUT / "scores.json").write_text(json.dumps({"pairs": PAIRS, "scores": scores}, indent=1) + "\n")
    print(scores)


if __name__ == "__main__":
    main()
