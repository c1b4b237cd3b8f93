"""Whom a request is from: the owner of what it makes, and what it may see."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from aiohttp import web

OWNER, RIGHTS, SALT = "X-Logitless-Owner", "X-Logitless-Rights", "X-Logitless-Salt"  # what a router says of its clients
_ALL, _ADMIN = "all", "admin"


@dataclass(frozen=True, slots=True)
class Client:
    """The key behind a request."""

    owner: str = ""  # of files, jobs and slot files that it makes: a digest of the key; "" without keys
    sees_all: bool = True  # there is nobody else, or it is the admin
    is_admin: bool = True  # it has the admin key, or there are no keys at all
    salt: str = ""  # of cached prefixes: keys that differ share none

    def may_see(self, row: Mapping[str, Any]) -> bool:
        """True for what this key made, and for what was made without keys."""
        return self.sees_all or row.get("owner", "") in ("", self.owner)

    def headers(self) -> dict[str, str]:
        """Headers by which a router passes it on."""
        rights = [word for word, has in ((_ALL, self.sees_all), (_ADMIN, self.is_admin)) if has]
        return {OWNER: self.owner, RIGHTS: ",".join(rights), SALT: self.salt}

    @classmethod
    def passed_on(cls, request: web.Request) -> Client:
        """The client that a router speaks for."""
        rights = request.headers.get(RIGHTS, "").split(",")
        owner, salt = (request.headers.get(name, "") for name in (OWNER, SALT))
        return cls(owner, _ALL in rights, _ADMIN in rights, salt)


CLIENT: web.RequestKey[Client] = web.RequestKey("client", Client)  # set by the guard
