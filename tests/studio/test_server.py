"""The studio over HTTP: its answers, bad files, and who gets in."""

from __future__ import annotations

import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import quote, urlsplit

import numpy as np
import pytest
from PIL import Image

httpx = pytest.importorskip("httpx")
gradio_client = pytest.importorskip("gradio_client")

import visualtokens  # noqa: E402
from tests.studio.conftest import Running, opened  # noqa: E402
from visualtokens.data import read_image  # noqa: E402
from visualtokens.errors import UserError  # noqa: E402
from visualtokens.studio.server import serve  # noqa: E402


def client(studio: Running) -> gradio_client.Client:
    return gradio_client.Client(studio.url, verbose=False, analytics_enabled=False)


def photo(path: Path, seed: int = 0, size: tuple[int, int] = (90, 70)) -> Path:
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(256, size=(6, 6, 3), dtype=np.uint8))
    coarse.resize(size, Image.Resampling.BICUBIC).save(path)
    return path


# Answers.


def test_the_endpoints_answer_as_the_library_does(
    studio: Running, checkpoints: list[Path], tmp_path: Path
) -> None:
    file, user = photo(tmp_path / "a.png"), client(studio)
    upload = gradio_client.handle_file(str(file))
    for folder in checkpoints:
        checkpoint = visualtokens.load(folder)
        found = user.predict(upload, folder.name, api_name="/predict")
        expected = checkpoint.predict(read_image(file)).to_dict()["classes"]
        assert [c["class"] for c in found["classes"]] == [c["class"] for c in expected]
        assert [c["probability"] for c in found["classes"]] == pytest.approx(
            [c["probability"] for c in expected], abs=1e-5
        )
    explained = user.predict(upload, "paca", -1, -1, 64, api_name="/explain")
    expected_why = visualtokens.load(checkpoints[1]).explain(read_image(file), budget=64)
    assert explained["values"] == pytest.approx(expected_why.values.tolist(), abs=1e-4)
    assert explained["class"] == expected_why.class_name(expected_why.target)
    reduced = user.predict(upload, "vit", "merge", 0.6, api_name="/reduce")
    model = visualtokens.reduce(visualtokens.load(checkpoints[0]).model, "merge", keep=reduced["keep"])
    assert reduced["macs"] == visualtokens.reduce.macs(model).total
    assert reduced["speedup"] > 0
    layers = user.predict(upload, "vit", api_name="/tokens")["layers"]
    assert [len(np.unique(layer["assignment"])) for layer in layers] == [layer["tokens"] for layer in layers]


def test_only_the_named_endpoints_are_offered(studio: Running) -> None:
    described = client(studio).view_api(return_format="dict", print_info=False)
    assert set(described["named_endpoints"]) == {"/predict", "/tokens", "/explain", "/reduce"}


def test_many_clients_at_once_get_their_own_answers(
    studio: Running, checkpoints: list[Path], tmp_path: Path
) -> None:
    checkpoint = visualtokens.load(checkpoints[1])
    files = [photo(tmp_path / f"{i}.png", i) for i in range(6)]
    expected = [checkpoint.predict(read_image(file)).top[0] for file in files]

    def ask(file: Path) -> tuple[str, float]:
        found = client(studio).predict(gradio_client.handle_file(str(file)), "paca", api_name="/predict")
        return found["classes"][0]["class"], found["classes"][0]["probability"]

    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(ask, files))
    assert [name for name, _ in found] == [name for name, _ in expected]
    assert [p for _, p in found] == pytest.approx([p for _, p in expected], abs=1e-5)


# Bad files.


def bad_files(folder: Path) -> dict[str, Path]:
    """Files that are not photos, or unusual ones, by what is wrong with them."""
    good = photo(folder / "good.jpg").read_bytes()
    huge = folder / "huge.png"
    Image.new("1", (12_000, 9_000)).save(huge)
    contents = {
        "empty": ("empty.jpg", b""),
        "text": ("text.jpg", b"this is no photo\n"),
        "truncated": ("truncated.jpg", good[: len(good) // 2]),
        "svg": ("script.svg", b'<svg xmlns="http://www.w3.org/2000/svg"><script>alert(1)</script></svg>'),
        "html name": ("<img src=x onerror=alert(1)>.jpg", b"no photo"),
    }
    files = {"100 megapixels": huge}
    for kind, (name, content) in contents.items():
        files[kind] = folder / name
        files[kind].write_bytes(content)
    return files


def unusual_files(folder: Path) -> dict[str, Path]:
    """Photos of unusual kinds."""
    rgb = Image.open(photo(folder / "rgb.png"))
    files = {
        "16 bit": folder / "sixteen.png",
        "CMYK": folder / "cmyk.jpg",
        "animated": folder / "animated.gif",
        "rotated": folder / "rotated.jpg",
        "one pixel": folder / "pixel.png",
        "thread": folder / "thread.png",
        "11 MB": folder / "large.png",
        "WebP": folder / "photo.webp",
    }
    Image.fromarray(np.full((40, 50), 40_000, dtype=np.uint16)).save(files["16 bit"])
    rgb.convert("CMYK").save(files["CMYK"])
    rgb.save(files["animated"], save_all=True, append_images=[rgb.rotate(90)])
    exif = Image.Exif()
    exif[0x0112] = 6
    rgb.save(files["rotated"], exif=exif)
    Image.new("RGB", (1, 1), "red").save(files["one pixel"])
    Image.new("RGB", (30_000, 2), "blue").save(files["thread"])
    noise = np.random.default_rng(0).integers(256, size=(1900, 2000, 3), dtype=np.uint8)
    Image.fromarray(noise).save(files["11 MB"], compress_level=0)
    rgb.save(files["WebP"])
    return files


def test_bad_files_get_a_sentence_and_the_queue_goes_on(studio: Running, tmp_path: Path) -> None:
    user = client(studio)
    for kind, file in bad_files(tmp_path).items():
        with pytest.raises(gradio_client.exceptions.AppError) as caught:
            user.predict(gradio_client.handle_file(str(file)), "paca", api_name="/predict")
        message = str(caught.value)
        assert "cannot read" in message.lower(), (kind, message)
        assert "Traceback" not in message
        assert str(studio.folder) not in message, "the message names a folder of the server"
    good = user.predict(gradio_client.handle_file(str(tmp_path / "good.jpg")), "paca", api_name="/predict")
    assert len(good["classes"]) == 5


def test_unusual_photos_are_answered(studio: Running, checkpoints: list[Path], tmp_path: Path) -> None:
    user, checkpoint = client(studio), visualtokens.load(checkpoints[1])
    for kind, file in unusual_files(tmp_path).items():
        found = user.predict(gradio_client.handle_file(str(file)), "paca", api_name="/predict")
        expected = checkpoint.predict(read_image(file)).top[0][0]
        assert found["classes"][0]["class"] == expected, kind


def test_no_photo_gets_a_sentence(studio: Running) -> None:
    with pytest.raises(gradio_client.exceptions.AppError, match="Give a photo first"):
        client(studio).predict(None, "paca", api_name="/predict")


# Who gets in, and what they can read.


def test_health(studio: Running) -> None:
    found = httpx.get(f"{studio.url}/health").json()
    assert found["status"] == "ok"
    assert found["models"] == ["vit", "paca"]


def test_files_outside_the_folder_of_the_studio_are_not_served(
    studio: Running, checkpoints: list[Path], tmp_path: Path
) -> None:
    (tmp_path / "secret.txt").write_text("secret")
    paths = [
        "/etc/passwd",
        str(checkpoints[0] / "config.json"),
        str(tmp_path / "secret.txt"),
        "pyproject.toml",
    ]
    paths += ["../../../../etc/passwd", "..%2f..%2f..%2fetc%2fpasswd", "/proc/self/environ"]
    for path in paths:
        for address in (
            f"/gradio_api/file={path}",
            f"/gradio_api/file={quote(path, safe='')}",
            f"/file={path}",
        ):
            answer = httpx.get(studio.url + address)
            assert answer.status_code in (403, 404), (address, answer.status_code)
    # nor read through an endpoint
    stolen = {"path": str(checkpoints[0] / "config.json"), "meta": {"_type": "gradio.FileData"}}
    with pytest.raises(Exception, match=r"(?i)not uploaded|not allowed|cannot|InvalidPath"):
        client(studio).predict(stolen, "paca", api_name="/predict")


def test_pages_of_other_sites_are_not_answered(studio: Running) -> None:
    assert httpx.get(f"{studio.url}/health", headers={"Host": "evil.example"}).status_code == 400


def test_only_this_machine_reaches_it(studio: Running) -> None:
    port = urlsplit(studio.url).port
    assert port is not None
    own = socket.gethostbyname(socket.gethostname())
    if own.startswith("127."):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(("10.255.255.255", 1))  # sends nothing; tells the address of this machine
            own = probe.getsockname()[0]
    if own.startswith("127."):
        pytest.skip("this machine has no other address")
    with pytest.raises(OSError, match="refused"):
        socket.create_connection((own, port), timeout=5).close()


def test_pages_may_load_nothing_from_elsewhere(studio: Running) -> None:
    answer = httpx.get(studio.url)
    assert "default-src 'self'" in answer.headers["content-security-policy"]
    assert answer.headers["x-content-type-options"] == "nosniff"


def test_other_hosts_need_a_password() -> None:
    with pytest.raises(UserError, match=r"host='0.0.0.0' lets others in; set a password"):
        serve({}, {}, host="0.0.0.0")


def test_a_password_is_asked_for_and_uploads_are_deleted(checkpoints: list[Path], tmp_path: Path) -> None:
    arguments = ("--checkpoint", str(checkpoints[1]), "--host", "127.0.0.1")
    with opened(*arguments, folder=tmp_path / "temporary", password="open sesame") as studio:
        assert httpx.get(f"{studio.url}/gradio_api/info").status_code == 401
        wrong = httpx.post(f"{studio.url}/login", data={"username": "studio", "password": "sesame"})
        assert wrong.status_code == 400
        user = gradio_client.Client(studio.url, auth=("studio", "open sesame"), verbose=False)
        file = photo(tmp_path / "a.png")
        assert user.predict(gradio_client.handle_file(str(file)), "paca", api_name="/predict")["classes"]
        assert list(studio.folder.glob("vtok-studio-*/**/a.png"))
        studio.process.send_signal(signal.SIGINT)
        assert studio.process.wait(30) == 0
        assert not list(studio.folder.glob("vtok-studio-*"))
