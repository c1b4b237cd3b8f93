"""Responses with tools of MCP servers: generations and calls by turns, within bounds, as one answer."""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from itertools import count
from typing import Any

from aiohttp import web

from logitless.engine.errors import Forbidden, InvalidRequest, RequestError, ServerFault, Unavailable
from logitless.engine.requests import Finished
from logitless.extras.tools.config import ToolConfig
from logitless.extras.tools.handlers import toolbox_of
from logitless.extras.tools.mcp.choice import (
    SEARCH,
    WEB_SEARCH,
    McpChoice,
    is_mcp,
    is_search,
    mcp_choice,
    model_name,
    search_function,
)
from logitless.extras.tools.server_tool import ServerTool, ToolError, result_text
from logitless.extras.tools.toolbox import Toolbox
from logitless.frontend.answers.generation import PromptTokensDetails
from logitless.frontend.answers.responses import (
    DeltaEvent,
    IncompleteDetails,
    ItemEvent,
    McpEvent,
    OutputItem,
    OutputTokensDetails,
    Response,
    ResponseEvent,
    ResponseUsage,
    Status,
    WholeEvent,
)
from logitless.frontend.chat.chat import parse_chat
from logitless.frontend.dialects.responses import ResponsesBody, chat_body
from logitless.frontend.fields import as_integer, as_object, as_text, bad_request, read
from logitless.frontend.media.sources import Unfetched
from logitless.frontend.parser import GenerationJob
from logitless.frontend.replies.blocks import BEGIN, CALL, END, MORE, AnswerBlock
from logitless.frontend.replies.encoding import plain, sse
from logitless.frontend.replies.reply import Result
from logitless.frontend.replies.responses import ResponsesReply
from logitless.frontend.workers import compute
from logitless.server.api.context import Context, client_of, json_response
from logitless.server.api.generate import CONVERSATION, generated, send
from logitless.server.api.openai.conversations import owner
from logitless.server.api.openai.responses import ParsedResponse, keeper, prepared
from logitless.server.api.openai.stored import as_items
from logitless.server.clients import CLIENT

log = logging.getLogger("logitless.http")
MAX_CALLS = 16  # of one response; max_tool_calls may say fewer
REFUSED = "The user did not allow this call."
Item = dict[str, Any]


async def run_with_tools(
    request: web.Request, context: Context, settings: ToolConfig, response: ResponsesBody, body: dict[str, Any]
) -> web.StreamResponse:
    """POST /v1/responses with tools of the type mcp."""
    _ = context.writer
    loop = _Loop(request, context, settings.web_search, response, body)
    await loop.prepare()
    if body.get("stream") is True:
        ping = body.get("sse_ping_interval")
        return await send(request, loop.stream(), ping if isinstance(ping, int) else 30)
    async with aclosing(loop.events()) as events:
        async for _piece in events:
            pass
    assert loop.final is not None
    return json_response(loop.final)


class _Loop:
    """One response: its output items, and the events of its stream. The same work answers without a stream."""

    def __init__(
        self, request: web.Request, context: Context, web_search: str, response: ResponsesBody, body: dict[str, Any]
    ) -> None:
        """`web_search`: the MCP tool that is OpenAI's; "": none."""
        self._web_search = web_search
        self._request, self._context, self._response = request, context, response
        self._toolbox = _allowed_toolbox(request)
        if response.background or CONVERSATION in request.headers:
            bad_request(
                "background" if response.background else CONVERSATION, "is not there with tools of the type mcp"
            )
        key = owner(request)
        self._body, self._fields, earlier, conversation = prepared(context, key, response, body)
        value = self._body.get("input")
        for i, item in enumerate(value if isinstance(value, list) else ()):
            item = as_object(f"input[{i}]", item)
        if not isinstance(value, list | str) or not value:
            bad_request("input", "must be a string or a non-empty array")
        self._input = ParsedResponse(as_items(value), earlier, conversation)
        self._keep = keeper(context, key, self._input, self._fields)
        self._most = MAX_CALLS
        if body.get("max_tool_calls") is not None:
            self._most = min(MAX_CALLS, max(0, as_integer("max_tool_calls", body["max_tool_calls"])))
        urls = self._toolbox.urls
        self._choices = {
            i: mcp_choice(f"tools[{i}]", tool, urls) for i, tool in enumerate(response.tools or ()) if is_mcp(tool)
        }
        labels = [choice.label for choice in self._choices.values()]
        if len(set(labels)) < len(labels):
            bad_request("tools", "name the same MCP server twice")
        self.calls: dict[str, tuple[McpChoice, ServerTool]] = {}  # by the model's names
        searches = [i for i, tool in enumerate(response.tools or ()) if is_search(tool)]
        self._searches = searches if web_search else []  # else skipped as hosted tools are
        if len(self._searches) > 1:
            bad_request("tools", "have a web_search twice")
        self._namespaces: dict[int, dict[str, Any]] = {}
        self._lists: list[OutputItem] = []
        self.output: list[OutputItem] = []
        self.numbers = count()
        self.id, self.created = "", 0
        self.final: Response | None = None
        self._n_calls, self._used, self._usages = 0, 0, [0, 0, 0, 0, 0]

    async def prepare(self) -> None:
        """Ask the servers for their tools, and parse the first generation's request: it may be refused."""
        items = [*self._input.earlier.items, *self._input.items]
        listed = {item.get("server_label") for item in items if item.get("type") == "mcp_list_tools"}
        for i, choice in self._choices.items():
            tools, error = await self._tools_of(choice)
            self._namespaces[i] = choice.as_namespace(tools)
            self.calls |= {model_name(choice.label, tool.bare): (choice, tool) for tool in tools}
            if choice.label not in listed:
                self._lists.append(_list_item(choice.label, tools, error))
        for i in self._searches:
            name = self._web_search
            result = await self._toolbox.find(name)
            if result is None:
                raise Unavailable(f"the search is not there now: the tool {name!r}")
            self._namespaces[i] = search_function(f"tools[{i}]", (self._response.tools or ())[i], result)
            self.calls[WEB_SEARCH] = SEARCH, result
        self._approvals = self._answered(items)
        self._first = await self._parsed(first=True)

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """The stream; an error is told in it."""
        try:
            async with aclosing(self.events()) as events:
                async for piece in events:
                    yield piece
        except RequestError as error:
            yield self._reply(self._first).failed(error)
        except Exception as error:  # the reply has begun: the error can only be told in it
            log.error("a stream failed: %s: %s", type(error).__name__, error, exc_info=log.isEnabledFor(logging.DEBUG))
            yield self._reply(self._first).failed(ServerFault("internal error"))

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The stream's events. Raises RequestError."""
        job = self._first
        reply = self._reply(job)
        self.id, self.created = reply.id, reply.created
        yield reply.opening()
        for item in self._lists:
            yield reply.listed(item)
        async for piece in self._run_approved(reply):
            yield piece
        while True:
            if self._n_calls:
                job = await self._parsed(first=False)
                reply = self._reply(job)
            async with aclosing(generated(self._request, reply)) as events:
                async for piece in events:
                    yield piece
            goes_on = True
            for item, called in reply.items():
                self.output.append(item)
                if called is None:
                    goes_on = goes_on and item.type not in ("function_call", "custom_tool_call", "mcp_approval_request")
                    continue
                yield await self._run(reply, item, called, len(self.output) - 1)
            self._count(reply)
            cut = reply.results[0].finished.stop_type == "limit"
            if cut or not goes_on or not reply.has_calls:
                break
        yield self._end(reply, cut=cut)

    async def _run_approved(self, reply: _Reply) -> AsyncIterator[bytes]:
        """The calls that the input approves, or does not."""
        for body, approve in self._approvals:
            name = model_name(body["server_label"], body["name"])
            item = OutputItem(
                id=f"mcp_{secrets.token_urlsafe(24)}",
                type="mcp_call",
                status="in_progress",
                server_label=body["server_label"],
                name=body["name"],
                arguments=body["arguments"],
                approval_request_id=body["id"],
            )
            self.output.append(item)
            at = len(self.output) - 1
            yield reply.began(item, at)
            known = self.calls.get(name)
            yield await self._run(reply, item, known[1] if known else None, at, refused=not approve)

    async def _run(
        self, reply: _Reply, item: OutputItem, tool: ServerTool | None, at: int, *, refused: bool = False
    ) -> bytes:
        """Run a call, put its result into its item, and tell of it."""
        self._n_calls += 1
        error = ""
        if refused or tool is None:
            error = REFUSED if refused else "there is no such tool any more"
        elif self._n_calls > self._most:
            error = f"not run: this response may have {self._most} calls"
        else:
            try:
                arguments = json.loads(reply.arguments(item))
            except ValueError:
                arguments = None
            if isinstance(arguments, dict):
                answer = await self._toolbox.call(tool, arguments, client_of(self._request))
                error, item.output = answer.get("error", ""), None if "error" in answer else result_text(answer)
            else:
                error = "the arguments are not a JSON object"
        item.status = "failed" if error else "completed"
        if item.type == "web_search_call":
            item.output = error or item.output
            return reply.ended(item, at)
        item.error = None
        if error:
            item.status, item.output = "failed", None
            item.error = {"type": "mcp_tool_execution_error", "content": [{"type": "text", "text": error}]}
        return reply.ended(item, at)

    async def _tools_of(self, choice: McpChoice) -> tuple[list[ServerTool], str]:
        """(the tools that the request allows, why there are none)."""
        try:
            tools = await self._toolbox.servers[choice.label].tools()
        except ToolError as error:
            return [], str(error)
        return [tool for tool in tools if choice.allowed.takes(tool)], ""

    def _answered(self, items: list[Item]) -> list[tuple[Item, bool]]:
        """The calls that the input's approvals are about, each with the answer."""
        body = {item.get("id"): item for item in items if item.get("type") == "mcp_approval_request"}
        done = {item.get("approval_request_id") for item in items if item.get("type") == "mcp_call"}
        result = []
        for i, item in enumerate(self._input.items):
            if item.get("type") != "mcp_approval_response":
                continue
            id, approve = (
                as_text(f"input[{i}].approval_request_id", item.get("approval_request_id")),
                item.get("approve"),
            )
            if id not in body or id in done:
                bad_request(f"input[{i}].approval_request_id", f"no approval {id[:64]!r} is asked for")
            if not isinstance(approve, bool):
                bad_request(f"input[{i}].approve", "must be a boolean")
            for key in ("server_label", "name", "arguments"):
                as_text(f"input[{i}].{key} of its request", body[id].get(key))
            done.add(id)
            result.append((body[id], approve))
        return result

    async def _parsed(self, *, first: bool) -> GenerationJob:
        """The next generation's request: what was said, and the output so far."""
        body = dict(self._body)
        body["tools"] = [self._namespaces.get(i, tool) for i, tool in enumerate(self._response.tools or ())]
        body["input"] = [*self._input.items, *plain(self.output)]
        body["tool_choice"] = self._choice(first)
        body.pop("max_tool_calls", None)
        if self._response.max_output_tokens is not None:
            body["max_output_tokens"] = max(1, self._response.max_output_tokens - self._used)
        parser = self._context.parser_for(self._request)
        response = read(ResponsesBody, body)

        def parse() -> GenerationJob:
            return chat_body(response, body, self._input.earlier.items).read(lambda chat: parse_chat(chat, parser))

        try:
            return await compute(parse, client_of(self._request))
        except Unfetched:
            raise InvalidRequest("images at addresses are not there together with tools of the type mcp") from None

    def _choice(self, first: bool) -> Any:
        if self._n_calls >= self._most:
            return "none"
        choice = self._body.get("tool_choice")
        if not first:
            return "none" if choice == "none" else "auto"
        if is_search(choice):
            return {"type": "function", "name": WEB_SEARCH}
        if isinstance(choice, dict) and choice.get("type") == "mcp":
            if choice.get("name") is None:
                return "required"
            return {"type": "function", "name": model_name(str(choice.get("server_label")), str(choice["name"]))}
        return choice

    def _reply(self, job: GenerationJob) -> _Reply:
        return _Reply(job, self)

    def reply_arguments(self, job: GenerationJob) -> tuple[Any, ...]:
        """Arguments of a reply."""
        return job, self._context.served, self._context.config, self._fields, None

    def _count(self, reply: _Reply) -> None:
        usage = reply.usage()
        self._used += usage.completion_tokens
        details = usage.prompt_tokens_details
        now = (
            usage.prompt_tokens,
            details.cached_tokens,
            usage.completion_tokens,
            reply.n_reasoning,
            usage.total_tokens,
        )
        self._usages = [a + b for a, b in zip(self._usages, now, strict=True)]

    def _end(self, reply: _Reply, *, cut: bool) -> bytes:
        n_prompt, n_cached, n_written, n_reasoning, n_total = self._usages
        self.final = reply.response(
            "incomplete" if cut else "completed",
            incomplete_details=IncompleteDetails("max_output_tokens") if cut else None,
            output=self.output,
            usage=ResponseUsage(
                input_tokens=n_prompt,
                input_tokens_details=PromptTokensDetails(n_cached, n_prompt - n_cached),
                output_tokens=n_written,
                output_tokens_details=OutputTokensDetails(n_reasoning),
                total_tokens=n_total,
            ),
        )
        if self._keep is not None:
            self._keep(plain(self.final))
        return reply.report(self.final)


class _Reply(ResponsesReply):
    """One generation of the loop: its items and events are among those of the whole response."""

    def __init__(self, job: GenerationJob, loop: _Loop) -> None:
        super().__init__(*loop.reply_arguments(job))
        self._loop = loop
        self.n_before = len(loop.output)
        self._arguments: dict[str, str] = {}  # of calls, by the ids of their items
        if loop.id:
            self.id, self.created = loop.id, loop.created

    @property
    def n_reasoning(self) -> int:
        return self.answers.n_reasoning

    @property
    def has_calls(self) -> bool:
        """True if the model called a tool that the server runs."""
        return any(self._mcp(block) is not None for block in self._blocks.blocks)

    def opening(self) -> bytes:
        """The events before all others."""
        response = self._response("in_progress")
        return self._report("response.created", response) + self._report("response.in_progress", response)

    def response(self, status: Any, **more: Any) -> Response:
        """The whole response."""
        return self._response(status, **more)

    def report(self, response: Response) -> bytes:
        """The last event."""
        return self._report(f"response.{response.status}", response)

    def listed(self, item: OutputItem) -> bytes:
        """The events of a server's list of tools, which is put into the output."""
        output = self._loop.output
        output.append(item)
        self.n_before = len(output)
        at: dict[str, Any] = {"output_index": len(output) - 1}
        begun = OutputItem(id=item.id, type=item.type, server_label=item.server_label, tools=[])
        kind = "response.mcp_list_tools."
        ended = "failed" if isinstance(item.error, str) else "completed"
        return (
            self._event(ItemEvent, "response.output_item.added", **at, item=begun)
            + self._event(McpEvent, f"{kind}in_progress", **at, item_id=item.id)
            + self._event(McpEvent, f"{kind}{ended}", **at, item_id=item.id)
            + self._event(ItemEvent, "response.output_item.done", **at, item=item)
        )

    def began(self, item: OutputItem, at: int) -> bytes:
        """The events of a call that begins."""
        kinds = ["mcp_call.in_progress"]
        if item.type == "web_search_call":
            kinds = ["web_search_call.in_progress", "web_search_call.searching"]
        added = self._event(ItemEvent, "response.output_item.added", output_index=at, item=item)
        states = [self._event(McpEvent, f"response.{kind}", output_index=at, item_id=item.id) for kind in kinds]
        return b"".join([added, *states])

    def ended(self, item: OutputItem, at: int) -> bytes:
        """The events of a call that has a result."""
        kind = "web_search_call.completed" if item.type == "web_search_call" else f"mcp_call.{item.status}"
        state = self._event(McpEvent, f"response.{kind}", output_index=at, item_id=item.id)
        return state + self._event(ItemEvent, "response.output_item.done", output_index=at, item=item)

    def items(self) -> list[tuple[OutputItem, ServerTool | None]]:
        """The output items, each with the tool that is to be run for it."""
        result: list[tuple[OutputItem, ServerTool | None]] = []
        for block in self._blocks.blocks:
            known = self._mcp(block)
            item = self._item(block, "incomplete" if block.cut else "completed")
            runs = item.type in ("mcp_call", "web_search_call") and not block.cut
            result.append((item, known[1] if known and runs else None))
            self._arguments[item.id] = block.text
        return result

    def arguments(self, item: OutputItem) -> str:
        """The arguments of a call, as JSON."""
        return self._arguments.get(item.id) or (item.arguments if isinstance(item.arguments, str) else "") or "{}"

    def finish(self, result: Result, finished: Finished) -> bytes:
        result.finished = finished
        steps = self._add(result, finished.text)
        steps += self._blocks.finish(cut=finished.stop_type == "limit")
        return self._step_events(steps)

    def _start(self, result: Result) -> bytes:
        return b""

    def _event(self, event: type[ResponseEvent], kind: str, **fields: Any) -> bytes:
        return sse(event(type=kind, sequence_number=next(self._loop.numbers), **fields), kind)

    def _mcp(self, block: AnswerBlock) -> tuple[McpChoice, ServerTool] | None:
        return self._loop.calls.get(block.name) if block.kind == CALL and not block.custom else None

    def _item(self, block: AnswerBlock, status: Status) -> OutputItem:
        item = super()._item(block, status)
        known = self._mcp(block)
        if known is None:
            return item
        choice, tool = known
        id, arguments = self._item_ids[block.index], "" if status == "in_progress" else block.text
        if choice.searches:
            query = "" if status == "in_progress" else _query(block.text)
            action = {"type": "search", "query": query, "queries": [query]}
            return OutputItem(id=f"ws_{id}", type="web_search_call", status=status, action=action)
        called: dict[str, Any] = {"server_label": choice.label, "name": tool.bare, "arguments": arguments}
        if choice.asks(tool):
            return OutputItem(id=f"mcpr_{id}", type="mcp_approval_request", **called)
        return OutputItem(id=f"mcp_{id}", type="mcp_call", status=status, **called)

    def _step(self, step: str, block: AnswerBlock, text: str) -> bytes:
        if self._mcp(block) is None:
            return super()._step(step, block, text)
        at = self.n_before + block.index
        item = self._item(block, "in_progress" if step == BEGIN else "completed")
        if item.type == "mcp_approval_request":
            if step != END:
                return b""
            added = self._event(ItemEvent, "response.output_item.added", output_index=at, item=item)
            return added + self._event(ItemEvent, "response.output_item.done", output_index=at, item=item)
        if step == BEGIN:
            return self.began(item, at)
        if item.type == "web_search_call":
            return b""
        of: dict[str, Any] = {"output_index": at, "item_id": item.id}
        if step == MORE:
            return self._event(DeltaEvent, "response.mcp_call_arguments.delta", **of, delta=text)
        return self._event(WholeEvent, "response.mcp_call_arguments.done", **of, arguments=block.text)


def _allowed_toolbox(request: web.Request) -> Toolbox:
    """The tools, for a client that may have them called. Forbidden: it may not."""
    toolbox = toolbox_of(request)
    if not request[CLIENT].runs_tools:
        raise Forbidden("tools that the server runs need the admin key")
    return toolbox


def _query(arguments: str) -> str:
    """The query of a search."""
    try:
        value = json.loads(arguments)
    except ValueError:
        return ""
    return str(value.get("query", "")) if isinstance(value, dict) else ""


def _list_item(label: str, tools: list[ServerTool], error: str) -> OutputItem:
    listed = [
        {"name": tool.bare, "description": tool.description, "input_schema": tool.parameters, "annotations": tool.hints}
        for tool in tools
    ]
    item = OutputItem(id=f"mcpl_{secrets.token_urlsafe(24)}", type="mcp_list_tools", server_label=label, tools=listed)
    item.error = error or None
    return item
