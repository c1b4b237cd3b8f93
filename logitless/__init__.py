"""logitless: run, serve and fine-tune GGUF models on CPU, OpenCL and Vulkan.

>>> from logitless import LLM, SamplingParams
>>> with LLM() as llm:
...     answer = llm.generate("ROMEO:", SamplingParams(temperature=0, max_tokens=8))
>>> answer.finish_reason
'length'

`LLM` and `AsyncLLM` run a model, `serve` and `asgi_app` put it behind HTTP, `Trainer` fine-tunes it, `quantize`
writes it with fewer bits, and `logitless.graph` is the tensor graph below. Importing this package loads none of them
before use."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from logitless import graph as graph
    from logitless.async_llm import AsyncFinetuneJob as AsyncFinetuneJob
    from logitless.async_llm import AsyncLLM as AsyncLLM
    from logitless.errors import DeviceError as DeviceError
    from logitless.errors import Error as Error
    from logitless.errors import FileError as FileError
    from logitless.errors import ModelError as ModelError
    from logitless.errors import OptionError as OptionError
    from logitless.errors import RequestError as RequestError
    from logitless.errors import TrainingError as TrainingError
    from logitless.llm import LLM as LLM
    from logitless.llm import FinetuneJob as FinetuneJob
    from logitless.outputs import BeamSearchOutput as BeamSearchOutput
    from logitless.outputs import BeamSearchSequence as BeamSearchSequence
    from logitless.outputs import ChatChunk as ChatChunk
    from logitless.outputs import ChatCompletion as ChatCompletion
    from logitless.outputs import Chunk as Chunk
    from logitless.outputs import Completion as Completion
    from logitless.outputs import Message as Message
    from logitless.outputs import Pooled as Pooled
    from logitless.outputs import Ranking as Ranking
    from logitless.outputs import Score as Score
    from logitless.outputs import TokenLogprob as TokenLogprob
    from logitless.outputs import ToolCall as ToolCall
    from logitless.params import BeamSearchParams as BeamSearchParams
    from logitless.params import LoRARequest as LoRARequest
    from logitless.params import SamplingParams as SamplingParams
    from logitless.quantization import convert as convert
    from logitless.quantization import quantize as quantize
    from logitless.serving import Server as Server
    from logitless.serving import asgi_app as asgi_app
    from logitless.serving import serve as serve
    from logitless.trainer import Trainer as Trainer
    from logitless.trainer import TrainingConfig as TrainingConfig

_HOMES = {
    "async_llm": ("AsyncFinetuneJob", "AsyncLLM"),
    "errors": ("DeviceError", "Error", "FileError", "ModelError", "OptionError", "RequestError", "TrainingError"),
    "llm": ("FinetuneJob", "LLM"),
    "outputs": (
        *("BeamSearchOutput", "BeamSearchSequence", "ChatChunk", "ChatCompletion", "Chunk", "Completion", "Message"),
        *("Pooled", "Ranking", "Score", "TokenLogprob", "ToolCall"),
    ),
    "params": ("BeamSearchParams", "LoRARequest", "SamplingParams"),
    "quantization": ("convert", "quantize"),
    "serving": ("Server", "asgi_app", "serve"),
    "trainer": ("Trainer", "TrainingConfig"),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}
__all__ = [*sorted(_HOME_OF), "graph"]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("logitless")
    if name == "graph":
        return import_module("logitless.graph")
    if name not in _HOME_OF:
        raise AttributeError(f"module 'logitless' has no attribute {name!r}")
    try:
        value = getattr(import_module(f"logitless.{_HOME_OF[name]}"), name)
    except AttributeError as error:  # Python would say "cannot import name" and hide the cause
        raise ImportError(f"logitless.{_HOME_OF[name]} cannot be imported: {error}") from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
