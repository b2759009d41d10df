"""Images as container engines save them: layers and a manifest, in an archive or a folder.

`docker save` and `podman save` write them: docker-archive, oci-archive, docker-dir, oci-dir. Nothing in them is
trusted: names lead into the archive only, layers must be what the image's own configuration says, and whatever a layer
writes or removes goes through a `LayerTree`, which never leaves its folder.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import NamedTuple, TypeVar

from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from rollcage.sandboxes.images.archives import entries
from rollcage.sandboxes.images.saved_files import MOST_FILES, Archive, Counted, Folder, ImageFiles, refuse
from rollcage.sandboxes.images.stacked import LayerTree, is_mark, remove_hidden
from rollcage.sandboxes.images.streams import boundary, is_compressed, plain
from rollcage.sandboxes.images.tree import Placing, parts_of, unpack

_DOCUMENT = 8 << 20
"""The largest manifest or configuration that is read."""
_MOST_LAYERS = 1000
_MOST_INDEXES = 4
_CHUNK = 1 << 20
_PART = re.compile(r"(blobs/\w+/)?[0-9a-f]{64,128}(\.tar|\.json|/\w[\w.]*)?")
_FOLDERS = re.compile(r"blobs|blobs/\w+|[0-9a-f]{64}")
_DOCUMENTS = frozenset(("manifest.json", "index.json", "oci-layout", "repositories"))
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
_MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}

Shape = TypeVar("Shape")


class CommandSettings(BaseModel):
    """What an image says of the commands that run in it."""

    env: list[str] | None = Field(None, alias="Env")
    """`NAME=VALUE`, each."""
    workdir: str | None = Field(None, alias="WorkingDir")
    """Where they start."""


class _System(BaseModel):
    layers: list[str] = Field(alias="diff_ids")


class _Configuration(BaseModel):
    architecture: str = ""
    os: str = "linux"
    config: CommandSettings | None = None
    rootfs: _System


class _Archived(BaseModel):
    config: str = Field(alias="Config")
    tags: list[str] | None = Field(None, alias="RepoTags")
    layers: list[str] = Field(alias="Layers")


class _Platform(BaseModel):
    architecture: str = ""
    os: str = ""


class _Described(BaseModel):
    digest: str
    platform: _Platform | None = None
    annotations: dict[str, str] = {}


class _Manifest(BaseModel):
    config: _Described
    layers: list[_Described]


class _Index(BaseModel):
    manifests: list[_Described]


_ANY_DOCUMENT: TypeAdapter[_Manifest | _Index] = TypeAdapter(_Manifest | _Index)
_ARCHIVED: TypeAdapter[list[_Archived]] = TypeAdapter(list[_Archived])


class SavedImage(NamedTuple):
    """An image that an engine saved, ready to be put together."""

    files: ImageFiles
    layers: Sequence[str]
    """Names of files, the lowest first."""
    digests: Sequence[str]
    """What each layer is, decompressed."""
    settings: CommandSettings

    def unpack(self, number: int, tree: LayerTree, place: Placing, limit: int) -> int:
        """Put its layer of that number, from 0 on, into a tree over those below it; returns its bytes, decompressed.

        `limit`: bytes that they may come to.
        """

        def visible(path: str) -> str | None:
            led = None if is_mark(path) or place(path) is None else tree.place(path)
            return None if led is None else place(led)

        name = self.layers[number]
        with self.files.open(name) as file, boundary(), plain(file) as stream:
            counted = Counted(stream, limit)
            # Removals come first, wherever they stand: they are meant for the layers below and not for this one.
            remove_hidden(counted, tree, place, visible)
            if counted.digest() != self.digests[number]:
                refuse(f"its layer {number + 1} is not what the image says it is: the archive is damaged")
        with self.files.open(name) as file:
            unpack(file, tree, visible)
        return counted.count


def is_saved(path: Path) -> bool:
    """Whether this is what an engine saves, by the first file in it; else it may be a root file system."""
    if path.is_dir():
        described = (path / "manifest.json").is_file() or (path / "index.json").is_file()
        return described and not (path / "usr").exists()
    try:
        with path.open("rb") as file, plain(file) as stream, entries(stream) as found:
            for member in islice(found, MOST_FILES):
                name = "/".join(parts_of(member.name))
                if not member.isdir():
                    return name in _DOCUMENTS or bool(_PART.fullmatch(name))
                if name and not _FOLDERS.fullmatch(name):
                    return False
    except Exception:  # noqa: BLE001 (whoever unpacks it says what is wrong with it)
        return False
    return False


@contextmanager
def opened(path: Path, scratch: Path, limit: int) -> Iterator[SavedImage]:
    """The image that was saved there. `scratch`: a folder where an archive is kept that must be decompressed, without a
    name, for that long."""
    if path.is_dir():
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            yield _described(Folder(fd))
        finally:
            os.close(fd)
        return
    with path.open("rb") as file:
        if not is_compressed(file):
            with boundary():
                files = Archive(file)
            yield _described(files)
            return
        with tempfile.TemporaryFile(dir=scratch) as copy:
            with boundary(), plain(file) as stream:
                shutil.copyfileobj(Counted(stream, limit), copy, _CHUNK)
                copy.seek(0)
                files = Archive(copy)
            yield _described(files)


def _described(files: ImageFiles) -> SavedImage:
    if files.has("manifest.json"):
        document = _document(files, "manifest.json", lambda text: json.loads(text))
        if isinstance(document, list):
            return _archived(files, _valid("manifest.json", lambda: _ARCHIVED.validate_python(document)))
        manifest = _valid("manifest.json", lambda: _Manifest.model_validate(document))
        return _manifested(files, manifest, _hex)
    if not files.has("index.json"):
        refuse("it has layers, but neither manifest.json nor index.json")
    return _indexed(files)


def _archived(files: ImageFiles, images: list[_Archived]) -> SavedImage:
    if len(images) != 1:
        tags = ", ".join(tag for image in images for tag in image.tags or ())[:200]
        refuse(f"it holds {len(images)} images ({tags}); save one by itself")
    [image] = images
    return _checked(files, image.config, image.layers)


def _indexed(files: ImageFiles) -> SavedImage:
    def blob(digest: str) -> str:
        return f"blobs/sha256/{_hex(digest)}"

    name, digest = "index.json", ""
    depth = 0
    while True:
        found = _document(files, name, _ANY_DOCUMENT.validate_json, digest)
        if isinstance(found, _Manifest):
            return _manifested(files, found, blob)
        fitting = [each for each in found.manifests if _fits(each.platform)]
        if len(fitting) != 1:
            named = [each.platform for each in found.manifests if each.platform and each.platform.os != "unknown"]
            there = ", ".join(f"{platform.os}/{platform.architecture}" for platform in named)[:200] or "none named"
            refuse(f"it holds {len(fitting)} images for {_machine()} ({there}); save one by itself")
        name, digest, depth = blob(fitting[0].digest), _hex(fitting[0].digest), depth + 1
        if depth > _MOST_INDEXES:
            refuse("its index leads to an index, and so on")


def _fits(wanted: _Platform | None) -> bool:
    """Attestations, which lie beside images, are for a platform `unknown`."""
    return wanted is None or (wanted.os in ("", "linux") and wanted.architecture in ("", _machine()))


def _manifested(files: ImageFiles, manifest: _Manifest, blob: Callable[[str], str]) -> SavedImage:
    config, layers = manifest.config.digest, [blob(layer.digest) for layer in manifest.layers]
    return _checked(files, blob(config), layers, _hex(config))


def _checked(files: ImageFiles, config: str, layers: Sequence[str], digest: str = "") -> SavedImage:
    found = _document(files, config, _Configuration.model_validate_json, digest)
    if found.os != "linux" or found.architecture not in ("", _machine()):
        refuse(f"it is an image for {found.os}/{found.architecture}, and this machine is linux/{_machine()}")
    if len(layers) != len(found.rootfs.layers) or len(layers) > _MOST_LAYERS:
        refuse(f"it has {len(layers)} layers, and its configuration names {len(found.rootfs.layers)}")
    for digest in found.rootfs.layers:
        _hex(digest)
    return SavedImage(files, layers, found.rootfs.layers, found.config or CommandSettings.model_validate({}))


def variables(settings: CommandSettings) -> dict[str, str]:
    """The environment it sets, without what every box has of its own."""
    pairs = [word.partition("=") for word in settings.env or ()]
    ours = ("HOME", "USER", "TMPDIR", "PWD", "HOSTNAME")
    return {name: value for name, _, value in pairs if name and name not in ours and "\0" not in name + value}


def _machine() -> str:
    return _MACHINES.get(platform.machine(), platform.machine())


def _hex(digest: str) -> str:
    matched = _DIGEST.fullmatch(digest)
    if matched is None:
        refuse(f"{digest[:100]!r} is no SHA-256")
    return matched[1]


def _document(files: ImageFiles, name: str, read: Callable[[bytes], Shape], digest: str = "") -> Shape:
    with files.open(name) as file:
        text = file.read(_DOCUMENT + 1)
    if len(text) > _DOCUMENT:
        refuse(f"{name} is too large to be a description of an image")
    if digest and hashlib.sha256(text).hexdigest() != digest:
        refuse(f"{name} is not what its digest says: the archive is damaged, or was changed")
    return _valid(name, lambda: read(text))


def _valid(name: str, read: Callable[[], Shape]) -> Shape:
    try:
        return read()
    except (ValidationError, ValueError, RecursionError) as error:
        first = str(error).splitlines()[0]
        refuse(f"{name} does not describe an image ({first})")
