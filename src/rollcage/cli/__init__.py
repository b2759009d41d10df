"""The command `rollcage`: its command groups, and how errors become one line with a remedy and an exit code.

Only click is imported at the top, here and in every file that defines commands: help must come at once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress

import click

from rollcage import errors
from rollcage.cli import (
    agent,
    audit,
    completion,
    demo,
    doctor,
    evaluate,
    export,
    fleet,
    image,
    log,
    model,
    nodes,
    reading,
    replay,
    reverify,
    run,
    sandbox,
    serve,
    tasks,
    view,
)
from rollcage.cli.codes import BROKEN, HELP, INTERNAL, INTERRUPTED, NOT_READY, PIPE_CLOSED, USAGE

__all__ = ["main", "rollcage"]


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110}, epilog=HELP)
@click.version_option(package_name="rollcage", message="rollcage %(version)s")
def rollcage() -> None:
    """Runs real coding agents in isolated boxes and brings back training-grade rollouts.

    \b
    Start here:
      rollcage doctor                          is this machine ready?
      rollcage demo                            one rollout, with a scripted model
      rollcage run TASK.toml --endpoint vllm   one rollout, with yours (VLLM_URL)
    """


for _command in (
    *(
        demo.demo,
        run.run,
        evaluate.evaluate,
        evaluate.report,
        evaluate.compare,
        replay.replay,
        replay.fork,
        run.watch,
        run.abort,
        reading.ls,
        reading.show,
        serve.serve,
        view.view,
        view.bundle,
        nodes.nodes,
        doctor.doctor,
        doctor.setup,
    ),
    *(
        audit.audit,
        reverify.reverify,
        export.export,
        tasks.tasks,
        agent.agent,
        image.image,
        model.model,
        sandbox.sandbox,
        fleet.fleet,
    ),
    *(log.prune, log.pin, log.vacuum, log.backup, log.import_),
    completion.completion,
):
    rollcage.add_command(_command)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and leave with its exit code."""
    if arguments is None and (asked := os.environ.get(completion.VARIABLE)):
        sys.exit(completion.answer(rollcage, asked))
    given = list(sys.argv[1:] if arguments is None else arguments)
    code = _code(given)
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        code = PIPE_CLOSED
    except (OSError, ValueError, AttributeError) as error:
        _complain(f"rollcage: cannot write to standard output: {error}")
        code = code or BROKEN
    with suppress(OSError, ValueError, AttributeError):
        # Python flushes once more on its way out, and would complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)


def _complain(message: str) -> None:
    with suppress(OSError, ValueError, AttributeError):
        print(message, file=sys.stderr, flush=True)


def _code(arguments: Sequence[str]) -> int:
    try:
        # Not `rollcage.main`: it would answer a closed pipe with an exit code of its own.
        with rollcage.make_context("rollcage", list(arguments)) as context:
            return int(rollcage.invoke(context) or 0)
    except BaseException as raised:  # noqa: BLE001 - the edge: whatever arrives here becomes one line
        for error in _leaves(raised):
            if isinstance(error, SystemExit | click.exceptions.Exit):
                return _exit_code(error)
            if isinstance(error, KeyboardInterrupt | click.Abort):
                return _report(arguments, "interrupted", "interrupted", INTERRUPTED)
            if isinstance(error, BrokenPipeError):
                return PIPE_CLOSED
            if isinstance(error, click.exceptions.NoArgsIsHelpError):
                click.echo(error.format_message())
                return USAGE
            if isinstance(error, click.ClickException):
                return _report(arguments, _click_message(error), "usage", USAGE)
            if isinstance(error, errors.RollcageError):
                _trace(raised)
                return _report(arguments, error.told(_as_option), _word(error), _code_of(error))
        _trace(raised)
        first = next(_leaves(raised))
        message = f"internal error: {type(first).__name__}: {first}; set ROLLCAGE_DEBUG=1 to see where, and report it"
        return _report(arguments, message, "internal_error", INTERNAL)


def _as_option(argument: str) -> str:
    from rollcage.cli.request import as_option

    return as_option(argument)


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error


def _exit_code(error: SystemExit | click.exceptions.Exit) -> int:
    code = error.exit_code if isinstance(error, click.exceptions.Exit) else error.code
    return code if isinstance(code, int) else 0 if code is None else BROKEN


def _click_message(error: click.ClickException) -> str:
    message = error.format_message().strip().rstrip(".")
    message = message[:1].lower() + message[1:]
    path = error.ctx.command_path if isinstance(error, click.UsageError) and error.ctx else "rollcage"
    return f"{message}; see {path} --help"


def _word(error: errors.RollcageError) -> str:
    """A stable word for programs."""
    for kind, word in (
        (errors.TaskError, "bad_task"),
        (errors.UsageError, "usage"),
        (errors.UnknownRollout, "unknown_rollout"),
        (errors.LogDamaged, "log_damaged"),
        (errors.StoreError, "store"),
        (errors.SetupError, "machine_not_ready"),
        (errors.ModelError, "model_unreachable"),
    ):
        if isinstance(error, kind):
            return word
    return "error"


def _code_of(error: errors.RollcageError) -> int:
    return USAGE if isinstance(error, errors.UsageError | errors.UnknownRollout) else NOT_READY


def _report(arguments: Sequence[str], message: str, word: str, code: int) -> int:
    """Write it to stderr, one line per problem; with --json, stdout still gets its one document."""
    from rollcage.cli.text import clean

    lines = [line for line in clean(message).split("\n") if line.strip()] or ["unknown error"]
    with suppress(OSError):
        for line in lines:
            encoding = sys.stderr.encoding or "ascii"
            shown = f"rollcage: {line}".encode(encoding, "backslashreplace").decode(encoding)
            print(shown, file=sys.stderr, flush=True)
    if "--json" in arguments:
        import json

        try:
            print(json.dumps({"error": message, "error_code": word}), flush=True)
        except BrokenPipeError:
            return PIPE_CLOSED
    return code


def _trace(error: BaseException) -> None:
    """Show where it came from, for those who asked."""
    from rollcage.settings import Settings

    with suppress(errors.UsageError):
        if Settings.from_environ().debug:
            import traceback

            traceback.print_exception(error, file=sys.stderr)
