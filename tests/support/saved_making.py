"""Images as container engines save them, made by hand: layers, a configuration, a manifest, in every form."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import zstandard

MACHINE = {"x86_64": "amd64", "aarch64": "arm64"}
FOLDER = tarfile.DIRTYPE
LINK = tarfile.SYMTYPE

Entry = tuple[str, bytes | str | None]
"""A name and its content; a text is where a symlink leads; null is a folder."""


def a_layer(*entries: Entry, below: Path | None = None) -> bytes:
    """A layer: what lies below a folder, and these."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as tar:
        if below is not None:
            tar.add(below, ".")
        for name, content in entries:
            info = tarfile.TarInfo(name)
            info.mode = 0o755
            if content is None:
                info.type = FOLDER
            elif isinstance(content, str):
                info.type, info.linkname = LINK, content
            else:
                info.size = len(content)
            tar.addfile(info, io.BytesIO(content) if isinstance(content, bytes) else None)
    return data.getvalue()


def sha256(data: bytes) -> str:
    """As images write it."""
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def a_configuration(layers: Sequence[bytes], **more: object) -> bytes:
    """What an image says of itself."""
    import platform

    machine = MACHINE[platform.machine()]
    rootfs = {"type": "layers", "diff_ids": [sha256(layer) for layer in layers]}
    return json.dumps({"architecture": machine, "os": "linux", "rootfs": rootfs, **more}).encode()


def docker_files(layers: Sequence[bytes], config: bytes) -> dict[str, bytes | str]:
    """As `docker save` wrote them up to version 24, and podman does: a layer that is there twice is a link."""
    names = [f"{sha256(layer)[7:]}/layer.tar" for layer in layers]
    listing = [{"Config": "c" * 64 + ".json", "RepoTags": ["x:1"], "Layers": [f"{number}.tar" for number in names]}]
    files: dict[str, bytes | str] = dict(zip(names, layers, strict=True))
    files |= {f"{name}.tar": f"../{name}" for name in names}
    return {**files, "c" * 64 + ".json": config, "manifest.json": json.dumps(listing).encode()}


def oci_files(layers: Sequence[bytes], config: bytes, squeeze: str = "gzip") -> dict[str, bytes | str]:
    """As oci-archive has them: blobs by digest, and an index of an index, beside an attestation."""
    packed = [gzip.compress(layer, 1) if squeeze == "gzip" else _zstd(layer) for layer in layers]
    listed = [
        {"mediaType": f"application/vnd.oci.image.layer.v1.tar+{squeeze}", "digest": sha256(blob)} for blob in packed
    ]
    manifest = json.dumps({"schemaVersion": 2, "config": {"digest": sha256(config)}, "layers": listed}).encode()
    machine = json.loads(config)["architecture"]
    fitting = {"digest": sha256(manifest), "platform": {"os": "linux", "architecture": machine}}
    beside = {"digest": sha256(b"none"), "platform": {"os": "unknown", "architecture": "unknown"}}
    inner = json.dumps({"schemaVersion": 2, "manifests": [beside, fitting]}).encode()
    index = json.dumps({"schemaVersion": 2, "manifests": [{"digest": sha256(inner)}]}).encode()
    blobs: dict[str, bytes | str] = {
        f"blobs/sha256/{sha256(blob)[7:]}": blob for blob in (*packed, config, manifest, inner)
    }
    return {**blobs, "index.json": index, "oci-layout": b'{"imageLayoutVersion": "1.0.0"}'}


def _zstd(data: bytes) -> bytes:
    half = len(data) // 2
    skipped = b"\x50\x2a\x4d\x18\x04\x00\x00\x00abcd"
    return zstandard.compress(data[:half]) + zstandard.compress(data[half:]) + skipped


def packed(files: Mapping[str, bytes | str], path: Path) -> Path:
    """One archive of them; a text is where a link leads."""
    with tarfile.open(path, "w") as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            if isinstance(content, str):
                info.type, info.linkname = LINK, content
                tar.addfile(info)
            else:
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
    return path


def laid_out(files: Mapping[str, bytes | str], folder: Path) -> Path:
    """A folder of them."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, str):
            path.symlink_to(content)
        else:
            path.write_bytes(content)
    return folder
