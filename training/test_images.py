"""Tests of the images that train.py takes: built-in shapes, torchvision's sets, folders."""

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision import datasets
from torchvision.transforms import functional as transforms

from hardneg import InvalidArgument
from training import images


def write_images(folder, per_class=6, classes=("cat", "dog"), size=(20, 20)):
    """Write constant images as PNG files; all pixels of image k of class c are 40 c + k."""
    for c, name in enumerate(classes):
        (folder / name).mkdir(parents=True)
        for k in range(per_class):
            pixels = torch.full((3, *size), 40 * c + k, dtype=torch.uint8)
            transforms.to_pil_image(pixels).save(folder / name / f"{k}.png")


def values_of(pixels):
    """Return the first value of each constant image."""
    return pixels[:, 0, 0, 0].tolist()


class TestShapes:
    """The built-in images."""

    def test_are_those_of_the_records(self):
        """One of each class, by the mean of its upper left quarter: shapes, places and colours."""
        pixels, labels = images.shapes(10, size=16)
        means = pixels[labels.argsort(), :, :8, :8].float().mean((1, 2, 3))
        wanted = [69.96, 155.81, 44.47, 154.21, 136.61, 150.33, 109.16, 39.94, 102.19, 94.64]
        np.testing.assert_allclose(means, wanted, rtol=0, atol=0.05)

    def test_a_seed_repeats_its_images(self):
        one, two, other = (images.shapes(50, seed=seed) for seed in (3, 3, 4))
        assert torch.equal(one[0], two[0]) and torch.equal(one[1], two[1])
        assert not torch.equal(one[0], other[0])
        assert one[0].shape == (50, 3, 32, 32) and one[1].bincount().tolist() == [5] * 10
        assert images.shapes(7, size=48)[0].shape == (7, 3, 48, 48)
        with pytest.raises(InvalidArgument, match="classes is 11"):
            images.shapes(7, classes=11)


class TestLoad:
    """Shares of a set, and the validation split."""

    def test_fraction_of_each_class(self, tmp_path):
        write_images(tmp_path, per_class=10)
        one, two = (images.load(tmp_path, fraction=0.4) for _ in range(2))
        other = images.load(tmp_path, fraction=0.4, seed=1)
        least = images.load(tmp_path, fraction=0.001)
        assert torch.equal(one.train, two.train) and not torch.equal(one.train, other.train)
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
        held = images.every_fifth(labels, ["a", "b", "c"])
        assert labels[held].bincount().tolist() == [2, 2, 2]
        assert images.every_fifth(torch.full((40,), -1), []).sum() == 8

    def test_at_most(self):
        pixels, labels = torch.zeros(80, 3, 1, 1), torch.arange(80) // 20
        some = images.at_most(images.Images(pixels, labels, pixels, labels, []), 40)
        assert some.train_labels.bincount().tolist() == [10] * 4
        assert some.test_labels.bincount().tolist() == [10] * 4


class TestTorchvision:
    """torchvision's sets: stand-ins are read as its classes are, item by item."""

    @pytest.mark.parametrize(
        "kind, part, mode, target",
        [
            ("CIFAR10", "train", "RGB", "targets"),
            ("STL10", "split", "RGB", "labels"),
            ("FashionMNIST", "train", "L", "targets"),
        ],
    )
    def test_formats(self, monkeypatch, kind, part, mode, target):
        pixels = np.random.default_rng(1).integers(0, 256, (7, 28, 28, 3), np.uint8)
        pictures = [Image.fromarray(x).convert(mode) for x in pixels]
        labels, name = [0, 1, -1, 1, 0, 1, 0], kind.lower().replace("nm", "n-m")

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


class TestFolders:
    """Folders of images: large or incomplete ones, broken files, all kinds of pixels."""

    @pytest.mark.parametrize("part, test", [("train", "test"), ("train", "val"), ("train", "")])
    def test_layouts(self, tmp_path, part, test):
        write_images(tmp_path / part, per_class=10)
        if test:
            write_images(tmp_path / test, per_class=2)
        found = images.load(tmp_path)
        kept = range(10) if test else [k for k in range(10) if k not in (4, 9)]
        held = (0, 1) if test else (4, 9)
        assert found.classes == ["cat", "dog"]
        assert found.train.shape[1:] == (3, 20, 20) and found.train.dtype == torch.uint8
        assert values_of(found.train) == [40 * c + k for c in (0, 1) for k in kept]
        assert values_of(found.test) == [40 * c + k for c in (0, 1) for k in held]
        assert found.train_labels.tolist() == [0] * len(kept) + [1] * len(kept)
        assert found.test_labels.tolist() == [0, 0, 1, 1]

    def test_images_without_classes(self, tmp_path):
        """They lie at any depth."""
        write_images(tmp_path / "all", 10, ("a", "b"), (8, 8))
        found = images.load(tmp_path)
        assert found.classes == [] and (len(found.train), len(found.test)) == (16, 4)
        assert found.train_labels.tolist() == [-1] * 16

    def test_hidden_folders_and_files_are_left_out(self, tmp_path):
        write_images(tmp_path, per_class=10)
        write_images(tmp_path / ".hidden", classes=("a",))
        write_images(tmp_path / "cat", classes=(".thumbnails",))
        found = images.load(tmp_path)
        assert found.classes == ["cat", "dog"] and len(found.train) == 16
        assert values_of(found.test) == [4, 9, 44, 49]

    @pytest.mark.parametrize(
        "size, side", [((20, 20), 20), ((71, 150), 70), ((21, 120), 20), ((99, 99), 96)]
    )
    def test_sides(self, tmp_path, size, side):
        """The shorter one, even and at most 96: images are cut to squares."""
        write_images(tmp_path, size=size)
        assert images.load(tmp_path).train.shape == (10, 3, side, side)
        assert images.load(tmp_path, size=24).test.shape == (2, 3, 24, 24)

    def test_the_middle_of_an_oblong_image_is_seen(self, tmp_path):
        pixels = torch.arange(60, dtype=torch.uint8).expand(3, 20, 60)
        for k in range(10):
            transforms.to_pil_image(pixels).save(tmp_path / f"{k}.png")
        assert torch.equal(images.load(tmp_path).train[0], pixels[:, :, 20:40])

    @pytest.mark.filterwarnings("ignore:.*cannot be read")
    def test_broken_files_are_left_out_and_named(self, tmp_path):
        for part in ("train", "test"):
            write_images(tmp_path / part)
        for name in ("cat/0", "cat/2", "dog/5"):
            (tmp_path / "train" / f"{name}.png").write_bytes(b"no image")
        with pytest.warns(UserWarning, match=r"3 of 12 .* left out, for example .*cat.0\.png"):
            found = images.load(tmp_path)
        assert values_of(found.train) == [1, 3, 4, 5, 40, 41, 42, 43, 44]
        assert found.train_labels.tolist() == [0] * 4 + [1] * 5
        state = torch.get_rng_state()
        assert torch.equal(found.train, images.load(tmp_path).train)
        assert torch.equal(torch.get_rng_state(), state)
        for path in (tmp_path / "test").rglob("*.png"):
            path.write_bytes(b"")
        with pytest.raises(InvalidArgument, match="9 readable images to train on and 0 to test"):
            images.load(tmp_path)

    def test_a_photograph_is_turned_as_the_camera_was(self, tmp_path):
        picture, exif = Image.new("RGB", (40, 20)), Image.Exif()
        picture.paste("white", (0, 0, 20, 20))
        exif[0x0112] = 6  # turn it by a quarter, clockwise
        for k in range(10):
            picture.save(tmp_path / f"{k}.png", exif=exif)
        x = images.load(tmp_path).train[0]
        assert x[:, :9].min() == 255 and x[:, 11:].max() == 0

    @pytest.mark.parametrize("kind", ["empty", "no images", "too few", "no images of a class"])
    def test_unusable_folders_are_named(self, kind, tmp_path):
        if kind == "no images":
            (tmp_path / "cat").mkdir()
        elif kind == "too few":
            write_images(tmp_path, per_class=1)
        elif kind == "no images of a class":
            write_images(tmp_path)
            (tmp_path / "cow").mkdir()
        found = "has no images in" if kind == "no images of a class" else "is"
        with pytest.raises(InvalidArgument, match=f"^--data {found} {tmp_path}"):
            images.load(tmp_path)

    def test_test_images_have_the_classes_of_the_training_images(self, tmp_path):
        write_images(tmp_path / "train")
        write_images(tmp_path / "test", classes=("cat", "cow"))
        said = "^--data needs the same classes in train/ and test/.*cat.*dog.* and .*cat.*cow"
        with pytest.raises(InvalidArgument, match=said):
            images.load(tmp_path)
