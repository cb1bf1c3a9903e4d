"""Tests of the images that train.py takes: built-in shapes, torchvision's sets, folders."""

import fcntl
import io
import os
import shutil
import threading
import warnings
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from PIL import EpsImagePlugin, ExifTags, Image
from torchvision import datasets
from torchvision.transforms import functional as transforms

from hardneg import InvalidArgument
from training import LOCK, PART, cache, images
from training.cache import Rows


def write_images(folder, per_class=6, classes=("cat", "dog"), size=(20, 20)):
    """Write constant images as PNG files; all pixels of image k of class c are 40 c + k."""
    for c, name in enumerate(classes):
        (folder / name).mkdir(parents=True)
        for k in range(per_class):
            pixels = torch.full((3, *size), 40 * c + k, dtype=torch.uint8)
            transforms.to_pil_image(pixels).save(folder / name / f"{k}.png")


def values_of(pixels):
    """Return the first value of each constant image."""
    return pixels[:][:, 0, 0, 0].tolist()


class TestShapes:
    """The built-in images."""

    def test_are_those_of_the_records(self):
        """One of each class, by the mean of its upper left quarter: shapes, places and colours."""
        pixels, labels = images.shapes(10, size=16)
        means = pixels[labels.argsort(), :, :8, :8].float().mean((1, 2, 3))
        wanted = [69.96, 155.81, 44.47, 154.21, 136.61, 150.33, 109.16, 39.94, 102.19, 94.64]
        np.testing.assert_allclose(means, wanted, rtol=0, atol=0.05)

    def test_each_seed_has_its_own(self):
        one, other = (images.shapes(50, seed=seed) for seed in (3, 4))
        assert not torch.equal(one[0], other[0])
        assert one[0].shape == (50, 3, 32, 32) and one[1].bincount().tolist() == [5] * 10


class TestLoad:
    """Shares of a set, and the validation split."""

    def test_fraction_of_each_class(self, tmp_path):
        write_images(tmp_path, per_class=10)
        one, two = (images.load(tmp_path, fraction=0.4) for _ in range(2))
        other = images.load(tmp_path, fraction=0.4, seed=1)
        least = images.load(tmp_path, fraction=0.001)
        assert torch.equal(one.train, two.train)
        assert not torch.equal(one.train, other.train)
        assert one.train_labels.bincount().tolist() == [3, 3]
        assert len(one.test) == 4 and len(least.train) == 2

    def test_validation_images_are_training_images(self, tmp_path):
        """An equal share of each class; test images are not looked at."""
        write_images(tmp_path / "train", per_class=10)
        write_images(tmp_path / "test", per_class=7, size=(22, 22))
        held = images.load(tmp_path, validation=True)
        assert values_of(held.test) == [4, 9, 44, 49] and held.test.shape[-1] == 20
        rest = [k for k in range(10) if k not in (4, 9)]
        assert values_of(held.train) == rest + [40 + k for k in rest]

    def test_images_without_a_label_are_no_test(self):
        """STL10 has many of them, beside its classes."""
        labels = torch.arange(40) % 4 - 1
        held = images.every_fifth(labels)
        assert labels[held].bincount().tolist() == [2, 2, 2]

    def test_at_most(self):
        labels = torch.arange(80) // 20
        pixels = labels[:, None, None, None].expand(-1, 3, 1, 1)  # each image shows its label
        sets = pixels, labels, pixels.roll(10, 0), labels.roll(10)
        some = images.at_most(images.Images(*sets, []), 40)
        parts = (some.train, some.train_labels), (some.test, some.test_labels)
        for shown, found in parts:
            assert found.bincount().tolist() == [10] * 4
            assert torch.equal(shown[:][:, 0, 0, 0], found)


class TestTorchvision:
    """torchvision's sets: stand-ins are read as its classes are, item by item."""

    SETS = [("CIFAR10", "train", "RGB", "targets"), ("STL10", "split", "RGB", "labels")]
    SETS += [("FashionMNIST", "train", "L", "targets")]

    @pytest.mark.parametrize("kind, part, mode, target", SETS)
    def test_formats(self, monkeypatch, kind, part, mode, target):
        pixels = np.random.default_rng(1).integers(0, 256, (7, 28, 28, 3), np.uint8)
        pictures = [Image.fromarray(x).convert(mode) for x in pixels]
        labels = [0, 1, -1, 1, 0, 1, 0]
        name = kind.lower().replace("nm", "n-m")

        class StandIn(list):
            def __init__(self, root, download, **which):
                is_train = which[part] in (True, "train", "train+unlabeled")
                some = slice(0, 5) if is_train else slice(5, 7)
                super().__init__(zip(pictures[some], labels[some], strict=True))
                setattr(self, target, labels[some])

        monkeypatch.setattr(datasets, kind, StandIn)
        for size in (None, 28, 64):
            found = images.load(name, size=size)
            larger = [x.convert("RGB").resize((size or 28,) * 2, Image.BICUBIC) for x in pictures]
            wanted = torch.stack([transforms.pil_to_tensor(x) for x in larger])
            assert len(found.train) == 5
            assert torch.equal(torch.cat([found.train, found.test]), wanted)
            assert torch.cat([found.train_labels, found.test_labels]).tolist() == labels

    def test_a_set_that_cannot_be_had_is_named(self, monkeypatch):
        monkeypatch.setattr(datasets, "SVHN", lambda *_, **__: open("no-such-file"))
        with pytest.raises(InvalidArgument, match="svhn is not in here.*no-such-file"):
            images.load("svhn", root="here")


# folders of five images each | images to train on + to test on, classes, and what is said; or error
LAYOUTS = """\
bus train plane | 12 + 3 bus plane train
bus test val | 12 + 3 bus test val
Training/cat Training/dog Testing/cat Testing/dog | 10 + 10 cat dog
TRAIN/cat TRAIN/dog Validation/cat Validation/dog | 10 + 10 cat dog
train/a train/b dev/a dev/b test/a test/b | 10 + 10 a b In HERE, 10 files or folders are left out, \
as they lie beside the folders that are read, for example dev/a/0.png,
train2017 val2017 | 5 + 5
all/a all/b/c | 8 + 2
seg_train/a seg_train/b seg_pred | --data is HERE, where seg_train may be classes or parts of a \
split, with seg_pred beside them. Expected is
train test other | --data is HERE, where train, test may be classes or parts
train/a train/b bus | --data is HERE, where train may be classes or parts
test val | --data is HERE, where test, val may be classes or parts of a split, with nothing beside
set/train/a set/train/b set/test/a set/test/b | --data is HERE, where test, train lie deeper, which
a/train a/valid b/train b/valid | --data is HERE, where train, valid lie deeper, which may be parts
bus/train car/a | 8 + 2 bus car
train/cat train/dog test/cat test/cow | --data needs the same classes in train/ and test/. Only \
one of them has cow, dog. Add or remove
""".splitlines()
RAMP = np.linspace(0, 1, 1024).reshape(32, 32)
GREY = Image.fromarray((255 * RAMP).round().astype(np.uint8))
DEEP = Image.fromarray((65535 * RAMP).astype(np.uint16))
INTEGERS = Image.fromarray((65535 * RAMP).astype(np.int32))
FLOATS = Image.fromarray((65535 * RAMP).astype(np.float32))
CLEAR = Image.new("L", (32, 32), 0)
TURNED = Image.Exif()
TURNED[ExifTags.Base.Orientation] = 6  # turn it by a quarter, clockwise
PIXELS = {  # a picture, its format, options, and the values that are right, or None for an error
    "16 bits": (DEEP, "PNG", {}, GREY),
    "16 bits, TIFF": (DEEP, "TIFF", {}, GREY),
    "16 bits, big-endian": (DEEP.convert("I").convert("I;16B"), "TIFF", {}, GREY),
    "16 bits, PGM": (INTEGERS, "PPM", {}, GREY),
    "32 bits": (INTEGERS, "TIFF", {}, None),
    "floats": (Image.fromarray(RAMP.astype(np.float32)), "TIFF", {}, GREY),
    "floats of any size": (FLOATS, "TIFF", {}, None),
    "not a number": (Image.fromarray(np.full((32, 32), np.nan, np.float32)), "TIFF", {}, None),
    "of a turned camera": (GREY, "JPEG", {"exif": TURNED}, GREY.rotate(-90)),
    "one channel": (GREY, "JPEG", {}, GREY),
    "one bit": (GREY.convert("1"), "PNG", {}, GREY.convert("1").convert("L")),
    "CMYK": (GREY.convert("RGB").convert("CMYK"), "JPEG", {}, GREY),
    "palette": (GREY.convert("P"), "PNG", {}, GREY),
    "palette, transparent": (CLEAR.convert("P"), "PNG", {"transparency": 0}, 255),
    "colour, transparent": (CLEAR.convert("RGB"), "PNG", {"transparency": (0, 0, 0)}, 255),
    "alpha": (Image.merge("LA", [CLEAR, GREY]), "PNG", {}, 255 - 255 * RAMP),
    "colours with alpha": (Image.merge("RGBA", [CLEAR] * 3 + [GREY]), "PNG", {}, 255 - 255 * RAMP),
}


@pytest.mark.filterwarnings("ignore:.* are left out")
class TestFolders:
    """Folders of images: large or incomplete ones, broken files, all kinds of pixels."""

    @pytest.mark.parametrize("folders, found", [line.split(" | ") for line in LAYOUTS])
    def test_folders_as_people_name_them(self, folders, found, tmp_path):
        """Each folder has five images."""
        for name in folders.split():
            write_images(tmp_path, 5, [name])
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            try:
                loaded = images.load(tmp_path)
                counts = f"{len(loaded.train)} + {len(loaded.test)}"
                result = " ".join([counts, *loaded.classes, *(str(x.message) for x in said)])
                numbers = range(len(loaded.classes)) or [-1]
                assert loaded.train_labels.unique().tolist() == list(numbers)
            except InvalidArgument as error:
                result = str(error)
        result = result.replace(f"{tmp_path}", "HERE")
        assert result.startswith(found), result

    def test_nothing_is_left_out_without_a_word(self, tmp_path):
        write_images(tmp_path, per_class=10)
        write_images(tmp_path / ".hidden", classes=("a",))
        write_images(tmp_path / "cat", classes=(".thumbnails",))
        (tmp_path / "cow").mkdir()
        for name in ("beside.png", "notes.txt", "cat/a.csv", "cat/b.csv", "dog/c", "dog/d.png"):
            (tmp_path / name).touch()
        for name, target in (("dog/up", ".."), ("cat/other", "../dog"), ("cat/none.png", "none")):
            (tmp_path / name).symlink_to(target)
        (tmp_path / "dog" / "away").symlink_to("/")
        with pytest.warns(UserWarning) as said:
            found = images.load(tmp_path)
        assert found.classes == ["cat", "dog"] and len(found.train) == 16
        assert values_of(found.test) == [4, 9, 44, 49]
        *found, broken = [str(x.message).removeprefix(f"In {tmp_path}, ") for x in said]
        assert f"{tmp_path}/dog/d.png (cannot identify" in broken
        wanted = """2 are hidden, for example .hidden, cat/.thumbnails.
3 are links to what is read elsewhere, for example cat/other, dog/away, dog/up.
5 do not end as names of images do, for example cat/a.csv, cat/b.csv, cat/none.png, ….
1 have no images, for example cow.
1 lie beside the folders that are read, for example beside.png.""".splitlines()
        assert [x.replace("files or folders are left out, as they ", "") for x in found] == wanted

    @pytest.mark.parametrize("ending", "gif JFIF jpe avif tif TIFF webp bmp ppm jp2 tga".split())
    def test_what_pillow_opens_is_read(self, ending, tmp_path):
        for k in range(10):
            Image.new("RGB", (16, 16), (99, 99, 99)).save(tmp_path / f"{k}.{ending}")
        found = images.load(tmp_path)
        assert len(found.train) == 8 and (found.train.float() - 99).abs().max() <= 3

    SIDES = [((20, 20), 20, (1, 1)), ((71, 150), 70, (200, 3)), ((21, 120), 20, (4, 4))]
    SIDES += [((99, 99), 96, (1000, 1000)), ((3, 4), 8, (99, 99))]

    @pytest.mark.parametrize("size, side, first", SIDES)
    def test_sides(self, tmp_path, size, side, first):
        """The shorter one of most images, even and from 8 to 96. Images are cut to squares."""
        write_images(tmp_path, size=size)
        Image.new("RGB", first).save(tmp_path / "cat" / "0.png")
        assert images.load(tmp_path).train.shape == (10, 3, side, side)
        assert images.load(tmp_path, size=24).test.shape == (2, 3, 24, 24)

    @pytest.mark.parametrize("name", PIXELS)
    def test_pixels_keep_their_meaning(self, name):
        """A ramp from black to white stays one, and what is transparent shows white.
        A photograph is turned as the camera was."""
        picture, kind, options, wanted = PIXELS[name]
        content = io.BytesIO()
        picture.save(content, kind, **options)
        with Image.open(content) as saved:
            if wanted is None:
                with pytest.raises(ValueError, match="of 8 or 16 bits, or floats from 0 to 1"):
                    images.colours_of(saved)
            else:
                found = np.asarray(images.colours_of(saved))
                grey = np.asarray(wanted)[..., None]
                wanted = np.broadcast_to(grey, (32, 32, 3))
                np.testing.assert_allclose(found, wanted, atol=2)

    def test_the_middle_of_an_oblong_image_is_seen(self, tmp_path):
        pixels = torch.arange(60, dtype=torch.uint8).expand(3, 20, 60)
        for k in range(10):
            transforms.to_pil_image(pixels).save(tmp_path / f"{k}.png")
        assert torch.equal(images.load(tmp_path).train[0], pixels[:, :, 20:40])

    @pytest.mark.filterwarnings("ignore:.*cannot be read")
    @pytest.mark.parametrize("name", ["cat/6.png", "cat/6.eps", "dog/6.ps"])
    def test_no_file_starts_a_program(self, name, tmp_path, monkeypatch):
        """Pillow starts Ghostscript for PostScript, which it knows by the content."""
        write_images(tmp_path)
        head = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 20 20\n%%EndComments\nshowpage\n"
        (tmp_path / name).write_bytes(head)
        monkeypatch.setattr(EpsImagePlugin, "Ghostscript", Mock(side_effect=AssertionError))
        with pytest.warns(UserWarning, match=f"left out.*{name}"):
            found = images.load(tmp_path)
        assert len(found.train) + len(found.test) == 12
        EpsImagePlugin.Ghostscript.assert_not_called()

    def test_broken_files_are_left_out_and_named(self, tmp_path):
        for part in ("train", "test"):
            write_images(tmp_path / part)
        for name in ("cat/0", "cat/2", "dog/5"):
            (tmp_path / "train" / f"{name}.png").write_bytes(b"no image")
        with pytest.warns(UserWarning, match=r"3 of 12 .* left out, for example .*cat.0\.png"):
            found = images.load(tmp_path)
        assert values_of(found.train) == [1, 3, 4, 5, 40, 41, 42, 43, 44]
        assert found.train_labels.tolist() == [0] * 4 + [1] * 5
        assert values_of(found.test) == [*range(6), *range(40, 46)]
        assert found.test_labels.tolist() == [0] * 6 + [1] * 6
        for path in (tmp_path / "test").rglob("*.png"):
            path.write_bytes(b"")
        with pytest.raises(InvalidArgument, match="9 readable images to train on and 0 to test"):
            images.load(tmp_path)

    @pytest.mark.parametrize("per_class", [0, 1])
    def test_unusable_folders_are_named(self, per_class, tmp_path):
        write_images(tmp_path, per_class)
        with pytest.raises(InvalidArgument, match=f"^--data is {tmp_path}"):
            images.load(tmp_path)


@pytest.mark.filterwarnings("ignore:.*cannot be read")
class TestCache:
    """Decoded images that a file keeps."""

    @pytest.fixture
    def photos(self, tmp_path, monkeypatch):
        """A folder of 20 images, two of them broken, and one to keep them decoded.
        The function that converts each picture counts its calls."""
        write_images(tmp_path / "photos", per_class=10)
        for name in ("cat/3", "dog/9"):
            (tmp_path / "photos" / f"{name}.png").write_bytes(b"no image")
        monkeypatch.setattr(images, "colours_of", Mock(wraps=images.colours_of))
        return tmp_path / "photos", tmp_path / "kept"

    @staticmethod
    def assert_equal(one, other):
        for a, b in zip(one, other, strict=True):
            assert torch.equal(a[:], b[:]) if hasattr(a, "shape") else a == b

    def files_of(self, kept):
        """List the endings of the files that are kept, but for the lock."""
        return sorted(path.suffix for path in kept.iterdir() if path.name != LOCK)

    def test_rows(self):
        """They are those that indexing gives, in all the ways in which images are taken."""
        pixels = torch.arange(84, dtype=torch.uint8).view(7, 3, 2, 2)
        index = torch.tensor([4, 0, 6, 2, 2])
        inner = torch.tensor([3, 1])
        wanted = pixels[index]
        rows = Rows(pixels, index)
        assert len(rows) == 5 and rows.shape == (5, 3, 2, 2) and rows.device == pixels.device
        for k in (1, slice(1, 3), inner, [0, 4]):
            assert torch.equal(rows[k], wanted[k])
        assert torch.equal(Rows(rows, inner)[:], wanted[inner])
        assert [len(part) for part in rows.split(2)] == [2, 2, 1]
        assert torch.equal(torch.cat([*Rows(rows, inner).split(1)]), wanted[inner])
        assert torch.equal(rows.to(torch.device("cpu")), wanted)

    def test_any_share_is_that_of_memory_and_decodes_once(self, photos, capsys):
        """One sentence says where the file lies, and how large it is."""
        folder, kept = photos
        decoded = []
        for options in ({"fraction": 0.4, "seed": 3}, {"validation": True}, {}):
            with pytest.warns(UserWarning, match="cannot be read .* cat.3.png|dog.9.png") as said:
                in_memory = images.load(folder, **options)
            images.colours_of.reset_mock()
            with pytest.warns(UserWarning) as said_now:
                found = images.load(folder, kept=kept, **options)
            decoded.append(images.colours_of.call_count)
            self.assert_equal(found, in_memory)
            again = " To try them again, remove what --cache keeps."
            assert [f"{x.message}" for x in said_now] == [f"{x.message}{again}" for x in said]
            assert isinstance(found.train, Rows)
        assert decoded == [18, 0, 0] and self.files_of(kept) == [".images"]
        (path,) = kept.glob("*.images")
        said = f"{path} keeps decoded images (0 MB). Remove it at any time.\n"
        assert capsys.readouterr().out == said
        (kept / f".a.images{PART}").touch()  # of a run that was killed
        (kept / "film.part").touch()  # of another program
        images.load(folder, kept=kept, size=8)
        assert self.files_of(kept) == [".images", ".images", ".part"]

    @pytest.mark.parametrize("change", ["time", "size", "version", "name"])
    def test_what_was_changed_is_decoded_anew(self, change, photos, monkeypatch):
        folder, kept = photos
        before = images.load(folder, kept=kept)
        file = folder / "cat" / "0.png"
        times = file.stat().st_atime_ns, file.stat().st_mtime_ns
        if change == "time":
            os.utime(file, ns=(times[0], times[1] + 1))
        elif change == "size":
            Image.new("RGB", (20, 20), (77, 77, 77)).save(file, compress_level=0)
            os.utime(file, ns=times)
        elif change == "version":
            monkeypatch.setattr(cache, "VERSION", 0)
        else:
            file.rename(file.with_name("00.png"))
        images.colours_of.reset_mock()
        found = images.load(folder, kept=kept)
        assert images.colours_of.call_count == 18
        assert (77 in values_of(found.train)) == (change == "size")
        assert (found.checksums != before.checksums) == (change == "size")

    def test_an_image_that_changes_its_class_changes_the_checksum(self, tmp_path):
        """The last image of a class becomes the first of the next."""
        for part in ("train", "test"):
            write_images(tmp_path / part)
        before = images.load(tmp_path)
        (tmp_path / "train" / "cat" / "5.png").rename(tmp_path / "train" / "dog" / "!.png")
        found = images.load(tmp_path)
        assert torch.equal(found.train, before.train)
        assert found.checksums[0] != before.checksums[0]
        assert found.checksums[1] == before.checksums[1]

    FAULTS = ["full before", "full meanwhile", "no folder", "no locks"]

    @pytest.mark.parametrize("fault", FAULTS)
    def test_what_cannot_be_kept_is_decoded_into_memory(self, fault, photos, monkeypatch):
        folder, kept = photos
        in_memory = images.load(folder)
        if fault == "full before":
            monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=0))
        elif fault == "full meanwhile":
            monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(28, "No space left")))
        elif fault == "no folder":
            kept.write_text("a file")
        elif fault == "no locks":  # as on some file systems
            monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError("no locks")))
        with pytest.warns(UserWarning, match="cannot keep decoded images .* into memory. Choose"):
            found = images.load(folder, kept=kept)
        self.assert_equal(found, in_memory)
        assert kept.is_file() or self.files_of(kept) == []

    @pytest.mark.parametrize("damage", ["cut", "shorter", "black", "no facts"])
    def test_what_is_damaged_is_made_anew(self, damage, photos, capsys):
        folder, kept = photos
        wanted = images.load(folder, kept=kept)
        (path,) = kept.glob("*.images")
        content = path.read_bytes()
        start = content.index(b"[")
        broken = {"cut": content[:99], "shorter": content[:-9], "no facts": content[:start]}
        broken["black"] = bytes(start) + content[start:]
        path.unlink()  # what is mapped to memory stays as it was
        path.write_bytes(broken[damage])
        assert images.load(folder, kept=kept).checksums == wanted.checksums
        assert f"{path} is damaged. It is made anew." in capsys.readouterr().out
        images.colours_of.reset_mock()
        self.assert_equal(images.load(folder, kept=kept), wanted)
        assert images.colours_of.call_count == 0

    def test_a_run_waits_for_another_that_writes(self, photos, tmp_path):
        """Its parts stay. What it wrote is not decoded again."""
        folder, kept = photos
        wanted, found = images.load(folder, kept=tmp_path / "other"), []
        images.colours_of.reset_mock()
        kept.mkdir()
        (kept / f".a.images{PART}").touch()
        with open(kept / LOCK, "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            late = threading.Thread(target=lambda: found.append(images.load(folder, kept=kept)))
            late.start()
            late.join(0.5)
            assert late.is_alive() and self.files_of(kept) == [PART]
            for path in (tmp_path / "other").glob("*.images"):
                shutil.copy(path, kept)
        late.join(20)
        self.assert_equal(found[0], wanted)
        assert images.colours_of.call_count == 0

    def test_what_fills_over_a_third_of_a_gpu_stays_where_it_is(self, monkeypatch):
        pixels = torch.zeros(10, 3, 10, 10, dtype=torch.uint8)
        some = images.Images(pixels, None, pixels, None, [])
        for memory, fits in ((18_000, True), (17_997, False)):
            properties = Mock(return_value=SimpleNamespace(total_memory=memory))
            monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
            assert images.fits(some, torch.device("cuda")) == fits
        assert not images.fits(some, torch.device("cpu"))
