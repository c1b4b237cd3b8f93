"""Page of ops (docs/ops.md): equal to the registries."""

from scripts import ops_page


def test_support_page_is_up_to_date() -> None:
    assert ops_page.PAGE.read_text(encoding="utf-8") == ops_page.page(), "run scripts/support"
