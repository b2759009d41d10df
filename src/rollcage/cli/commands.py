"""What can be typed. Only click is imported here: help must come at once, so each command fetches its own parts."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import click

from rollcage.cli.codes import HELP
from rollcage.cli.fleet import fleet
from rollcage.cli.image import image
from rollcage.cli.model import model
from rollcage.cli.sandbox import sandbox
from rollcage.cli.serve import serve

F = TypeVar("F", bound=Callable[..., Any])


def seconds(text: str) -> float:
    """A duration: a finite number greater than zero."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number) or number <= 0:
        raise click.BadParameter(f"{text!r} is not a number of seconds greater than 0")
    return number


JSON = click.option("--json", "as_json", is_flag=True, help="Write JSON to stdout, and nothing else.")

ENDPOINT = (
    click.option("--endpoint", "-e", metavar="KIND", help="vllm, openai, hf_router, local or scripted."),
    click.option("--base-url", metavar="URL", help="The model's address; /v1 is added where it is missing."),
    click.option("--api-key", metavar="KEY", help="The key; better set as a variable, where ps cannot see it."),
    click.option("--model", "-m", metavar="NAME", help="The model's name there."),
    click.option("--model-key", metavar="KEY", help="Older shape: vllm://REPO or hf-router://REPO:PROVIDER."),
    click.option("--vllm-url", metavar="URL", help="Goes with --model-key vllm://..."),
    click.option("--hf-token", metavar="TOKEN", help="Goes with --model-key hf-router://..."),
    click.option("--thinking/--no-thinking", default=None, help="Whether the chat template may think."),
)
SAMPLING = (
    click.option("--temperature", type=click.FloatRange(min=0, max=100), help="Sampling temperature."),
    click.option("--seed", type=int, help="Sampling seed."),
    click.option("--top-logprobs", type=click.IntRange(0, 20), help="Alternatives asked for per token.  [default: 5]"),
)
TASK = (
    click.option("--instruction", "-i", metavar="TEXT", help="The prompt, in place of the file's; - reads stdin."),
    click.option("--task-id", metavar="NAME", help="Your own name for the task."),
    click.option("--setup", multiple=True, metavar="COMMAND", help="Bash, run before the agent; may be repeated."),
    click.option("--verify", multiple=True, metavar="COMMAND", help="Bash, run after the agent; may be repeated."),
    click.option("--test-script", metavar="FILE", help="A bash verifier that writes $REWARD_FILE."),
    click.option("--verify-in", type=click.Choice(["box", "fresh"]), help="The same box put back, or a new one."),
)
LIMITS = (
    click.option(
        "--timeout", type=seconds, metavar="SECONDS", help="One deadline for everything, boot and scoring included."
    ),
    click.option("--agent-timeout", type=seconds, metavar="SECONDS", help="The agent's own time.  [default: 600]"),
    click.option(
        "--setup-timeout", type=seconds, metavar="SECONDS", help="The time of all setup commands.  [default: 300]"
    ),
    click.option("--verify-timeout", type=seconds, metavar="SECONDS", help="The time of verification.  [default: 300]"),
    click.option("--max-tokens-cap", type=click.IntRange(min=0), help="Tokens per answer; 0: none.  [default: 4096]"),
    click.option("--max-turns", type=click.IntRange(min=0), help="Model calls; 0: no limit.  [default: 0]"),
)
ENVIRONMENT = (
    click.option("--environment", metavar="ADDRESS", help="Remote: fleet:KEY, openenv:URL or mcp:URL; its tools."),
    click.option("--environment-seed", type=int, help="The remote environment is reset with it."),
    click.option("--verifier", metavar="FILE", help="Python that judges the remote environment's data."),
)
WHERE = (
    click.option("--agent", metavar="NAME", help="The agent CLI.  [default: opencode]"),
    click.option("--sandbox", metavar="NAME", help="The kind of box.  [default: local]"),
    click.option("--template", metavar="NAME", help="A prebaked image of that kind of box."),
    click.option("--mode", type=click.Choice(["transparent_proxy", "black_box"]), help="black_box records no turns."),
)


def _all(*options: Callable[[F], F]) -> Callable[[F], F]:
    def decorate(command: F) -> F:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110}, epilog=HELP)
@click.version_option(package_name="rollcage", message="rollcage %(version)s")
def rollcage() -> None:
    """Runs real coding agents in cages and brings back training-grade rollouts.

    \b
    Start here:
      rollcage doctor                          is this machine ready?
      rollcage run examples/paginate.toml      one rollout, with a scripted model
      rollcage run TASK.toml --endpoint vllm   one rollout, with yours (VLLM_URL)
    """


@rollcage.command(epilog=HELP)
@click.argument("task", required=False, metavar="[TASK.toml]")
@_all(*TASK, *ENDPOINT, *SAMPLING, *LIMITS, *WHERE, *ENVIRONMENT, JSON)
@click.option("--follow", is_flag=True, help="With --json: every event as one line, as it happens.")
def run(task: str | None, as_json: bool, follow: bool, **options: Any) -> int:
    """Run one rollout and show it as it happens.

    The task comes from a file, from --instruction, or from both: options win over the file, and --setup and --verify
    add to it. Ctrl-C aborts cleanly; a second one leaves at once. A task that brings its own solution runs against the
    scripted model unless an endpoint is named.
    """
    if follow and not as_json:
        raise click.UsageError("--follow goes with --json (the view without --json is live anyway)")
    from rollcage.cli import rollouts

    return rollouts.run(task, options, "lines" if follow else "json" if as_json else "view")


@rollcage.command()
@click.option("--limit", "-n", type=click.IntRange(1, 1_000_000), default=20, show_default=True, help="How many.")
@click.option("--open", "open_only", is_flag=True, help="Only those that have not ended.")
@JSON
def ls(limit: int, open_only: bool, as_json: bool) -> int:
    """List rollouts, newest first."""
    from rollcage.cli import reading

    return reading.ls(limit, open_only, as_json)


@rollcage.command()
@click.argument("rollout_id", metavar="ID")
@click.option("--events", is_flag=True, help="Every entry of its log.")
@click.option("--turns", is_flag=True, help="What the model said, turn by turn.")
@JSON
def show(rollout_id: str, events: bool, turns: bool, as_json: bool) -> int:
    """Show one rollout. The first characters of its ID are enough."""
    if events and turns:
        raise click.UsageError("--events and --turns do not go together")
    from rollcage.cli import reading

    return reading.show(rollout_id, "events" if events else "turns" if turns else "", as_json)


@rollcage.command(epilog=HELP)
@click.argument("rollout_id", metavar="ID")
@JSON
def watch(rollout_id: str, as_json: bool) -> int:
    """Follow a rollout live, whichever process runs it. Ctrl-C leaves; the rollout goes on.

    With --json: every event as one line.
    """
    from rollcage.cli import rollouts

    return rollouts.watch(rollout_id, as_json)


@rollcage.command()
@click.argument("rollout_id", metavar="ID")
@click.option("--reason", default="", help="Kept in the log.")
@click.option(
    "--wait",
    "wait_s",
    type=seconds,
    metavar="SECONDS",
    default=60.0,
    show_default=True,
    help="How long to wait for its end.",
)
@JSON
def abort(rollout_id: str, reason: str, wait_s: float, as_json: bool) -> int:
    """Stop a rollout, whichever process runs it, and wait for its end."""
    from rollcage.cli import rollouts

    return rollouts.abort(rollout_id, reason, wait_s, as_json)


@rollcage.command(epilog=HELP)
@_all(*ENDPOINT, JSON)
def doctor(as_json: bool, **options: Any) -> int:
    """Check this machine, the agent and an endpoint, and say what to fix.

    Without an endpoint option, every endpoint that the environment's variables name is asked.
    """
    from rollcage.cli import doctor

    return doctor.doctor(options, as_json)


@rollcage.command()
@click.option("--check", is_flag=True, help="Only say whether it was done; exit code 3 where it was not.")
@JSON
def setup(check: bool, as_json: bool) -> int:
    """Fetch the agent and build its base layer, once; the next time there is nothing to do."""
    from rollcage.cli import doctor

    return doctor.setup(check, as_json)


rollcage.add_command(model)
rollcage.add_command(fleet)
rollcage.add_command(serve)
rollcage.add_command(image)
rollcage.add_command(sandbox)
