"""Downloads from public addresses only, as far as a client or a redirect names them."""

from __future__ import annotations

import urllib.request
from typing import Any

from logitless.cli.flags.flags import CliError
from logitless.training.graders.public import PrivateAddress, public_opener


class NotPublic(CliError):
    """A host of this machine or of a local network."""


def open_url(request: urllib.request.Request, timeout: float, *, public_only: bool) -> Any:
    """`urlopen`, or the same with public addresses only. Raises NotPublic and urlopen's errors."""
    if not public_only:
        return urllib.request.urlopen(request, timeout=timeout)
    try:
        return public_opener().open(request, timeout=timeout)
    except PrivateAddress as error:
        needs = "downloads from this machine and local networks need --allow-private-addresses"
        raise NotPublic(f"{error}: {needs}") from None
