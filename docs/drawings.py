"""The drawings of docs/strategies.md (what each of four ranks keeps, and what is sent in a step) and of
docs/architecture.md (the packages of src/rung and the imports between them).

python docs/drawings.py            # all of them, into docs/drawings/
python docs/drawings.py ddp tp     # some of them
python docs/drawings.py rooms      # after an import between packages was added or removed

A model is drawn as a square of four layers, each of which can be cut into four parts. Two drawings are read from the
code: the order of a pipeline's micro-batches from steps that the training code takes in a fake world, the packages from
the layers of pyproject.toml and the import statements below src/rung.
"""

from __future__ import annotations

import ast
import itertools
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

from rung.system.svg import BLUE, GREEN, GREY, INK, LINE, MARGIN, ORANGE, PANEL, PURPLE, RED, WIDTH, Page

FOLDER = Path(__file__).parent / "drawings"
_ROOT = Path(__file__).parent.parent
_LEFT, _GAP, _CELL = MARGIN + 84, 14, 13
_CARD = (WIDTH - MARGIN - _LEFT - 3 * _GAP) // 4  # whole numbers: lines between cells look alike everywhere
_KINDS = (("parameters", BLUE, "#b3d9f0"), ("gradients", ORANGE, "#f7e0ad"), ("optimizer", GREEN, "#b0e0d1"))
# A file of its own cannot know the colours of the page around it, but it can ask what the reader prefers.
_DARK = {
    INK: "#e6edf3", GREY: "#a3b0bd", LINE: "#465260", PANEL: "#18202a", BLUE: "#3f9fd8", ORANGE: "#e0a526",
    GREEN: "#2cb38c", PURPLE: "#d490b6", "#b3d9f0": "#1d4966", "#f7e0ad": "#5a481d", "#b0e0d1": "#1c4c40",
    "#e9edf0": "#242d38", "#56b4e9": "#8ccbf2", "#f7d37f": "#f3d48a", "#f0e442": "#d6cc3c",
}  # fmt: skip
_STYLE = (
    "<style>@media (prefers-color-scheme: dark) {\n"
    'svg > rect[width="100%"] { fill: #0f151c }\n'
    + "\n".join(f'[fill="{light}"] {{ fill: {dark} }}' for light, dark in _DARK.items())
    + "\n"
    + "\n".join(f'[stroke="{light}"] {{ stroke: {dark} }}' for light, dark in _DARK.items())
    + "\n}</style>"
)


@dataclass(frozen=True)
class Rank:
    """What one rank has. A `#` is kept, an `o` is there for a moment of the step, a dot is elsewhere. The samples are
    one row, the rest a row for each layer."""

    name: str
    samples: str
    parameters: str
    gradients: str
    optimizer: str


@dataclass(frozen=True)
class Message:
    """`how`: all meet (-), or arrows run to the next (>), to the one before (<), to the first (to), or from it."""

    phase: str
    how: str
    words: str
    groups: tuple[tuple[int, ...], ...] = ((0, 1, 2, 3),)


@dataclass(frozen=True)
class Drawing:
    title: str
    ranks: list[Rank]
    messages: list[Message]
    note: str = ""


WHOLE, NONE, MOMENT = "#### #### #### ####", ".... .... .... ....", "oooo oooo oooo oooo"


def columns(kept: str, gathered: str = "") -> str:
    """Every layer cut alike. `gathered` says of each layer whether the rest of it is there for a moment."""
    rows = []
    for layer in range(4):
        rest = "o" if gathered[layer : layer + 1] == "o" else "."
        rows.append(kept.replace(".", rest))
    return " ".join(rows)


def layers(*kept: int, row: str = "####", rest: str = "....") -> str:
    """Some layers, and the others elsewhere."""
    return " ".join(row if layer in kept else rest for layer in range(4))


def part(rank: int, count: int = 4) -> str:
    return "".join("#" if place == rank else "." for place in range(count))


def _ranks(describe: list[tuple[str, str, str, str]], names: list[str] | None = None) -> list[Rank]:
    names = names or [f"rank {number}" for number in range(len(describe))]
    return [Rank(name, *row) for name, row in zip(names, describe, strict=True)]


def _sharded(parameters: list[str], kept: list[str]) -> list[Rank]:
    return _ranks([(part(n), p, k, k) for n, (p, k) in enumerate(zip(parameters, kept, strict=True))])


QUARTERS = [columns(part(number)) for number in range(4)]
_HALVES = ["##..", "..##", "##..", "..##"]
_PAIRS = ((0, 1), (2, 3))
_ACROSS = ((0, 2), (1, 3))
_SERVED = ["server", "trainer 0", "trainer 1", "trainer 2"]


def drawings() -> dict[str, Drawing]:
    return {
        "dp": Drawing(
            "dp4: one process, four devices",
            _ranks(
                [(part(0), WHOLE, WHOLE, WHOLE), *((part(number), MOMENT, MOMENT, NONE) for number in (1, 2, 3))],
                [f"device {number}" for number in range(4)],
            ),
            [
                Message("forward", "from", "inputs and parameters go out"),
                Message("forward", "to", "outputs come in; the loss is taken on device 0"),
                Message("backward", "from", "gradients of the outputs go out"),
                Message("backward", "to", "gradients of the parameters come in and are added"),
            ],
            "In every micro-batch, all of it through device 0.",
        ),
        "ddp": Drawing(
            "ddp: the batch is cut, the model is not",
            _ranks([(part(number), WHOLE, WHOLE, WHOLE) for number in range(4)]),
            [Message("backward", "-", "all-reduce of the gradients, in buckets, while backward runs: 2P")],
        ),
        "zero1": Drawing(
            "zero1: the optimizer state is cut, too",
            _ranks([(part(number), WHOLE, WHOLE, QUARTERS[number]) for number in range(4)]),
            [
                Message("backward", "-", "all-reduce of the gradients: 2P"),
                Message("update", "-", "all-gather of the slices that each rank has updated: P"),
            ],
        ),
        "zero2": Drawing(
            "zero2: the gradients are cut, too, and the parameters between steps",
            _sharded([columns(part(number), "oooo") for number in range(4)], QUARTERS),
            [
                Message(
                    "forward", "-", "all-gather of the parameters, once a step; they stay until backward is over: P"
                ),
                Message("backward", "-", "reduce-scatter of the gradients, in every micro-batch: P"),
            ],
        ),
        "zero3": Drawing(
            "zero3, fsdp: parameters are there one unit at a time",
            _sharded([columns(part(number), ".o..") for number in range(4)], QUARTERS),
            [
                Message("forward", "-", "all-gather of each unit before its forward, given back after it: P"),
                Message("backward", "-", "all-gather of each unit again: P"),
                Message("backward", "-", "reduce-scatter of its gradients: P"),
            ],
            "In every micro-batch. The next unit is gathered while this one computes.",
        ),
        "hsdp": Drawing(
            "hsdp2x2: cut inside a group, replicated between groups",
            _sharded([columns(half, ".o..") for half in _HALVES], [columns(half) for half in _HALVES]),
            [
                Message("forward", "-", "all-gather of each unit", _PAIRS),
                Message("backward", "-", "all-gather, then reduce-scatter", _PAIRS),
                Message(
                    "backward", "-", "all-reduce of the gradient shards between replicas, once a step: 2P/S", _ACROSS
                ),
            ],
        ),
        "tp": Drawing(
            "tp4: each matrix is cut, and all ranks work on the same samples",
            _ranks([("####", QUARTERS[n], QUARTERS[n], QUARTERS[n]) for n in range(4)]),
            [
                Message("forward", "-", "all-reduce of activations after every pair of matrices"),
                Message("backward", "-", "all-reduce of their gradients before every pair"),
            ],
            "Nothing of the parameters is sent. Activations are whole between the pairs.",
        ),
        "cp": Drawing(
            "cp4: each rank has a part of every sequence, and the whole model",
            _ranks([("####", WHOLE, WHOLE, WHOLE) for _ in range(4)]),
            [
                Message("forward", "-", "all-to-all of queries, keys and values, and of the result, in every block"),
                Message("backward", "-", "the same of their gradients; then all-reduce of the gradients: 2P"),
            ],
            "All ranks read the same samples. Activations inside of blocks are cut along the sequence.",
        ),
        "pp": Drawing(
            "pp4: each rank has some of the layers, and micro-batches pass through",
            _ranks([("####", layers(n), layers(n), layers(n)) for n in range(4)]),
            [
                Message("forward", ">", "activations of each micro-batch"),
                Message("backward", "<", "their gradients"),
            ],
            "The schedule decides which rank is idle when.",
        ),
        "pp-fsdp": Drawing(
            "pp2,fsdp2: two stages, each sharded on two ranks",
            _ranks(
                [
                    (
                        "##.." if n % 2 == 0 else "..##",
                        " ".join(
                            (_HALVES[n].replace(".", "o") if layer == stage[0] else _HALVES[n])
                            if layer in stage
                            else "...."
                            for layer in range(4)
                        ),
                        layers(*stage, row=_HALVES[n]),
                        layers(*stage, row=_HALVES[n]),
                    )
                    for n, stage in enumerate([(0, 1), (0, 1), (2, 3), (2, 3)])
                ]
            ),
            [
                Message("forward", "-", "all-gather of each unit", _PAIRS),
                Message("forward", ">", "activations to the next stage", _ACROSS),
                Message("backward", "<", "their gradients", _ACROSS),
                Message("backward", "-", "all-gather, then reduce-scatter", _PAIRS),
            ],
        ),
        "fsdp-tp": Drawing(
            "fsdp2,tp2: matrices cut between neighbours, the cut ones sharded between pairs",
            _ranks(
                [
                    (
                        "##.." if n < 2 else "..##",
                        " ".join(
                            (own.replace("-", "o") if layer == 1 else own.replace("-", ".")) for layer in range(4)
                        ),
                        columns(own.replace("-", ".")),
                        columns(own.replace("-", ".")),
                    )
                    for n, own in enumerate(["#-..", "..#-", "-#..", "..-#"])
                ]
            ),
            [
                Message("forward", "-", "all-gather of each unit's part", _ACROSS),
                Message("forward", "-", "all-reduce of activations", _PAIRS),
                Message("backward", "-", "all-gather, then reduce-scatter of the part's gradients", _ACROSS),
                Message("backward", "-", "all-reduce of activations' gradients", _PAIRS),
            ],
        ),
        "ps": Drawing(
            "ps: a server keeps the parameters, trainers compute",
            _ranks(
                [("...", WHOLE, MOMENT, WHOLE), *((part(n, 3), WHOLE, MOMENT, NONE) for n in range(3))],
                _SERVED,
            ),
            [
                Message("backward", "to", "gradients are pushed, and added in the order of the trainers"),
                Message("update", "from", "updated parameters are pulled"),
            ],
            "With several servers, each keeps some of the parameters and their optimizer state.",
        ),
        "ps-async": Drawing(
            "ps-async: each trainer at its own pace, a whole batch at a time",
            _ranks(
                [("...", WHOLE, MOMENT, WHOLE), *(("###", MOMENT, MOMENT, NONE) for _ in range(3))],
                _SERVED,
            ),
            [
                Message(
                    "forward", "from", "parameters are pulled: by one trainer now, by another later", ((0, 1, 2, 3),)
                ),
                Message("backward", "to", "a push is an update at once; it may be late by up to K updates"),
            ],
            "Trainers do not wait for each other; some may leave.",
        ),
        "ddp-ps": Drawing(
            "ddp+ps: large embeddings on a server, dense layers under ddp",
            _ranks(
                [
                    ("...", layers(0), layers(0, row="oooo"), layers(0)),
                    *((part(n, 3), layers(1, 2, 3), layers(1, 2, 3), layers(1, 2, 3)) for n in range(3)),
                ],
                _SERVED,
            ),
            [
                Message("forward", "to", "indices of the rows that a batch needs"),
                Message("forward", "from", "these rows"),
                Message("backward", "to", "gradients of these rows"),
                Message("backward", "-", "all-reduce of the dense layers' gradients", ((1, 2, 3),)),
            ],
        ),
        "rpc-pp": Drawing(
            "rpc-pp4: stages that call each other",
            _ranks([("####", layers(n), layers(n), layers(n)) for n in range(4)]),
            [
                Message("forward", ">", "each stage calls the one before, which returns activations"),
                Message("forward", "to", "losses", ((0, 3),)),
                Message("backward", "<", "gradients, sent by distributed autograd"),
                Message("update", "from", "rank 0 calls the DistributedOptimizer: each rank updates its own"),
            ],
        ),
    }


def draw(drawing: Drawing) -> str:
    page = Page()
    page.y += 8
    page.text(MARGIN, page.y, drawing.title, size=16, bold=True)
    page.y += 16
    page.text(MARGIN, page.y + 47, "each has", size=12, fill=GREY)
    for number, rank in enumerate(drawing.ranks):
        _card(page, _place(number), page.y, rank)
    page.y += 150
    for phase in ("forward", "backward", "update"):
        _phase(page, phase, [message for message in drawing.messages if message.phase == phase])
    page.y += 26
    x = float(_LEFT)
    for words, fill, line in (
        ("kept", BLUE, BLUE),
        ("there for a moment", "#b3d9f0", BLUE),
        ("elsewhere", PANEL, LINE),
    ):
        page.box(x, page.y - 10, 11, 11, fill, line=line)
        page.text(x + 17, page.y, words, size=11.5, fill=GREY)
        x += 17 + 5.7 * len(words) + 18
    page.text(WIDTH - MARGIN, page.y, drawing.note, size=11.5, fill=GREY, anchor="end")
    page.y -= 10
    return _finish(page, drawing.title)


def _place(number: int) -> float:
    return _LEFT + number * (_CARD + _GAP)


def _card(page: Page, x: float, y: float, rank: Rank) -> None:
    page.box(x, y, _CARD, 138, PANEL, line=LINE, round=6)
    page.text(x + 12, y + 20, rank.name, size=13, bold=True)
    inner = _CARD - 24
    page.text(x + 12, y + 39, "samples", size=10.5, fill=GREY)
    width = (inner - 52) / len(rank.samples)
    for place, state in enumerate(rank.samples):
        has = state == "#"
        page.box(x + 64 + place * width, y + 30, width - 2, 10, PURPLE if has else PANEL, line=PURPLE if has else LINE)
    step = (inner - 4 * _CELL) // 2
    for number, (kind, kept, moment) in enumerate(_KINDS):
        left = x + 12 + number * step
        page.text(left, y + 62, kind, size=10.5, fill=GREY)
        for layer, row in enumerate(getattr(rank, kind).split()):
            for place, state in enumerate(row):
                fill = {"#": kept, "o": moment, ".": PANEL}[state]
                line = LINE if state == "." else kept
                page.box(left + place * _CELL, y + 70 + layer * (_CELL + 1), _CELL - 1, _CELL - 1, fill, line=line)


def _phase(page: Page, phase: str, messages: list[Message]) -> None:
    page.line([(MARGIN, page.y), (WIDTH - MARGIN, page.y)], LINE)
    page.text(MARGIN, page.y + 23, phase, size=12, bold=True)
    if not messages:
        page.text(_place(0) + _CARD / 2, page.y + 23, "nothing is sent", size=12, fill=GREY)
        page.y += 34
    for message in messages:
        _message(page, message)


def _message(page: Page, message: Message) -> None:
    crossing = len(message.groups) > 1 and message.groups[0][-1] > message.groups[1][0]
    for number, group in enumerate(message.groups):
        y = page.y + 30 + (9 * number if crossing else 0)
        places = [_place(rank) + _CARD / 2 for rank in group]
        if number == 0 or not crossing:
            page.text((places[0] + places[-1]) / 2, page.y + 20, message.words, size=12, anchor="middle")
        page.line([(places[0], y), (places[-1], y)], RED, width=1.8)
        for place in places:
            page.dot(place, y, 3.4, RED)
        if message.how in (">", "<"):
            for one, other in itertools.pairwise(places):
                _arrow(page, (one + other) / 2, y, 1 if message.how == ">" else -1)
        elif message.how == "to":
            _arrow(page, places[0] + 14, y, -1)
        elif message.how == "from":
            for place in places[1:]:
                _arrow(page, place - 8, y, 1)
    page.y += 44 + (9 if crossing else 0)


def _arrow(page: Page, x: float, y: float, direction: int) -> None:
    page.line([(x - 5 * direction, y - 5), (x + 3 * direction, y), (x - 5 * direction, y + 5)], RED, width=1.8)


def draw_schedules() -> str:
    """Four ranks and eight micro-batches under every schedule, all stages alike, on one scale of time."""
    from rung.planner.explain.explanation import explain, idle_share, lay_out
    from rung.spec.config import RunConfig
    from rung.spec.presets import SCHEDULES
    from rung.spec.strategy import parse
    from rung.spec.task import load_task

    task = load_task(_ROOT / "examples" / "gpt").bind({"model.layers": 8, "model.width": 32})
    config = RunConfig(batch_size=8, micro_batch=1)
    colours = {"F": (BLUE, "#56b4e9"), "B": (ORANGE, "#f7d37f"), "I": ("#f0e442", ""), "W": (GREEN, "")}
    found = {}
    for name in SCHEDULES:
        views = explain(task, parse(f"pp4:{name}", 4), config).ranks
        later = {stage for view in views for stage in view.stages[1:]}
        stages = sum(len(view.stages) for view in views)
        found[name] = lay_out([view.actions for view in views], [1] * stages), later, stages // 4
    page = Page()
    title = "pp4: four ranks, eight micro-batches"
    page.y += 8
    page.text(MARGIN, page.y, title, size=16, bold=True)
    longest = max(max(slot.stop for slot in chart) / each for chart, _, each in found.values())
    for name, (chart, later, each) in found.items():
        page.y += 34
        idle = f"{100 * idle_share(chart, 4):.0f} % idle"
        page.text(MARGIN, page.y, name, size=13, bold=True)
        page.text(_LEFT + 20, page.y, idle, size=12, fill=GREY)
        page.y += 8
        scale = (WIDTH - MARGIN - _LEFT) / longest / each  # two stages of a rank have half the layers each
        for rank in range(4):
            y = page.y + 22 * rank
            page.text(MARGIN, y + 14, f"rank {rank}", size=12)
            page.box(_LEFT, y, max(slot.stop for slot in chart) * scale, 19, "#e9edf0")
        for slot in chart:
            width = (slot.stop - slot.start) * scale
            fill = colours[slot.kind][slot.stage in later]
            x, y = _LEFT + slot.start * scale, page.y + 22 * slot.rank
            page.box(x, y, width - 1, 19, fill)
            ink = "#ffffff" if fill in (BLUE, GREEN) else "#1c2734"
            page.text(x + width / 2 - 0.5, y + 13.5, str(slot.chunk), size=10.5, fill=ink, anchor="middle")
        page.y += 88
    page.y += 26
    x = float(MARGIN)
    for words, fill in (
        ("forward", BLUE),
        ("backward", ORANGE),
        ("", "#56b4e9"),
        ("the same of a rank's second stage", "#f7d37f"),
        ("gradients of the inputs", "#f0e442"),
        ("gradients of the weights", GREEN),
        ("idle", "#e9edf0"),
    ):
        page.box(x, page.y - 10, 11, 11, fill)
        page.text(x + 17, page.y, words, size=11.5, fill=GREY)
        x += 17 + 5.7 * len(words) + (16 if words else -2)
    page.y -= 10
    return _finish(page, title)


# A few words on each package; a test holds that none is missing.
ROOM_WORDS = {
    "program": "rung.train and rung.compare: the commands, called by a program",
    "cli": "one file a command: flags to calls, errors to one line",
    "compare": "rung compare, rung verify, rung report",
    "planner": "rung plan, rung explain: the training code on fake tensors",
    "hardware": "rung bench, rung doctor; records of devices and links",
    "launch": "worker processes, rendezvous, restarts, reports of failures; rung submit",
    "train": "what one rank does: loop, metrics, heartbeat, when to save",
    "checkpoint": "state without topology: save, reshard, load, export",
    "runtime": "build_runtime; the protocol Runtime: what takes a step",
    "parallel": "parallelize: stages, tensors, sharding, compression",
    "data": "which sample is read when, by which rank",
    "distributed": "the world, real or fake; store, RPC, MPI, status board",
    "spec": "task, settings, strategy, and whether they fit together; no torch",
    "system": "environment, network, processes, files, units; standard library only",
    "errors": "one class for each kind of mistake",
}


def room_layers() -> list[list[str]]:
    """The packages from the top to the bottom, as the import contract orders them; those of one layer together."""
    contracts = tomllib.loads((_ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    return [layer.split(" | ") for layer in layers if layer != "__main__"]


def find_imports() -> set[tuple[str, str]]:
    """Which package imports which other one, wherever in a file.

    Not how often: a number would make the drawing stale with every file that is added.
    """
    found: set[tuple[str, str]] = set()
    source = _ROOT / "src" / "rung"
    rooms = {room for layer in room_layers() for room in layer}
    for path in sorted(source.rglob("*.py")):
        own = path.relative_to(source).parts[0].removesuffix(".py")
        if own not in rooms:
            continue  # rung/__init__.py and rung/__main__.py: the doors, not a package
        for node in ast.walk(ast.parse(path.read_text())):
            for other in _imported_rooms(node):
                if other in rooms and other != own:
                    found.add((own, other))
    return found


def _imported_rooms(node: ast.AST) -> set[str]:
    if isinstance(node, ast.ImportFrom) and node.module == "rung":
        return {name.name for name in node.names}
    names = [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
    names += [name.name for name in node.names] if isinstance(node, ast.Import) else []
    return {name.split(".")[1] for name in names if name.startswith("rung.")}


def draw_rooms() -> str:
    """A staircase: a bar for each package, and above its right end a column with the packages that import it."""
    layers, imports = room_layers(), find_imports()
    rooms = [room for layer in layers for room in layer]
    page = Page()
    title = "the packages of src/rung, and the imports between them"
    page.y += 8
    page.text(MARGIN, page.y, title, size=16, bold=True)
    page.y += 20
    words = "An arrow leads down to an imported package; a dot marks who imports it; a bracket is one layer."
    page.text(MARGIN, page.y, words, size=12, fill=GREY)
    page.y += 20
    row, column = 44, 35
    ends = {room: WIDTH - MARGIN - (len(rooms) - 1 - place) * column for place, room in enumerate(rooms)}
    tops = {room: page.y + place * row for place, room in enumerate(rooms)}
    middles = {room: (ends[room] - column / 2, tops[room] + row / 2 - 3) for room in rooms}
    for layer in layers:
        if len(layer) > 1:  # packages of one layer do not import each other
            top, bottom = tops[layer[0]] - 5, tops[layer[-1]] + row - 1
            page.line([(MARGIN - 4, top), (MARGIN - 10, top), (MARGIN - 10, bottom), (MARGIN - 4, bottom)], GREY)
    for room in rooms:
        targets = [other for other in rooms if (room, other) in imports]
        if targets:
            y = middles[room][1]
            page.line([(ends[room], y), (middles[targets[-1]][0], y)], LINE, width=1.5)
        sources = [other for other in rooms if (other, room) in imports]
        if sources:
            x, y = middles[room][0], tops[room]
            page.line([(x, middles[sources[0]][1]), (x, y)], LINE, width=1.5)
            page.line([(x - 4, y - 6), (x, y - 1), (x + 4, y - 6)], GREY, width=1.8)
    for room in rooms:
        page.box(MARGIN, tops[room], ends[room] - MARGIN, row - 6, PANEL, line=BLUE, round=5)
        page.text(MARGIN + 12, tops[room] + 24, room, size=14, bold=True)
        page.text(MARGIN + 108, tops[room] + 24, ROOM_WORDS[room], size=12, fill=GREY)
    for one, other in sorted(imports):
        x, y = middles[other][0], middles[one][1]
        page.box(x - 5, y - 5, 10, 10, BLUE, round=5)
    page.y += len(rooms) * row - 12
    return _finish(page, title)


def _finish(page: Page, title: str) -> str:
    return page.render(title).replace("</title>\n", f"</title>\n{_STYLE}\n", 1)


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    known = drawings()
    from_code = {"schedules": draw_schedules, "rooms": draw_rooms}
    for name in sys.argv[1:] or [*known, *from_code]:
        (FOLDER / f"{name}.svg").write_text(from_code[name]() if name in from_code else draw(known[name]))
        sys.stdout.write(f"{FOLDER.name}/{name}.svg\n")


if __name__ == "__main__":
    main()
