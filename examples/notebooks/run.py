"""Runs notebooks from top to bottom, each in a kernel of its own, and fails where one of them does.

    python run.py                    runs all of this folder, and compares what each cell shows with what is committed
    python run.py --write 1-tour     runs one, and writes its outputs into it

A notebook fails on an error, on anything on standard error (evcxr reports a panic there and goes
on), and where a cell shows nothing of a kind, text or picture, that it has shown before. What the
text says is for the notebook's own asserts.
"""

import sys
import time
from datetime import datetime
from pathlib import Path

import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).resolve().parent
# The first cell of the first notebook builds the library.
CELL_SECONDS = 1800
# Cells that take longer are named.
SLOW_SECONDS = 10


def kinds(cell):
    """What a cell shows: text, pictures, the value that it ends with."""
    shown = set()
    for output in cell.outputs:
        shown |= {output.name} if output.output_type == "stream" else set(output.get("data", {}))
    return shown


def complaints(cell):
    for output in cell.outputs:
        if output.output_type == "error":
            yield output.evalue or "\n".join(output.traceback)
        elif output.output_type == "stream" and output.name == "stderr":
            yield output.text


def run(path, write):
    before = nbformat.read(path, as_version=4)
    notebook = nbformat.read(path, as_version=4)
    begun = time.time()
    client = NotebookClient(
        notebook, timeout=CELL_SECONDS, allow_errors=True, resources={"metadata": {"path": str(HERE)}}
    )
    client.execute()
    failures = []
    for number, (old, new) in enumerate(zip(before.cells, notebook.cells), 1):
        if new.cell_type != "code":
            continue
        when = {key: datetime.fromisoformat(value) for key, value in new.metadata.pop("execution", {}).items()}
        if len(when) > 1 and (seconds := (max(when.values()) - min(when.values())).total_seconds()) > SLOW_SECONDS:
            print(f"  cell {number} took {seconds:.0f} s", flush=True)
        failures += [f"cell {number}: {complaint.strip()}" for complaint in complaints(new)]
        if not write and (missing := kinds(old) - kinds(new)):
            failures.append(f"cell {number}: shows no {', '.join(sorted(missing))} any more")
    print(f"{path.name}: {'failed' if failures else 'passed'} in {time.time() - begun:.0f} s", flush=True)
    for failure in failures:
        print(f"  {failure}", flush=True)
    if write and not failures:
        notebook.metadata = before.metadata
        nbformat.write(notebook, path)
    return not failures


def main():
    write = "--write" in sys.argv
    names = [name for name in sys.argv[1:] if name != "--write"]
    paths = [HERE / f"{name.removesuffix('.ipynb')}.ipynb" for name in names] or sorted(HERE.glob("*.ipynb"))
    # One after the other: they share a build.
    results = [run(path, write) for path in paths]
    sys.exit(0 if all(results) and results else 1)


if __name__ == "__main__":
    main()
