"""Draws dashboard.svg: the terminal of `fireclay train`, some seconds after its start.

    pip install pyte && python3 docs/pictures/dashboard.py SECONDS target/release/fireclay

The run writes to a temporary folder and is stopped afterwards. Unix only.
"""

import fcntl
import os
import pty
import select
import signal
import struct
import sys
import tempfile
import termios
import time
from html import escape
from pathlib import Path

import pyte

COLUMNS, LINES = 100, 30
WIDTH, HEIGHT = 8.43, 18.0
MARGIN = 8.0
BACKGROUND = "#1e2127"
# By pyte's names of the terminal's colours, which are numbers where a program says 38;5;N.
COLOURS = {"default": "#dcdfe4", "000000": BACKGROUND, "7f7f7f": "#7f848e", "cd0000": "#e06c75", "00cd00": "#7bc275",
           "cdcd00": "#e5c07b", "0000ee": "#61afef", "cd00cd": "#c678dd", "00cdcd": "#56b6c2", "e5e5e5": "#dcdfe4"}
SIDES = {"l": (-1, 0), "r": (1, 0), "u": (0, -1), "d": (0, 1)}
BOXES = {"─": "lr", "│": "ud", "┌": "rd", "┐": "ld", "└": "ru", "┘": "lu"}
# Of a braille character's eight bits: column and row of the dot.
DOTS = [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (0, 3), (1, 3)]


def screen_after(seconds: float, command: list[str]) -> pyte.Screen:
    """The terminal's screen, that many seconds after the command's start."""
    child, terminal = pty.fork()
    if child == 0:
        os.environ["TERM"] = "xterm-256color"
        time.sleep(0.3)  # until the size is set
        os.execvp(command[0], command)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
    screen = pyte.Screen(COLUMNS, LINES)
    stream = pyte.ByteStream(screen)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if select.select([terminal], [], [], 0.1)[0]:
            data = os.read(terminal, 1 << 16)
            for _ in range(data.count(b"\x1b[6n")):  # asks for the cursor's position
                os.write(terminal, b"\x1b[1;1R")
            stream.feed(data)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return screen


def drawn(screen: pyte.Screen) -> str:
    """The screen as SVG: blocks, braille dots and box lines as shapes, everything else as text."""
    shapes: dict[str, list[str]] = {}
    lines, labels = [], []
    for y in range(LINES):
        run, at, style = "", 0, None
        for x in range(COLUMNS + 1):
            cell = screen.buffer[y][x] if x < COLUMNS else None
            symbol = cell.data if cell else ""
            left, top = MARGIN + x * WIDTH, MARGIN + y * HEIGHT

            def box(colour: str, dx: float, dy: float, wide: float, high: float) -> None:
                path = f"M{left + dx:.2f} {top + dy:.2f}h{wide:.2f}v{high:.2f}h{-wide:.2f}z"
                shapes.setdefault(colour, []).append(path)

            if cell:
                fore, back = (cell.bg, cell.fg) if cell.reverse else (cell.fg, cell.bg)
                fore = BACKGROUND if cell.reverse and fore == "default" else COLOURS[fore]
                if cell.reverse or back != "default":
                    box(COLOURS[back], 0, 0, WIDTH + 0.1, HEIGHT)
            if "\u2588" <= symbol <= "\u258f":
                box(fore, 0, 0, WIDTH * (0x2590 - ord(symbol)) / 8 + 0.1, HEIGHT)
            elif "\u2801" <= symbol <= "\u28ff":
                for bit, (column, row) in enumerate(DOTS):
                    if ord(symbol) - 0x2800 >> bit & 1:
                        box(fore, WIDTH * (0.25 + 0.5 * column) - 1.1, HEIGHT * (0.125 + 0.25 * row) - 1.1, 2.2, 2.2)
            elif symbol in BOXES:
                for dx, dy in (SIDES[side] for side in BOXES[symbol]):
                    middle = f"M{left + WIDTH / 2:.2f} {top + HEIGHT / 2:.2f}"
                    lines.append(f"{middle}l{dx * WIDTH / 2:.2f} {dy * HEIGHT / 2:.2f}")
            plain = symbol.isprintable() and not ("\u2500" <= symbol <= "\u28ff") and symbol != ""
            here = (fore, cell.bold) if plain and symbol != " " else None
            if style and (here and here != style or not plain or symbol == " " and run.endswith(" ")):
                words = run.rstrip()
                bold = ' font-weight="bold"' if style[1] else ""
                labels.append(
                    f'<text x="{MARGIN + at * WIDTH:.1f}" y="{top + 13.5:.1f}" fill="{style[0]}"{bold} '
                    f'textLength="{len(words) * WIDTH:.1f}" lengthAdjust="spacingAndGlyphs">{escape(words)}</text>'
                )
                run, style = "", None
            if here and not style:
                at, style = x, here
            if style:
                run += symbol
    wide, high = 2 * MARGIN + COLUMNS * WIDTH, 2 * MARGIN + LINES * HEIGHT
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide:.0f} {high:.0f}" font-size="14" '
        'font-family="DejaVu Sans Mono,Menlo,Consolas,monospace" xml:space="preserve">',
        f'<rect width="100%" height="100%" rx="6" fill="{BACKGROUND}"/>',
        *(f'<path fill="{colour}" d="{"".join(paths)}"/>' for colour, paths in shapes.items()),
        f'<path stroke="{COLOURS["7f7f7f"]}" fill="none" d="{"".join(lines)}"/>',
        *labels,
        "</svg>\n",
    ])


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        program = [str(Path(sys.argv[2]).resolve()), "train", "--out", f"{folder}/stories"]
        picture = drawn(screen_after(float(sys.argv[1]), program))
    Path(__file__).with_suffix(".svg").write_text(picture)
