"""What a stranger who reaches the port of a store can do: nothing that a process of the job believes."""

from __future__ import annotations

import base64
import errno
import json
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousGracefulExitError,
    RendezvousStateError,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc, _RendezvousState

from rung.distributed import store as ranks_store
from rung.distributed.job_key import derive_key, new_key, shared_key
from rung.distributed.signed_store import LOOPBACK, ForgedMessage, SignedStore, join_store, serve_store
from rung.errors import ConfigError, EnvironmentProblem
from rung.launch.rendezvous.elastic import Unconfirmed
from rung.launch.rendezvous.rendezvous import Rendezvous, local_rendezvous, open_rendezvous
from rung.launch.rendezvous.round import LauncherResult, Round
from rung.launch.rendezvous.state import JsonRendezvousBackend, StateCodec
from rung.spec.config import RunConfig
from tests.harness import on_ranks
from tests.launcher import WarmLauncher, assert_soon
from tests.sockets import family_of, listeners

_MARK = "a-stranger-was-here"


class _Bomb:
    """Unpickled, it runs a command."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[object, ...]:
        return os.system, (f"touch {self.target}",)


@pytest.fixture
def store() -> SignedStore:
    return SignedStore(serve_store(LOOPBACK), new_key())


# -- signed values -----------------------------------------------------------------------------------------------------


def test_what_a_process_with_the_key_wrote_is_read(store: SignedStore) -> None:
    other = SignedStore(join_store(LOOPBACK, store.port), store.key)
    other.set("word", b"\x00\xff told")
    assert store.get("word") == b"\x00\xff told"
    assert store.compare_set("first", "", "mine") == b"mine"
    assert other.compare_set("first", "", "theirs") == b"mine"
    assert other.compare_set("first", "mine", "theirs") == b"theirs" == store.get("first")
    assert (store.add("count", 2), other.add("count", 1), store.get("count")) == (2, 3, b"3")


@pytest.mark.parametrize("value", [b"", b"told", b"x" * 31, b"x" * 40, b"5"])
def test_what_a_stranger_wrote_is_refused(store: SignedStore, value: bytes) -> None:
    stranger = join_store(LOOPBACK, store.port)
    stranger.set("word", value)
    with pytest.raises(ForgedMessage, match=r"'word' at 127.0.0.1:\d+ is not signed with the key of this job"):
        store.get("word")
    if value:  # nothing under a name is what `compare_set` begins with
        with pytest.raises(ForgedMessage):
            store.compare_set("word", "", "mine")


def test_a_signed_value_under_another_name_is_refused(store: SignedStore) -> None:
    store.set("harmless", "told")
    stranger = join_store(LOOPBACK, store.port)
    stranger.set("folder", stranger.get("harmless"))
    with pytest.raises(ForgedMessage):
        store.get("folder")


def test_a_number_is_believed_where_this_process_counts_and_nowhere_else(store: SignedStore) -> None:
    store.add("count", 1)
    stranger = join_store(LOOPBACK, store.port)
    stranger.set("count", "no number")
    with pytest.raises(ForgedMessage):
        store.get("count")


def test_a_store_listens_on_one_interface_alone() -> None:
    served = serve_store(LOOPBACK)
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    rows += [line.split() for line in Path("/proc/net/tcp6").read_text().splitlines()[1:]]
    wanted = f"{served.port:04X}"
    listening = [row[1].partition(":")[0] for row in rows if row[3] == "0A" and row[1].endswith(f":{wanted}")]
    assert listening == ["0100007F"]  # 127.0.0.1


# -- keys --------------------------------------------------------------------------------------------------------------


def test_the_key_is_of_the_flag_then_of_the_environment_then_of_the_user(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv("RUNG_RDZV_KEY", raising=False)
    own = shared_key()
    made = tmp_path / "rung" / "key"
    assert made.stat().st_mode & 0o777 == 0o600 and len(own) == 64
    assert shared_key() == own and [path.name for path in made.parent.iterdir()] == ["key"]
    monkeypatch.setenv("RUNG_RDZV_KEY", "of the environment")
    assert shared_key() == "of the environment"
    file = tmp_path / "file"
    file.write_text("of the flag, and long enough\n")
    file.chmod(0o600)
    assert shared_key(str(file)) == "of the flag, and long enough"


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOTSUP, errno.ENOSPC])
def test_a_key_is_made_where_the_file_system_has_no_links(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, number: int
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("os.link", refuse)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv("RUNG_RDZV_KEY", raising=False)
    made = tmp_path / "rung" / "key"
    if number == errno.ENOSPC:  # which is no matter of links
        with pytest.raises(EnvironmentProblem, match="cannot be made: No space left"):
            shared_key()
        assert list(made.parent.iterdir()) == []
        return
    own = shared_key()
    assert shared_key() == own and len(own) == 64 and made.stat().st_mode & 0o777 == 0o600
    assert list(made.parent.iterdir()) == [made], "nothing stays behind"


def test_a_key_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "key"
    with pytest.raises(ConfigError, match=r"--rdzv-key, .*key, cannot be read: No such file"):
        shared_key(str(file))
    file.write_text("short")
    file.chmod(0o600)
    with pytest.raises(ConfigError, match=r"has 5 characters; a key has 16 to 4096"):
        shared_key(str(file))
    file.write_text("x" * 5000)
    with pytest.raises(ConfigError, match="a key has 16 to 4096"):
        shared_key(str(file))
    file.write_bytes(b"\xff" * 32)
    with pytest.raises(ConfigError, match="is not text"):
        shared_key(str(file))
    file.write_text("long enough for a key")
    for mode in (0o644, 0o640, 0o660):
        file.chmod(mode)
        with pytest.raises(ConfigError, match="can be read by other users of this machine: chmod 600"):
            shared_key(str(file))
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(ConfigError, match="is not a file"):
        shared_key(str(tmp_path / "pipe"))
    monkeypatch.setenv("RUNG_RDZV_KEY", "short")
    with pytest.raises(ConfigError, match="the environment variable RUNG_RDZV_KEY has 5 characters"):
        shared_key()


def test_where_no_key_can_be_made_the_way_out_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "file"))
    monkeypatch.delenv("RUNG_RDZV_KEY", raising=False)
    with pytest.raises(EnvironmentProblem, match=r"--rdzv-key FILE, or the environment variable RUNG_RDZV_KEY"):
        shared_key()


# -- the rendezvous ----------------------------------------------------------------------------------------------------


def test_no_pickle_of_a_stranger_is_read_where_launchers_meet(tmp_path: Path) -> None:
    """torch's own backend unpickles what lies under its key; whoever reaches the port has then run code."""
    rendezvous = local_rendezvous()
    stranger = join_store(LOOPBACK, rendezvous.job.base.port)
    bomb = pickle.dumps(_Bomb(tmp_path / _MARK))
    for name in ("torch.rendezvous.rung-0", "rendezvous/rung-0"):
        stranger.set(name, base64.b64encode(bomb))
    with pytest.raises(ForgedMessage):
        rendezvous.job.handler._handler._state_holder.sync()
    stranger.set("rendezvous/rung-0", bomb)
    with pytest.raises(ForgedMessage):
        rendezvous.job.handler._handler._state_holder.sync()
    assert not (tmp_path / _MARK).exists()


def test_a_launcher_with_another_key_is_told_so() -> None:
    served = serve_store(LOOPBACK)
    endpoint = f"{LOOPBACK}:{served.port}"
    first = open_rendezvous(endpoint, "the first key of all", (1, 2), print)
    with pytest.raises(ForgedMessage, match="Give all of them the same --rdzv-key FILE"):
        open_rendezvous(endpoint, "quite another key", (1, 2), print)
    first.leave()


# -- signed values that somebody puts back -----------------------------------------------------------------------------


class _Launchers:
    """Jobs that share a key, one after the other, each with a store of its own that a stranger reaches."""

    def __init__(self) -> None:
        self.served = serve_store(LOOPBACK)
        self.stranger = join_store(LOOPBACK, self.served.port)
        self.all: list[Rendezvous] = []

    def join(self, nodes: tuple[int, int]) -> Rendezvous:
        self.all.append(open_rendezvous(f"{LOOPBACK}:{self.served.port}", _SHARED, nodes, print))
        return self.all[-1]

    def leave(self) -> None:
        for rendezvous in self.all:
            rendezvous.leave()

    def record(self, *names: str) -> dict[str, bytes]:
        return {name: self.stranger.get(name) for name in names}

    def put_back(self, values: dict[str, bytes]) -> None:
        for name, value in values.items():
            self.stranger.set(name, value)


_SHARED = "a key that all jobs of a user share"
_ROUND = "rung/0/round/0"


@pytest.fixture
def jobs() -> Iterator[list[_Launchers]]:
    made = [_Launchers(), _Launchers()]
    yield made
    for job in made:
        job.leave()


def _form(*meetings: Rendezvous) -> list[Round]:
    """A world of these launchers, the rounds in the order of `meetings`."""
    with ThreadPoolExecutor(len(meetings)) as pool:
        return list(pool.map(lambda rendezvous: rendezvous.form(1, "ddp", RunConfig(), resume=False), meetings))


def test_launchers_agree_and_each_world_has_a_key_of_its_own(jobs: list[_Launchers]) -> None:
    first, second = (jobs[0].join((2, 2)) for _ in range(2))
    assert [first.agree("folder", "runs/a"), second.agree("folder", "runs/b")] == ["runs/a", "runs/a"]
    keys = []
    for attempt in (1, 2):
        rounds = _form(first, second)
        assert {round_.attempt for round_ in rounds} == {attempt}
        assert first.key_of(rounds[0]) == second.key_of(rounds[1])
        keys.append(first.key_of(rounds[0]))
    first.leave()
    third = jobs[0].join((2, 2))
    assert third.agree("folder", "runs/c") == "runs/a"
    assert {round_.attempt for round_ in _form(second, third)} == {3}, "who was in a world confirms what it knows"
    other = jobs[1].join((1, 1))
    keys.append(other.key_of(*_form(other)))
    assert len(set(keys)) == 3


def test_a_plan_of_another_job_is_refused(jobs: list[_Launchers], monkeypatch: pytest.MonkeyPatch) -> None:
    """It says where the ranks of that job met."""
    _form(*(jobs[0].join((2, 2)) for _ in range(2)))
    later = jobs[1].join((2, 2))
    jobs[1].put_back(jobs[0].record(f"{_ROUND}/first", f"{_ROUND}/plan"))
    monkeypatch.setattr(later.job.handler, "join", lambda *_: (1, 2))
    with pytest.raises(ForgedMessage, match=r"'round/0/plan' at 127.0.0.1:\d+ was not made for the world that is form"):
        _form(later)


def test_an_offer_of_a_launcher_that_is_not_there_is_refused(
    jobs: list[_Launchers], monkeypatch: pytest.MonkeyPatch
) -> None:
    _form(*(jobs[0].join((2, 2)) for _ in range(2)))
    later = jobs[1].join((2, 2))
    jobs[1].put_back(jobs[0].record(f"{_ROUND}/host/1"))
    monkeypatch.setattr(later.job.handler, "join", lambda *_: (0, 2))
    with pytest.raises(ForgedMessage, match=r"'round/0/host/1' at .* was not made for the world"):
        _form(later)


@pytest.mark.parametrize("name", ["folder", "run", "begins"])
def test_a_directory_that_another_job_chose_is_not_used(jobs: list[_Launchers], name: str) -> None:
    """Launchers agree upon it before the first round."""
    jobs[0].join((1, 2)).agree(name, "of a run that is done")
    jobs[1].put_back(jobs[0].record(f"rung/0/{name}"))
    later = jobs[1].join((1, 2))
    assert later.agree(name, "new") == "of a run that is done"
    with pytest.raises(EnvironmentProblem, match=f"as the {name} of this job, and no machine that takes part has"):
        _form(later)


def test_launchers_meet_anew_when_all_that_began_the_job_are_gone(jobs: list[_Launchers]) -> None:
    """As where one leaves and waits for a place again, and then the machine of the other one is gone."""
    gone = jobs[0].join((1, 2))
    gone.agree("begins", "True")
    _form(gone)
    waiting = jobs[0].join((1, 2))
    assert waiting.agree("begins", "False") == "True"
    gone.leave()
    with pytest.raises(Unconfirmed):
        _form(waiting)
    waiting.leave()
    anew = jobs[0].join((1, 2))
    assert anew.agree("begins", "False") == "False"
    (round_,) = _form(anew)
    assert round_.num_hosts == 1


def test_a_launcher_goes_on_at_the_store_of_a_machine_that_was_started_again(jobs: list[_Launchers]) -> None:
    """The machine that serves the store is lost with it. Started again, it finds the run in the shared directory."""
    first, second = (jobs[0].join((2, 2)) for _ in range(2))
    for one in (first, second):
        assert one.agree("begins", "True") == "True" and one.agree("run", "a") == "a"
    _form(first, second)
    first.leave()
    again = jobs[1].join((2, 2))
    assert again.agree("begins", "False") == "False" and again.agree("run", "a") == "a"
    second._use(join_store(LOOPBACK, jobs[1].served.port))
    assert {round_.attempt for round_ in _form(again, second)} == {2}


def test_the_result_of_a_launcher_of_another_job_is_refused(jobs: list[_Launchers]) -> None:
    old, new = ([job.join((2, 2)) for _ in range(2)] for job in jobs)
    for pair in (old, new):
        _form(*pair)
    for rendezvous in old:
        rendezvous.report(LauncherResult("failed", "10.0.0.1", 1, "of another job"))
    jobs[1].put_back(jobs[0].record(f"{_ROUND}/result/0", f"{_ROUND}/result/1"))
    for host in (0, 1):
        with pytest.raises(ForgedMessage):
            new[0]._round_store.get(f"result/{host}")
    time.sleep(0.6)
    assert not new[0].peers().results and not new[1].peers().results


def test_the_end_of_another_job_is_not_that_of_this_one(jobs: list[_Launchers]) -> None:
    """A launcher that waits for a place learns from the store how the job ended, and exits with 0 if it finished."""
    done, waiting = (jobs[0].join((1, 1)) for _ in range(2))
    _form(done)
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(_form, waiting)
        while not done.job.handler.state.redundancy_list:
            time.sleep(0.05)
            done.job.handler._handler._state_holder.sync()
        done.close("finished", "")
        with pytest.raises((RendezvousClosedError, RendezvousGracefulExitError)):
            waits.result(10)
    assert waiting.ending() == ("finished", "") == done.ending()
    later = jobs[1].join((1, 1))
    jobs[1].put_back(jobs[0].record("rung/0/ending", "rendezvous/rung-0"))
    with pytest.raises(RendezvousClosedError):
        _form(later)
    assert later.ending() == ("failed", "it was closed")


def _rank_stores(served: TCPStore, size: int = 2) -> list[SignedStore]:
    """What ranks that torchrun has started make of its store, each in a thread."""

    def make(rank: int) -> SignedStore:
        store = join_store(LOOPBACK, served.port, seconds=20)
        return ranks_store._of_world(store, ranks_store._make_world_key(SignedStore(store, _SHARED), rank, size))

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(make, range(size)))


def test_what_ranks_of_another_job_wrote_is_refused() -> None:
    """Ranks that torchrun, srun or mpirun has started, with a key that all jobs of the user share."""
    served = [serve_store(LOOPBACK) for _ in range(2)]
    stranger = [join_store(LOOPBACK, one.port) for one in served]
    old, new = (_rank_stores(one, size=3) for one in served)
    assert len({one.key for one in old}) == len({one.key for one in new}) == 1 and old[0].key != new[0].key
    old[1].set("address", "of a dead rank")
    assert old[2].get("address") == b"of a dead rank"
    names = [f"world-{derive_key(one[0].key, 'name')[:16]}/address" for one in (old, new)]
    stranger[1].set(names[1], stranger[0].get(names[0]))
    with pytest.raises(ForgedMessage):
        new[2].get("address")


def test_ranks_that_torchrun_starts_again_find_nothing_of_the_earlier_ones() -> None:
    """It keeps the store meanwhile."""
    served = serve_store(LOOPBACK)
    old = _rank_stores(served)
    old[1].set("address", "of a dead rank")
    again = _rank_stores(served)
    assert again[0].key == again[1].key != old[0].key
    assert not again[0].check(["address"])


def test_a_rank_takes_no_answer_that_rank_0_gave_in_another_job() -> None:
    served = [serve_store(LOOPBACK) for _ in range(2)]
    _rank_stores(served[0])
    store = SignedStore(join_store(LOOPBACK, served[1].port, seconds=1), _SHARED)
    stranger, recorded = (join_store(LOOPBACK, one.port) for one in (served[1], served[0]))
    asked = SignedStore(recorded, _SHARED).get("nonce/1").decode()
    stranger.set(f"answer/{asked}", recorded.get(f"answer/{asked}"))
    with pytest.raises(EnvironmentProblem, match="rank 1 got no answer from rank 0"):
        ranks_store._make_world_key(store, 1, 2)
    stranger.set("answer/new", recorded.get(f"answer/{asked}"))  # under the name that this rank waits for
    with pytest.raises(ForgedMessage):
        store.get("answer/new")


# -- the state of the rendezvous ---------------------------------------------------------------------------------------


def _state() -> _RendezvousState:
    state = _RendezvousState()
    first, second = _NodeDesc("a", 1, 0), _NodeDesc("b", 2, 0)
    state.round, state.complete, state.participants = 3, True, {first: 0, second: 1}
    state.wait_list, state.redundancy_list = {_NodeDesc("c", 3, 1)}, {_NodeDesc("d", 4, 0)}
    state.last_heartbeats = {node: datetime.now(UTC) for node in (first, second)}
    state.deadline = datetime.now(UTC) + timedelta(seconds=1)
    return state


def test_the_state_survives_the_way_through_json() -> None:
    writer, reader = StateCodec(1.0), StateCodec(1.0)
    state = _state()
    found = reader.decode(writer.encode(state).encode())
    for name in ("round", "complete", "closed", "participants", "wait_list", "redundancy_list"):
        assert getattr(found, name) == getattr(state, name)
    assert found.last_heartbeats.keys() == state.last_heartbeats.keys()
    assert found.deadline is not None


def test_machines_whose_clocks_differ_do_not_take_each_other_for_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher is dead when its counter stands still, whatever its clock says."""
    kept = SignedStore(serve_store(LOOPBACK), new_key())
    began, second = datetime.now(UTC), timedelta(seconds=1)
    slow, quick = (JsonRendezvousBackend(kept, "job", 1.0) for _ in range(2))
    ahead = _RendezvousState()
    node = _NodeDesc("ahead", 1, 0)
    ahead.last_heartbeats = {node: datetime.now(UTC) + timedelta(hours=-5)}  # of a clock that is five hours behind
    ahead.deadline = datetime.now(UTC) + timedelta(hours=-5, seconds=1)
    answer = quick.set_state(pickle.dumps(ahead))
    assert answer is not None and answer[2]
    got = slow.get_state()
    assert got is not None
    seen = pickle.loads(got[0])
    assert began - second < seen.last_heartbeats[node] < datetime.now(UTC) + second
    assert began < seen.deadline < datetime.now(UTC) + 1.1 * second
    # It says nothing more: its age grows on the reader's monotonic clock.
    started = time.monotonic()
    for passed in range(1, 8):
        monkeypatch.setattr("rung.launch.rendezvous.state.time.monotonic", lambda passed=passed: started + passed)
        got = slow.get_state()
        assert got is not None
    seen = pickle.loads(got[0])
    assert began - 8 * second < seen.last_heartbeats[node] < datetime.now(UTC) - 6 * second


def test_a_launcher_that_was_held_up_does_not_take_others_for_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine with too much to do, it may not look for a while; the others lived meanwhile, or did not."""
    writer, reader = StateCodec(1.0), StateCodec(1.0)
    state = _state()
    text = writer.encode(state).encode()
    reader.decode(text)
    started, (node, _) = time.monotonic(), state.last_heartbeats
    ages = []
    for passed in (30, 31, 32, 33, 34):
        monkeypatch.setattr("rung.launch.rendezvous.state.time.monotonic", lambda passed=passed: started + passed)
        ages.append((datetime.now(UTC) - reader.decode(text).last_heartbeats[node]).total_seconds())
    assert ages[0] < 3 < ages[-1], "it is given time to be seen again, and no more than that"


def test_a_launcher_that_joined_again_is_alive_to_one_that_was_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its counter begins anew, and may have come as far as the other has seen it before."""
    writer, reader = StateCodec(1.0), StateCodec(1.0)
    node, state, began = _NodeDesc("a", 1, 0), _RendezvousState(), datetime.now(UTC)
    state.last_heartbeats = {node: datetime.now(UTC)}
    reader.decode(writer.encode(state).encode())
    writer.decode(writer.encode(_RendezvousState()).encode())  # it left
    state.last_heartbeats = {node: datetime.now(UTC)}
    again = writer.encode(state)
    started = time.monotonic()
    monkeypatch.setattr("rung.launch.rendezvous.state.time.monotonic", lambda: started + 7)
    seen = reader.decode(again.encode())
    assert seen.last_heartbeats[node] > began - timedelta(seconds=1)


def test_only_who_gives_a_sign_of_life_changes_a_counter() -> None:
    one, two = StateCodec(1.0), StateCodec(1.0)
    text = one.encode(_state())
    state = two.decode(text.encode())
    again = json.loads(two.encode(state))
    assert again == json.loads(text), "reading and writing back changes nothing"
    state.last_heartbeats[_NodeDesc("b", 2, 0)] = datetime.now(UTC)
    counters = {row[0]: row[3] for row in json.loads(two.encode(state))["heartbeats"]}
    before = {row[0]: row[3] for row in json.loads(text)["heartbeats"]}
    assert counters == {"a": before["a"], "b": before["b"] + 1}


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", "{}", '{"round": "1"}', '{"round": 1e400}', "[" * 5000, '{"round": true}'],
)
def test_a_state_that_makes_no_sense_is_refused(text: str) -> None:
    with pytest.raises(RendezvousStateError, match="is invalid"):
        StateCodec(1.0).decode(text.encode())


# -- what ranks send each other ----------------------------------------------------------------------------------------


def _gathers_without_pickle() -> list[object]:
    def refuse(*_: object) -> object:
        raise AssertionError("an object of another rank was unpickled")

    dist.distributed_c10d._tensor_to_object = refuse  # type: ignore[attr-defined]
    from rung.distributed.world import open_world
    from rung.spec.strategy import parse

    with open_world(parse("ddp", 2), device="cpu") as world:
        return world.gather_objects({"rank": world.rank, "text": "ä" * (1 + 500 * world.rank), "nothing": None})


def test_objects_of_ranks_travel_as_json() -> None:
    rows = on_ranks(_gathers_without_pickle, 2)
    assert rows[0] == rows[1] == [{"rank": n, "text": "ä" * (1 + 500 * n), "nothing": None} for n in (0, 1)]


def test_groups_of_torch_refuse_an_address_that_a_stranger_wrote(store: SignedStore) -> None:
    """They reach the store through a prefix, in C++."""
    group = dist.PrefixStore("default_pg", store)  # type: ignore[attr-defined]
    group.set("0", "127.0.0.1:1")
    assert group.get("0") == b"127.0.0.1:1"
    stranger = dist.PrefixStore("default_pg", join_store(LOOPBACK, store.port))  # type: ignore[attr-defined]
    stranger.set("0", "127.0.0.1:2")
    with pytest.raises(ForgedMessage):
        group.get("0")


# -- calls over RPC ----------------------------------------------------------------------------------------------------


def test_a_call_that_is_not_signed_is_not_unpickled(store: SignedStore, tmp_path: Path) -> None:
    from rung.distributed.rpc import _SigningPickler

    pickler = _SigningPickler(store)
    content, tensors = pickler.serialize({"word": 1, "tensor": torch.ones(2)})
    found = pickler.deserialize(content, tensors)
    assert found["word"] == 1 and torch.equal(found["tensor"], torch.ones(2))
    bomb = pickle.dumps(_Bomb(tmp_path / _MARK))
    with pytest.raises(ForgedMessage):
        pickler.deserialize(bomb, [])
    with pytest.raises(ForgedMessage):
        pickler.deserialize(bytes(32) + bomb, [])
    assert not (tmp_path / _MARK).exists()


# -- the attack itself -------------------------------------------------------------------------------------------------

SLOW_TASK = """
import time, torch
from torch import nn
from torch.utils.data import TensorDataset
defaults = {"batch_size": 4, "device": "cpu", "steps": 40}
def model(): return nn.Linear(2, 2)
def train_data(): return TensorDataset(torch.randn(400, 2), torch.randint(0, 2, (400,)))
def loss(output, target):
    time.sleep(0.1)
    return nn.functional.cross_entropy(output, target)
def optimizer(model): return torch.optim.SGD(model.parameters(), lr=0.1)
"""

# Without torch: what any program on the machine can send. The protocol is that of torch's TCPStore.
_ATTACK = r"""
import base64, pickle, socket, struct, sys, os
class Bomb:
    def __reduce__(self): return os.system, (f"touch {sys.argv[1]}",)
bomb = pickle.dumps(Bomb())
def text(value): return struct.pack("<Q", len(value)) + value
for port in map(int, sys.argv[2:]):
    try:
        with socket.create_connection(("127.0.0.1", port), 1) as peer:
            peer.sendall(bytes([0]) + struct.pack("<I", 0x3C85F7CE))  # VALIDATE
            for name in ("/torch.rendezvous.rung-0", "/rendezvous/rung-0", "/rung/0/settings"):
                for value in (bomb, base64.b64encode(bomb)):
                    peer.sendall(bytes([1]) + text(name.encode()) + text(value))  # SET
            print("wrote to", port)
    except OSError as error:
        print(port, error)
"""


def test_a_stranger_on_the_machine_runs_no_code_in_a_job(launcher: WarmLauncher, tmp_path: Path) -> None:
    """`rung train --strategy ddp --nproc 2`, and a process without torch that writes into every store it finds."""
    (tmp_path / "task.py").write_text(SLOW_TASK)
    mark = tmp_path / _MARK

    def attack(folder: Path) -> None:
        assert_soon((folder / "run" / "metrics.jsonl").exists, "training did not begin", seconds=60)
        ports = {str(listener.port) for listener in listeners(family_of(launcher.pid))}
        command = [sys.executable, "-c", _ATTACK, str(mark), *ports]
        told = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
        assert "wrote to" in told

    words = ["train", "task.py", "--strategy", "ddp", "--nproc", "2", "--out", "run"]
    launcher.call(tmp_path, *words, during=attack, limit=90)
    assert not mark.exists(), "a stranger's code ran"
