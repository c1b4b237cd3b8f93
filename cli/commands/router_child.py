"""Child process of a router: a `logitless serve` that ends when the router does.

Started as `python -m logitless.cli.commands.router_child serve …`.

Its standard input is a pipe of which the router has the other end. However the router ends, the system closes it."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

from logitless.cli.main import main

GRACE = 6.0  # seconds for running requests


def end_with_the_router() -> None:
    """Wait until the pipe is closed; then end as by SIGTERM, or by force."""
    while os.read(0, 1024):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE)
    os._exit(1)


if __name__ == "__main__":
    threading.Thread(target=end_with_the_router, name="router", daemon=True).start()
    sys.exit(main())
