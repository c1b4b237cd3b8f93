"""Fixtures: servers by their command line."""

from tests.integration.conftest import serve_module  # noqa: F401  (a fixture)
