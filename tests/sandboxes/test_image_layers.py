"""Layers of saved images: kept once for all images that have them, laid over one another as their engine meant it, and
removed when no image needs them."""

from __future__ import annotations

import io
import json
import os
import struct
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from rollcage.errors import UsageError
from rollcage.sandboxes.images.catalog import Image, ImageStore
from rollcage.sandboxes.images.imports import ImageSource, import_image
from rollcage.sandboxes.layers import LayerStore
from rollcage.sandboxes.local.provider import LocalProvider
from rollcage.types import SandboxSpec
from support.commands import rollcage
from support.image_making import folders, imported, said, tarred
from support.saved_making import Entry, a_configuration, a_layer, docker_files, oci_files, packed
from support.systems import a_system

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = a_system(tmp_path_factory.mktemp("base") / "system")
    (folder / "opt/lib").mkdir()
    (folder / "opt/lib").chmod(0o711)
    (folder / "opt/lib/shared").write_text("shared")
    (folder / "opt/gone").write_text("gone")
    (folder / "opt/old").mkdir()
    (folder / "opt/old/a").write_text("a")
    (folder / "opt/way").symlink_to("lib")
    (folder / "root/old").write_text("old")
    return a_layer(below=folder)


@pytest.fixture
async def provider(tmp_path: Path) -> AsyncIterator[LocalProvider]:
    async with LocalProvider(tmp_path / "state") as boxes:
        yield boxes


def saved(path: Path, *layers: bytes) -> Path:
    return packed(docker_files(layers, a_configuration(layers)), path)


async def test_images_on_one_base_store_it_once(provider: LocalProvider, base: bytes, tmp_path: Path) -> None:
    told: list[str] = []
    for name in ("one", "two"):
        path = saved(tmp_path / "x.tar", base, a_layer((f"opt/{name}", name.encode() * 5000)))
        made = await import_image(provider, name, ImageSource(path=path), told.append)
        assert made.new and len(made.image.parts) == 2
    assert [line for line in told if line.startswith("unpacking")] == [
        "unpacking layer 1 of 2",
        "unpacking layer 2 of 2",
        "unpacking layer 2 of 2",
    ]
    one, two = provider.images.all()
    assert one.parts[1] == two.parts[1] and one.parts[0] != two.parts[0]
    sizes = provider.images.sizes([one, two])
    assert sizes["one"][1] == sizes["two"][1] > 1 << 20 > sizes["one"][0] >= 4096
    async with provider.open(SandboxSpec(template="two")) as box:
        assert await said(box, "ls /opt") == "gone\nlib\nold\ntwo\nway\n"
        await provider.images.remove("one")
        assert folders(provider) == set(two.parts), "what another image has stays"
        assert await said(box, "ls /opt/two") == "/opt/two\n"


UPPER: tuple[Entry, ...] = (
    ("opt/.wh.gone", b""),
    ("opt/lib/own", b"own"),
    ("opt/way/through", b"through a link of the layer below"),
    ("opt/old/b", b"b"),
    ("opt/old/.wh..wh..opq", b""),
    ("opt/.wh.never", b""),
    ("root/.wh.old", b""),
    ("root/new", b"new"),
    ("var/.wh.lib", b""),
    ("var/lib", None),
    ("var/lib/again", b"again"),
)


@pytest.mark.parametrize("rooted", [False, True])
async def test_a_box_sees_layers_as_their_engine_meant_them(
    provider: LocalProvider, base: bytes, tmp_path: Path, rooted: bool
) -> None:
    upper = a_layer(*UPPER)
    link = io.BytesIO(upper)
    with tarfile.open(fileobj=link, mode="a") as tar:
        entry = tarfile.TarInfo("opt/linked")
        entry.type, entry.linkname = tarfile.LNKTYPE, "opt/lib/shared"
        tar.addfile(entry)
    layers = (base, link.getvalue(), a_layer(("opt/old/c", b"c")))
    await imported(provider, "x", packed(oci_files(layers, a_configuration(layers)), tmp_path / "x.tar"))
    async with provider.open(SandboxSpec(template="x", writable_system=rooted)) as box:
        assert await said(box, "cd /opt; ls; ls old; cat linked lib/through") == (
            "lib\nlinked\nold\nway\nb\nc\nsharedthrough a link of the layer below"
        )
        assert await said(box, "cd /opt; readlink way; stat -c %a lib; ls lib") == "lib\n711\nown\nshared\nthrough\n"
        assert await said(box, "ls -A /root /var/lib") == "/root:\n.profile\nnew\n\n/var/lib:\nagain\n"
        if rooted:
            assert await said(box, "echo x > /opt/lib/shared; rm /opt/old/b; cat /opt/lib/shared; ls /opt/old") == (
                "x\nc\n"
            )


async def test_a_layer_may_remove_all_that_was_below(provider: LocalProvider, base: bytes, tmp_path: Path) -> None:
    layers = (a_layer(("data/secret", b"secret")), a_layer((".wh..wh..opq", b"")), base)
    await imported(provider, "x", saved(tmp_path / "x.tar", *layers))
    async with provider.open(SandboxSpec(template="x")) as box:
        assert await said(box, "test -e /data || echo gone; ls /opt/old") == "gone\na\n"


async def test_a_folder_that_moves_is_taken_from_all_layers(
    provider: LocalProvider, base: bytes, tmp_path: Path
) -> None:
    upper = a_layer(("opt/old/b", b"b"), ("opt/old/.wh.a", b""), ("opt/old/deep", None), ("opt/old/deep/c", b"c"))
    path = saved(tmp_path / "x.tar", base, upper, a_layer(("opt/old/deep/d", b"d")))
    plain = await imported(provider, "plain", path)
    moved = await imported(provider, "moved", path, workdir="/opt/old")
    assert moved.image.parts[1:] == plain.image.parts, "the layers are shared, whatever moves"
    sizes = provider.images.sizes(provider.images.all())
    assert sizes["moved"][0] < 16 << 10, "files that moved are not copied"
    async with provider.open(SandboxSpec(template="moved")) as box:
        assert await said(box, "cd /opt/old && pwd -P && find . -type f | sort; echo x > b; stat -c %a /opt/lib") == (
            "/home/user/workdir\n./b\n./deep/c\n./deep/d\n711\n"
        )
    async with provider.open(SandboxSpec(template="plain")) as box:
        assert await said(box, "cat /opt/old/b") == "b", "what is written in a box changes no layer"


async def test_what_cannot_move_is_found_before_anything_is_copied(
    provider: LocalProvider, base: bytes, tmp_path: Path
) -> None:
    (tmp_path / "folder/etc").mkdir(parents=True)
    (tmp_path / "folder/testbed").write_text("a file")
    emptied = saved(tmp_path / "saved.tar", base, a_layer((".wh.testbed", b"")))
    for source, why in (
        (emptied, "/testbed: there is no such folder"),
        (tmp_path / "folder", "/testbed: /testbed is no folder"),
        (tarred(tmp_path / "folder", tmp_path / "x.tar"), "/testbed: /testbed is no folder"),
        (tarred(tmp_path / "folder", tmp_path / "x.tar.gz", "w:gz"), "/testbed: /testbed is no folder"),
    ):
        told: list[str] = []
        with pytest.raises(UsageError, match=why):
            await import_image(provider, "x", ImageSource(path=source, workdir="/testbed"), told.append)
        assert told == [f"looking at {source}"], "nothing was unpacked"
        assert folders(provider) == set()
    # The same where the layers are there already.
    await imported(provider, "plain", emptied)
    with pytest.raises(UsageError, match="there is no such folder"):
        await imported(provider, "x", emptied, workdir="/testbed")


async def test_a_system_for_another_processor_is_refused_before_it_is_copied(
    provider: LocalProvider, tmp_path: Path
) -> None:
    program = tmp_path / "folder/usr/bin/env"
    program.parent.mkdir(parents=True)
    program.write_bytes(b"\x7fELF\x02\x01\x01" + bytes(11) + struct.pack("<H", 22) + bytes(64))
    for source in (tmp_path / "folder", tarred(tmp_path / "folder", tmp_path / "x.tar")):
        told: list[str] = []
        with pytest.raises(UsageError, match="another processor"):
            await import_image(provider, "x", ImageSource(path=source), told.append)
        assert told == [f"looking at {source}"] and folders(provider) == set()


async def test_layers_count_against_the_limit_also_where_they_are_there(
    provider: LocalProvider, base: bytes, tmp_path: Path
) -> None:
    path = saved(tmp_path / "x.tar", base)
    await imported(provider, "x", path)
    with pytest.raises(UsageError, match="--max-gb"):
        await imported(provider, "y", path, max_gb=0.001)
    assert provider.images.names() == ["x"]


async def test_prune_removes_what_nobody_needs_and_nothing_that_a_box_uses(
    provider: LocalProvider, base: bytes, tmp_path: Path
) -> None:
    made = await imported(provider, "x", saved(tmp_path / "x.tar", base))
    # A killed build leaves a layer that is not whole, an archive, and a layer that no image came to name.
    left = provider.layers.folder / ".image_layer-0123.draft"
    (left / "system").mkdir(parents=True)
    (provider.layers.folder / "image_layer-4567").mkdir()
    (provider.layers.folder / "image_layer-4567/file").write_bytes(bytes(10_000))
    (provider.images.builds / "dead").mkdir(parents=True)
    (provider.images.builds / "dead/image.tar").write_bytes(b"x")
    with provider.images.build_folder() as building:
        (building / "image.tar").write_bytes(b"x")
        async with provider.open(SandboxSpec(template="x")) as box:
            # Made anew meanwhile: the box has layers that no image has.
            await imported(
                provider, "x", saved(tmp_path / "x.tar", a_layer(("opt/x", b"x"), below=a_system(tmp_path / "s")))
            )
            assert await provider.images.prune() >= 0
            assert await said(box, "ls /opt/old") == "a\n"
            assert set(made.image.parts) < folders(provider)
        assert await provider.images.prune() > 1 << 20
        assert (building / "image.tar").exists(), "a build that goes on is left alone"
    assert not left.exists() and list(provider.images.builds.iterdir()) == []
    assert folders(provider) == set(provider.images.get("x").parts)


def test_the_command_shows_what_is_shared_and_prunes(base: bytes, tmp_path: Path) -> None:
    for name in ("one", "two"):
        path = saved(tmp_path / f"{name}.tar", base, a_layer((f"opt/{name}", name.encode())))
        assert rollcage(tmp_path, "image", "import", name, str(path)).returncode == 0
    listed = rollcage(tmp_path, "image", "ls").stdout
    assert "OWN" in listed and "SHARED" in listed
    rows = json.loads(rollcage(tmp_path, "image", "ls", "--json").stdout)
    assert [row["shared_bytes"] > 100 * row["own_bytes"] > 0 for row in rows] == [True, True]
    assert "shared with other images" in rollcage(tmp_path, "image", "show", "one").stdout
    [record] = [path for path in tmp_path.rglob("one.json") if path.parent.name == "images"]
    os.unlink(record)
    freed = json.loads(rollcage(tmp_path, "image", "prune", "--json").stdout)["freed_bytes"]
    assert freed == rows[0]["own_bytes"]
    assert "0.0 MB freed" in rollcage(tmp_path, "image", "prune").stdout


def test_a_file_with_two_names_counts_once_in_a_part_that_images_share(tmp_path: Path) -> None:
    store = ImageStore(tmp_path / "images", LayerStore(tmp_path / "layers"))
    part = tmp_path / "layers" / "image_layer-a"
    part.mkdir(parents=True)
    (part / "one").write_bytes(bytes(range(256)) * 4096)
    (part / "two").hardlink_to(part / "one")
    images = [Image(name=name, parts=(part.name,)) for name in ("a", "b")]
    size = (part / "one").stat().st_blocks * 512
    assert store.sizes(images) == {"a": (0, size), "b": (0, size)} and store.sizes(images[:1]) == {"a": (size, 0)}
