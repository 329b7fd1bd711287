"""Where the data sets are published, and the SHA-256 that each unpacked file must have.

The sums were computed from MNIST, Fashion-MNIST and CIFAR-10 files whose MD5 are the published ones.
The Shakespeare text is Project Gutenberg's of 1994, the one LEAF splits; the notice in it allows
personal and non-commercial use only.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Published:
    """One address and the files that it gives once unpacked: name to SHA-256."""

    url: str
    files: Mapping[str, str]

    @property
    def archive(self) -> str:
        """The file's name at its address."""
        return self.url.rpartition("/")[2]


def published(source: str) -> tuple[Published, ...]:
    """What a source is made of; nothing for one that needs no files."""
    match source:
        case "mnist":
            return _packed_one_by_one(_MNIST, _MNIST_FILES)
        case "fashion-mnist":
            return _packed_one_by_one(_FASHION, _FASHION_FILES)
        case "cifar10":
            return (Published(_CIFAR10, _CIFAR10_FILES),)
        case "shakespeare":
            return (Published(_SHAKESPEARE, _SHAKESPEARE_FILES),)
        case _:
            return ()


def _packed_one_by_one(root: str, files: Mapping[str, str]) -> tuple[Published, ...]:
    return tuple(Published(f"{root}/{name}.gz", {name: digest}) for name, digest in files.items())


_MNIST = "https://ossci-datasets.s3.amazonaws.com/mnist"
_MNIST_FILES = {
    "train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    "t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
}
_FASHION = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com"
_FASHION_FILES = {
    "train-images-idx3-ubyte": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    "train-labels-idx1-ubyte": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    "t10k-images-idx3-ubyte": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    "t10k-labels-idx1-ubyte": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
}
_CIFAR10 = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
_CIFAR10_FILES = {
    "data_batch_1.bin": "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
    "data_batch_2.bin": "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
    "data_batch_3.bin": "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
    "data_batch_4.bin": "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
    "data_batch_5.bin": "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
    "test_batch.bin": "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
}
_SHAKESPEARE = (
    "https://raw.githubusercontent.com/riccardomurri/pyspark-intro-course/"
    "55d0c06af8887d9477d58681c593315faec7304b/data/shakespeare.txt.gz"
)
_SHAKESPEARE_FILES = {
    "pg100.txt": "5886dc8d8d2d1726fc93a1b014ff7db691707d5a2ccb8b8888d87037dccc8982",
}
