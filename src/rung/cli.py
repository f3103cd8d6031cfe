"""The command line: flags to calls, and errors to one clear line. No logic of its own."""

from __future__ import annotations

import argparse
import difflib
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from rung.config import FLAGS, SETTINGS
from rung.disk import is_refused, reason
from rung.environment import ignored_interfaces, outside_place, told_settings
from rung.errors import RESUME_EXIT_CODE, ConfigError, JobFailed, RungError
from rung.flags import TRAINED, add_settings, assignments_of
from rung.network import interface_of
from rung.strategy import PRESETS, SCHEDULES
from rung.submit.command import add_submit
from rung.tools import add_tools, run_plan
from rung.untrusted import printable
from rung.version import VERSION
from rung.watching import add_watching

# Those of `rung explain`: what changes where things live, what is sent, and when.
_EXPLAINED = {
    "where": ("strategy", "nproc", "schedule", "split", "sequence_parallel", "offload", "shard_by"),
    "how much": ("batch_size", "micro_batch"),
    "how": ("precision", "clip", "activation_checkpointing", "compress"),
}


_LAYOUT = "\n\t"  # of errors with several lines
_MAIN_SECONDS = 20.0  # that rank 0 has to speak; on a busy machine it may come late


class _Parser(argparse.ArgumentParser):
    """argparse with a suggestion for a misspelt flag or command, and help that fits a screen."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("allow_abbrev", False)
        kwargs.setdefault("formatter_class", _Help)
        super().__init__(*args, **kwargs)

    def error(self, message: str) -> NoReturn:
        unknown = re.search(r"unrecognized arguments: (\S+)", message)
        if unknown:
            word = unknown.group(1).partition("=")[0]
            known = [option for action in self._all_actions() for option in action.option_strings]
            own = [option for action in self._asked()._actions for option in action.option_strings]
            match = [
                *difflib.get_close_matches(word, own, n=1, cutoff=0.5),
                *difflib.get_close_matches(word, known, n=1, cutoff=0.5),
            ]
            setting = word.lstrip("-").replace("-", "_")
            hint = f" Did you mean {match[0]!r}?" if match else ""
            if setting in SETTINGS and setting not in FLAGS:
                hint = f" It is a setting without a flag: --set {setting}=VALUE."
            if word in known and (owners := self._owners(word)):
                match = difflib.get_close_matches(word, own, n=1, cutoff=0.85)
                hint = f" Did you mean {match[0]!r}?" if match else f" It is a flag of {', '.join(owners)}."
            message = f"there is no argument {word!r}{' here' * (word in known)}.{hint}"
        invalid = re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message)
        if invalid:
            choices = [choice.strip("' ") for choice in invalid.group(2).split(",")]
            match = difflib.get_close_matches(invalid.group(1), choices, n=1, cutoff=0.5)
            message = f"{invalid.group(1)!r} is not one of {', '.join(choices)}." + (
                f" Did you mean {match[0]!r}?" if match else ""
            )
        _leave_word_to_main()
        sys.stderr.write(f"rung: {message}\n{self._asked().prog} --help tells more.\n")
        raise SystemExit(2)

    def _asked(self) -> _Parser:
        """The command whose help is wanted: leftovers of a command are complained of by the parser above it."""
        parser = self
        for word in sys.argv[1:]:
            if word not in (commands := parser._commands()):
                break
            parser = commands[word]
        return parser

    def _commands(self) -> dict[str, _Parser]:
        found = [a for a in self._actions if isinstance(a, argparse._SubParsersAction)]
        return {name: parser for action in found for name, parser in action.choices.items()}

    def _owners(self, word: str) -> list[str]:
        """The commands that know a flag. `rung submit` has those of `rung train`, which is what it submits."""
        owners = [name for parser in self._commands().values() for name in parser._owners(word)]
        if not owners and any(word in action.option_strings for action in self._actions):
            return [self.prog]
        is_trained = "rung train" in owners
        return [name for name in dict.fromkeys(owners) if not (is_trained and name.startswith("rung submit"))]

    def _all_actions(self) -> list[argparse.Action]:
        found = list(self._actions)
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                for parser in action.choices.values():
                    found += parser._all_actions()
        return found


class _Help(argparse.HelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=34, width=119)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _build_parser()
    options = parser.parse_args(arguments)
    try:
        place = outside_place()
        if place is not None and not place.is_main and options.call in _ALONE:
            return 0
        starts_ranks = vars(options).pop("starts_ranks", False)
        if starts_ranks and place is None and getattr(options, "rdzv", None) is None:
            ignored = ignored_interfaces(interface_of("127.0.0.1"))
            sys.stderr.write(f"{printable(ignored)}\n" if ignored is not None else "")
        return int(options.call(options))
    except JobFailed as error:
        sys.stderr.write(f"{printable(error, keep=_LAYOUT)}\n")
        return 2 if error.is_mistake else 1
    except RungError as error:
        _leave_word_to_main()
        sys.stderr.write(f"rung: {printable(error, keep=_LAYOUT)}\n")
        return 2
    except OSError as error:
        if not is_refused(error):
            raise
        _leave_word_to_main()
        sys.stderr.write(f"rung: the system refuses it: {reason(error)}.\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return 130
    except Exception:
        _leave_word_to_main()
        raise


def _leave_word_to_main() -> None:
    """Of ranks that mpirun or torchrun has started, rank 0 says what all of them find: when it has, the others are
    ended. One that finds something alone says it a little later."""
    try:
        place = outside_place()
    except RungError:  # it is what there is to say
        return
    if place is not None and not place.is_main:
        time.sleep(_MAIN_SECONDS)


def _build_parser() -> _Parser:
    parser = _Parser(prog="rung", description="One plain PyTorch task, every way of spreading it.")
    parser.add_argument("--version", action="version", version=f"rung {VERSION}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, parser_class=_Parser)

    train = commands.add_parser(
        "train",
        help="train a task under a strategy",
        description="Train a task under a strategy. Under mpirun, torchrun or srun each process is a rank already.",
        usage="rung train [flags] task",  # of so many flags, a list of names only hides the list below
    )
    train.add_argument("task", help="a task file, or a directory with a task.py")
    add_settings(train, TRAINED)
    train.add_argument(
        "--resume",
        nargs="?",
        const=True,
        metavar="RUN",
        help="go on with a run from its newest checkpoint; without RUN, the task's newest",
    )
    train.add_argument(
        "--resume-if-there",
        action="store_true",
        help="go on with the run of --out if there is one, else begin it: for what a scheduler starts again",
    )
    train.set_defaults(call=_train)

    verify = commands.add_parser(
        "verify",
        help="prove that strategies give the same numbers on a task",
        description="Train a task for a few steps under each strategy and compare every parameter, buffer, loss and "
        "gradient norm with one process. Exits with 1 if any differs.",
    )
    verify.add_argument("task", help="a task file, or a directory with a task.py")
    verify.add_argument("--nproc", type=int, default=2, metavar="N", help="processes (default 2)")
    verify.add_argument(
        "--strategies",
        nargs="+",
        action="extend",
        metavar="NAME",
        help="names separated by spaces, repeated flags, or 'all' (default)",
    )
    verify.add_argument("--steps", type=int, default=5, metavar="N", help="steps of each run (default 5)")
    verify.add_argument("--batch-size", type=int, metavar="N", help="samples in one step (default: the task's)")
    verify.add_argument("--micro-batch", type=int, metavar="N", help="samples a process takes at a time")
    verify.add_argument(
        "--precision", choices=("fp64", "fp32"), default="fp64", help="fp64 to 1e-9 (default), or fp32 to 1e-5"
    )
    verify.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="a setting, or an argument of the task"
    )
    verify.add_argument("--json", action="store_true", help="the result as JSON on standard output")
    verify.set_defaults(call=_verify, starts_ranks=True)

    explain = commands.add_parser(
        "explain",
        help="show what a strategy will do with a task",
        description="Show where each parameter lives, what is sent in a step, and the schedule of a pipeline. It is "
        "read from a pretended step of the real training code: no process is started, so --nproc may be any number.",
    )
    explain.add_argument("task", help="a task file, or a directory with a task.py")
    add_settings(explain, _EXPLAINED, nproc="processes of the job; default: as many as the strategy's sizes say")
    result = explain.add_argument_group("what comes out")
    result.add_argument("--out", dest="svg", metavar="FILE.svg", help="draw it, too")
    result.add_argument("--json", action="store_true", help="the explanation as JSON on standard output")
    explain.set_defaults(call=_explain)

    scale = commands.add_parser(
        "scale",
        help="change the number of processes of a running job",
        description="Change the number of processes of a job that was started with --nproc MIN:MAX. No step is lost.",
    )
    scale.add_argument("run", help="the run's directory")
    scale.add_argument("processes", type=int, help="how many to go on with")
    scale.set_defaults(call=_scale)

    rdzv = commands.add_parser(
        "rdzv",
        help="keep the place where the machines of a job meet",
        description="Keep the place where machines meet (--rdzv HOST:PORT) in a process of its own, so that the job "
        "outlives the loss of any machine. Without it, the machine of that address keeps it. Ends with Ctrl-C.",
    )
    rdzv.add_argument("place", metavar="[HOST:]PORT", help="a port of all interfaces, or of the one of an address")
    rdzv.add_argument(
        "--once",
        action="store_true",
        help=f"end when a job that met there has finished; exits with {RESUME_EXIT_CODE} if a signal comes before",
    )
    rdzv.set_defaults(call=_rdzv)

    checkpoints = commands.add_parser(
        "checkpoints",
        help="list the checkpoints of a run and check them",
        description="List the checkpoints of a run, check every byte of them, and say which one --resume would take. "
        "Exits with 1 if any is damaged.",
    )
    checkpoints.add_argument("run", metavar="RUN", help="a run directory, or its folder of checkpoints")
    checkpoints.add_argument("--quick", action="store_true", help="look at the sizes of files, not at their content")
    checkpoints.add_argument("--json", action="store_true", help="the list as JSON on standard output")
    checkpoints.set_defaults(call=_checkpoints)

    export = commands.add_parser(
        "export",
        help="write a run's weights for use without Rung",
        description="Write the weights of a run under the module's own names: they load with strict=True into the "
        "bare module, whatever strategy trained them. The newest whole checkpoint is taken, or the end of the run.",
    )
    export.add_argument("run", metavar="RUN", help="a run directory, its folder of checkpoints, or one checkpoint")
    export.add_argument("--output", metavar="FILE", required=True, help="FILE.safetensors, FILE.pt or FILE.pth")
    export.add_argument("--step", type=int, metavar="N", help="the checkpoint of this step")
    export.add_argument("--best", action="store_true", help="that of the best evaluation (--set keep_best=METRIC)")
    export.add_argument(
        "--max-shard-size",
        metavar="SIZE",
        help="above it, several .safetensors files and an index as Hugging Face has (default 5GB)",
    )
    export.add_argument("--force", action="store_true", help="replace FILE if it is there")
    export.set_defaults(call=_export)

    add_watching(commands)
    add_tools(commands)
    add_submit(commands)

    new = commands.add_parser(
        "new", help="write a commented task file that runs", description="Write a commented task file that runs."
    )
    new.add_argument("name", help="a directory to make, with a task.py in it")
    new.set_defaults(call=_new)

    strategies = commands.add_parser("strategies", help="list the strategies", description="List the strategies.")
    strategies.set_defaults(call=_strategies)
    return parser


def _train(options: argparse.Namespace) -> int:
    from rung.launch.command import train

    flags = {name: getattr(options, name) for name in FLAGS}
    if flags["strategy"] == "auto":
        flags = _planned(options, flags)
    return train(
        options.task,
        config_file=options.config,
        flags=flags,
        assignments=assignments_of(options.set),
        resume=options.resume,
        resume_if_there=options.resume_if_there,
    )


def _planned(options: argparse.Namespace, flags: dict[str, Any]) -> dict[str, Any]:
    from rung.planner.auto import choose_flags

    if options.resume or options.resume_if_there or outside_place() is not None:
        raise ConfigError("--strategy auto is for a new run that `rung train` starts. Name a strategy.")
    if any(told.setting == "nnodes" and told.value != "1" for told in told_settings()):
        raise ConfigError("--strategy auto is for one machine, and the environment speaks of several. Name a strategy.")
    return choose_flags(
        options.task,
        config_file=options.config,
        flags=flags,
        assignments=assignments_of(options.set),
        say=lambda line: print(line, flush=True),
    )


def _verify(options: argparse.Namespace) -> int:
    from rung.verify import verify_command

    place = outside_place()
    if place is not None:
        raise ConfigError(
            f"`rung verify` starts processes of its own, and {place.launcher} has started {place.size} of it. Start it "
            "once, by itself."
        )
    flags = {"batch_size": options.batch_size, "micro_batch": options.micro_batch, "steps": options.steps}
    return verify_command(
        options.task,
        num_ranks=options.nproc,
        strategies=options.strategies or ["all"],
        precision=options.precision,
        flags=flags,
        assignments=assignments_of(options.set),
        as_json=options.json,
    )


def _explain(options: argparse.Namespace) -> int:
    from rung.explain_view import explain_command

    flags = {name: getattr(options, name) for names in _EXPLAINED.values() for name in names}
    return explain_command(
        options.task,
        config_file=options.config,
        flags=flags,
        assignments=assignments_of(options.set),
        out=options.svg,
        as_json=options.json,
    )


def _scale(options: argparse.Namespace) -> int:
    from rung.launch.elastic import scale

    print(scale(options.run, options.processes))
    return 0


def _rdzv(options: argparse.Namespace) -> int:
    from rung.launch.elastic import keep_store

    def tell(where: str) -> None:
        print(f"machines can meet at {where}", flush=True)

    is_over = keep_store(options.place, tell, once=options.once)
    return RESUME_EXIT_CODE if options.once and not is_over else 0


def _checkpoints(options: argparse.Namespace) -> int:
    from rung.checkpoint_view import checkpoints_command

    return checkpoints_command(options.run, as_json=options.json, quick=options.quick)


def _export(options: argparse.Namespace) -> int:
    from rung.checkpoint_view import export_command

    return export_command(
        options.run,
        output=options.output,
        step=options.step,
        best=options.best,
        max_shard_size=options.max_shard_size,
        force=options.force,
    )


def _new(options: argparse.Namespace) -> int:
    from rung.template import write_template

    if not options.name:
        raise ConfigError("the name of the directory to make is empty. Give it one: rung new NAME.")
    path = write_template(Path(options.name))
    print(f"wrote {path}\ntry: rung train {path} --nproc 2")
    return 0


def _strategies(options: argparse.Namespace) -> int:
    for name, preset in PRESETS.items():
        print(f"  {name:<8} {preset.summary}")
    print("\nA size makes a name a number of processes: ddp4, zero1x4, hsdp2x2, tp2, pp4.")
    print("Compositions have one of each kind, with commas: pp2,ddp2  fsdp2,tp2  pp2,fsdp,tp2.")
    print("\nSchedules of a pipeline, as in pp4:zb or --schedule zb:")
    for name, summary in SCHEDULES.items():
        print(f"  {name:<12} {summary}")
    return 0


# What one process does: of several that mpirun has started, the first.
_ALONE = (_verify, _explain, run_plan, _scale, _checkpoints, _export, _new, _strategies)


if __name__ == "__main__":
    sys.exit(main())
