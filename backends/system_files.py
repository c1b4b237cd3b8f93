"""Linux's files about this process: their content, and the folders of its control groups."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

ROOT = Path("/")  # of the system's files
_GROUP = re.compile(r"\d+:([^:]*):(/.*)")  # of /proc/self/cgroup: controllers, path


def read(path: str) -> str:
    """Content of one of the system's files; "" where the system has none. Names of groups may be any bytes."""
    try:
        return (ROOT / path).read_text(errors="surrogateescape").strip()
    except (OSError, ValueError):  # a path with a zero byte
        return ""


def is_number(text: str) -> bool:
    return text.isdecimal() and len(text) < 20


def group_folders(controller: str) -> Iterator[tuple[str, int]]:
    """Folders of the control groups that this process is in, with the version (1 or 2) of their files.

    `controller`: cpu, memory. A container sees its own group where the root would be, so a folder may not exist."""
    for line in read("proc/self/cgroup").split("\n"):
        controllers, path = match.groups() if (match := _GROUP.fullmatch(line)) else ("", "/")
        if controllers and controller not in controllers.split(","):
            continue
        group = PurePosixPath(path)
        for folder in (group, *group.parents):
            for mount in (controllers, controller) if controllers else ("", "unified"):
                yield str(PurePosixPath("sys/fs/cgroup", mount, folder.relative_to("/"))), 1 if controllers else 2
