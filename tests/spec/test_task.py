from __future__ import annotations

from pathlib import Path

import pytest

from rung.errors import ConfigError, TaskError
from rung.spec.task import Task, coerce, load_task, split_batch

COMPLETE = """
def model(depth=4, name="x", wide=False, scale=1.0): return depth
def train_data(): ...
def loss(output, target): ...
def optimizer(model, lr=0.1): return lr
"""


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(text)
    return path


def test_a_file_is_a_task_by_the_names_of_its_functions(tmp_path: Path) -> None:
    task = load_task(write(tmp_path, COMPLETE + "defaults = {'batch_size': 4}\nblocks = 'layers.*'\n"))
    assert task.name == "mine"
    assert task.defaults == {"batch_size": 4}
    assert task.blocks == "layers.*"
    assert task.eval_data is None


def test_arguments_with_defaults_can_be_set(tmp_path: Path) -> None:
    task = load_task(write(tmp_path, COMPLETE))
    assert task.arguments() == {
        "model.depth": 4,
        "model.name": "x",
        "model.wide": False,
        "model.scale": 1.0,
        "optimizer.lr": 0.1,
    }
    assert task.bind({"model.depth": "8"}).model() == 8
    assert task.bind({"optimizer.lr": "1e-3"}).optimizer(None) == 1e-3


@pytest.mark.parametrize(
    ("replaced", "by", "words"),
    [
        ("def optimizer(model, lr=0.1)", "def optimzer(model, lr=0.1)", ["optimzer", "misspelt 'optimizer'"]),
        ("def loss(output, target)", "def criterion(output, target)", ["missing: def loss(output, target)"]),
        ("def loss(output, target)", "def loss(output)", ["cannot be called as loss(output, target)"]),
        ("def optimizer(model, lr=0.1)", "def optimizer()", ["cannot be called as optimizer(model)"]),
        ("def model(depth=4, ", "def model(depth, ", ["cannot be called as model()", "need defaults"]),
        ("def train_data(): ...", "def train_dat(): ...", ["misspelt 'train_data'"]),
        ("def train_data(): ...", "def train_data(): ...\nmetrics = 3", ["metrics must be a function"]),
        ("def train_data(): ...", "def train_data(): ...\ndefaults = 3", ["defaults must be a dict"]),
        ("def train_data(): ...", "def train_data(): ...\ndef scheduler(o, t): ...", ["misspelt 'schedule'"]),
        ("def train_data(): ...", "def train_data(): ...\ndefault = {}", ["misspelt 'defaults'"]),
        ("def train_data(): ...", "def train_data(): ...\ndef on_stpe(s): ...", ["no hook 'on_stpe'", "'on_step'?"]),
        (
            "def train_data(): ...",
            "def train_data(): ...\ndef on_epoch(state): ...",
            ["no hook 'on_epoch', and it would never be called", "on_start, on_step, on_evaluation"],
        ),
        ("def train_data(): ...", "def train_data(): ...\ndef onstep(state): ...", ["misspelt 'on_step'"]),
        ("def train_data(): ...", "def train_data(): ...\ndef on_step(): ...", ["called as on_step(state)"]),
        ("def loss(output, target)", "def loss(output, target, log=1)", ["log of loss() gets a function", "is 1"]),
        ("def train_data(): ...", "raise ValueError('no')", ["does not load: ValueError: no", "line 3"]),
        ("def train_data(): ...", "def train_data( ...", ["does not load: SyntaxError"]),
    ],
)
def test_an_incomplete_file_is_one_clear_error(tmp_path: Path, replaced: str, by: str, words: list[str]) -> None:
    with pytest.raises(TaskError) as error:
        load_task(write(tmp_path, COMPLETE.replace(replaced, by)))
    for word in words:
        assert word in str(error.value)


def test_a_missing_file_suggests_its_neighbour(tmp_path: Path) -> None:
    write(tmp_path, COMPLETE)
    with pytest.raises(TaskError, match=r"no task file.*mine\.py"):
        load_task(tmp_path / "mime.py")


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("model.dept", "no argument 'dept'. Did you mean 'depth'"),
        ("modle.depth", "no setting 'modle.depth'. Did you mean 'model.depth'"),
        ("metrics.x", "no metrics() in this task"),
    ],
)
def test_an_unknown_argument_names_the_nearest(tmp_path: Path, key: str, words: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_task(write(tmp_path, COMPLETE)).bind({key: 1})
    assert words in str(error.value)


def test_helpers_beside_the_file_can_be_imported(tmp_path: Path) -> None:
    (tmp_path / "my_helper_module.py").write_text("VALUE = 3\n")
    load_task(write(tmp_path, "from my_helper_module import VALUE\n" + COMPLETE))


@pytest.mark.parametrize(
    ("value", "default", "expected"),
    [
        ("3", 1, 3),
        ("1_000", 1, 1000),
        ("2", 1.0, 2.0),
        ("true", False, True),
        ("off", True, False),
        ("7", "x", "7"),
        ("7", None, 7),
        ("[1, 2]", None, [1, 2]),
        ("word", None, "word"),
    ],
)
def test_values_take_the_type_of_the_default(value: str, default: object, expected: object) -> None:
    assert coerce("k", value, default) == expected


@pytest.mark.parametrize(("value", "default"), [("x", 1), ("1.5", 1), ("x", 1.0), ("maybe", True), (True, 1)])
def test_values_of_another_type_are_refused(value: object, default: object) -> None:
    with pytest.raises(ConfigError, match="k is a"):
        coerce("k", value, default)


def test_batches_are_pairs_or_dicts() -> None:
    assert split_batch((1, 2)) == (1, 2)
    assert split_batch({"x": 1, "labels": 2}) == ({"x": 1}, 2)
    assert split_batch({"x": 1}) == ({"x": 1}, {"x": 1})


def test_a_task_object_is_checked_like_a_file() -> None:
    with pytest.raises(TaskError, match="cannot be called as loss"):
        Task(model=lambda: 0, train_data=lambda: 0, loss=lambda x: x, optimizer=lambda m: 0)


def test_functions_with_an_argument_log_can_be_called_without_it(tmp_path: Path) -> None:
    logs = "def loss(output, target, log, scale=1.0): log('x', 1)\ndef forward(model, batch, *, log=None): log('y', 2)"
    task = load_task(write(tmp_path, COMPLETE.replace("def loss(output, target): ...", logs)))
    assert "loss.log" not in task.arguments() and task.arguments()["loss.scale"] == 1.0
    task.loss(0, 0)
    task.forward(0, 0)
    found: list[tuple[str, int]] = []
    bound = task.with_log({name: lambda *given: found.append(given) for name in task.logging_functions()})
    bound.bind({"loss.scale": "2"}).loss(0, 0)
    bound.forward(0, 0)
    assert found == [("x", 1), ("y", 2)]


def test_hooks_have_arguments_as_other_functions(tmp_path: Path) -> None:
    task = load_task(write(tmp_path, COMPLETE + "def on_step(state, every=10): return every\n"))
    assert task.hooks() == ["on_step"] and task.bind({"on_step.every": "5"}).on_step(None) == 5
