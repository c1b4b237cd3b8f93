"""Server settings of the command line: folders, pages' settings, variables of chat templates."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from logitless.cli.flags.flags import CliError, parse
from logitless.cli.flags.options import SERVE
from logitless.cli.setup.server import template_variables, ui_settings, writable_folder
from logitless.models.chat.template import ChatTemplate

FLAGS = [flag for group in SERVE for flag in group.flags]
KEEPING = (  # GLM's manner, and Qwen's
    "{% for m in messages %}{% if m.reasoning_content and (clear_thinking is defined and not clear_thinking) %}"
    "<{{ m.reasoning_content }}>{% endif %}{{ m.content }};{% endfor %}",
    "{% for m in messages %}{% if m.reasoning_content and preserve_thinking | default(false) %}"
    "<{{ m.reasoning_content }}>{% endif %}{{ m.content }};{% endfor %}",
)


def options(*words: str, **environ: str) -> SimpleNamespace:
    return parse(FLAGS, words, environ)


def test_a_new_folder_of_prompts_is_made_for_its_user_alone(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    assert writable_folder("--log-prompts-dir", str(folder), make=True) == str(folder)
    assert folder.stat().st_mode & 0o777 == 0o700
    with pytest.raises(CliError, match=r"--slot-save-path: .*/c is not a folder"):
        writable_folder("--slot-save-path", str(tmp_path / "c"))
    (tmp_path / "file").touch()
    with pytest.raises(CliError, match=r"--log-prompts-dir: .*/file/x cannot be made: Not a directory"):
        writable_folder("--log-prompts-dir", str(tmp_path / "file" / "x"), make=True)


def test_settings_of_pages_come_from_a_text_or_a_file(tmp_path: Path) -> None:
    file = tmp_path / "ui.json"
    file.write_text('\ufeff{"theme": "dark"}', "utf-8")
    assert ui_settings(options()) == {}
    assert ui_settings(options("--ui-config", '{"a": 1}')) == {"a": 1}
    assert ui_settings(options(LLAMA_ARG_UI_CONFIG_FILE=str(file))) == {"theme": "dark"}
    file.write_text("[]")
    for words, line in (
        (("--webui-config-file", str(file)), "ui.json is not a JSON object"),
        (("--ui-config-file", str(tmp_path / "none")), "No such file"),
        (("--ui-config", "{}", "--ui-config-file", str(file)), "give one of them"),
    ):
        with pytest.raises(CliError, match=line):
            ui_settings(options(*words))


@pytest.mark.parametrize("source", KEEPING)
def test_reasoning_of_earlier_answers_stays_or_goes_where_the_template_can_choose(source: str) -> None:
    template = ChatTemplate(source, bos_token="", eos_token="")
    messages = [{"role": "assistant", "content": "a", "reasoning_content": "why"}, {"role": "user", "content": "b"}]
    for words, kept in ((("--reasoning-preserve",), True), (("--no-reasoning-preserve",), False)):
        variables = template_variables(options(*words))
        assert ("<why>" in template.render(messages, add_generation_prompt=False, **variables)) is kept
    own = template_variables(options("--reasoning-preserve", "--chat-template-kwargs", '{"clear_thinking": true}'))
    assert own["clear_thinking"] is True
    assert template_variables(options()) == {}


@pytest.mark.parametrize(
    "words",
    [
        "--device none -devd none -mmdev none",
        "--direct-io -ndio -dio --no-direct-io -lm dio -lzm on --no-mmap --mlock",
        "--log-jsonl --no-log-jsonl --log-colors on --no-log-prefix --no-log-timestamps -lv 5",
        "--reasoning-preserve --skip-chat-parsing -ag",
        "--cors-methods GET,POST --cors-headers Content-Type,X-Tool-Cwd --no-cors-credentials",
        "-C f --cpu-range 0-1 --cpu-strict 0 --prio 2 --poll 50 -ncffn 3 -otd blk=cpu -cmoed -ncmoed 2",
        "--ui-config {} -fa on -fit off --numa isolate --spec-draft-sampling greedy",
    ],
)
def test_command_lines_of_llama_server_parse(words: str) -> None:
    options(*words.split())


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("-fa on --jinja --mmap -ndio -lzm auto --repack --no-perf --check-tensors --moe-cache-mib 0 -cb -kvo", []),
        ("-fa off -td 3 --no-mmap --no-repack", ["-fa", "-td", "--no-mmap", "--no-repack"]),
        ("--poll 0 -nocb -nkvo --numa isolate --threads-http 3 -fitt 512,1 --video-fps 4 --cpu-strict 0", []),
    ],
)
def test_flags_that_ask_for_what_is_not_so_are_named(words: str, named: list[str]) -> None:
    assert options(*words.split()).notices == named


@pytest.mark.parametrize(
    "words", ["--cpu-strict 1", "--cpu-strict-batch-draft 1", "--video-fps 2", "--video-ffmpeg-dir x"]
)
def test_flags_that_cannot_have_their_effect_are_refused(words: str) -> None:
    with pytest.raises(CliError, match=rf"^not supported yet: {words.split()[0]}: .*(--cpu-mask|pictures)"):
        options(*words.split())


def test_presets_are_llama_servers_settings() -> None:
    got = options("--gpt-oss-20b-default")
    assert (str(got.hf_repo), got.hf_file, got.port) == ("ggml-org/gpt-oss-20b-GGUF", "gpt-oss-20b-mxfp4.gguf", 8013)
    assert (got.parallel, got.ctx_size, got.temp, got.top_p, got.top_k, got.min_p) == (2, 262144, 1, 1, 0, 0.01)
    got = options("--fim-qwen-7b-spec", "--port", "9")
    assert (got.hf_file, got.port, got.cache_reuse) == ("qwen2.5-coder-7b-q8_0.gguf", 9, 256)
    assert (str(got.hf_repo_draft), got.spec_type) == ("ggml-org/Qwen2.5-Coder-0.5B-Q8_0-GGUF", "draft-simple")


@pytest.mark.parametrize("made", ["file", "file/below"])
def test_data_dir_that_is_a_file_is_named_with_its_flag(tmp_path: Path, made: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CliError, match=r"^--data-dir: .*file.* cannot be made: "):
        writable_folder("--data-dir", str(tmp_path / made), make=True)
    assert writable_folder("--data-dir", str(tmp_path / "a" / "b"), make=True)  # a new one is made
