"""Draw which experts the messages of each cipher get, before training and with the weights of a run.

python examples/moe/picture.py RUN/model.safetensors picture.svg
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parent))
import task

CELL = 30


def shares(weights=None):
    """For each cipher the share of its messages that each expert gets."""
    torch.manual_seed(0)
    model = task.model()
    if weights is not None:
        model.load_state_dict(weights)
    pairs, _ = task.eval_data().tensors
    with torch.no_grad():
        chosen = model(pairs)[1].argmax(-1)
    counts = torch.zeros(task.CIPHERS, model.experts.num_experts)
    counts.index_put_((pairs[:, 0, 1], chosen), torch.ones(len(chosen)), accumulate=True)
    return counts / counts.sum(1, keepdim=True)


def panel(found, left, title):
    width = CELL * found.shape[1]
    lines = [f'<text x="{left + width / 2}" y="22" text-anchor="middle">{title}</text>']
    for cipher, row in enumerate(found.tolist()):
        for expert, share in enumerate(row):
            x, y = left + CELL * expert, 34 + CELL * cipher
            lines.append(
                f'<rect x="{x}" y="{y}" width="{CELL - 2}" height="{CELL - 2}" fill="#1f5fa8" '
                f'fill-opacity="{0.06 + 0.94 * share:.2f}"/>'
            )
    bottom = 34 + CELL * found.shape[0]
    lines.append(f'<text x="{left + width / 2}" y="{bottom + 18}" text-anchor="middle">expert</text>')
    return lines


def draw(before, after):
    height, width = 34 + CELL * before.shape[0] + 30, CELL * before.shape[1]
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {2 * width + 110} {height}" '
        'font-family="sans-serif" font-size="14" fill="#333">',
        f'<rect width="{2 * width + 110}" height="{height}" fill="#fff"/>',
        f'<text transform="translate(22 {34 + CELL * before.shape[0] / 2}) rotate(-90)" '
        'text-anchor="middle">cipher</text>',
        *panel(before, 36, "before training"),
        *panel(after, width + 74, "after"),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def main(weights, out):
    before, after = shares(), shares(load_file(weights))
    Path(out).write_text(draw(before, after))
    for name, found in (("before", before), ("after", after)):
        print(f"{name}: {found.max(1).values.mean():.0%} of a cipher's messages go to its favourite expert")


if __name__ == "__main__":
    main(*sys.argv[1:])
