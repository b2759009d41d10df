"""Images as engines save them: their layers become one system, and nothing in them reaches beyond it."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import stat
import subprocess
import tarfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
import zstandard

from rollcage.errors import UsageError
from rollcage.sandboxes.images.saved import is_saved, opened, variables
from rollcage.sandboxes.images.stacked import LayerTree, Stacked
from rollcage.sandboxes.local.provider import LocalProvider
from rollcage.types import HOME, SandboxSpec
from support.commands import rollcage
from support.image_making import folders, imported, said
from support.saved_making import Entry, a_configuration, a_layer, docker_files, laid_out, oci_files, packed, sha256
from support.systems import MARK, a_system

LOWER: Sequence[Entry] = (
    ("opt", None),
    ("opt/old", None),
    ("opt/old/a", b"a"),
    ("opt/gone", b"x"),
    ("opt/kind", b"file"),
    ("opt/tree", None),
    ("opt/tree/x", b"x"),
    ("opt/link", "old"),
    ("opt/other", None),
    ("opt/other/a", b"a"),
    ("opt/way", "other"),
    ("opt/lane", "other"),
    ("opt/kept", b"kept"),
)
UPPER: Sequence[Entry] = (
    # The mark that empties a folder may come after what this layer puts into it.
    ("opt/old", None),
    ("opt/old/b", b"b"),
    ("opt/old/.wh..wh..opq", b""),
    ("opt/.wh.gone", b""),
    ("opt/kind", None),
    ("opt/kind/in", b"in"),
    ("opt/tree", b"now a file"),
    # Here a folder takes a link's place: emptying it must not empty what the link led to.
    ("opt/link", None),
    ("opt/link/.wh..wh..opq", b""),
    ("opt/link/l", b"l"),
    ("opt/way", None),
    ("opt/way/.wh.a", b""),
    ("opt/lane/.wh..wh..opq", b""),
    ("opt/.wh..wh.plnk/1", b"of another file system's own"),
)
TOGETHER = {f"opt/{name}" for name in ("kept", "kind/in", "lane", "link/l", "old/b", "other/a", "tree")}


def _files(system: Stacked) -> set[str]:
    found = {path[1:]: os.lstat(places[0]).st_mode for path, places in system.walk("")}
    return {path for path, mode in found.items() if not stat.S_ISDIR(mode)}


def _unpacked(path: Path, folder: Path, limit: int = 1 << 30) -> set[str]:
    assert is_saved(path)
    (folder / "tree").mkdir(parents=True)
    below: list[Path] = []
    with opened(path, folder, limit) as image:
        for number in range(len(image.layers)):
            layer = folder / "tree" / str(number)
            layer.mkdir()
            with LayerTree(layer, below, limit=limit) as tree:
                image.unpack(number, tree, lambda name: name, limit)
            below.insert(0, layer)
    assert [path.name for path in folder.iterdir()] == ["tree"], "what was decompressed is gone"
    return _files(Stacked(below))


def _squeezed(path: Path, squeeze: Callable[[bytes], bytes]) -> Path:
    path.write_bytes(squeeze(path.read_bytes()))
    return path


FORMS: Mapping[str, Callable[[Sequence[bytes], bytes, Path], Path]] = {
    "docker-archive": lambda layers, config, path: packed(docker_files(layers, config), path),
    "docker-archive.gz": lambda layers, config, path: _squeezed(
        packed(docker_files(layers, config), path), gzip.compress
    ),
    "oci-archive": lambda layers, config, path: packed(oci_files(layers, config), path),
    "oci-archive.zst": lambda layers, config, path: _squeezed(
        packed(oci_files(layers, config, "zstd"), path), zstandard.compress
    ),
    "oci-dir": lambda layers, config, path: laid_out(oci_files(layers, config), path),
    "docker-dir": lambda layers, config, path: laid_out(
        {
            **{sha256(data)[7:]: data for data in (*layers, config)},
            "manifest.json": json.dumps(
                {"config": {"digest": sha256(config)}, "layers": [{"digest": sha256(layer)} for layer in layers]}
            ).encode(),
        },
        path,
    ),
    # As Docker writes it from version 25 on: both descriptions, of the same blobs.
    "docker-archive-25": lambda layers, config, path: packed(
        {
            **oci_files(layers, config),
            **docker_files(layers, config),
        },
        path,
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_layers_are_laid_over_one_another_and_what_one_removes_is_gone(form: str, tmp_path: Path) -> None:
    layers = (a_layer(*LOWER), a_layer(*UPPER), a_layer(("opt/kept", b"kept")))
    path = FORMS[form](layers, a_configuration(layers), tmp_path / "saved")
    assert _unpacked(path, tmp_path / "to") == TOGETHER
    assert (tmp_path / "to/tree/1/opt/tree").read_bytes() == b"now a file"


@pytest.mark.parametrize(
    "entry",
    [
        ("link/.wh.secret", b""),
        ("link/.wh..wh..opq", b""),
        ("up/.wh.secret", b""),
        ("up/secret", b"mine"),
        ("link", None),
        ("link/.wh..", b""),
        ("../.wh.outside", b""),
        (".wh...", b""),
    ],
)
def test_a_hostile_layer_removes_and_writes_nothing_outside(entry: Entry, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_text("the host's")
    lower = a_layer(("link", str(outside)), ("up", "../../../../../../../.." + str(outside)))
    layers = (lower, a_layer(entry))
    path = packed(docker_files(layers, a_configuration(layers)), tmp_path / "saved.tar")
    try:
        _unpacked(path, tmp_path / "to")
    except UsageError as error:
        assert "cannot take" in str(error)
    assert [(file.name, file.read_text()) for file in outside.iterdir()] == [("secret", "the host's")]


def _changed(**files: bytes | str | None) -> Callable[[dict[str, bytes | str]], dict[str, bytes | str]]:
    def change(before: dict[str, bytes | str]) -> dict[str, bytes | str]:
        after = {
            **before,
            **{name.replace("__", "."): content for name, content in files.items() if content is not None},
        }
        return {name: content for name, content in after.items() if files.get(name.replace(".", "__"), b"") is not None}

    return change


def _with_listing(**fields: object) -> bytes:
    return json.dumps([{"Config": "c" * 64 + ".json", "RepoTags": None, "Layers": [], **fields}]).encode()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (_changed(manifest__json=None), "neither manifest.json nor index.json"),
        (_changed(manifest__json=b"{"), "manifest.json does not describe an image"),
        (_changed(manifest__json=b"[" * 100_000), "manifest.json does not describe an image"),
        (_changed(manifest__json=b" " * (9 << 20)), "manifest.json is too large"),
        (_changed(manifest__json="manifest.json"), "neither manifest.json nor index.json"),
        (_changed(manifest__json=_with_listing(Config="../../etc/passwd")), "'../../etc/passwd' is missing"),
        (_changed(manifest__json=_with_listing(Config="/etc/passwd")), "'/etc/passwd' is missing"),
        (_changed(manifest__json=_with_listing()), "has 0 layers, and its configuration names 2"),
        (_changed(manifest__json=_with_listing(Layers=["/etc/passwd", "x"])), "'/etc/passwd' is missing"),
        (_changed(manifest__json=json.dumps([json.loads(_with_listing())[0]] * 2).encode()), "it holds 2 images"),
    ],
)
def test_a_description_that_makes_no_sense_is_refused(
    change: Callable[[dict[str, bytes | str]], dict[str, bytes | str]], why: str, tmp_path: Path
) -> None:
    layers = (a_layer(*LOWER), a_layer(*UPPER))
    path = packed(change(docker_files(layers, a_configuration(layers))), tmp_path / "saved.tar")
    with pytest.raises(UsageError) as refused:
        _unpacked(path, tmp_path / "to")
    assert why in str(refused.value) and "docker export" in str(refused.value)


def test_layers_that_are_not_what_the_image_says_are_refused(tmp_path: Path) -> None:
    layers = (a_layer(*LOWER), a_layer(*UPPER))
    config = a_configuration(layers)
    damaged = packed(docker_files((layers[0], a_layer(("opt/x", b"x"))), config), tmp_path / "damaged.tar")
    with pytest.raises(UsageError, match="its layer 2 is not what the image says it is"):
        _unpacked(damaged, tmp_path / "1")
    half = packed(
        {name: content[: len(content) // 2] for name, content in oci_files(layers, config).items()}, tmp_path / "half"
    )
    with pytest.raises(UsageError):
        _unpacked(half, tmp_path / "2")
    foreign = a_configuration(layers, architecture="s390x")
    for number, files in enumerate((docker_files(layers, foreign), oci_files(layers, foreign))):
        with pytest.raises(UsageError, match=r"image for linux/s390x|holds 0 images for \w+ \(linux/s390x\)"):
            _unpacked(packed(files, tmp_path / "foreign.tar"), tmp_path / f"foreign-{number}")


def test_layers_that_decompress_to_more_than_allowed_are_refused(tmp_path: Path) -> None:
    # In a folder that is left out: nothing of it would be written, but it would have to be read.
    layers = (a_layer(("tmp/bomb", bytes(64 << 20))),)
    for name, files in (
        ("a", oci_files(layers, a_configuration(layers))),
        ("b", docker_files(layers, a_configuration(layers))),
    ):
        path = _squeezed(packed(files, tmp_path / name), lambda data: gzip.compress(data, 1))
        assert path.stat().st_size < 1 << 20
        with pytest.raises(UsageError, match="more than --max-gb allows"):
            _unpacked(path, tmp_path / f"to-{name}", limit=16 << 20)


def test_descriptions_that_are_not_what_their_digests_say_are_refused(tmp_path: Path) -> None:
    layers = (a_layer(*LOWER),)
    config = a_configuration(layers)
    changed = a_configuration(layers, config={"Env": ["LD_PRELOAD=/opt/kept"]})
    files = oci_files(layers, config)
    names = {name for name, content in files.items() if isinstance(content, bytes) and content.startswith(b"{")}
    for number, name in enumerate(sorted(names - {"index.json", "oci-layout"})):
        content = files[name]
        assert isinstance(content, bytes)
        other = {**files, name: changed if content == config else content + b" "}
        with pytest.raises(UsageError, match="is not what its digest says"):
            _unpacked(packed(other, tmp_path / "saved.tar"), tmp_path / str(number))
    assert number == 2, "an index, a manifest and a configuration"


def test_folders_without_end_are_no_saved_image(tmp_path: Path) -> None:
    layers = (a_layer(*LOWER),)
    saved = packed(docker_files(layers, a_configuration(layers)), tmp_path / "saved.tar").read_bytes()
    folder = tarfile.TarInfo("blobs")
    folder.type = tarfile.DIRTYPE
    path = tmp_path / "many.tar"
    path.write_bytes(folder.tobuf() * 5000 + saved)
    assert is_saved(path)
    path.write_bytes(folder.tobuf() * 10_000 + saved)
    assert not is_saved(path)
    with pytest.raises(UsageError, match="more files than any image"), opened(path, tmp_path / "scratch", 1 << 30):
        pass


def test_folders_in_folders_without_end_are_refused_and_can_be_removed(tmp_path: Path) -> None:
    deep: list[Entry] = [("a/" * 150 + "x", b"x")]
    for number in range(20):
        deep += [(f"l{number}", ("a/" * 149 + "a") if number == 0 else f"l{number - 1}/" + "a/" * 149 + "a")]
        deep += [(f"l{number}/" + "a/" * 150 + "x", b"x")]
    layers = (a_layer(*deep),)
    path = packed(docker_files(layers, a_configuration(layers)), tmp_path / "saved.tar")
    with pytest.raises(UsageError, match="nested too deeply"):
        _unpacked(path, tmp_path / "to")
    shutil.rmtree(tmp_path / "to")


def test_a_root_file_system_is_not_taken_for_a_saved_image(tmp_path: Path) -> None:
    for name, entries in {
        "export": (("manifest.json", b"[]"), ("usr", None)),
        "plain": ((".", None), ("bin", "usr/bin"), ("manifest.json", b"[]")),
        "empty": (),
    }.items():
        (tmp_path / name).write_bytes(a_layer(*entries))
    assert not is_saved(tmp_path / "plain") and not is_saved(tmp_path / "empty") and not is_saved(tmp_path / "none")
    (tmp_path / "folder/usr").mkdir(parents=True)
    (tmp_path / "folder/manifest.json").write_text("[]")
    assert not is_saved(tmp_path / "folder")


async def test_a_saved_image_becomes_a_box_with_its_own_environment(tmp_path: Path) -> None:
    greet = b"#!/bin/sh\necho $COLOUR\n"
    layers = (
        a_layer(("testbed/gone.py", b"x"), below=a_system(tmp_path / "system")),
        a_layer(
            ("opt/bin", None), ("opt/bin/greet", greet), ("testbed/.wh.gone.py", b""), ("testbed/module.py", b"1\n")
        ),
    )
    settings = {"Env": ["PATH=/opt/bin:/usr/bin:/bin", "COLOUR=green", "HOME=/root", "=x"], "WorkingDir": "/testbed"}
    path = packed(oci_files(layers, a_configuration(layers, config=settings)), tmp_path / "saved.tar")
    async with LocalProvider(tmp_path / "state") as provider:
        made = await imported(provider, "own", path, workdir="/testbed", env={"PATH": "/first:$PATH"})
        assert made.image.env == {"PATH": "/first:/opt/bin:/usr/bin:/bin", "COLOUR": "green"}
        async with provider.open(SandboxSpec(template="own")) as box:
            assert await said(box, "greet; echo $HOME; ls /testbed") == f"green\n{HOME}\nmodule.py\n"
            assert MARK in await said(box, "cat /etc/os-release")
        assert not (await imported(provider, "own", path, workdir="/testbed", env={"PATH": "/first:$PATH"})).new
        with pytest.raises(UsageError, match="damaged"):
            os.truncate(path, 0)
            await imported(provider, "bad", packed(docker_files(layers[:1], a_configuration(layers[1:])), path))
        assert folders(provider) == set(made.image.parts)
    told = rollcage(
        tmp_path,
        "image",
        "import",
        "told",
        str(packed(docker_files(layers, a_configuration(layers, config=settings)), path)),
    )
    assert told.returncode == 0 and "start in /testbed; --workdir" in told.stderr, told.stderr


def test_what_a_box_has_of_its_own_is_not_taken_from_an_image() -> None:
    from rollcage.sandboxes.images.saved import CommandSettings

    settings = CommandSettings.model_validate({"Env": ["HOME=/root", "A=b=c", "TMPDIR=/x", "EMPTY=", "B\0=x"]})
    assert variables(settings) == {"A": "b=c", "EMPTY": ""}
    assert variables(CommandSettings.model_validate({"Env": None})) == {}


@pytest.mark.slow
async def test_whatever_an_engine_writes_of_one_image_gives_the_same_system(
    engine_address: str, tmp_path: Path
) -> None:
    import docker  # type: ignore[import-untyped]

    system = a_system(tmp_path / "system")
    change = (
        "set -e; rm -r /opt; mkdir -p /opt/bin; echo b > /opt/b; "
        "rm /testbed/gone; mkdir /testbed/gone; echo in > /testbed/gone/in"
    )
    (system / "opt/gone").write_text("x")
    (system / "testbed/gone").write_text("x")
    client = docker.DockerClient(base_url=engine_address, timeout=120)
    name = f"localhost/rollcage-test-{os.getpid()}"
    # What an engine gives by default may be more than it may give.
    limits = [docker.types.Ulimit(name=kind, soft=1024, hard=1024) for kind in ("nofile", "nproc")]
    try:
        with (tmp_path / "system.tar").open("w+b") as archive:
            subprocess.run(["tar", "--create", "--directory", system, "."], stdout=archive, check=True)
            archive.seek(0)
            client.api.import_image_from_data(archive.read(), repository=name, tag="latest")
        command = ["/bin/sh", "-c", change]
        container = client.containers.create(f"{name}:latest", command, network_mode="none", ulimits=limits)
        container.start()
        assert container.wait()["StatusCode"] == 0, container.logs()
        container.commit(name, "latest", changes=["ENV COLOUR=green"])
        with (tmp_path / "export.tar").open("wb") as file:
            file.writelines(container.export())
        container.remove()
        with (tmp_path / "save.tar").open("wb") as file:
            file.writelines(client.images.get(f"{name}:latest").save(named=True))
    finally:
        client.images.remove(f"{name}:latest", force=True)
        client.close()
    async with LocalProvider(tmp_path / "state") as provider:
        trees = []
        for kind in ("export", "save"):
            made = await imported(provider, kind, tmp_path / f"{kind}.tar")
            tree = Stacked([provider.layers.folder / part / "system" for part in made.image.parts])
            trees.append({file for file in _files(tree) if not file.startswith((".dockerenv", "etc/"))})
            assert made.image.env.get("COLOUR") == ("green" if kind == "save" else None)
        assert trees[0] == trees[1]
        assert {"opt/b", "testbed/gone/in"} <= trees[0] and "opt/gone" not in trees[0]
