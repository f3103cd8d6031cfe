"""Checks of a machine's GPUs: the driver's report, the links between them, and their measured speed."""

from __future__ import annotations

import csv
import io
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence

import torch

from rung.hardware.doctor.finding import Finding, failed, not_here, ok, warning
from rung.system.units import human_bytes

# The fields to query from nvidia-smi. A card reports [N/A] for a field that it does not have.
QUERY = (
    "index",
    "name",
    "driver_version",
    "temperature.gpu",
    "memory.used",
    "memory.total",
    "ecc.errors.uncorrected.volatile.total",
    "clocks_throttle_reasons.hw_slowdown",
    "clocks_throttle_reasons.sw_thermal_slowdown",
    "pcie.link.width.current",
    "pcie.link.width.max",
)
_SECONDS = 20
RunSmi = Callable[[Sequence[str]], str | None]  # arguments -> output of nvidia-smi; None if it is missing or fails
_HOT, _MAX_USED_MIB = 88, 1024  # degrees Celsius; memory in use before a job starts
_SLOW_VS_OTHERS, _SLOW_VS_DATASHEET = 0.85, 0.4  # shares of the speed below which a GPU is slow
# Part of the name -> (dense bf16 TFLOP/s, memory TB/s) of the datasheet. The first match counts: longer names first.
_DATASHEET = {
    "B200": (2250.0, 8.0),
    "H200": (989.0, 4.8),
    "H100 PCIe": (756.0, 2.0),
    "H100 NVL": (835.0, 3.9),
    "H100": (989.0, 3.35),
    "A100-SXM4-80GB": (312.0, 2.04),
    "A100": (312.0, 1.55),
    "L40S": (362.0, 0.864),
    "L4": (121.0, 0.3),
    "A10": (125.0, 0.6),
}


def check_gpus(num_visible: int | None = None, smi: RunSmi | None = None) -> list[Finding]:
    """Check what nvidia-smi reports. `smi` replaces nvidia-smi in tests."""
    query = smi or _nvidia_smi
    table = query([f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader,nounits"])
    visible = torch.cuda.device_count() if num_visible is None else num_visible
    if table is None:
        if visible:
            return [
                warning(
                    "GPUs", f"{visible}, but nvidia-smi does not answer", "install nvidia-utils to see their health"
                )
            ]
        return [not_here("GPUs", "torch sees none, and there is no nvidia-smi")]
    cards = [dict(zip(QUERY, row, strict=True)) for row in csv.reader(io.StringIO(table), skipinitialspace=True) if row]
    return [_presence(cards, visible), _errors(cards), _heat(cards), _memory(cards), _bus(cards), _nvlink(query, cards)]


def _presence(cards: list[dict[str, str]], visible: int) -> Finding:
    if not cards:
        return not_here("GPUs", "the driver reports none")
    names = sorted({card["name"] for card in cards})
    found = f"{len(cards)} x {', '.join(names)}, driver {cards[0]['driver_version']}"
    if not visible:
        fix = "install a torch built for CUDA, and check CUDA_VISIBLE_DEVICES"
        return failed("GPUs", f"{found}, and torch sees none of them", fix)
    if len(names) > 1:
        return warning(
            "GPUs", f"{found}: not all alike", "choose equal ones with CUDA_VISIBLE_DEVICES: the slowest sets the pace"
        )
    return ok("GPUs", found + (f"; torch sees {visible}" if visible != len(cards) else ""))


def _errors(cards: list[dict[str, str]]) -> Finding:
    counts = {card["index"]: card["ecc.errors.uncorrected.volatile.total"] for card in cards}
    bad = [f"GPU {index}: {count}" for index, count in counts.items() if count.isdigit() and int(count)]
    if bad:
        fix = (
            "nvidia-smi --gpu-reset -i <index>, or leave it out with CUDA_VISIBLE_DEVICES; replace it if they come back"
        )
        return failed("GPU memory errors", f"uncorrected since the driver was loaded: {', '.join(bad)}", fix)
    if not any(count.isdigit() for count in counts.values()):
        return not_here("GPU memory errors", "these cards do not count them")
    return ok("GPU memory errors", "no uncorrected ones since the driver was loaded")


def _heat(cards: list[dict[str, str]]) -> Finding:
    slowed = [
        f"GPU {card['index']} at {card['temperature.gpu']} C"
        for card in cards
        if "Active"
        in (card["clocks_throttle_reasons.hw_slowdown"], card["clocks_throttle_reasons.sw_thermal_slowdown"])
    ]
    if slowed:
        return failed(
            "GPU clocks", f"slowed down by the card: {', '.join(slowed)}", "check its cooling and its power cable"
        )
    degrees = [int(card["temperature.gpu"]) for card in cards if card["temperature.gpu"].isdigit()]
    found = f"not slowed down, {max(degrees)} C at most" if degrees else "not slowed down"
    if degrees and max(degrees) >= _HOT:
        return warning("GPU clocks", found, "check the cooling: the card slows itself down a few degrees above")
    return ok("GPU clocks", found)


def _memory(cards: list[dict[str, str]]) -> Finding:
    used = {card["index"]: int(card["memory.used"]) for card in cards if card["memory.used"].isdigit()}
    taken = [f"GPU {index}: {human_bytes(mib * 2**20)}" for index, mib in used.items() if mib > _MAX_USED_MIB]
    if taken:
        return warning("GPU memory", f"already in use: {', '.join(taken)}", "end the processes that nvidia-smi lists")
    return ok("GPU memory", "free on all of them")


def _bus(cards: list[dict[str, str]]) -> Finding:
    """Check the width of the bus, not its generation, which an idle card lowers by itself."""
    widths = {card["index"]: (card["pcie.link.width.current"], card["pcie.link.width.max"]) for card in cards}
    narrow = [
        f"GPU {index}: x{now} of x{most}"
        for index, (now, most) in widths.items()
        if now.isdigit() and most.isdigit() and int(now) < int(most)
    ]
    if narrow:
        return warning("PCIe", f"narrower than the card: {', '.join(narrow)}", "reseat the card, or use a full slot")
    return ok("PCIe", ", ".join(sorted({f"x{now}" for now, _ in widths.values()})))


def _nvlink(query: RunSmi, cards: list[dict[str, str]]) -> Finding:
    status = query(["nvlink", "--status"]) or ""
    links = re.findall(r"Link \d+: (.*)", status)
    if not links:
        return not_here("NVLink", "no links between these cards")
    down = [link for link in links if "inactive" in link.lower() or link.strip().startswith("0 ")]
    if down and len(cards) > 1:
        return failed(
            "NVLink",
            f"{len(down)} of {len(links)} links are down",
            "see nvidia-smi nvlink --status; check the fabric manager",
        )
    if down:
        return not_here("NVLink", f"{len(links)} links, {len(down)} of them unused by a card alone")
    return ok("NVLink", f"{len(links)} links up")


def peer_access() -> Finding:
    """Check whether GPUs can access each other's memory without the host."""
    count = torch.cuda.device_count()
    if count < 2:
        return not_here("peer access", f"{count} GPU{'s' * (count != 1)} here")
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    missing = [f"{a}-{b}" for a, b in pairs if not torch.cuda.can_device_access_peer(a, b)]
    if missing:
        found = f"{len(missing)} of {len(pairs)} pairs go through the host: {', '.join(missing[:8])}"
        return warning("peer access", found, "check ACS in the BIOS, and nvidia-smi topo -m")
    return ok("peer access", f"all {len(pairs)} pairs")


# -- speed -----------------------------------------------------------------------------------------------------------


def probe_speed(device: torch.device) -> tuple[float, float]:
    """(TFLOP/s of a bf16 matrix product, TB/s of a copy) of one GPU, the best of several rounds."""
    size = 8192
    with torch.no_grad():
        a = torch.randn(size, size, device=device, dtype=torch.bfloat16)
        b, c = torch.randn_like(a), torch.empty_like(a)
        product = _best_seconds(device, lambda: torch.mm(a, b, out=c))
        source = torch.empty(2**29, device=device, dtype=torch.uint8)
        target = torch.empty_like(source)
        copy = _best_seconds(device, lambda: target.copy_(source))
    return 2 * size**3 / product / 1e12, 2 * source.numel() / copy / 1e12


def _best_seconds(device: torch.device, work: Callable[[], object], rounds: int = 8) -> float:
    best = float("inf")
    for _ in range(rounds):
        torch.cuda.synchronize(device)
        started = time.perf_counter()
        work()
        torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - started)
    return best


def judge_speed(names: Sequence[str], speeds: Sequence[tuple[float, float]], places: Sequence[str]) -> Finding:
    """Compare each GPU with the others of its model and with its datasheet. `places` names the rank of each."""
    slow = []
    for number, (name, speed) in enumerate(zip(names, speeds, strict=True)):
        others = [other for rank, other in enumerate(speeds) if names[rank] == name and rank != number]
        for which, unit in enumerate(("TFLOP/s in bf16", "TB/s of memory")):
            typical = sorted(other[which] for other in others)[len(others) // 2] if others else 0.0
            peak = next((peaks[which] for part, peaks in _DATASHEET.items() if part in name), 0.0)
            if speed[which] < _SLOW_VS_OTHERS * typical:
                slow.append(f"{places[number]}: {speed[which]:.3g} {unit}, the others {typical:.3g}")
            elif speed[which] < _SLOW_VS_DATASHEET * peak:
                slow.append(f"{places[number]}: {speed[which]:.3g} {unit}, the datasheet says {peak:.3g}")
    if slow:
        return failed(
            "GPU speed", "; ".join(slow), "see what else runs there and how hot it is; leave it out if it stays slow"
        )
    flops, rates = [speed[0] for speed in speeds], [speed[1] for speed in speeds]
    found = f"{_span(flops, '.0f')} TFLOP/s in bf16, copies at {_span(rates, '.2f')} TB/s"
    return ok("GPU speed", found)


def _span(values: Sequence[float], form: str) -> str:
    low, high = format(min(values), form), format(max(values), form)
    return low if low == high else f"{low} to {high}"


def _nvidia_smi(arguments: Sequence[str]) -> str | None:
    path = shutil.which("nvidia-smi")
    if path is None:
        return None
    try:
        done = subprocess.run([path, *arguments], capture_output=True, text=True, timeout=_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
