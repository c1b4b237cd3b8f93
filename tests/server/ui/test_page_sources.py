"""Sources of the web page, checked without node: types of answers, strictness, pinned packages."""

from __future__ import annotations

import json
import re

from scripts.page_types import BODIES, MODULES, SOURCES, bodies

RUN = "run scripts/page-types"


def test_types_of_answers_are_the_servers() -> None:
    assert BODIES.read_text() == bodies(), RUN
    assert "export interface Adapter {\n  id: number;\n  path: string;\n" in bodies()
    assert '  status: "cancelled" | "failed"' in bodies()


def test_types_are_strict_and_nothing_escapes_them() -> None:
    options = json.loads((SOURCES / "tsconfig.json").read_text())["compilerOptions"]
    assert options["strict"]
    assert options["checkJs"]
    assert options["noUncheckedIndexedAccess"]
    for path in (*SOURCES.glob("*.ts"), *MODULES.glob("*.js")):
        text = path.read_text()
        assert not re.search(r"[{:<,|&]\s*any\b(?! )|@ts-(ignore|nocheck|expect-error)", text), path.name


def test_pinned_packages_name_no_registry() -> None:
    pins = json.loads((SOURCES / "package.json").read_text())["devDependencies"]
    assert all(re.fullmatch(r"[\d.]+", version) for version in pins.values())
    lock = json.loads((SOURCES / "package-lock.json").read_text())["packages"]
    assert lock[""]["devDependencies"] == pins
    assert all("resolved" not in package and ("integrity" in package or not name) for name, package in lock.items())


def test_maps_of_sources_are_not_shipped() -> None:
    assert not [path.name for path in MODULES.rglob("*.map")]
    assert not [path.name for path in MODULES.glob("*.js") if "sourceMappingURL" in path.read_text()]
