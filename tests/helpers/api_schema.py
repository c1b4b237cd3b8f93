"""OpenAPI check of a running server: schemathesis sends requests of its document, judges replies.

As a program: api_schema.py [--examples 200] starts a server of its own and sends many more requests
than the tests do.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import APIOperation, Case, GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

_CHECKS = [
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    unsupported_method,
]
_REFUSALS = (501, 503)  # not supported or switched off; full
_MOST_OPTIONAL = 4  # optional fields of a body: with more, one of them is almost certainly invalid
FLAGS = ("--metrics", "--props", "--embedding", "-c", "256", "-np", "2", "-kvu", "-n", "24")


@dataclass
class Findings:
    """Requests sent, and what was wrong with the replies."""

    statuses: dict[str, Counter[int]] = field(default_factory=dict)
    wrong: dict[str, str] = field(default_factory=dict)  # problem: the request, as a command

    def judge(self, case: Case, response: Any) -> None:
        """Check one reply."""
        place = f"{case.operation.method.upper()} {case.operation.path}"
        self.statuses.setdefault(place, Counter())[response.status_code] += 1
        if response.status_code >= 500 and response.status_code not in _REFUSALS:
            self._add(place, f"{response.status_code} {response.text[:200]}", case)
        try:
            case.validate_response(response, checks=_CHECKS)
        except BaseExceptionGroup as group:
            for error in group.exceptions:
                self._add(place, f"{type(error).__name__} {error}", case)

    def _add(self, place: str, what: str, case: Case) -> None:
        self.wrong.setdefault(f"{place}: {what}"[:600], case.as_curl_command()[:600])


def flags(folder: Path) -> list[str]:
    """Command line of a server with every feature switched on."""
    for name in ("slots", "data"):
        (folder / name).mkdir()
    return [*FLAGS, "--slot-save-path", str(folder / "slots"), "--data-dir", str(folder / "data")]


def check(url: str, n_examples: int, *, aliases: bool) -> Findings:
    """Send the document's examples, then `examples` valid and as many invalid requests per
    operation.

    The requests are the same on every run. `aliases`: includes operations under a second path.
    """
    document = requests.get(f"{url}/openapi.json", timeout=60).json()
    schema = schemathesis.openapi.from_dict(document)
    schema.config.update(base_url=url)
    findings, covered = Findings(), set()
    with requests.Session() as session:
        for result in schema.get_all_operations():
            operation = result.ok()
            summary = document["paths"][operation.path][operation.method]["summary"]
            if not aliases and (operation.method, summary) in covered:
                continue
            covered.add((operation.method, summary))
            _examples(operation, document, session, findings)
            _random(operation, n_examples, GenerationMode.POSITIVE, session, findings)
            if any(body.media_type != "application/octet-stream" for body in operation.body):  # any bytes are right
                _random(operation, n_examples, GenerationMode.NEGATIVE, session, findings)
    return findings


def _examples(operation: APIOperation, document: Any, session: requests.Session, findings: Findings) -> None:
    description = document["paths"][operation.path][operation.method]
    content = description.get("requestBody", {}).get("content", {}).get("application/json", {})
    if "example" not in content:
        return
    for changes in (
        ({}, {"stream": True}) if "text/event-stream" in description["responses"]["200"]["content"] else ({},)
    ):
        body = content["example"] | changes if changes else content["example"]
        names = {p["name"]: "0" for p in description.get("parameters", ()) if p["in"] == "path"}
        query = {"action": "erase"} if any(p["name"] == "action" for p in description.get("parameters", ())) else {}
        case = operation.Case(body=body, path_parameters=names, query=query, media_type="application/json")
        findings.judge(case, case.call(session=session, timeout=60))


def _random(operation: APIOperation, n: int, mode: Any, session: requests.Session, findings: Findings) -> None:
    @given(operation.as_strategy(generation_mode=mode), st.integers(0, 2**32 - 1))
    @settings(
        max_examples=n,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def one(case: Case, choice: int) -> None:
        schema = operation.body[0].definition["schema"] if operation.body else {}
        if mode is GenerationMode.POSITIVE and isinstance(case.body, dict):
            needed = schema.get("required", [])
            optional = sorted(set(case.body) - set(needed))
            chosen = random.Random(choice).sample(optional, min(_MOST_OPTIONAL, len(optional)))
            case.body = {name: case.body[name] for name in [*needed, *chosen] if name in case.body}
        findings.judge(case, case.call(session=session, timeout=60))

    one()


def main() -> int:
    """A long run with a server of its own; exits with 1 if something is wrong."""
    from tests.integration.conftest import servers

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--examples", type=int, default=200, help="requests of each kind for each operation")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, servers() as start:
        findings = check(start(None, *flags(Path(folder))).url, arguments.examples, aliases=True)
    for place, counts in sorted(findings.statuses.items()):
        print(place, dict(sorted(counts.items())))
    for what, request in findings.wrong.items():
        print(f"WRONG {what}\n    {request}", file=sys.stderr)
    return bool(findings.wrong)


if __name__ == "__main__":
    sys.exit(main())
