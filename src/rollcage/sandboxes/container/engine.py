"""The container engine, docker or podman, behind its HTTP API: the only module that knows the client library."""

from __future__ import annotations

import io
import json
import re
import resource
import secrets
import tarfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar

import anyio
import anyio.to_thread

from rollcage.errors import SandboxError, SetupError, UsageError, needs_extra

if TYPE_CHECKING:
    import docker  # type: ignore[import-untyped]

T = TypeVar("T")

_AT_ONCE = 16
"""Calls to the engine at a time; each holds a thread while it lasts, and boxes that merely run hold none."""
_TIMEOUT_S = 120
_REMOVAL_S = 30
_PAUSE_S = 0.02
_NOWHERE = "/rollcage-probe"
_FILES_AT_ONCE = 4096
_MOST_PROCESSES = 32768
"""Of the user that all boxes share. podman lowers its own limit to this; the box's own is a cgroup's."""
_REMEDY = (
    "start one: `systemctl --user start podman.socket`, or `podman system service --time=0 &`, or docker; "
    "or name its socket in DOCKER_HOST=unix:///path"
)


@dataclass(frozen=True)
class Container:
    """What a box's container is made of."""

    name: str
    image: str
    command: Sequence[str]
    labels: Mapping[str, str]
    mounts: Mapping[str, str]
    """What of the host is seen where, read-only."""
    tmpfs: Mapping[str, str]
    limits: Mapping[str, Any] = field(default_factory=dict)
    """As the engine's API calls them."""


class ContainerEngine:
    """A connection to an engine that answered."""

    def __init__(self, client: docker.APIClient, address: str) -> None:
        """`open` makes it."""
        self.address = address
        """Its socket."""
        self._client = client
        self._limiter = anyio.CapacityLimiter(_AT_ONCE)

    @classmethod
    async def open(cls, addresses: Sequence[str]) -> ContainerEngine:
        """The first engine that answers at one of these addresses; SetupError where none does."""
        with needs_extra("a container", "container"):
            import docker
        tried: list[str] = []
        for address in addresses:
            if not address.startswith("unix://"):
                raise SetupError(
                    f"DOCKER_HOST={address}: container boxes need an engine on this machine, reached by its unix socket"
                )
            if not await anyio.Path(address.removeprefix("unix://")).exists():
                tried.append(f"{address}: no such socket")
                continue
            try:
                client = await anyio.to_thread.run_sync(_connect, address)
            except (docker.errors.DockerException, OSError) as error:
                tried.append(f"{address}: {_said(error)}")
                continue
            return cls(client, address)
        raise SetupError(f"no container engine answers ({'; '.join(tried)})", remedy=_REMEDY)

    def close(self) -> None:
        """Let go of it."""
        self._client.close()

    async def call(self, what: str, action: Callable[[docker.APIClient], T]) -> T:
        """One call of the client library, in a thread. It is waited for even by those who are cancelled."""
        import docker

        results: list[T] = []
        try:
            with anyio.CancelScope(shield=True):
                results.append(await anyio.to_thread.run_sync(action, self._client, limiter=self._limiter))
        except (docker.errors.DockerException, OSError) as error:
            raise SandboxError(f"the container engine could not {what}: {_said(error)}") from error
        return results[0]

    async def unenforced(self) -> frozenset[str]:
        """The names of those limits that this engine cannot enforce: `memory`, `cpus`, `pids`."""
        said = await self.call("describe itself", lambda client: client.info())
        known = {"memory": "MemoryLimit", "cpus": "CpuCfsQuota", "pids": "PidsLimit"}
        return frozenset(name for name, key in known.items() if not said.get(key))

    async def has_image(self, name: str) -> bool:
        """Whether the image is here."""
        return await self.call("look for an image", lambda client: _image_id(client, name) != "")

    async def image(self, name: str) -> str:
        """The id of an image, which is fetched where it is not here; UsageError where there is no such image."""
        found = await self.call("look for an image", lambda client: _image_id(client, name))
        if found:
            return found
        said = await self.call("fetch an image", lambda client: _pull(client, name))
        found = await self.call("look for an image", lambda client: _image_id(client, name))
        if not found:
            raise UsageError(
                f"there is no image {name!r} here, and it cannot be fetched ({said})",
                argument="template",
                remedy="name one that `docker images` or `podman images` lists, or import one",
            )
        return found

    async def environment(self, image: str) -> dict[str, str]:
        """What an image wants every command to find in its environment."""
        said = await self.call("look at an image", lambda client: client.inspect_image(image))
        pairs = (entry.partition("=") for entry in (said.get("Config") or {}).get("Env") or ())
        return {name: value for name, _, value in pairs if name}

    async def import_tree(self, archive: bytes, name: str, *, env: Mapping[str, str] | None = None) -> None:
        """Make an image out of a tar archive of a whole file system."""
        changes = [f"ENV {key}={value}" for key, value in (env or {}).items()]
        await self.call("import an image", lambda client: _import(client, archive, name, changes))

    async def bake(self, base: str, archive: IO[bytes], name: str) -> None:
        """Make an image out of another and a tar archive that is unpacked in it. Nothing is run and nothing fetched."""
        await self.call("bake an image", lambda client: _bake(client, base, archive, name))

    async def remove_image(self, name: str) -> None:
        """Remove an image, and any container made of it."""
        await self.call("remove an image", lambda client: client.remove_image(name, force=True))

    async def start(self, container: Container) -> None:
        """Create a container and start it. It is there to be removed even where it did not start."""
        await self.call(f"create a container of {container.image}", lambda client: _create(client, container))
        await self.call(f"start a container of {container.image}", lambda client: client.start(container.name))

    async def check_runtime(self) -> None:
        """SetupError where no container can be started at all, whatever is in it, with the runtime's own words."""
        name, image = f"rollcage-probe-{secrets.token_hex(6)}", "localhost/rollcage/probe:empty"
        await self.import_tree(empty_system(["dev", "proc"], {}), image)
        limits: dict[str, Any] = {"ulimits": ulimits(), "security": []}
        try:
            await self.start(Container(name, image, (_NOWHERE,), {}, {}, {}, limits))
        except SandboxError as error:
            # The image is empty: a runtime that works gets as far as to miss the program.
            if _NOWHERE in str(error) and ("not found" in str(error) or "no such file" in str(error).lower()):
                return
            raise SetupError(
                f"the container engine at {self.address} answers and cannot start any container: {error}",
                remedy='try another runtime: install runc, and set runtime = "runc" in containers.conf',
            ) from error
        finally:
            await self.remove(name)

    async def lacks_program(self, image: str, name: str, folders: Sequence[str]) -> bool:
        """Whether an image has no such program in any of these folders."""
        paths = [f"{folder}/{name}" for folder in folders]
        return await self.call("look into an image", lambda client: not _has_any(client, image, paths))

    async def runs(self, name: str) -> bool:
        """Whether a container is running."""
        return await self.call("look at a container", lambda client: _runs(client, name))

    async def remove(self, name: str) -> None:
        """Kill a container and remove it, if it is there."""
        await self.call("remove a container", lambda client: _remove(client, name))

    async def owned(self, label: str, value: str) -> list[tuple[str, Mapping[str, str]]]:
        """The names and labels of all containers with this label, running or not."""
        listed = await self.call(
            "list containers", lambda client: client.containers(all=True, filters={"label": [f"{label}={value}"]})
        )
        return [(entry["Id"], entry.get("Labels") or {}) for entry in listed]


def ulimits() -> dict[str, int]:
    """What a container's processes may have, no more than this process may.

    They are always said: an engine that may not raise limits fails when it sets its own large ones.
    """
    most = {"nofile": (resource.RLIMIT_NOFILE, _FILES_AT_ONCE), "nproc": (resource.RLIMIT_NPROC, _MOST_PROCESSES)}
    ours = {name: (resource.getrlimit(kind)[1], value) for name, (kind, value) in most.items()}
    return {name: value if hard == resource.RLIM_INFINITY else min(value, hard) for name, (hard, value) in ours.items()}


def _connect(address: str) -> docker.APIClient:
    import docker

    client = docker.APIClient(base_url=address, version="1.41", timeout=_TIMEOUT_S, num_pools=_AT_ONCE)
    try:
        client.ping()
    except BaseException:
        client.close()
        raise
    return client


def _image_id(client: docker.APIClient, name: str) -> str:
    import docker

    try:
        return str(client.inspect_image(name)["Id"])
    except docker.errors.ImageNotFound:
        return ""


def _pull(client: docker.APIClient, name: str) -> str:
    """Fetch an image; what the engine said against it, which comes as an error or in the midst of a good answer."""
    import docker

    tagged = ":" in name.rpartition("/")[2] or "@" in name
    said = ""
    try:
        for line in client.pull(name, **({} if tagged else {"tag": "latest"}), stream=True, decode=True):
            said = line.get("error") or said
    except docker.errors.DockerException as error:
        return _said(error)
    return re.sub(r"\s+", " ", said).strip()[:400]


def _import(client: docker.APIClient, archive: bytes, name: str, changes: list[str]) -> None:
    repository, _, tag = name.rpartition(":")
    said = client.import_image_from_data(archive, repository=repository, tag=tag, changes=changes)
    # Older podmans do not look at the tag; the last line names what was made.
    client.tag(json.loads(said.strip().splitlines()[-1])["status"], repository, tag)


def _bake(client: docker.APIClient, base: str, archive: IO[bytes], name: str) -> None:
    import docker

    repository, _, tag = name.rpartition(":")
    made = client.create_container(base, command=["true"], host_config=client.create_host_config(network_mode="none"))
    try:
        for tries_left in (2, 1, 0):
            archive.seek(0)
            try:
                client.put_archive(made["Id"], "/", archive)
                break
            except docker.errors.APIError:
                # Podman now and then closes its end of a pipe before it has passed on all of a large archive.
                if not tries_left:
                    raise
        client.commit(made["Id"], repository=repository, tag=tag)
    finally:
        client.remove_container(made["Id"], force=True)


def _has_any(client: docker.APIClient, image: str, paths: Sequence[str]) -> bool:
    import docker

    made = client.create_container(image, command=["true"], host_config=client.create_host_config(network_mode="none"))
    try:
        for path in paths:
            try:
                stream, _ = client.get_archive(made["Id"], path)
            except docker.errors.NotFound:
                continue
            stream.close()
            return True
        return False
    finally:
        client.remove_container(made["Id"], force=True)


CAPABILITIES = ("CHOWN", "KILL", "SETGID", "SETPCAP", "SETUID", "SYS_ADMIN")
"""Asked for; SYS_ADMIN for dividing the box. Nothing but a container's first process ever has any of them."""


def _create(client: docker.APIClient, container: Container) -> None:
    import docker

    limits = dict(container.limits)
    ulimits = [docker.types.Ulimit(name=name, soft=most, hard=most) for name, most in limits.pop("ulimits").items()]
    host = client.create_host_config(
        network_mode="none",
        read_only=True,
        cap_drop=["ALL"],
        cap_add=list(CAPABILITIES),
        security_opt=["no-new-privileges", *limits.pop("security")],
        binds=[f"{source}:{target}:ro" for target, source in container.mounts.items()],
        tmpfs=dict(container.tmpfs),
        ulimits=ulimits,
        log_config={"Type": "none"},
        auto_remove=True,
        **limits,
    )
    client.create_container(
        container.image,
        name=container.name,
        entrypoint=list(container.command),
        command=[],
        user="0:0",
        working_dir="/",
        hostname="box",
        labels=dict(container.labels),
        stop_signal="SIGKILL",
        host_config=host,
    )


def _runs(client: docker.APIClient, name: str) -> bool:
    import docker

    try:
        return bool(client.inspect_container(name)["State"]["Running"])
    except docker.errors.NotFound:
        return False
    except docker.errors.APIError:
        # podman says it with a 500 where the container goes while it is looked at.
        if client.containers(all=True, filters={"name": [name]}):
            raise
        return False


def _remove(client: docker.APIClient, name: str) -> None:
    """Until it is gone: a container that ends at this moment is removed by the engine itself, and both may stumble."""
    import docker

    deadline = time.monotonic() + _REMOVAL_S
    while True:
        try:
            client.remove_container(name, force=True, v=True)
        except docker.errors.NotFound:
            return
        except docker.errors.APIError:
            if time.monotonic() > deadline:
                raise
        time.sleep(_PAUSE_S)


def _said(error: Exception) -> str:
    text = str(getattr(error, "explanation", None) or error)
    return re.sub(r"\s+", " ", text).strip()[:400]


def archive_of(folders: Mapping[str, Path], output: IO[bytes], *, owner: int) -> None:
    """Pack folders, each under its own path, as files of one user; links are packed as links."""

    def owned(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.uid = member.gid = owner
        member.uname = member.gname = ""
        return member

    with tarfile.open(fileobj=output, mode="w") as tar:
        for place, folder in folders.items():
            tar.add(folder, arcname=place.lstrip("/"), filter=owned)


def empty_system(folders: Sequence[str], links: Mapping[str, str]) -> bytes:
    """A tar archive of a file system that has folders and links and nothing else."""
    output = io.BytesIO()
    with tarfile.open(fileobj=output, mode="w") as tar:
        for name in folders:
            member = tarfile.TarInfo(name)
            member.type, member.mode = tarfile.DIRTYPE, 0o755
            tar.addfile(member)
        for name, target in links.items():
            member = tarfile.TarInfo(name)
            member.type, member.linkname = tarfile.SYMTYPE, target
            tar.addfile(member)
    return output.getvalue()
