"""Handwritten digits (MNIST): a fully connected network (784 → 500 → 10) and a convolutional one."""

from __future__ import annotations

import gzip
import struct
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from examples.devices import open_session, parser
from examples.network import F32, I32, Batches, Network, he
from logitless.graph.execution.session import Session
from logitless.graph.ops.conv import conv2d, max_pool
from logitless.graph.ops.elementwise import add
from logitless.graph.ops.linear import linear
from logitless.graph.ops.pointwise import relu
from logitless.graph.ops.shape import reshape
from logitless.graph.tensor import Tensor
from logitless.training.data.sampler import split
from logitless.training.errors import TrainingError
from logitless.training.reporting.results import Result

SIDE, N_CLASSES = 28, 10
EPOCHS = {"mnist-fc": 30, "mnist-cnn": 8}  # of `train`, with the batches that each network has by default


def load(folder: str | Path) -> dict[str, tuple[F32, I32]]:
    """`train` and `test`: images (n, 784) from 0 to 1 and labels (n,). TrainingError names a file
    that is not right."""
    folder = Path(folder)
    return {
        name: (
            _idx(folder / f"{prefix}-images-idx3-ubyte.gz", 3).reshape(-1, SIDE * SIDE).astype(np.float32)
            * np.float32(1 / 255),
            _idx(folder / f"{prefix}-labels-idx1-ubyte.gz", 1).astype(np.int32),
        )
        for name, prefix in (("train", "train"), ("test", "t10k"))
    }


def _idx(path: Path, n_dims: int) -> npt.NDArray[np.uint8]:
    packed = path.read_bytes()
    try:
        raw = gzip.decompress(packed)
        magic, *shape = struct.unpack_from(f">{1 + n_dims}I", raw)
        values = np.frombuffer(raw, np.uint8, offset=4 + 4 * n_dims)
        if magic != 0x800 + n_dims or values.size != np.prod(shape):
            raise ValueError("wrong header")
        return values.reshape(shape)
    except (gzip.BadGzipFile, zlib.error, EOFError, struct.error, ValueError) as error:
        raise TrainingError(f"{path}: is not an IDX file of {n_dims} dimensions: {error}") from None


def _fc(p: Mapping[str, Tensor], x: Tensor) -> Tensor:
    hidden = relu(add(linear(x, p["w1"]), p["b1"]))
    return add(linear(hidden, p["w2"]), p["b2"])


def _cnn(p: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """conv 3×3 (8), pool 2, conv 3×3 (16), pool 2, dense."""
    image = reshape(x, shape=(-1, SIDE, SIDE, 1))
    image = max_pool(relu(add(conv2d(image, p["k1"], size=(3, 3), padding=1), p["b1"])), size=2)
    image = max_pool(relu(add(conv2d(image, p["k2"], size=(3, 3), padding=1), p["b2"])), size=2)
    flat = reshape(image, shape=(x.shape[0], 7 * 7 * 16))
    return add(linear(flat, p["w"]), p["b"])


def fc(session: Session, seed: int = 0, batches: Batches | None = None) -> Network:
    rng = np.random.default_rng(seed)
    n_hidden = 500
    params = {
        "w1": he(rng, n_hidden, SIDE * SIDE),
        "b1": np.zeros(n_hidden, np.float32),
        "w2": he(rng, N_CLASSES, n_hidden),
        "b2": np.zeros(N_CLASSES, np.float32),
    }
    return Network(session, params, _fc, SIDE * SIDE, batches or Batches())


def cnn(session: Session, seed: int = 0, batches: Batches | None = None) -> Network:
    rng = np.random.default_rng(seed)
    params = {
        "k1": he(rng, 8, 9),
        "b1": np.zeros(8, np.float32),
        "k2": he(rng, 16, 9 * 8),
        "b2": np.zeros(16, np.float32),
        "w": he(rng, N_CLASSES, 7 * 7 * 16),
        "b": np.zeros(N_CLASSES, np.float32),
    }
    return Network(session, params, _cnn, SIDE * SIDE, batches or Batches(100, 100))


def train(
    network: Network,
    data: Mapping[str, tuple[F32, I32]],
    n_epochs: int = 30,
    seed: int = 0,
    on_epoch: Callable[[int, Result, Result], None] | None = None,
) -> Result:
    """Epochs over 95 % of the training images, validated on the rest; the result of the test
    images."""
    digits, test = (network.table(name, *data[name]) for name in ("train", "test"))
    indices, held_out = split(len(digits.labels), 0.05, seed)
    rng = np.random.default_rng([seed, 6])
    for i in range(n_epochs):
        trained = network.epoch(digits, rng.permutation(indices))
        validated = network.evaluate(digits, held_out)
        if on_epoch is not None:
            on_epoch(i + 1, trained, validated)
    return network.evaluate(test)


def main(words: Sequence[str] | None = None) -> None:
    """Train on the digits, with a line for each epoch and the test's."""
    flags = parser(__doc__ or "")
    flags.add_argument("--data", required=True, help="folder of the four IDX files, gzipped")
    flags.add_argument("--network", choices=sorted(EPOCHS), default="mnist-fc")
    flags.add_argument("--epochs", type=int, default=0, help="0: 30, or 8 of mnist-cnn")
    o = flags.parse_args(words)
    began = time.monotonic()

    def report(epoch: int, trained: Result, validated: Result) -> None:
        print(
            f"epoch {epoch}: loss {trained.loss:.4f}, accuracy {100 * trained.accuracy:.2f} %; validation loss "
            f"{validated.loss:.4f}, accuracy {100 * validated.accuracy:.2f} %; {time.monotonic() - began:.1f} s",
            flush=True,
        )

    with open_session(o) as session:
        network = (fc if o.network == "mnist-fc" else cnn)(session, o.seed)
        test = train(network, load(o.data), o.epochs or EPOCHS[o.network], o.seed, report)
    print(f"test: loss {test.loss:.4f}, accuracy {100 * test.accuracy:.2f}±{100 * test.accuracy_uncertainty:.2f} %")


if __name__ == "__main__":
    main()
