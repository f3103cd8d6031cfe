"""`rung watch`: the progress of a run, shown on another console. It only reads files that the run writes."""

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

from rung.distributed.live_status import JobSnapshot, RankFigures, read_snapshot, snapshot_path
from rung.distributed.status_board import RankStatus, read_statuses
from rung.errors import ConfigError
from rung.launch.rendezvous.elastic import launchers
from rung.spec.expert_rows import read_layers
from rung.system.processes import is_running, machine_name
from rung.system.store import check_address, is_store, local_folder
from rung.system.units import human_bytes, human_seconds
from rung.system.untrusted import lines_of, open_regular, parse_json, printable

_POLL_SECONDS = 0.5
_RECENT = 50  # steps over which speed and time left are averaged
_STALL_SECONDS = 20.0  # without progress of any rank, before a line says so
_SILENT_SECONDS = 300.0  # after the last update of a run on another machine
_MAX_CHARACTERS = 40  # of a figure that is not a number
_EXPERT_LOADS = ("expert_load_max", "expert_rank_load_max")
_MOST_LAYERS, _MOST_BARS = 6, 32  # of experts
_BARS = " ▁▂▃▄▅▆▇█"
_PHASES = ("data", "forward", "backward", "update")
_MAX_METRICS = 2**34  # bytes; about a hundred million steps
_DEFAULT_RANKS = 24  # shown with --once, or where the output is not a terminal


@dataclass(frozen=True)
class RunView:
    """The state of a run at one moment, as read from its files."""

    name: str
    state: str  # starting, running, silent, finished, stopped
    facts: Mapping[str, Any] = field(default_factory=dict)  # of its last start or resume
    steps: tuple[Mapping[str, Any], ...] = ()  # the most recent
    evaluation: Mapping[str, Any] | None = None
    checkpoint: Mapping[str, Any] | None = None
    experts: Mapping[str, Any] | None = None  # the rows of each, in the last step in which they were counted
    live: JobSnapshot | None = None
    statuses: Mapping[int, RankStatus] = field(default_factory=dict)  # of ranks on this machine
    now: float = 0.0  # time.monotonic()

    @property
    def step(self) -> int:
        logged: int = self.steps[-1]["step"] if self.steps else self.facts.get("step", 0)
        return max(logged, self.live.step if self.live is not None else 0)

    @property
    def seconds_left(self) -> float | None:
        total = self.facts.get("total_steps")
        if total is None or not self.steps or self.state not in ("running", "silent"):
            return None
        each = sum(row["step_seconds"] for row in self.steps) / len(self.steps)
        return float(each * max(0, total - self.step))


class Watcher:
    """Polls the files of a run. Of its metrics it reads only the lines added since the last poll."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._offset = 0  # of the first unread line
        self._reset()

    def _reset(self) -> None:
        self._facts: dict[str, Any] = {}
        self._steps: deque[bytes] = deque(maxlen=_RECENT)
        self._last: dict[str, bytes] = {}  # the last evaluation and checkpoint
        self._has_ended = False

    def poll(self) -> RunView:
        started = launchers(self._run)
        local = [launcher for launcher in started.values() if launcher.get("machine", machine_name()) == machine_name()]
        is_here = any(is_running(launcher["pid"]) for launcher in local)
        # Only after the launchers: once a launcher has exited, its last lines are in the file.
        self._read_metrics()
        live = read_snapshot(snapshot_path(self._run))
        return RunView(
            name=self._run.resolve().name,
            state=self._state(is_here, len(started) > len(local), live),
            facts=self._facts,
            steps=tuple(step for line in self._steps if (step := _step_of(_parsed(line))) is not None),
            evaluation=_event_of(_parsed(self._last.get("eval"))),
            checkpoint=_event_of(_parsed(self._last.get("checkpoint"))),
            experts=_event_of(_parsed(self._last.get("experts"))),
            live=live,
            statuses=self._statuses() if is_here else {},
            now=time.monotonic(),
        )

    def _state(self, is_here: bool, is_elsewhere: bool, live: JobSnapshot | None) -> str:
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
                    raise ConfigError(f"{file.name} has {size:,} bytes; a run's metrics have at most {_MAX_METRICS:,}.")
                if size < self._offset:  # a new run replaced the file
                    self._offset = 0
                    self._reset()
                file.seek(self._offset)
                for line in lines_of(file):
                    if not line.endswith(b"\n"):
                        break  # a line still being written; the next poll reads it
                    self._offset = file.tell()
                    self._add_line(line)
        except FileNotFoundError:
            return
        except OSError as error:
            raise ConfigError(f"{self._run / 'metrics.jsonl'} cannot be read: {error.strerror}.") from None

    def _add_line(self, line: bytes) -> None:
        """Tell steps from events by their first bytes: most lines are steps, and only the last of them are parsed."""
        if not line.startswith(b'{"event"'):
            self._steps.append(line)
            return
        if line.startswith(b'{"event": "experts"'):  # may be long, and only the last is shown
            self._last["experts"] = line
            return
        row = _parsed(line)
        if row is None:
            return
        event = row["event"]
        if event in ("start", "resume"):
            self._facts = _facts_of(row)
            self._steps.clear()
            self._last.pop("experts", None)
            self._has_ended = False
        elif event == "end":
            self._has_ended = True
            if self._facts:  # an end without a start has too few facts to draw
                self._facts["seconds"] = _measure(row.get("seconds")) or 0.0
        elif event in ("eval", "checkpoint"):
            self._last[event] = line


def watch_command(run: str | None, *, once: bool) -> int:
    """Show a run until it ends; once with --once, or if the output is not a terminal."""
    watcher = Watcher(_find_run(run))
    console = Console(file=sys.stdout, highlight=False, markup=False)
    view = watcher.poll()
    if once or not console.is_terminal:
        if not console.is_terminal:
            console.width = 120
        console.print(draw(view, _DEFAULT_RANKS))
        return 0
    try:
        with LiveDisplay(console=console, auto_refresh=False, vertical_overflow="crop") as display:
            while True:
                display.update(draw(view, max(4, console.height - 12)), refresh=True)
                if view.state in ("finished", "stopped"):
                    return 0
                time.sleep(_POLL_SECONDS)
                view = watcher.poll()
    except KeyboardInterrupt:
        return 0  # the way to quit; the run is not affected


def _find_run(run: str | None) -> Path:
    if run is not None:
        folder = local_folder(check_address(run, "RUN")) if is_store(run) else Path(run)
        if is_store(run) and not folder.is_dir():
            raise ConfigError(f"{folder}, the part of {run} on this machine, is not there. Watch it where it runs.")
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


def draw(view: RunView, num_rows: int) -> RenderableType:
    """Render a view, with at most `num_rows` ranks."""
    parts: list[RenderableType] = [_headline(view)]
    if view.facts:
        parts.append(_progress(view))
    if view.steps:
        parts.append(Text(printable(_figures(view))))
        if loads := _expert_loads(view):
            parts.append(Text(printable(loads)))
        parts += [Text(printable(line)) for line in _expert_rows(view)]
    parts += [Text(printable(line)) for line in _events(view)]
    live = view.live
    if live is not None and live.ranks:
        parts += [Text(""), _ranks(view, live, num_rows)]
        parts += [Text(printable(slow.text), style="bold red") for slow in live.slow]
    parts += [Text(printable(line), style="yellow") for line in _stall_lines(view)]
    return Group(*parts)


def _headline(view: RunView) -> Text:
    styles = {"running": "green", "finished": "green", "stopped": "red", "silent": "yellow"}
    facts = view.facts
    plural = "s" if facts and facts["ranks"] > 1 else ""
    words = printable(f"  {facts['strategy']} on {facts['ranks']} {facts['device']} rank{plural}") if facts else ""
    text = Text(printable(view.name), style="bold")
    text.append(words, style="not bold")
    text.append(f"  {_state_words(view)}", style=f"not bold {styles.get(view.state, 'yellow')}")
    return text


def _state_words(view: RunView) -> str:
    if view.state == "finished":
        return f"finished in {_clock(view.facts.get('seconds', 0.0))}"
    if view.state == "stopped":
        return "stopped before its end; logs/ has the cause, --resume continues it"
    if view.state == "silent":
        return f"on another machine, no update for more than {_SILENT_SECONDS / 60:.0f} minutes"
    return view.state


def _progress(view: RunView) -> RenderableType:
    total = view.facts.get("total_steps")
    if total is None:
        return Text(f"step {view.step} of a stream without an end")
    grid = Table.grid(padding=(0, 2, 0, 0))
    left = view.seconds_left
    grid.add_row(
        f"step {view.step}/{total}",
        ProgressBar(total=max(total, 1), completed=view.step, width=30),
        f"{100 * view.step / max(total, 1):.0f} %",
        f"about {_clock(left)} left" if left is not None else "",
    )
    return grid


def _figures(view: RunView) -> str:
    last = view.steps[-1]
    seconds = sum(row["step_seconds"] for row in view.steps)
    samples = sum(row["samples_per_second"] * row["step_seconds"] for row in view.steps)
    figures = [f"epoch {last['epoch'] + 1}", f"loss {_number(last['loss'])}"]
    norm = next((row["grad_norm"] for row in reversed(view.steps) if row.get("grad_norm") is not None), None)
    if norm is not None:
        figures.append(f"grad norm {_number(norm)}")
    figures.append(f"{_number(samples / seconds if seconds else 0.0)} samples/s")
    figures.append(f"{human_seconds(seconds / len(view.steps))} a step")
    return "  ".join(figures)


def _expert_loads(view: RunView) -> str:
    """How much more than an even share the busiest expert gets, and the busiest rank that shares out experts."""
    expert, rank = (view.steps[-1].get(name) for name in _EXPERT_LOADS)
    if expert is None or rank is None:
        return ""
    return f"rows of experts: {_number(expert)} x an even share for the busiest, {_number(rank)} x for the busiest rank"


def _expert_rows(view: RunView) -> list[str]:
    """The share of each expert in the rows of its layer, as bars; the most uneven layers, if there are many."""
    layers = read_layers(view.experts.get("layers")) if view.experts is not None else []
    layers = [layer for layer in layers if layer.total]
    if view.experts is None or not layers:
        return []
    shown = sorted(layers, key=lambda layer: -layer.unevenness)[:_MOST_LAYERS]
    width = max(len(layer.name) for layer in shown)
    lines = [f"rows of each expert in step {view.experts['step']}"]
    for layer in (layer for layer in layers if layer in shown):
        each = -(-len(layer.rows) // _MOST_BARS)
        sums = [sum(layer.rows[start : start + each]) for start in range(0, len(layer.rows), each)]
        bars = "".join(_BARS[-(-count * (len(_BARS) - 1) // max(sums))] for count in sums)
        together = f" ({each} a bar)" if each > 1 else ""
        lost = f", {layer.lost()}" if layer.lost() else ""
        lines.append(f"  {layer.name:{width}}  |{bars}|  {layer.spread()}{lost}{together}")
    if len(layers) > len(shown):
        lines.append(f"  and {len(layers) - len(shown)} more layers, more even")
    return lines


def _events(view: RunView) -> list[str]:
    lines = []
    if view.evaluation is not None:
        shown = {k: v for k, v in view.evaluation.items() if k not in ("event", "step", "epoch", "seconds")}
        figures = "  ".join(f"{name} {_number(value)}" for name, value in shown.items())
        lines.append(f"evaluation after step {view.evaluation['step']}: {figures}")
    if view.checkpoint is not None:
        problem = view.checkpoint.get("error")
        step = view.checkpoint["step"]
        lines.append(f"last checkpoint: step {step}" if problem is None else f"step {step} is not saved: {problem}")
    return lines


def _ranks(view: RunView, live: JobSnapshot, num_rows: int) -> RenderableType:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("rank", "samples/s", *_PHASES, "rest", "memory", "now"):
        table.add_column(column, justify="left" if column == "now" else "right", no_wrap=True)
    slow = {(straggler.rank, straggler.phase) for straggler in live.slow}
    chosen = _choose(live, num_rows)
    for rank in chosen:
        table.add_row(*_row(rank, live.ranks[rank], live, slow, view.statuses.get(rank)))
    left_out = len(live.ranks) - len(chosen)
    return Group(table, Text(f"and {left_out} more ranks, less busy")) if left_out else table


def _row(
    rank: int, figures: RankFigures, live: JobSnapshot, slow: set[tuple[int, str]], status: RankStatus | None
) -> list[Text]:
    # The rest of a step: mostly waiting in collectives, also logging and saving.
    rest = max(0.0, live.step_seconds - sum(figures.seconds.values()))
    is_slow = any(slow_rank == rank for slow_rank, _ in slow)
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


def _choose(live: JobSnapshot, num_rows: int) -> list[int]:
    """The ranks to show, if they do not all fit: slow ones first, then the busiest."""
    ranks = range(len(live.ranks))
    if len(ranks) <= num_rows:
        return list(ranks)
    slow = {straggler.rank for straggler in live.slow}
    by_interest = sorted(ranks, key=lambda rank: (rank not in slow, -sum(live.ranks[rank].seconds.values())))
    return sorted(by_interest[:num_rows])


def _stall_lines(view: RunView) -> list[str]:
    """The phases of the ranks, if none has made progress for a while."""
    if view.state != "running" or not view.statuses:
        return []
    age = view.now - max(status.changed for status in view.statuses.values())
    if age < _STALL_SECONDS:
        return []
    where = ", ".join(f"rank {rank} in {status.phase}" for rank, status in sorted(view.statuses.items())[:8])
    return [f"no rank has made progress for {age:.0f} s: {where}"]


def _parsed(line: bytes | None) -> dict[str, Any] | None:
    """The record in a line; None for a damaged line, which is skipped."""
    try:
        row = parse_json(line) if line is not None else None
    except ValueError:
        return None
    return row if isinstance(row, dict) and "event" in row else None


def _facts_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a start record that are drawn, with checked types: the file may be damaged."""
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
    # Strings such as "nan" are shown as they are.
    raw = {key: row.get(key) for key in ("loss", "grad_norm", *_EXPERT_LOADS)}
    return {**raw, "step": step, "epoch": epoch, "step_seconds": seconds, "samples_per_second": _measure(rate) or 0.0}


def _event_of(row: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    return row if row is not None and _count(row.get("step")) is not None else None


def _count(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value < 2**53 else None


def _measure(value: Any) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and math.isfinite(value) and 0 <= value < 1e15 else None


def _clock(seconds: float) -> str:
    """m:ss or h:mm:ss."""
    whole = round(seconds)
    hours, minutes = whole // 3600, whole % 3600 // 60
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"


def _number(value: Any) -> str:
    if not isinstance(value, int | float):
        return str(value)[:_MAX_CHARACTERS]
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e15 else f"{value:.4g}"
