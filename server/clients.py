"""Client of a request: the owner of its results, and its access to results of others."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from aiohttp import web

OWNER, RIGHTS, SALT = "X-Logitless-Owner", "X-Logitless-Rights", "X-Logitless-Salt"  # client headers of a router
_ALL, _ADMIN, _TOOLS = "all", "admin", "tools"


@dataclass(frozen=True, slots=True)
class HttpClient:
    """The key behind a request."""

    owner: str = ""  # of files, jobs and slot files that it makes: a digest of the key; "" without keys
    sees_all: bool = True  # there is nobody else, or it is the admin
    is_admin: bool = True  # it has the admin key, or there are no keys at all
    salt: str = ""  # owner of its cached prefixes; "": they are shared with everybody
    runs_tools: bool = True  # it may have the tools of the server called, if there are any
    batch: bool = False  # its requests are of a batch, and give way to all others

    def may_see(self, row: Mapping[str, Any]) -> bool:
        """True for items that this key made, and for items made without keys."""
        return self.sees_all or row.get("owner", "") in ("", self.owner)

    def cache_salt(self, named: str, shared: Collection[str]) -> str:
        """The salt of a request that names one. Names in `shared` are the same for all keys."""
        owner = "" if named in shared else self.salt
        return f"{owner}/{named}" if owner or named else ""

    @property
    def slots(self) -> str | None:
        """The owner of the slots that it may see; None: all of them."""
        return None if self.sees_all else self.salt

    def headers(self) -> dict[str, str]:
        """Headers by which a router passes it on."""
        has = {_ALL: self.sees_all, _ADMIN: self.is_admin, _TOOLS: self.runs_tools}
        rights = [word for word in has if has[word]]
        return {OWNER: self.owner, RIGHTS: ",".join(rights), SALT: self.salt}

    @classmethod
    def passed_on(cls, request: web.Request) -> HttpClient:
        """The client that a router speaks for."""
        rights = request.headers.get(RIGHTS, "").split(",")
        owner, salt = (request.headers.get(name, "") for name in (OWNER, SALT))
        return cls(owner, _ALL in rights, _ADMIN in rights, salt, _TOOLS in rights)


CLIENT: web.RequestKey[HttpClient] = web.RequestKey("client", HttpClient)  # set by the guard
LOCAL_CLIENT = "logitless.client"  # name of a transport's extra information: the client of a request of this process
