"""Draw the loss of runs, step by step, each with the length of its sequences.

python examples/long_context/picture.py needle.svg RUN RUN ...
"""

import json
import math
import sys
import tomllib
from pathlib import Path

WIDTH, HEIGHT, LEFT, TOP = 420, 220, 60, 20
COLOURS = ("#1f5fa8", "#c8641e", "#3c8c4a", "#8a4fa3")


def losses(run):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"]) for line in lines if line["event"] == "step"]


def label(run):
    config = tomllib.loads((run / "config.toml").read_text())
    length = config.get("train_data", {}).get("length", 4096)
    return f"{length:,} tokens, {config.get('strategy', 'one process')}"


def draw(curves):
    last = max(step for points in curves.values() for step, _ in points)

    def place(step, loss):
        return LEFT + WIDTH * step / last, TOP + HEIGHT * (1 - loss / 2.8)

    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH + 180} {TOP + HEIGHT + 50}" '
        'font-family="sans-serif" font-size="13" fill="#333">',
        f'<rect width="{LEFT + WIDTH + 180}" height="{TOP + HEIGHT + 50}" fill="#fff"/>',
    ]
    for loss, name in ((0, "0"), (1, "1"), (math.log(8), "a guess")):
        x, y = place(0, loss)
        lines.append(f'<line x1="{x}" x2="{x + WIDTH}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        lines.append(f'<text x="{x - 6}" y="{y + 4:.1f}" text-anchor="end">{name}</text>')
    lines.extend(
        f'<text x="{place(step, 0)[0]:.1f}" y="{TOP + HEIGHT + 18}" text-anchor="middle">{step}</text>'
        for step in range(0, last + 1, 50)
    )
    lines.append(f'<text x="{LEFT + WIDTH / 2}" y="{TOP + HEIGHT + 38}" text-anchor="middle">step</text>')
    for number, ((name, points), colour) in enumerate(zip(curves.items(), COLOURS, strict=False)):
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in points))
        lines.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.6"/>')
        y = TOP + 14 + 20 * number
        lines.append(f'<text x="{LEFT + WIDTH + 14}" y="{y}" fill="{colour}">{name}</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"


def main(out, *runs):
    Path(out).write_text(draw({label(Path(run)): losses(Path(run)) for run in runs}))


if __name__ == "__main__":
    main(*sys.argv[1:])
