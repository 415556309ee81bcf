"""The images that files, folders, patterns, lists and tar shards name."""

from __future__ import annotations

import io
import os
import random
import tarfile
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from visualtokens.data import BadImage
from visualtokens.errors import UserError
from visualtokens.predict.images import Images, Lookup, Names, find_images, read_list


def png(value: int = 0) -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.full((4, 4, 3), value, np.uint8)).save(file, "PNG")
    return file.getvalue()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in ("b.png", "a.JPG", "notes.txt", ".hidden.png", "sub/c.webp", ".git/d.png", "sub/.DS_Store"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(png())
    return tmp_path


def names(root: Path, *inputs: str | Path) -> list[str]:
    return [os.path.relpath(name, root) for name in find_images(list(map(str, inputs)))]


def test_folders_are_searched_in_order(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        assert names(root, root) == ["a.JPG", "b.png", "sub/c.webp"]
    assert [record.message for record in caplog.records] == [
        "ignored 1 file without the extension of an image"
    ]
    expected = sorted(p for p in root.rglob("*") if p.suffix.lower() in (".jpg", ".png", ".webp"))
    visible = [p for p in expected if not any(part.startswith(".") for part in p.relative_to(root).parts)]
    assert list(find_images([str(root)])) == list(map(str, visible))


def test_inputs_keep_their_order_and_named_files_need_no_extension(root: Path) -> None:
    given = (root / "sub", root / "notes.txt", root / "nowhere.png", root / ".hidden.png")
    assert names(root, *given) == ["sub/c.webp", "notes.txt", "nowhere.png", ".hidden.png"]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("*", ["a.JPG", "b.png"]),
        ("**/*", ["a.JPG", "b.png", "sub/c.webp"]),
        ("**", ["a.JPG", "b.png", "sub/c.webp"]),
        ("[b]*", ["b.png"]),
        ("*/?.webp", ["sub/c.webp"]),
    ],
)
def test_patterns(root: Path, pattern: str, expected: list[str]) -> None:
    assert names(root, root / pattern) == expected


def test_files_whose_names_look_like_patterns(root: Path) -> None:
    (root / "[b]*.png").write_bytes(png())
    assert names(root, root / "[b]*.png") == ["[b]*.png"]
    assert names(root, root / "[31m.png", root / "b.png") == ["[31m.png", "b.png"], "it is unreadable"
    assert names(root, root / "n*", root / "b.png") == ["b.png"], "it matches no image"


def test_links_are_followed_as_in_datasets(root: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "e.png").write_bytes(png())
    (root / "link").symlink_to(elsewhere)
    (root / "lost.png").symlink_to("nowhere")
    assert names(root, root) == ["a.JPG", "b.png", "link/e.png", "lost.png", "sub/c.webp"]
    (root / "sub" / "up").symlink_to(root)
    with pytest.raises(UserError, match=r"the link .*/sub/up leads to"):
        find_images([str(root)])


def test_a_folder_of_pictures_is_not_searched(root: Path) -> None:
    images = find_images([str(root)], skip=root / "sub")
    assert [Path(name).name for name in images] == ["a.JPG", "b.png"]


def test_nothing_found_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError) as caught:
        find_images([str(tmp_path / "empty"), str(tmp_path / "*.png"), "-"], listed=io.BytesIO(b"\n\n"))
    message = str(caught.value)
    assert message.startswith(f"no images to predict: '{tmp_path}/empty' holds none (.avif .bmp ")
    assert f"'{tmp_path}/*.png' matches none (" in message
    assert message.endswith("; standard input lists no files")


def test_an_input_without_images_is_reported(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    (root / "empty").mkdir()
    assert names(root, root / "empty", root / "b.png") == ["b.png"]
    assert [r.message.split(" (")[0] for r in caplog.records] == [f"'{root / 'empty'}' holds none"]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"a.png\nb c.png\n", ["a.png", "b c.png"]),
        (b"a.png\r\n\r\nb.png", ["a.png", "b.png"]),
        (b"a.png\0b\nc.png\0", ["a.png", "b\nc.png"]),
        (b"caf\xe9.png\n", [os.fsdecode(b"caf\xe9.png")]),
        (b"", []),
        (b"\n" * 5000, []),
        (b"x" * 4096 + b"\n" + b"y\n" * 5000, ["x" * 4096] + ["y"] * 5000),
    ],
    ids=range(7),
)
def test_lists_of_names(content: bytes, expected: list[str]) -> None:
    assert list(read_list(io.BytesIO(content))) == expected


def test_lists_longer_than_a_chunk() -> None:
    rng = random.Random(0)
    expected = ["".join(rng.choices("abc/ é", k=rng.randint(1, 200))).strip() or "x" for _ in range(30_000)]
    for separator in ("\n", "\0"):
        assert list(read_list(io.BytesIO(separator.join(expected).encode()))) == expected


@pytest.mark.parametrize("content", [b"x" * 4097, b"a\n" + b"x" * 3_000_000, b"x" * 5000 + b"\n"])
def test_a_name_that_no_file_can_have_ends_the_list(content: bytes) -> None:
    with pytest.raises(UserError, match=r"holds a name of more than 4,096 bytes; give one path per line"):
        list(read_list(io.BytesIO(content)))


# Tar shards.


def write_tar(path: Path, files: dict[str, bytes]) -> None:
    with tarfile.open(path, "w") as tar:
        for name, data in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    long = "long/" * 50 + "name.png"
    write_tar(tmp_path / "b.tar", {"3.png": png(3), "3.cls": b"1", "4.jpg": b"no image"})
    write_tar(tmp_path / "a.tar", {"1.png": png(1), "sub/2.PNG": png(2), long: png(9)})
    write_tar(tmp_path / ".c.tar", {"5.png": png(5)})
    (tmp_path / "_info.json").write_text("{}")
    return tmp_path


def test_members_of_shards_are_images(shards: Path) -> None:
    (shards / "x.png").write_bytes(png(7))
    images = find_images([f"{shards}/x.png", f"wds:{shards}", f"{shards}/x.png", f"wds:{shards}/b.tar"])
    long = "long/" * 50 + "name.png"
    found = [os.path.relpath(name, shards) for name in images]
    assert found == [
        *("x.png", "a.tar/1.png", "a.tar/sub/2.PNG", f"a.tar/{long}", "b.tar/3.png", "b.tar/4.jpg"),
        *("x.png", "b.tar/3.png", "b.tar/4.jpg"),
    ]
    read = [i for i in range(9) if not found[i].endswith(".jpg")]
    assert [images.read(i).getpixel((0, 0)) for i in read] == [(v,) * 3 for v in (7, 1, 2, 9, 3, 7, 3)]
    with pytest.raises(BadImage, match=r"b\.tar/4\.jpg: not an image"):
        images.read(5)


@pytest.mark.parametrize("damage", ["cut in a file", "cut in a header", "no end", "a wrong header"])
def test_a_damaged_shard_costs_only_what_follows(shards: Path, damage: str) -> None:
    content = bytearray((shards / "a.tar").read_bytes())
    offsets = []
    with tarfile.open(shards / "a.tar") as tar:
        offsets = [(member.offset, member.offset_data, member.name) for member in tar]
    second = offsets[1][0]
    if damage == "cut in a file":
        content = content[: offsets[1][1] + 8]
    elif damage == "cut in a header":
        content = content[: second + 100]
    elif damage == "no end":
        content = content[:second]
    else:
        content[second : second + 512] = b"\xff" * 512
    (shards / "a.tar").write_bytes(content)
    images = find_images([f"wds:{shards}"])
    found = [os.path.relpath(name, shards) for name in images]
    assert found[0] == "a.tar/1.png"
    assert found[-3:] == ["a.tar", "b.tar/3.png", "b.tar/4.jpg"]
    with pytest.raises(BadImage, match=r"a\.tar: damaged after \d of its images: ") as caught:
        images.read(len(found) - 3)
    assert caught.value.path == f"{shards}/a.tar"
    assert images.read(len(found) - 2).getpixel((0, 0)) == (3, 3, 3)


def test_a_header_that_points_back_does_not_loop(shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    after = tarfile.TarFile.next

    def backwards(self: tarfile.TarFile) -> tarfile.TarInfo | None:
        member = after(self)
        self.offset = 0  # type: ignore[attr-defined]
        return member

    monkeypatch.setattr(tarfile.TarFile, "next", backwards)
    images = Images()
    images.add_shard(str(shards / "b.tar"))
    assert len(images) == 1
    with pytest.raises(BadImage, match="a header with a negative size"):
        images.read(0)


def test_files_in_shards_have_a_largest_size(shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("visualtokens.predict.images.MAX_FILE_BYTES", 10)
    with pytest.raises(BadImage, match=r"too large: \d+ bytes; a file may have 10"):
        find_images([f"wds:{shards}"]).read(0)


def test_what_is_no_tar_file_is_refused(shards: Path, tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "z.tar", "w:gz") as tar:
        tar.add(shards / "_info.json")
    with pytest.raises(UserError, match=r"z\.tar' is not an uncompressed tar file; unpack or repack it"):
        find_images([f"wds:{shards}"])
    os.remove(tmp_path / "z.tar")
    os.mkfifo(tmp_path / "z.tar")
    message = r"is not a tar file; give wds:FOLDER or wds:FILE\.tar on a local"
    for given in (shards, shards / "nowhere.tar", "https://example.org/a"):
        with pytest.raises(UserError, match=message):
            find_images([f"wds:{given}"])


# Names in memory.

ODD = ["", "a", "é", os.fsdecode(b"\xff\xfe"), "a\nb", "😀", "\ud800"]


def test_names_are_exact() -> None:
    kept = Names()
    for name in ODD:
        kept.append(name)
    assert list(kept) == ODD
    assert kept[len(ODD) - 1] == ODD[-1]
    for index in (-1, len(ODD)):
        with pytest.raises(IndexError):
            kept[index]


def test_lookup_finds_the_first_of_equal_names() -> None:
    kept = Names()
    rng = random.Random(0)
    given = [*ODD, *(str(rng.randint(0, 500)) for _ in range(1000)), *ODD]
    for name in given:
        kept.append(name)
    lookup = Lookup(kept)
    for name in given:
        assert lookup.find(name) == given.index(name)
    assert lookup.find("absent") == -1
    assert lookup.repeated().tolist() == [given.index(name) != i for i, name in enumerate(given)]
    empty = Lookup(Names())
    assert empty.find("a") == -1
    assert empty.repeated().tolist() == []


def test_equal_hashes_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("visualtokens.predict.images.hash", len, raising=False)
    kept = Names()
    for name in ("aa", "b", "bb", "c", "aa"):
        kept.append(name)
    lookup = Lookup(kept)
    assert [lookup.find(name) for name in ("aa", "b", "bb", "c", "cc")] == [0, 1, 2, 3, -1]
    assert lookup.repeated().tolist() == [False, False, False, False, True]


def test_memory_of_many_names() -> None:
    kept = Names()
    tracemalloc.start()
    try:
        for i in range(20_000):
            kept.append(f"/data/photos/{i:032d}.jpg")
        lookup = Lookup(kept)
        size, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert lookup.find(kept[777]) == 777
    assert size < 20_000 * 95, "a list of these names takes 106 bytes for each, without a way to find one"
