#!/usr/bin/env python3
"""Writes preferences.safetensors: what TRL computes of preference pairs with the models and adapters in this folder.

    pip install torch transformers peft trl
    python3 tests/golden/preferences.py

The policy is the model `llama` with the adapter `adapters/llama`, and the reference is that model
without an adapter. Three pairs, BETA 0.3:

pair.<i>.{prompt,chosen,rejected}    token ids
<loss>.loss                          mean over the pairs
<loss>.gradient.<name>               of the adapter's matrices, under their names in its file
<loss>.rewards                       chosen, rejected, margins, accuracies
"""
import pathlib
import tempfile

import torch
from datasets import Dataset
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer
from trl.trainer.dpo_trainer import DataCollatorForPreference

HERE = pathlib.Path(__file__).resolve().parent
BETA = 0.3
LOSSES = ["sigmoid", "ipo", "sigmoid_norm"]
torch.manual_seed(11)

golden = {}
adapter = load_file(HERE / "adapters/llama/adapter_model.safetensors")
config = LoraConfig.from_pretrained(HERE / "adapters/llama")
config.inference_mode = False
vocabulary = AutoModelForCausalLM.from_pretrained(HERE / "llama").config.vocab_size
pairs = []
for number, (prompt, chosen, rejected) in enumerate([(5, 4, 7), (3, 6, 2), (8, 3, 3)]):
    pair = {
        f"{name}_ids": torch.randint(0, vocabulary, (size,)).tolist()
        for name, size in [("prompt", prompt), ("chosen", chosen), ("rejected", rejected)]
    }
    pairs.append(pair)
    for name, ids in pair.items():
        golden[f"pair.{number}.{name.removesuffix('_ids')}"] = torch.tensor(ids).int()

for loss in LOSSES:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(HERE / "chats/tokenizer.json"), bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    with tempfile.TemporaryDirectory() as folder:
        arguments = DPOConfig(
            output_dir=folder, report_to=[], use_cpu=True, beta=BETA, loss_type=[loss], max_length=None,
            gradient_checkpointing=False, bf16=False,
        )
        trainer = DPOTrainer(
            AutoModelForCausalLM.from_pretrained(HERE / "llama", dtype=torch.float64),
            args=arguments,
            train_dataset=Dataset.from_list([{"prompt": "q", "chosen": "a", "rejected": "b"}]),
            processing_class=tokenizer,
            peft_config=config,
        )
        # In f64, so that the figures are right to the last bit of f32.
        model = trainer.model.train().double()
        named = {
            key.replace(".default", ""): parameter
            for key, parameter in model.named_parameters()
            if parameter.requires_grad
        }
        assert named.keys() == adapter.keys(), (sorted(named)[:3], sorted(adapter)[:3])
        with torch.no_grad():
            for key, parameter in named.items():
                parameter.copy_(adapter[key].double())
        batch = DataCollatorForPreference(pad_token_id=0)(pairs)
        value = trainer._compute_loss(model, batch, False)
        value.backward()
        golden[f"{loss}.loss"] = value.detach()[None].float()
        for key, parameter in named.items():
            golden[f"{loss}.gradient.{key}"] = parameter.grad.contiguous().float()
        metrics = trainer._metrics["train"]
        names = ["rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies"]
        golden[f"{loss}.rewards"] = torch.tensor([metrics[name][-1] for name in names])
        print(loss, value.item(), golden[f"{loss}.rewards"].tolist())
save_file(golden, HERE / "preferences.safetensors")
