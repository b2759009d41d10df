"""Shell completion: the script that a shell sources, and the rollout ids that it offers."""

from __future__ import annotations

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

    It completes commands, options and rollout ids.

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

    from rollcage.errors import RollcageError
    from rollcage.settings import Settings
    from rollcage.store.sqlite import ids_like

    try:
        found = ids_like(Settings.from_environ().log_path, incomplete, OFFERED)
    except (RollcageError, OSError):
        return []
    return [CompletionItem(rollout_id, help=task or None) for rollout_id, task in found]
