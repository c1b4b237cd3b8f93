"""JavaScript functions of the web page, called in a browser."""

from __future__ import annotations

import json

import pytest

from logitless.server.ui.page import version
from tests.helpers.browser import Browser
from tests.helpers.http_fakes import running

TREE = """
let c = tree.newConversation("a", {}, 1);
c = tree.added(c, null, {role: "user", content: "Hello there"});
c = tree.added(c, "m1", {role: "assistant", content: "Hi"});
c = tree.added(c, "m2", {role: "user", content: "More"});
c = tree.added(c, "m1", {role: "assistant", content: "Ho"});
"""
CASES = [  # an expression, its value
    ("[c.leaf, tree.path(c).map(n => n.content)]", ["m4", ["Hello there", "Ho"]]),
    ("[tree.siblings(c, 'm2'), tree.siblings(c, 'm1')]", [["m2", "m4"], ["m1"]]),
    ("tree.path(tree.chosen(c, 'm2')).map(n => n.content)", ["Hello there", "Hi", "More"]),
    ("[Object.keys(tree.removed(c, 'm2').nodes), tree.removed(c, 'm2').leaf]", [["m1", "m4"], "m4"]),
    ("[Object.keys(tree.removed(c, 'm1').nodes), tree.removed(c, 'm1').leaf]", [[], None]),
    ("tree.titleOf(c)", "Hello there"),
    ("tree.search([c], 'HELLO more').length", 1),
    ("tree.search([c], 'hello less').length", 0),
    ("tree.imported(tree.exported([c]))[0].nodes.m4.content", "Ho"),
    ("request.textOf({content: 'x', files: [{name: 'a.txt', text: 'b'}]})", "File a.txt:\n```\nb\n```\n\nx"),
    ("schema.schemaOf(schema.fieldOf({type: 'array', items: {enum: ['a']}}))",
     {"type": "array", "items": {"enum": ["a"]}}),
    ("schema.fieldOf({type: 'object', properties: {a: {type: 'string', pattern: 'x'}}})", None),
    ("['https://a/b', 'javascript:alert(1)', ' JavaScript:x', 'data:,x', 'x', 'mailto:a@b'].map(markdown.safeAddress)",
     ["https://a/b", "", "", "", "", "mailto:a@b"]),
    ("[request.sayable({token: 'é', bytes: [195, 169]}), request.sayable({token: '', bytes: [195]})]", [True, False]),
]  # fmt: skip
BAD_EXPORTS = [
    ("{", "JSON"),
    ("[]", "“format”"),
    ('{"format": "logitless-conversations"}', "“conversations” must be an array"),
    ('{"format": "logitless-conversations", "conversations": [null]}', "conversations[0].id"),
    ('{"format": "logitless-conversations", "conversations": [{"id": "a", "nodes": {"x": {}}}]}', "nodes.x"),
    (
        '{"format": "logitless-conversations", "conversations": [{"id": "a", "leaf": null, "nodes": '
        '{"m1": {"id": "m1", "parent": "m1", "role": "user", "content": ""}}}]}',
        "earlier message",
    ),
    (
        '{"format": "logitless-conversations", "conversations": [{"id": "a", "leaf": null, "nodes": '
        '{"m1": {"id": "m1", "parent": null, "role": "user", "content": "", "images": ["http://x"]}}}]}',
        "data URIs",
    ),
    (
        '{"format": "logitless-conversations", "conversations": [{"id": "a", "leaf": null, "nodes": '
        '{"m1": {"id": "m1", "parent": null, "role": "user", "content": "", "sounds": ["data:text/html,x", 7]}}}]}',
        "nodes.m1.sounds must be data URIs",
    ),
]
SAFE = [  # Markdown, the elements' HTML
    ("**a** `b<c>`", "<p><strong>a</strong> <code>b&lt;c&gt;</code></p>"),
    ("<script>alert(1)</script>", "<p>&lt;script&gt;alert(1)&lt;/script&gt;</p>"),
    ("a <img src=x onerror=alert(1)> b", "<p>a &lt;img src=x onerror=alert(1)&gt; b</p>"),
    ("[a](javascript:alert(1))", '<p><span title="javascript:alert(1)">a</span></p>'),
    ("[a](java&#115;cript:alert(1))", '<p><span title="javascript:alert(1)">a</span></p>'),
    ("H<sub>2</sub>O<br>x &amp; y &#60;", "<p>H<sub>2</sub>O<br>x &amp; y &lt;</p>"),
    ("<sub onclick=x>2</sub>", "<p>&lt;sub onclick=x&gt;2&lt;/sub&gt;</p>"),
    ("# A", '<h3 class="level1">A</h3>'),
    ("1. a\n2. b", "<ol><li><span>a</span></li><li><span>b</span></li></ol>"),
    ("costs $5 and $6", "<p>costs $5 and $6</p>"),
]  # fmt: skip


@pytest.fixture
async def modules(browser: Browser):
    async with running() as server, browser.tab() as tab:
        await tab.open(server.url + "/")
        names = ("tree", "request", "schema", "markdown")
        base = f"{server.url}/ui/{version()}"
        loads = ", ".join(f"import('{base}/{name}.js').then(m => globalThis.{name} = m)" for name in names)
        await tab.run(f"Promise.all([{loads}]).then(() => 0)")
        yield tab


async def test_values(modules) -> None:
    for expression, value in CASES:
        assert await modules.run(f"(() => {{ {TREE} return {expression}; }})()") == value, expression
    for text, told in BAD_EXPORTS:
        call = f"(() => {{ try {{ tree.imported({json.dumps(text)}); }} catch (e) {{ return e.message; }} }})()"
        assert told in (await modules.run(call) or ""), text


async def test_markdown_is_elements_of_a_fixed_set(modules) -> None:
    for text, markup in SAFE:
        shown = f"(box => {{ markdown.show(box, {json.dumps(text)}); return box.innerHTML; }})"
        assert await modules.run(f"{shown}(document.createElement('div'))") == markup, text


async def test_markdown_that_grows_keeps_its_blocks(modules) -> None:
    script = """(() => { const box = document.createElement('div');
    markdown.show(box, 'a\\n\\n```py\\nx'); const [first, code] = box.children;
    markdown.show(box, 'a\\n\\n```py\\nx = 1\\n```\\n\\nb');
    return [box.children[0] === first, box.children[1] === code, box.children.length,
      box.querySelector('pre').textContent]; })()"""
    assert await modules.run(script) == [True, False, 3, "x = 1"]


async def test_pieces_of_a_stream(modules) -> None:
    script = """(() => { let a = {role: 'assistant', content: 'x', status: 'running'};
    const tell = (delta, more) => { a = request.absorbed(a, [{choices: [{delta, ...more}]}]); };
    tell({reasoning_content: 'hm'}); tell({content: 'y'});
    tell({tool_calls: [{index: 0, id: 'c', function: {name: 'f', arguments: '{'}}]});
    tell({tool_calls: [{index: 0, function: {arguments: '}'}}]}, {finish_reason: 'tool_calls'}); return a; })()"""
    told = await modules.run(script)
    assert (told["content"], told["thought"], told["status"]) == ("xy", "hm", "done")
    assert told["calls"] == [{"id": "c", "name": "f", "text": "{}"}]


async def test_another_token_keeps_what_was_before_it(modules) -> None:
    script = """(() => { const t = (kind, text) => ({kind, text, entries: [{token: text, id: 1, logprob: 0, top: []}]});
    const a = {model: 'm', content: 'ab', thought: 'uv'};
    a.tokens = [t('thought', 'u'), t('thought', 'v'), t('text', 'a'), t('text', 'b')];
    return [[3, 'X'], [1, 'Y']].map(([at, token]) => request.instead(a, at, {token, id: 2, logprob: -1}))
      .map(n => [n.thought, n.content, n.tokens.map(t => t.text).join('')]); })()"""
    assert await modules.run(script) == [["uv", "aX", "uvaX"], ["uY", "", "uY"]]
