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
    ("exchange.imported(exchange.exported([c]))[0].nodes.m4.content", "Ho"),
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
    ('{"format": "logitless-conversations", "conversations": [null]}', "conversations[0] must be an object"),
    ('{"format": "logitless-conversations", "conversations": [{"id": "a", "nodes": {"x": {}}}]}', "nodes.x"),
    (
        '{"format": "logitless-conversations", "conversations": [{"id": "a", "leaf": null, "nodes": '
        '{"m1": {"id": "m1", "parent": "m1", "role": "user", "content": ""}}}]}',
        "earlier message",
    ),
    (
        '{"format": "logitless-conversations", "conversations": [{"id": "a", "leaf": null, "nodes": '
        '{"m1": {"id": "m1", "parent": null, "role": "user", "content": "", "images": ["http://x"]}}}]}',
        "nodes.m1.images[0] must be an address that begins with data:image/",
    ),
    (
        '{"format": "logitless-conversations", "conversations": [{"id": "a", "leaf": null, "nodes": '
        '{"m1": {"id": "m1", "parent": null, "role": "user", "content": "", "sounds": ["data:text/html,x", 7]}}}]}',
        "nodes.m1.sounds[0] must be an address",
    ),
]
NODE = {"id": "m1", "parent": None, "role": "assistant", "content": "x"}
ENTRY = {"id": 1, "token": "x", "logprob": -1, "top": []}
MALFORMED = [  # a field of a conversation or of its message, what is told
    ({"id": 7}, "conversations[0].id must be a string"),
    ({"id": "constructor"}, "conversations[0].id must be an id"),
    ({"title": ["x"]}, "conversations[0].title must be a string"),
    ({"at": "now"}, "conversations[0].at must be a number"),
    ({"mode": "poem"}, "conversations[0].mode must be “chat” or “text”"),
    ({"leaf": 5}, "conversations[0].leaf must be"),
    ({"leaf": "constructor"}, "conversations[0].leaf must be"),
    ({"nodes": []}, "conversations[0].nodes must be an object"),
    ({"settings": "none"}, "conversations[0].settings must be an object"),
    ({"settings": {"system": {}}}, "settings.system must be a string"),
    ({"settings": {"sampling": {"top_k": "40"}}}, "settings.sampling.top_k must be a number"),
    ({"settings": {"stop": ["x"]}}, "settings.stop must be a string"),
    ({"settings": {"tools": {}}}, "settings.tools must be an array"),
    ({"settings": {"tools": [{"name": "f", "parameters": 5}]}}, "settings.tools[0].parameters must be an object"),
    ({"settings": {"serverTools": [1]}}, "settings.serverTools[0] must be a string"),
    ({"settings": {"schema": {"on": True, "value": None}}}, "settings.schema.value must be an object"),
    ({"settings": {"lora": [1]}}, "settings.lora must be an object"),
    ({"settings": {"thinking": True}}, "settings.thinking must be"),
    ({"content": None}, "nodes.m1.content must be a string"),
    ({"role": "system"}, "nodes.m1.role must be"),
    ({"thought": 1}, "nodes.m1.thought must be a string"),
    ({"model": {}}, "nodes.m1.model must be a string"),
    ({"status": "odd"}, "nodes.m1.status must be"),
    ({"calls": {}}, "nodes.m1.calls must be an array"),
    ({"calls": [{"id": "a", "name": "f"}]}, "nodes.m1.calls[0].text must be a string"),
    ({"tokens": [{"kind": "text", "text": "x"}]}, "nodes.m1.tokens[0].entries must be an array"),
    ({"tokens": [{"kind": "text", "text": "x", "entries": [ENTRY | {"top": 1}]}]}, "entries[0].top must be an array"),
    ({"timings": {"n": "3"}}, "nodes.m1.timings.n must be a number"),
    ({"role": "user", "files": [{"name": "a"}]}, "nodes.m1.files[0].text must be a string"),
    ({"role": "user", "images": "data:image/png,"}, "nodes.m1.images must be data URIs"),
    ({"role": "tool", "callId": "c"}, "nodes.m1.name must be a string"),
]  # fmt: skip
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
        names = ("tree", "request", "schema", "markdown", "exchange", "merge", "models")
        base = f"{server.url}/ui/{version()}"
        loads = ", ".join(f"import('{base}/{name}.js').then(m => globalThis.{name} = m)" for name in names)
        await tab.run(f"Promise.all([{loads}]).then(() => 0)")
        yield tab


async def test_values(modules) -> None:
    for expression, value in CASES:
        assert await modules.run(f"(() => {{ {TREE} return {expression}; }})()") == value, expression
    for text, told in BAD_EXPORTS:
        call = f"(() => {{ try {{ exchange.imported({json.dumps(text)}); }} catch (e) {{ return e.message; }} }})()"
        assert told in (await modules.run(call) or ""), text


def export(**changes: object) -> str:
    """An export of one conversation with one message."""
    node = NODE | {name: value for name, value in changes.items() if name not in ("id", *TOP)}
    whole = {"id": "a", "leaf": "m1", "nodes": {"m1": node}}
    whole |= {name: value for name, value in changes.items() if name in ("id", *TOP)}
    return json.dumps({"format": "logitless-conversations", "conversations": [whole]})


TOP = ("title", "at", "mode", "leaf", "nodes", "settings")


async def test_model_that_is_not_loaded_reads_what_its_list_promises(modules) -> None:
    told = await modules.run("""(() => { const one = (id, kinds) => ({id, architecture: {input_modalities: kinds}});
        const list = [one('a', ['text', 'image']), one('b', ['text', 'audio'])];
        const at = (model, props) => [models.sees, models.hears].map(reads => reads({props, model, models: list}));
        const loaded = {modalities: {vision: false, audio: true}};
        return [at('a', null), at('b', null), at('a', loaded), at('c', null)]; })()""")
    assert told == [[True, False], [False, True], [False, True], [False, False]]


async def test_malformed_fields_of_an_export_are_named(modules) -> None:
    for changes, told in MALFORMED:
        text = export(**changes)
        call = f"(() => {{ try {{ exchange.imported({json.dumps(text)}); }} catch (e) {{ return e.message; }} }})()"
        assert told in (await modules.run(call) or ""), changes


async def test_export_of_an_older_page_is_complete_after_import(modules) -> None:
    """Unknown fields and absent settings are no errors; a running answer has been cut."""
    text = export(status="running", later=1, settings={"system": "Be brief.", "later": 2}, at=None)
    (one,) = await modules.run(f"exchange.imported({json.dumps(text)})")
    assert one["settings"]["system"] == "Be brief."
    assert one["settings"]["tools"] == one["settings"]["serverTools"] == []
    assert one["nodes"]["m1"] == NODE | {"status": "stopped"}
    assert one["mode"] == "chat"
    assert one["at"] > 0


async def test_import_over_a_conversation_keeps_both_sides_messages(modules) -> None:
    told = await modules.run(f"""(() => {{ {TREE}
        const more = tree.added(c, 'm4', {{role: 'user', content: 'later'}});
        const other = tree.changed(c, 'm2', {{content: 'another text'}});
        const [older] = exchange.joined([more], [c], () => 'new'), [wider] = exchange.joined([c], [more], () => 'new');
        const copies = exchange.joined([c], [other], () => 'new').map(x => x.id).sort();
        return [Object.keys(older.nodes).length, older.leaf, Object.keys(wider.nodes).length, copies]; }})()""")
    assert told == [5, "m5", 5, ["a", "new"]]


MERGES = [  # what each of two tabs does with the conversation, its messages in the end
    ("tree.added(c, 'm4', {role: 'user', content: 'x'}, '-a')",
     "tree.added(c, 'm4', {role: 'user', content: 'y'}, '-b')",
     ["Hello there", "Hi", "More", "Ho", "x", "y"]),
    ("tree.removed(c, 'm2')", "tree.added(c, 'm3', {role: 'assistant', content: 'y'}, '-b')",
     ["Hello there", "Hi", "More", "Ho", "y"]),
    ("tree.added(c, 'm3', {role: 'assistant', content: 'x'}, '-a')", "tree.removed(c, 'm2')",
     ["Hello there", "Hi", "More", "Ho", "x"]),
    ("tree.removed(c, 'm2')", "({...c, title: 'T'})", ["Hello there", "Ho"]),
    ("tree.removed(c, 'm2')", "tree.removed(c, 'm4')", ["Hello there"]),
    ("tree.changed(c, 'm4', {content: 'Ho a'})", "tree.changed(c, 'm4', {content: 'Ho b'})",
     ["Hello there", "Hi", "More", "Ho b", "Ho a"]),
    ("tree.changed(c, 'm4', {content: 'Ho a'})", "tree.changed(c, 'm4', {content: 'Ho ab', status: 'done'})",
     ["Hello there", "Hi", "More", "Ho ab"]),
    ("tree.changed(c, 'm4', {shown: 'tokens'})", "tree.changed(c, 'm4', {content: 'Ho ab'})",
     ["Hello there", "Hi", "More", "Ho ab"]),
]  # fmt: skip


async def test_two_tabs_changes_are_merged_without_loss(modules) -> None:
    for ours, theirs, contents in MERGES:
        found = await modules.run(f"""(() => {{ {TREE}
            const next = merge.joinedSides(c, {ours}, {theirs}, '-t');
            for (const n of Object.values(next.nodes)) if (n.parent && !next.nodes[n.parent]) throw new Error(n.id);
            if (next.leaf && !next.nodes[next.leaf]) throw new Error('leaf');
            return Object.values(next.nodes).map(n => n.content); }})()""")
        assert sorted(found) == sorted(contents), (ours, theirs)


async def test_two_tabs_heads_are_merged_field_by_field(modules) -> None:
    told = await modules.run(f"""(() => {{ {TREE} c = {{...c, settings: {{system: 'a', stop: '', lora: {{}}}}}};
        const ours = {{...c, title: 'T', settings: {{...c.settings, system: 'b'}}}};
        const theirs = {{...c, at: 9, settings: {{...c.settings, stop: 's'}}}};
        const next = merge.joinedSides(c, ours, theirs, '');
        return [next.title, next.at, next.settings]; }})()""")
    assert told == ["T", 9, {"system": "b", "stop": "s", "lora": {}}]


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
