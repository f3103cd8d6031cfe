"""`rung watch`: what a run is doing, seen from another console. It reads what the run writes, and asks it nothing."""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live as LiveDisplay
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rung.errors import ConfigError
from rung.launch.elastic import launchers
from rung.live import Live, RankFigures, live_path, read_live
from rung.processes import is_running, machine_name
from rung.sizes import human_bytes, human_seconds
from rung.status import RankStatus, read_statuses
from rung.untrusted import lines_of, open_regular, parse_json, printable

_POLL_SECONDS = 0.5
_RECENT = 50  # steps from which the time left is guessed
_STILL_SECONDS = 20.0  # without any rank coming forward, before it is worth a word
_SILENT_SECONDS = 300.0  # without news of a run on another machine
_MOST_CHARACTERS = 40  # of a figure that is no number
_PHASES = ("data", "forward", "backward", "update")
_MAX_METRICS = 2**34  # bytes; a hundred million steps
_FEW_RANKS = 24  # that are shown where the height of the terminal says nothing


@dataclass(frozen=True)
class Picture:
    """Everything that is known of a run at one moment."""

    name: str
    state: str  # starting, running, silent, finished, stopped
    facts: Mapping[str, Any] = field(default_factory=dict)  # as the run told them when it began
    steps: tuple[Mapping[str, Any], ...] = ()  # the last ones
    evaluation: Mapping[str, Any] | None = None
    checkpoint: Mapping[str, Any] | None = None
    live: Live | None = None
    statuses: Mapping[int, RankStatus] = field(default_factory=dict)  # of ranks on this machine
    now: float = 0.0  # time.monotonic()

    @property
    def step(self) -> int:
        told: int = self.steps[-1]["step"] if self.steps else self.facts.get("step", 0)
        return max(told, self.live.step if self.live is not None else 0)

    @property
    def seconds_left(self) -> float | None:
        total = self.facts.get("total_steps")
        if total is None or not self.steps or self.state not in ("running", "silent"):
            return None
        each = sum(row["step_seconds"] for row in self.steps) / len(self.steps)
        return float(each * max(0, total - self.step))


class Watcher:
    """Looks at a run again and again; of its metrics it reads only what is new."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._offset = 0  # of the first line that was not read yet
        self._forget()

    def _forget(self) -> None:
        self._facts: dict[str, Any] = {}
        self._steps: deque[bytes] = deque(maxlen=_RECENT)
        self._last: dict[str, bytes] = {}  # the last evaluation, checkpoint and end
        self._has_ended = False

    def look(self) -> Picture:
        told = launchers(self._run)
        own = [one for one in told.values() if one.get("machine", machine_name()) == machine_name()]
        is_here = any(is_running(one["pid"]) for one in own)
        self._read_metrics()  # after the launchers: what a run writes last is there when its launcher is gone
        live = read_live(live_path(self._run))
        return Picture(
            name=self._run.resolve().name,
            state=self._state(is_here, len(told) > len(own), live),
            facts=self._facts,
            steps=tuple(step for line in self._steps if (step := _step_of(_parsed(line))) is not None),
            evaluation=_event_of(_parsed(self._last.get("eval"))),
            checkpoint=_event_of(_parsed(self._last.get("checkpoint"))),
            live=live,
            statuses=self._statuses() if is_here else {},
            now=time.monotonic(),
        )

    def _state(self, is_here: bool, is_elsewhere: bool, live: Live | None) -> str:
        if is_here:
            return "running" if self._facts and not self._has_ended else "starting"
        if self._has_ended:
            return "finished"
        if is_elsewhere:
            is_fresh = live is not None and time.time() - live.when < _SILENT_SECONDS
            return "running" if is_fresh else "silent"
        return "stopped"

    def _statuses(self) -> dict[int, RankStatus]:
        found: dict[int, RankStatus] = {}
        for path in [self._run / ".state" / "status", *(self._run / ".state").glob("*/status")]:
            found |= read_statuses(path)
        return found

    def _read_metrics(self) -> None:
        try:
            with open_regular(self._run / "metrics.jsonl") as file:
                size = file.seek(0, 2)
                if size > _MAX_METRICS:
                    raise ConfigError(f"{file.name} has {size:,} bytes: no run writes as many.")
                if size < self._offset:  # another run's
                    self._offset = 0
                    self._forget()
                file.seek(self._offset)
                for line in lines_of(file):
                    if not line.endswith(b"\n"):
                        break  # half a line; it is read again when it is whole
                    self._offset = file.tell()
                    self._take(line)
        except FileNotFoundError:
            return
        except OSError as error:
            raise ConfigError(f"{self._run / 'metrics.jsonl'} cannot be read: {error.strerror}.") from None

    def _take(self, line: bytes) -> None:
        """Sort a line by how it begins: most are steps, and of those only the last are ever parsed."""
        if not line.startswith(b'{"event"'):
            self._steps.append(line)
            return
        row = _parsed(line)
        if row is None:
            return
        event = row["event"]
        if event in ("start", "resume"):
            self._facts = _facts_of(row)
            self._steps.clear()
            self._has_ended = False
        elif event == "end":
            self._has_ended = True
            if self._facts:  # an end without a beginning tells too little
                self._facts["seconds"] = _measure(row.get("seconds")) or 0.0
        elif event in ("eval", "checkpoint"):
            self._last[event] = line


def watch_command(run: str | None, *, once: bool) -> int:
    """Show a run until it ends, or one picture of it where nobody looks on."""
    watcher = Watcher(_find(run))
    console = Console(file=sys.stdout, highlight=False, markup=False)
    picture = watcher.look()
    if once or not console.is_terminal:
        if not console.is_terminal:
            console.width = 120
        console.print(draw(picture, _FEW_RANKS))
        return 0
    try:
        with LiveDisplay(console=console, auto_refresh=False, vertical_overflow="crop") as display:
            while True:
                display.update(draw(picture, max(4, console.height - 12)), refresh=True)
                if picture.state in ("finished", "stopped"):
                    return 0
                time.sleep(_POLL_SECONDS)
                picture = watcher.look()
    except KeyboardInterrupt:
        return 0  # the way to leave; the run goes on


def _find(run: str | None) -> Path:
    if run is not None:
        folder = Path(run)
        if not folder.is_dir():
            raise ConfigError(f"there is no directory {run}. `rung watch` takes the directory of a run.")
        if not (folder / "config.toml").exists() and not (folder / "metrics.jsonl").exists():
            raise ConfigError(f"{run} is not the directory of a run: it has no config.toml and no metrics.jsonl.")
        return folder
    found = [path.parent for path in Path("runs").glob("*/config.toml")]
    if not found:
        raise ConfigError(f"there is no run in {Path('runs').resolve()}. Name its directory: rung watch RUN.")
    return max(found, key=lambda folder: (folder / "config.toml").stat().st_mtime)


# -- drawing ---------------------------------------------------------------------------------------------------------


def draw(picture: Picture, num_rows: int) -> RenderableType:
    """The whole picture, with at most so many ranks."""
    parts: list[RenderableType] = [_headline(picture)]
    if picture.facts:
        parts.append(_progress(picture))
    if picture.steps:
        parts.append(Text(printable(_figures(picture))))
    parts += [Text(printable(line)) for line in _events(picture)]
    live = picture.live
    if live is not None and live.ranks:
        parts += [Text(""), _ranks(picture, live, num_rows)]
        parts += [Text(printable(slow.text), style="bold red") for slow in live.slow]
    parts += [Text(printable(line), style="yellow") for line in _stillness(picture)]
    return Group(*parts)


def _headline(picture: Picture) -> Text:
    styles = {"running": "green", "finished": "green", "stopped": "red", "silent": "yellow"}
    facts = picture.facts
    plural = "s" if facts and facts["ranks"] > 1 else ""
    words = printable(f"  {facts['strategy']} on {facts['ranks']} {facts['device']} rank{plural}") if facts else ""
    text = Text(printable(picture.name), style="bold")
    text.append(words, style="not bold")
    text.append(f"  {_state_words(picture)}", style=f"not bold {styles.get(picture.state, 'yellow')}")
    return text


def _state_words(picture: Picture) -> str:
    if picture.state == "finished":
        return f"finished in {_clock(picture.facts.get('seconds', 0.0))}"
    if picture.state == "stopped":
        return "stopped before its end; logs/ tells more, and --resume goes on with it"
    if picture.state == "silent":
        return "on another machine, without news for minutes"
    return picture.state


def _progress(picture: Picture) -> RenderableType:
    total = picture.facts.get("total_steps")
    if total is None:
        return Text(f"step {picture.step} of a stream without an end")
    grid = Table.grid(padding=(0, 2, 0, 0))
    left = picture.seconds_left
    grid.add_row(
        f"step {picture.step}/{total}",
        ProgressBar(total=max(total, 1), completed=picture.step, width=30),
        f"{100 * picture.step / max(total, 1):.0f} %",
        f"about {_clock(left)} left" if left is not None else "",
    )
    return grid


def _figures(picture: Picture) -> str:
    last = picture.steps[-1]
    seconds = sum(row["step_seconds"] for row in picture.steps)
    samples = sum(row["samples_per_second"] * row["step_seconds"] for row in picture.steps)
    told = [f"epoch {last['epoch'] + 1}", f"loss {_number(last['loss'])}"]
    norm = next((row["grad_norm"] for row in reversed(picture.steps) if row.get("grad_norm") is not None), None)
    if norm is not None:
        told.append(f"grad norm {_number(norm)}")
    told.append(f"{_number(samples / seconds if seconds else 0.0)} samples/s")
    told.append(f"{human_seconds(seconds / len(picture.steps))} a step")
    return "  ".join(told)


def _events(picture: Picture) -> list[str]:
    lines = []
    if picture.evaluation is not None:
        shown = {k: v for k, v in picture.evaluation.items() if k not in ("event", "step", "epoch", "seconds")}
        figures = "  ".join(f"{name} {_number(value)}" for name, value in shown.items())
        lines.append(f"evaluation after step {picture.evaluation['step']}: {figures}")
    if picture.checkpoint is not None:
        lines.append(f"last checkpoint: step {picture.checkpoint['step']}")
    return lines


def _ranks(picture: Picture, live: Live, num_rows: int) -> RenderableType:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("rank", "samples/s", *_PHASES, "rest", "memory", "now"):
        table.add_column(column, justify="left" if column == "now" else "right", no_wrap=True)
    slow = {(one.rank, one.phase) for one in live.slow}
    chosen = _choose(live, num_rows)
    for rank in chosen:
        table.add_row(*_row(rank, live.ranks[rank], live, slow, picture.statuses.get(rank)))
    left_out = len(live.ranks) - len(chosen)
    return Group(table, Text(f"and {left_out} more ranks, less busy")) if left_out else table


def _row(
    rank: int, figures: RankFigures, live: Live, slow: set[tuple[int, str]], status: RankStatus | None
) -> list[Text]:
    # Mostly waiting for others; logging and saving, too.
    rest = max(0.0, live.step_seconds - sum(figures.seconds.values()))
    is_slow = any(one == rank for one, _ in slow)
    return [
        Text(f"{rank}", style="bold red" if is_slow else ""),
        Text(_number(figures.samples_per_second)),
        *(
            Text(human_seconds(figures.seconds.get(phase, 0.0)), style="bold red" if (rank, phase) in slow else "")
            for phase in _PHASES
        ),
        Text(human_seconds(rest)),
        Text(human_bytes(figures.memory_bytes)),
        Text(status.phase if status is not None else ""),
    ]


def _choose(live: Live, num_rows: int) -> list[int]:
    """The ranks to show: all, or those that are slow and then those with the most to do."""
    everyone = range(len(live.ranks))
    if len(everyone) <= num_rows:
        return list(everyone)
    slow = {one.rank for one in live.slow}
    by_interest = sorted(everyone, key=lambda rank: (rank not in slow, -sum(live.ranks[rank].seconds.values())))
    return sorted(by_interest[:num_rows])


def _stillness(picture: Picture) -> list[str]:
    """Where the ranks are, when none has come forward for a while."""
    if picture.state != "running" or not picture.statuses:
        return []
    age = picture.now - max(status.changed for status in picture.statuses.values())
    if age < _STILL_SECONDS:
        return []
    where = ", ".join(f"rank {rank} in {status.phase}" for rank, status in sorted(picture.statuses.items())[:8])
    return [f"no rank has come forward for {age:.0f} s: {where}"]


def _parsed(line: bytes | None) -> dict[str, Any] | None:
    """None for a line that is damaged, too: the others tell enough."""
    try:
        row = parse_json(line) if line is not None else None
    except ValueError:
        return None
    return row if isinstance(row, dict) and "event" in row else None


def _facts_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """What a run tells when it begins, with the types that drawing needs."""
    words = {key: str(row.get(key, "?")) for key in ("strategy", "device")}
    counts = {"step": _count(row.get("step")) or 0, "ranks": _count(row.get("ranks")) or 0}
    return {**words, **counts, "total_steps": _count(row.get("total_steps"))}


def _step_of(row: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if row is None:
        return None
    step, epoch = _count(row.get("step")), _count(row.get("epoch"))
    seconds, rate = _measure(row.get("step_seconds")), row.get("samples_per_second")
    if step is None or epoch is None or seconds is None:
        return None
    # What is no number, such as a loss of "nan", is shown as it is.
    told = {key: row.get(key) for key in ("loss", "grad_norm")}
    return {**told, "step": step, "epoch": epoch, "step_seconds": seconds, "samples_per_second": _measure(rate) or 0.0}


def _event_of(row: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    return row if row is not None and _count(row.get("step")) is not None else None


def _count(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value < 2**53 else None


def _measure(value: Any) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and math.isfinite(value) and 0 <= value < 1e15 else None


def _clock(seconds: float) -> str:
    """As on a clock: minutes and seconds, or hours before them."""
    whole = round(seconds)
    hours, minutes = whole // 3600, whole % 3600 // 60
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"


def _number(value: Any) -> str:
    if not isinstance(value, int | float):
        return str(value)[:_MOST_CHARACTERS]
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e15 else f"{value:.4g}"
