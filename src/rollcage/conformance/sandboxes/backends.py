"""What the backends that come with rollcage are, and how their boxes can be made to vanish."""

from __future__ import annotations

import os
import signal

from rollcage.conformance.sandboxes.values import Traits
from rollcage.sandboxes.base import Provider, Sandbox


async def _lose_local(box: Sandbox) -> None:
    """Kill the fork server: nothing of its boxes is left."""
    from rollcage.sandboxes.local.box import LocalBox

    assert isinstance(box, LocalBox)
    os.kill(box._fork_server.pid, signal.SIGKILL)


async def _lose_e2b(box: Sandbox) -> None:
    """Have the cloud end it."""
    from rollcage.sandboxes.e2b.box import E2BBox

    assert isinstance(box, E2BBox)
    await box.cloud.kill(box.id)


async def _lose_container(box: Sandbox) -> None:
    """Have the engine remove it."""
    from rollcage.sandboxes.container.box import ContainerBox

    assert isinstance(box, ContainerBox)
    await box._engine.remove(box.id)


TRAITS: dict[str, Traits] = {
    "local": Traits(lose=_lose_local),
    "container": Traits(lose=_lose_container),
    "e2b": Traits(own_kernel=True, lose=_lose_e2b, pace=4),
}
"""By the provider's name. A backend from elsewhere hands its own to `check`."""


def traits_of(provider: Provider) -> Traits:
    """What is known of a backend."""
    return TRAITS.get(provider.name, Traits())
