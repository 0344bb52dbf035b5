"""Signals, forks, threads, interpreter exit and memory. Each test runs a process, which must not hang or crash."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import BACKEND, SMALL

HEAD = f"""
import gc, logging, os, signal, sys, threading, time
import fireclay
BACKEND, SMALL = {BACKEND!r}, {SMALL!r}

def memory():
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
"""


def begun(code: str, *arguments: object) -> subprocess.Popen[str]:
    words = [sys.executable, "-X", "faulthandler", "-c", HEAD + code, *map(str, arguments)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ended(process: subprocess.Popen[str], patience: float = 90) -> tuple[str, str]:
    try:
        return process.communicate(timeout=patience)
    except subprocess.TimeoutExpired:
        process.kill()
        pytest.fail(f"it hangs: {process.communicate()}")


def run(code: str, *arguments: object) -> str:
    process = begun(code, *arguments)
    out, err = ended(process)
    assert process.returncode == 0, (process.returncode, out, err)
    assert err == ""
    return out


def interrupted(process: subprocess.Popen[str], after: float = 0.3) -> None:
    """Sends Ctrl-C after the process has printed ``begun``."""
    assert process.stdout is not None
    assert process.stdout.readline().strip() == "begun"
    time.sleep(after)
    process.send_signal(signal.SIGINT)


TIMED = """
sent = []
# The wakeup descriptor is written to when the signal comes, and not when Python has time for it.
read, write = os.pipe()
os.set_blocking(write, False)
signal.set_wakeup_fd(write)
def watch():
    os.read(read, 1)
    sent.append(time.monotonic())
threading.Thread(target=watch, daemon=True).start()
print("begun", flush=True)
try:
    WORK
    print("came to its end")
except KeyboardInterrupt:
    print(f"{time.monotonic() - sent[0]:.3f}")
"""


@pytest.mark.parametrize(
    "work",
    [
        'model.generate(["There was"] * 5000, max_tokens=60)',
        '[piece for _ in range(10000) for piece in model.stream("There was", max_tokens=60)]',
        "[model.perplexity(text) for _ in range(10000)]",
    ],
)
def test_ctrl_c_ends_a_call_at_once_and_leaves_the_model(stories: Path, work: str) -> None:
    code = "model = fireclay.load(sys.argv[1], backend=BACKEND)\ntext = 'There was a potter.' + chr(10)\ntext *= 2000\n"
    code += TIMED.replace("WORK", work) + 'print(len(model.generate("There", max_tokens=3)) > 0)\n'
    process = begun(code, stories)
    interrupted(process)
    out, err = ended(process)
    seconds, again = out.split()
    assert process.returncode == 0 and again == "True" and err == "", (out, err)
    assert float(seconds) < 0.2, f"{seconds} s"


def test_ctrl_c_leaves_a_saved_run(tmp_path: Path) -> None:
    code = "logging.basicConfig(stream=sys.stdout, format='%(message)s', level=logging.INFO)\n"
    work = 'fireclay.train("stories", backend=BACKEND, out=sys.argv[1], steps=100000, **SMALL)'
    process = begun(code + TIMED.replace("WORK", work), tmp_path / "run")
    interrupted(process, 2.0)
    out, err = ended(process)
    *said, seconds = out.splitlines()
    assert said[-1].startswith("stopped and saved at step") and err == ""
    assert float(seconds) < 0.2, f"{seconds} s"
    assert list((tmp_path / "run" / "training").iterdir())


def test_a_fork_says_what_is_wrong(stories: Path) -> None:
    out = run(
        """
model = fireclay.load(sys.argv[1], backend=BACKEND)
model.generate("Once", max_tokens=2)
child = os.fork()
if child == 0:
    for call in (lambda: model.generate("Once"), lambda: fireclay.load(sys.argv[1], backend=BACKEND)):
        try:
            call()
        except fireclay.Error as error:
            print("spawn" in str(error), flush=True)
    del model
    gc.collect()
    sys.exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
print(len(model.generate("Once", max_tokens=2)) > 0)
""",
        stories,
    )
    assert out.split() == ["True", "True", "0", "True"]


def test_threads_and_models_work_together(stories: Path) -> None:
    out = run(
        """
models = [fireclay.load(sys.argv[1], backend=BACKEND) for _ in range(3)]
wanted = [models[0].generate("Once", max_tokens=12, seed=seed) for seed in range(8)]
wrong, told = [], []
def work(number):
    for seed in range(8):
        if models[number % 3].generate("Once", max_tokens=12, seed=seed) != wanted[seed]:
            wrong.append((number, seed))
def train():
    told.extend(fireclay.train("stories", backend=BACKEND, out=sys.argv[1] + "-thread", steps=5, **SMALL).losses[0])
threads = [threading.Thread(target=work, args=(number,)) for number in range(6)] + [threading.Thread(target=train)]
for thread in threads: thread.start()
# The interpreter's lock is free meanwhile.
turns = 0
while any(thread.is_alive() for thread in threads):
    time.sleep(0.001)
    turns += 1
print(wrong, len(told), turns > 20)
""",
        stories,
    )
    assert out.strip() == "[] 5 True"


@pytest.mark.parametrize(
    "work",
    [
        'model.generate(["There was"] * 200, max_tokens=60)',
        'list(model.stream("There was", max_tokens=60))',
        'fireclay.train("stories", backend=BACKEND, out=sys.argv[1] + "-exit", steps=100000, **SMALL)',
        'trainer.step()',
    ],
)
def test_the_interpreter_ends_in_the_middle(stories: Path, work: str) -> None:
    out = run(
        f"""
model = fireclay.load(sys.argv[1], backend=BACKEND)
trainer = fireclay.Trainer("stories", backend=BACKEND, **SMALL)
def work():
    while True:
        try:
            {work}
        except fireclay.Error:
            return
threading.Thread(target=work, daemon=True).start()
time.sleep(0.5)
print("done", flush=True)
""",
        stories,
    )
    assert out == "done\n"


def test_a_stream_that_is_left_ends(stories: Path) -> None:
    out = run(
        """
model = fireclay.load(sys.argv[1], backend=BACKEND)
stream = model.stream("There was", max_tokens=60)
first = next(stream)
del stream
begin = time.monotonic()
model.generate("There was", max_tokens=1)
print(bool(first), time.monotonic() - begin < 1)
""",
        stories,
    )
    assert out.split() == ["True", "True"]


def test_memory_is_back_after_many_calls_and_many_models(stories: Path) -> None:
    out = run(
        """
model = fireclay.load(sys.argv[1], backend=BACKEND)
for _ in range(300):
    model.generate("Once", max_tokens=2)
before = memory()
for _ in range(10_000):
    model.generate("Once", max_tokens=2)
calls = memory() - before
del model
def rounds(count):
    for _ in range(count):
        fireclay.load(sys.argv[1], backend=BACKEND).generate("Once", max_tokens=2)
rounds(10)
before = memory()
rounds(50)
print(calls, memory() - before)
""",
        stories,
    )
    calls, models = map(int, out.split())
    size = (stories / "model.safetensors").stat().st_size
    # Exceeded if each call leaked a thousandth of its cache, or each load a thousandth of its model.
    assert calls < 4 << 20, f"{calls} bytes more after 10,000 calls"
    assert models < max(2 * size, 4 << 20), f"{models} bytes more after 50 models of {size}"


@pytest.mark.skipif(not os.environ.get("FIRECLAY_WHEEL"), reason="of a wheel, which CI does not build")
def test_the_module_brings_no_allocator() -> None:
    import fireclay._native as native

    symbols = subprocess.run(["strings", native.__file__], capture_output=True, text=True, check=True).stdout
    assert "mimalloc" not in symbols
