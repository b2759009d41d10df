"""`rollcage nodes`: the machines of a cluster, and what they are busy with. Also what `--ray` means."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from rollcage.cli import codes
from rollcage.cli.options import JSON

if TYPE_CHECKING:
    from rollcage.cluster import Cluster


@click.command()
@JSON
def nodes(as_json: bool) -> int:
    """List the nodes of a Ray cluster.

    Of the one whose head runs here: `rollcage serve --ray` or `rollcage eval --ray` with the same ROLLCAGE_HOME.
    Servers elsewhere tell at /nodes.

    \b
    Examples:
      rollcage nodes
      rollcage nodes --json | jq '[.[].running] | add'
    """
    import time

    from rollcage.cli.output import environment, program, write_json
    from rollcage.cli.text import clean
    from rollcage.cluster.view import read_view

    settings = environment()
    found, age = read_view(settings.home, time.time())
    if as_json:
        write_json([node.model_dump(mode="json") for node in found])
        return codes.OK
    if not found:
        click.echo(f"no cluster runs in {settings.home}; try: {program()} serve --ray local")
        return codes.OK
    for node in found:
        what = node.problem or f"{', '.join(node.images) or 'no images'}"
        line = f"{node.id[:12]}  {node.address:<15} {node.state:<11} {node.running:>4}/{node.places:<4}"
        click.echo(clean(f"{line} {node.calls:>4} calls  load {node.load:>5.1f}  {what}"))
    click.echo(f"{sum(node.running for node in found)} of {sum(node.places for node in found)} places, {age:.0f} s ago")
    return codes.OK


def cluster_of(options: dict[str, Any]) -> Cluster | None:
    """What the options of `--ray` ask for, taken out of them; None where nobody did."""
    names = ("ray_places", "ray_resource", "ray_label", "ray_lease", "ray_autoscale", "node_home")
    address, given = options.pop("ray"), {name: options.pop(name) for name in names}
    if address is None:
        if used := [name for name, value in given.items() if value]:
            raise click.UsageError(f"--{used[0].replace('_', '-')} goes with --ray")
        return None
    from rollcage.cluster import Cluster

    more: dict[str, Any] = {
        "resources": {name: _number(name, value) for name, value in _pairs("ray-resource", given["ray_resource"])},
        "labels": dict(_pairs("ray-label", given["ray_label"])),
        "places": given["ray_places"],
        "lease_s": given["ray_lease"],
        "autoscale": given["ray_autoscale"],
        "node_home": given["node_home"],
    }
    return Cluster(address=address, **{name: value for name, value in more.items() if value})


def _pairs(option: str, texts: tuple[str, ...]) -> list[tuple[str, str]]:
    found = []
    for text in texts:
        name, separator, value = text.partition("=")
        if not name or not separator:
            raise click.UsageError(f"--{option}: {text!r} is not NAME=VALUE")
        found.append((name, value))
    return found


def _number(name: str, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if 0 <= number < float("inf"):
        return number
    raise click.UsageError(f"--ray-resource: {name}={text!r} is no amount")
