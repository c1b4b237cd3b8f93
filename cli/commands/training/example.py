"""`logitless example`: small networks that learn in seconds, on the same graph and devices."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

from logitless.cli.flags.flags import CliError, UsageError
from logitless.cli.setup.training_run import open_session

if TYPE_CHECKING:
    from logitless.graph.execution.session import Session
    from logitless.training.reporting.results import Result

NAMES = ("sine", "mnist-fc", "mnist-cnn")


def run(options: SimpleNamespace) -> int:
    from logitless.training.errors import TrainingError

    if options.name not in NAMES:
        raise UsageError(f"example: --name NAME is required, one of {', '.join(NAMES)}")
    if options.name != "sine" and not options.data:
        raise UsageError("example: --data FOLDER is required: the four IDX files, gzipped")
    try:
        with open_session(options) as session:
            if options.name == "sine":
                _sine(session, options)
            else:
                _digits(session, options)
    except TrainingError as error:
        raise CliError(str(error)) from None
    return 0


def _sine(session: Session, o: SimpleNamespace) -> None:
    from logitless.training.examples.sine import Sine, picture

    with tempfile.TemporaryDirectory(prefix="logitless-") as folder:
        toy = Sine(session, Path(folder), o.seed, o.loss, o.optimizer, o.rank)
        toy.train(o.examples, lambda i, loss: print(f"batch {i}: loss {loss:.3f}", flush=True))
        print(f"{toy.n_evaluations} evaluations")
        print(picture(toy.draw(48)))


def _digits(session: Session, o: SimpleNamespace) -> None:
    from logitless.training.examples import mnist

    data = mnist.load(o.data)
    network = (mnist.fc if o.name == "mnist-fc" else mnist.cnn)(session, o.seed)
    began = time.monotonic()

    def report(epoch: int, trained: Result, validated: Result) -> None:
        print(
            f"epoch {epoch}: loss {trained.loss:.4f}, accuracy {100 * trained.accuracy:.2f} %; validation loss "
            f"{validated.loss:.4f}, accuracy {100 * validated.accuracy:.2f} %; {time.monotonic() - began:.1f} s",
            flush=True,
        )

    test = mnist.train(network, data, o.epochs or mnist.EPOCHS[o.name], o.seed, report)
    print(f"test: loss {test.loss:.4f}, accuracy {100 * test.accuracy:.2f}±{100 * test.accuracy_uncertainty:.2f} %")
