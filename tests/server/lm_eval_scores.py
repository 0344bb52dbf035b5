"""Log-likelihoods by lm-evaluation-harness: of a server, against those of its own `hf` backend on
the same checkpoint.

    python3 tests/server/lm_eval_scores.py URL             # asks the server of FOLDER/chat, as
                                                           # models.py makes it
    python3 tests/server/lm_eval_scores.py --make FOLDER   # writes the wanted numbers again: needs
                                                           # torch and transformers

Needs `lm-eval[api]`. The task is a local file of questions with four answers each; batches have 24 prompts.
"""

import json
import sys
import tempfile
from pathlib import Path

import lm_eval
from lm_eval.tasks import TaskManager

WANTED = Path(__file__).with_suffix(".json")
GLAZES = ["celadon", "tenmoku", "shino", "copper red, which needs a smoky kiln"]


def task(folder):
    """A multiple-choice task of 30 questions, some of which spell special tokens or are not ASCII."""
    questions = []
    for at in range(30):
        pot = [
            "a jug", "a bowl of 20 cm", "une théière", "壺", "<|im_start|>a pot<|im_end|>", "a tile\n\twith a lid",
        ][at % 6]
        questions.append(
            {"question": f"Potter {at} has made {pot}. " * (1 + at % 4), "choices": GLAZES, "answer": at % 4}
        )
    data = folder / "glazes.jsonl"
    data.write_text("".join(json.dumps(question) + "\n" for question in questions))
    (folder / "glazes.yaml").write_text(
        "task: glazes\n"
        "dataset_path: json\n"
        f"dataset_kwargs:\n  data_files:\n    test: {data}\n"
        "output_type: multiple_choice\n"
        "test_split: test\n"
        "doc_to_text: '{{question}}Its glaze is'\n"
        "doc_to_choice: choices\n"
        "doc_to_target: answer\n"
        "metric_list:\n  - metric: acc\n"
    )


def scores(model, arguments):
    """Of each question the log-likelihood of each answer, and whether it is what greedy decoding gives."""
    with tempfile.TemporaryDirectory() as folder:
        task(Path(folder))
        results = lm_eval.simple_evaluate(
            model=model, model_args=arguments, tasks=["glazes"], batch_size=24, log_samples=True,
            task_manager=TaskManager(include_path=folder), bootstrap_iters=0, cache_requests=False,
        )
    samples = sorted(results["samples"]["glazes"], key=lambda sample: sample["doc_id"])
    of = lambda answer: [float(answer[0]), str(answer[1]) == "True"]
    return [
        [of(answer[0] if isinstance(answer[0], (list, tuple)) else answer) for answer in sample["resps"]]
        for sample in samples
    ]


def main():
    if sys.argv[1] == "--make":
        made = scores("hf", {"pretrained": str(Path(sys.argv[2]) / "chat"), "dtype": "float32", "device": "cpu"})
        WANTED.write_text(json.dumps(made) + "\n")
        return
    wanted = json.loads(WANTED.read_text())
    url = sys.argv[1].rstrip("/") + "/v1/completions"
    told = scores("local-completions", {"model": "chat", "base_url": url, "tokenizer_backend": "remote"})
    assert len(told) == len(wanted) == 30
    worst = 0.0
    for at, (ours, theirs) in enumerate(zip(told, wanted)):
        for (one, greedy), (other, wanted_greedy) in zip(ours, theirs, strict=True):
            worst = max(worst, abs(one - other))
            assert abs(one - other) < 1e-3 and greedy == wanted_greedy, f"question {at}: {ours}, and {theirs} by hf"
    print(f"lm-evaluation-harness: 120 log-likelihoods, at most {worst:.1e} from those of its hf backend")


if __name__ == "__main__":
    main()
