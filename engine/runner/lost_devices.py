"""Lost devices: remote ones are tried again, off the engine thread, until their server answers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence


class LostDevices:
    """Tries of lost devices, one at a time on a thread of its own: a connection may take seconds."""

    def __init__(self, can_open: Callable[[str], bool]) -> None:
        self._can_open = can_open
        self._thread: threading.Thread | None = None
        self._answered = False

    def answered(self, names: Sequence[str]) -> bool:
        """True if one of the devices could be opened in the last try; else begins the next try."""
        if self._thread is not None and self._thread.is_alive():
            return False
        answered, self._answered = self._answered, False
        if not answered:
            self._thread = threading.Thread(target=self._try, args=(tuple(names),), name="lost-devices", daemon=True)
            self._thread.start()
        return answered

    def join(self) -> None:
        """Wait for the end of a try."""
        if self._thread is not None:
            self._thread.join()

    def _try(self, names: Sequence[str]) -> None:
        self._answered = any(map(self._can_open, names))
