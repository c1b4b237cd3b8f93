"""docs/ops.md says what the registries say."""

from logitless.cli.commands import support


def test_support_page_is_up_to_date() -> None:
    assert support.PAGE.read_text(encoding="utf-8") == support.page(), "run scripts/support"
