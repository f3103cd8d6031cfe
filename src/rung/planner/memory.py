"""Memory of a trace: peak bytes in live allocations, and the bytes that the CUDA caching allocator would reserve."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from dataclasses import dataclass, field

from rung.planner.trace import Alloc, Free, Trace

MIB = 2**20
# Constants of torch's CUDA caching allocator.
ROUNDING = 512
_SMALL = MIB  # requests up to this size come from segments of _SMALL_SEGMENT
_SMALL_SEGMENT = 2 * MIB
_LARGE_SEGMENT = 20 * MIB  # the segment of requests between _SMALL and _LARGE
_LARGE = 10 * MIB  # from here on a segment has the size of the request, rounded up to _SEGMENT_ROUNDING
_SEGMENT_ROUNDING = 2 * MIB


@dataclass(frozen=True)
class Peak:
    """The event of a trace at which the most memory is allocated."""

    num_bytes: int
    by_kind: dict[str, int]
    event: int
    phase: str


def find_peak(trace: Trace, *, rounding: int = 1, on_host: bool = False) -> Peak:
    """The peak of allocated bytes of the device, or of those that offloading keeps on the host.

    Each allocation is rounded up to `rounding`, as the device's allocator does.
    """
    found = find_peaks(trace, rounding=rounding, on_host=on_host).values()
    return max(found, key=lambda peak: peak.num_bytes, default=Peak(0, {}, 0, ""))


def find_peaks(trace: Trace, *, rounding: int = 1, on_host: bool = False) -> dict[str, Peak]:
    """The peak of each phase, in the order of the phases. More layers may move the peak of all to another one."""
    alive = 0
    best: dict[str, tuple[int, int]] = {}
    for position, event in enumerate(trace.events):
        if isinstance(event, Alloc | Free) and event.allocation.on_host == on_host:
            size = _rounded(event.allocation.num_bytes, rounding)
            alive += size if isinstance(event, Alloc) else -size
            if isinstance(event, Alloc) and alive > best.get(event.allocation.phase, (0, 0))[0]:
                best[event.allocation.phase] = alive, position
    kinds: dict[str, Counter[str]] = {phase: Counter() for phase in best}
    for allocation in trace.allocations:
        if allocation.on_host != on_host:
            continue
        size, died = _rounded(allocation.num_bytes, rounding), allocation.died
        for phase, (_, where) in best.items():
            if allocation.born <= where and (died is None or died > where):
                kinds[phase][allocation.kind] += size
    return {phase: Peak(size, dict(kinds[phase]), where, phase) for phase, (size, where) in best.items()}


def _rounded(num_bytes: int, to: int) -> int:
    return -(-num_bytes // to) * to


@dataclass(slots=True)
class _Piece:
    """A block of a segment, free or in use, linked to its neighbours."""

    size: int
    number: int
    pool: tuple[int, bool]
    before: _Piece | None = None
    after: _Piece | None = None
    is_free: bool = False


@dataclass
class CachingAllocator:
    """A model of torch's CUDA caching allocator that computes the reserved bytes.

    Each stream has a pool of small pieces and one of large pieces. A request gets the smallest free piece of its pool
    that fits, split if enough remains, or a new segment. Free neighbours are merged. Segments are never released.
    """

    reserved: int = 0
    _free: dict[tuple[int, bool], list[tuple[int, int]]] = field(default_factory=dict)  # size, number; sorted
    _pieces: dict[int, _Piece] = field(default_factory=dict)
    _numbers: int = 0

    def take(self, num_bytes: int, stream: int = 0) -> _Piece | None:
        if not num_bytes:
            return None
        size = _rounded(num_bytes, ROUNDING)
        pool = stream, size <= _SMALL
        free = self._free.setdefault(pool, [])
        place = bisect_left(free, (size, 0))
        piece = (
            self._pieces[free.pop(place)[1]] if place < len(free) else self._new_segment(self._segment_size(size), pool)
        )
        piece.is_free = False
        left = piece.size - size
        if left >= ROUNDING if pool[1] else left > _SMALL:  # torch's rule for splitting a block
            rest = self._new_piece(left, pool)
            rest.before, rest.after = piece, piece.after
            if piece.after is not None:
                piece.after.before = rest
            piece.after, piece.size = rest, size
            self._set_free(rest)
        return piece

    def give_back(self, piece: _Piece) -> None:
        for neighbour in (piece.before, piece.after):
            if neighbour is not None and neighbour.is_free:
                self._free[piece.pool].remove((neighbour.size, neighbour.number))
                piece.size += neighbour.size
                if neighbour is piece.before:
                    piece.before = neighbour.before
                    if piece.before is not None:
                        piece.before.after = piece
                else:
                    piece.after = neighbour.after
                    if piece.after is not None:
                        piece.after.before = piece
                del self._pieces[neighbour.number]
        self._set_free(piece)

    def _segment_size(self, size: int) -> int:
        if size <= _SMALL:
            return _SMALL_SEGMENT
        return _LARGE_SEGMENT if size < _LARGE else _rounded(size, _SEGMENT_ROUNDING)

    def _new_segment(self, size: int, pool: tuple[int, bool]) -> _Piece:
        self.reserved += size
        return self._new_piece(size, pool)

    def _new_piece(self, size: int, pool: tuple[int, bool]) -> _Piece:
        self._numbers += 1
        piece = self._pieces[self._numbers] = _Piece(size, self._numbers, pool)
        return piece

    def _set_free(self, piece: _Piece) -> None:
        piece.is_free = True
        insort(self._free.setdefault(piece.pool, []), (piece.size, piece.number))


def reserve(trace: Trace, workspaces: dict[str, int] | None = None) -> int:
    """The bytes that the allocator has reserved at the end of a trace.

    `workspaces` maps a phase to the bytes that libraries allocate at its first allocation and keep.
    """
    allocator = CachingAllocator()
    held: dict[int, _Piece] = {}
    waiting = dict(workspaces or {})
    for event in trace.events:
        if isinstance(event, Alloc) and not event.allocation.on_host:
            if event.allocation.phase in waiting:
                allocator.take(waiting.pop(event.allocation.phase))
            piece = allocator.take(event.allocation.num_bytes, event.allocation.stream)
            if piece is not None:
                held[event.allocation.number] = piece
        elif isinstance(event, Free) and event.allocation.number in held:
            allocator.give_back(held.pop(event.allocation.number))
    return allocator.reserved
