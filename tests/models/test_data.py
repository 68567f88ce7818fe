import gzip
import os
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from patience import soonest

from gradbus.models import DataMissing, Dataset, DataSplit, batches, glyphs, load, mnist, resolve_data_root
from gradbus.models import mnist_files as download_module
from gradbus.models.mnist_files import read_idx

MNIST_FOLDER = Path(os.environ.get("GRADBUS_DATA") or "/nonexistent") / "MNIST" / "raw"
needs_mnist = pytest.mark.skipif(not MNIST_FOLDER.is_dir(), reason="MNIST not found; set GRADBUS_DATA to its data root")


def idx_bytes(array: torch.Tensor) -> bytes:
    header = struct.pack(f">4B{array.dim()}I", 0, 0, 8, array.dim(), *array.shape)
    return header + bytes(array.flatten().tolist())


def write_small_mnist(root: Path, *, packed: bool) -> None:
    raw = root / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for part, count in (("train", 6), ("t10k", 3)):
        images = torch.arange(count, dtype=torch.uint8).view(-1, 1, 1).expand(count, 28, 28)
        files = {"images-idx3-ubyte": images, "labels-idx1-ubyte": torch.arange(count, dtype=torch.uint8)}
        for suffix, array in files.items():
            data = idx_bytes(array)
            name = f"{part}-{suffix}"
            (raw / (name + ".gz" if packed else name)).write_bytes(gzip.compress(data) if packed else data)


@pytest.mark.parametrize("packed", [False, True])
def test_mnist_is_read_unpacked_or_packed_and_nothing_is_written(tmp_path: Path, packed: bool) -> None:
    write_small_mnist(tmp_path, packed=packed)
    before = sorted(tmp_path.rglob("*"))
    split = mnist(tmp_path, download=False)
    assert sorted(tmp_path.rglob("*")) == before
    assert split.test is not None
    assert (len(split.train), len(split.test), split.name) == (6, 3, "mnist")
    assert split.train.images.shape == (6, 1, 28, 28)
    assert split.train.labels.tolist() == list(range(6))
    assert float(split.train.images[5, 0, 0, 0]) == pytest.approx((5 / 255 - 0.1307) / 0.3081)
    assert str(tmp_path) in split.note


@needs_mnist
def test_the_real_mnist_has_its_size_and_is_normalised() -> None:
    split = mnist(download=False)
    assert split.test is not None
    assert (len(split.train), len(split.test)) == (60_000, 10_000)
    assert split.train.images.dtype == torch.float32
    assert float(split.train.images.mean()) == pytest.approx(0, abs=1e-3)
    assert float(split.train.images.std()) == pytest.approx(1, abs=1e-3)
    assert torch.bincount(split.test.labels).tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]


def test_the_root_is_the_argument_then_the_variable_then_the_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("GRADBUS_DATA", "/from/variable")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert resolve_data_root("/from/argument") == Path("/from/argument")
    assert resolve_data_root() == Path("/from/variable")
    monkeypatch.setenv("GRADBUS_DATA", "")
    assert resolve_data_root() == tmp_path / "gradbus" / "data"


def test_missing_files_are_one_line_that_says_where_and_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(DataMissing, match="GRADBUS_DATA") as caught:
        mnist(tmp_path, download=False)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.root == tmp_path
    assert isinstance(caught.value, FileNotFoundError)


def test_a_root_that_is_a_file_counts_as_missing(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DataMissing):
        mnist(tmp_path / "file", download=False)


def test_a_silent_mirror_is_given_up_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr(download_module, "PROBE_URL", f"http://127.0.0.1:{silent.getsockname()[1]}/")
        monkeypatch.setattr(download_module, "PROBE_TIMEOUT_S", 0.2)
        monkeypatch.setenv("no_proxy", "*")

        def takes_s() -> float:
            started_s = time.monotonic()
            with pytest.raises(DataMissing, match="mirror does not answer"):
                mnist(tmp_path)
            return time.monotonic() - started_s

        assert soonest(takes_s, 2.0) < 2
    assert not list(tmp_path.iterdir())


def test_a_download_that_hangs_is_ended_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download_module, "probe", lambda url, timeout_s: None)
    monkeypatch.setattr(download_module, "CHILD_PROGRAM", "import time; time.sleep(60)")
    with pytest.raises(DataMissing, match=r"longer than 0\.3 s"):
        mnist(tmp_path, download_timeout_s=0.3)
    assert not [path for path in tmp_path.rglob("*") if not path.is_dir() or path.name.startswith(".")]


def test_a_failed_download_is_reported_with_its_last_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download_module, "probe", lambda url, timeout_s: None)
    monkeypatch.setattr(download_module, "CHILD_PROGRAM", "raise SystemExit('checksum differs')")
    with pytest.raises(DataMissing, match=r"failed \(checksum differs\)"):
        mnist(tmp_path)


def test_downloaded_files_are_moved_into_the_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_small_mnist(tmp_path / "mirror", packed=True)
    monkeypatch.setattr(download_module, "probe", lambda url, timeout_s: None)
    copy = f"import sys, shutil; shutil.copytree({str(tmp_path / 'mirror')!r}, sys.argv[1], dirs_exist_ok=True)"
    monkeypatch.setattr(download_module, "CHILD_PROGRAM", copy)
    assert len(mnist(tmp_path / "root").train) == 6
    assert sorted(path.name for path in (tmp_path / "root").iterdir()) == ["MNIST"]


def test_auto_takes_mnist_where_it_is_and_glyphs_where_not(tmp_path: Path) -> None:
    fallback = load("auto", tmp_path, download=False)
    assert fallback.name == "glyphs"
    assert "in place of MNIST" in fallback.note
    write_small_mnist(tmp_path, packed=True)
    assert load("auto", tmp_path, download=False).name == "mnist"


def test_mnist_by_name_does_not_fall_back(tmp_path: Path) -> None:
    with pytest.raises(DataMissing):
        load("mnist", tmp_path, download=False)


def test_an_unknown_set_is_refused() -> None:
    with pytest.raises(ValueError, match="no data set 'cifar'"):
        load("cifar")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "starts with nothing"),
        (b"\x00\x00\x0d\x01", "not an IDX file of unsigned bytes"),
        (b"\x00\x00\x08\x03\x00\x00", "inside the header"),
        (b"\x00\x00\x08\x01\x00\x00\x00\x05abc", "header says 5 bytes"),
    ],
)
def test_a_damaged_idx_file_is_named(tmp_path: Path, data: bytes, words: str) -> None:
    path = tmp_path / "broken"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=words) as caught:
        read_idx(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("cut", [5, 30, -4])
def test_a_cut_gzip_file_is_named(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "broken.gz"
    path.write_bytes(gzip.compress(idx_bytes(torch.arange(200, dtype=torch.uint8)))[:cut])
    with pytest.raises(ValueError, match="damaged gzip"):
        read_idx(path)


def test_glyphs_look_like_mnist_and_depend_on_the_seed_alone() -> None:
    a, b, other = (
        glyphs(seed=1, train=50, test=20),
        glyphs(seed=1, train=50, test=20),
        glyphs(seed=2, train=50, test=20),
    )
    assert a.test is not None
    assert a.train.images.shape == (50, 1, 28, 28)
    assert a.train.images.dtype == torch.float32
    assert (len(a.train), len(a.test)) == (50, 20)
    assert torch.equal(a.train.images, b.train.images)
    assert torch.equal(a.train.labels, b.train.labels)
    assert not torch.equal(a.train.images, other.train.images)
    assert not torch.equal(a.train.images[:20], a.test.images)


def test_all_ten_digits_occur_among_the_glyphs() -> None:
    assert torch.bincount(glyphs(train=500, test=1).train.labels).min() > 20


def test_glyphs_without_a_test_set_say_so() -> None:
    assert glyphs(train=1, test=0).test is None
    with pytest.raises(ValueError, match="train >= 1"):
        glyphs(train=0)


def test_batches_cover_everything_in_the_order_asked_for() -> None:
    data = Dataset("d", torch.arange(10.0).view(10, 1), torch.arange(10))
    assert [labels.tolist() for _, labels in batches(data, 4)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert [labels.tolist() for _, labels in batches(data, 2, torch.tensor([9, 0, 9]))] == [[9, 0], [9]]


def test_a_dataset_refuses_labels_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="3 labels for images"):
        Dataset("d", torch.zeros(2, 1), torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ValueError, match="int64"):
        Dataset("d", torch.zeros(2, 1), torch.zeros(2))


def test_a_split_without_a_test_set_moves_to_a_device() -> None:
    split = DataSplit(Dataset("d", torch.zeros(2, 1), torch.zeros(2, dtype=torch.int64)))
    assert split.to("cpu").test is None


def test_networks_and_glyphs_work_without_torchvision() -> None:
    code = """
import sys
sys.modules["torchvision"] = None                       # any import of it now fails
import gradbus.models
assert "PIL" not in sys.modules
gradbus.models.mnist_cnn()
gradbus.models.glyphs(train=2, test=1)
own = ("gradbus.models", "gradbus.moved")               # the latter finds modules by their former names
version = ("gradbus.runtime", "gradbus.runtime.needs")  # which version of gradbus this is
others = [name for name in sys.modules if name.startswith("gradbus.") and not name.startswith(own)]
others = [name for name in others if name not in version]
assert not others, others
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_digest_is_that_of_the_samples_their_labels_their_types_and_their_number() -> None:
    found = glyphs(train=600, test=20)
    train, test = found.train, found.test
    assert found.digest() == glyphs(train=600, test=20).digest()
    others = [
        glyphs(seed=1, train=600, test=20), glyphs(train=600, test=0),
        DataSplit(Dataset("other labels", train.images, train.labels.roll(1)), test),
        DataSplit(Dataset("another type", train.images.half(), train.labels), test),
        DataSplit(Dataset("another shape", train.images.flatten(1), train.labels), test),
        DataSplit(train.subset(torch.arange(599)), test),
        DataSplit(train.subset(torch.arange(0)), test),
        DataSplit(train, train),
    ]  # fmt: skip
    assert len({found.digest(), *(other.digest() for other in others)}) == 1 + len(others)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64, torch.uint8])
def test_samples_of_any_type_have_a_digest(dtype: torch.dtype) -> None:
    numbers = torch.arange(3)
    first, second = (DataSplit(Dataset("numbers", (numbers + add).to(dtype), numbers)).digest() for add in (0, 1))
    assert first != second
