"""Shell completion: the script that a shell sources, and what it offers: rollouts, batches, agents, endpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import click
from click.shell_completion import CompletionItem, get_completion_class, shell_complete

VARIABLE = "_ROLLCAGE_COMPLETE"
"""Click's scripts set it when the shell asks for completions."""
OFFERED = 50
"""Rollouts that are offered, the newest ones."""


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(context: click.Context, shell: str) -> int:
    """Print the completion script of a shell.

    It completes commands, options, rollout ids, batches, agents, endpoints and kinds of box.

    \b
    Example:
      echo 'eval "$(rollcage completion bash)"' >> ~/.bashrc
      echo 'eval "$(rollcage completion zsh)"' >> ~/.zshrc
      rollcage completion fish > ~/.config/fish/completions/rollcage.fish
    """
    kind = get_completion_class(shell)
    if kind is None:
        raise click.UsageError(f"click has no completion for {shell}")
    click.echo(kind(context.find_root().command, {}, "rollcage", VARIABLE).source())
    return 0


def answer(command: click.Command, instruction: str) -> int:
    """What the shell asked for: the script, or the completions of the words so far."""
    return shell_complete(command, {}, "rollcage", VARIABLE, instruction)


def rollout_ids(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """The ids in the log that begin with what was typed, newest first; none where the log cannot be read."""
    from rollcage.store.sqlite import ids_like

    return _logged(ids_like, incomplete)


def batches(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """The same of batches."""
    from rollcage.store.sqlite import batches_like

    return _logged(batches_like, incomplete)


def _logged(like: Callable[[Path, str, int], list[tuple[str, str]]], incomplete: str) -> list[CompletionItem]:
    from rollcage.errors import RollcageError
    from rollcage.settings import Settings

    try:
        found = like(Settings.from_environ().log_path, incomplete, OFFERED)
    except (RollcageError, OSError):
        return []
    return [CompletionItem(name, help=task or None) for name, task in found]


def named(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """The agents, endpoints or kinds of box, by what the option or argument is called."""
    from rollcage import endpoints, wiring
    from rollcage.settings import Settings

    settings = Settings.from_environ()
    kinds: dict[str, Callable[[], Iterable[str]]] = {
        "agent": lambda: wiring.agents(settings),
        "endpoint": lambda: endpoints.CATALOG,
        "sandbox": lambda: wiring.providers(settings),
        "backend": lambda: wiring.providers(settings),
    }
    kind = (parameter.name or "").removesuffix("s")
    return [CompletionItem(name) for name in kinds[kind]() if name.startswith(incomplete)] if kind in kinds else []
