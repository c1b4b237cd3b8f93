"""Image encoders of Hugging Face folders: rows of transformers, and llama.cpp's answers by the converted pair."""

from __future__ import annotations

import base64
import json
from importlib.util import find_spec
from pathlib import Path
from shutil import copytree
from typing import Any

import numpy as np
import pytest

from logitless import convert
from logitless.backends.cpu.backend import CPUBackend
from logitless.cli.main import main
from logitless.graph.execution.session import Session
from logitless.models.audio.encoder import WhisperEncoder
from logitless.models.audio.params import read_audio_params
from logitless.models.errors import ModelFileError
from logitless.models.gguf.file import GGUFFile
from logitless.models.huggingface.config import Config
from logitless.models.huggingface.visions import projector_file
from logitless.models.media.projector_choice import check_projector, fitting_projector, media_of
from logitless.models.model import hparams_of
from logitless.models.quantization.quantize import dequantized
from logitless.models.vision.encoder import VisionEncoder
from logitless.models.vision.params import read_params
from logitless.models.weights.weights import check_weights
from tests.helpers.audio_files import sound, wav
from tests.helpers.huggingface_folders import DATA, recorded, tokenizer_json, write_folder, write_tensors
from tests.helpers.huggingface_weights import pixels, spectrogram, weight
from tests.helpers.vision_files import SMOL_TOKENS, SPECS, picture, png, write_projector
from tests.helpers.vision_requests import Runs
from tests.models.vision.test_llama_cpp_images import theirs

NAMES = sorted(path.stem for path in (DATA / "visions").glob("*.json"))
FILE = "preprocessor_config.json"
NEXT = {"architectures": ["LlavaNextForConditionalGeneration"], "image_grid_pinpoints": [[16, 48], [32, 32]]}
TOKENS = {"smolvlm": SMOL_TOKENS, "pixtral": ["[IMG_BREAK]"], "mistral3": ["[IMG_BREAK]"]}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {name: write_folder(tmp_path_factory.mktemp(name) / "model", f"visions/{name}") for name in NAMES}
    for name, tokens in TOKENS.items():
        words = tokenizer_json()
        words["added_tokens"] += [{"id": 272 + i, "content": word, "special": True} for i, word in enumerate(tokens)]
        (folders[name] / "tokenizer.json").write_text(json.dumps(words))
    folders["llava 1.6"] = rewritten(folders["llava"], folders["llava"].parent / "next" / "model", **NEXT)
    with_newline = {**all_tensors("llava"), "image_newline": np.ones(64, np.float32)}
    write_tensors(folders["llava 1.6"] / "model.safetensors", with_newline)
    return folders


def all_tensors(name: str) -> dict[str, np.ndarray[Any, Any]]:
    return {tensor: weight(tensor, shape) for tensor, shape in recorded(f"visions/{name}")["tensors"].items()}


def rewritten(folder: Path, new: Path, **settings: Any) -> Path:
    """A copy of a folder with other settings; None: it has not that one."""
    copytree(folder, new)
    config = json.loads((new / "config.json").read_text()) | settings
    (new / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    return new


@pytest.mark.parametrize("name", NAMES)
def test_rows_of_a_picture_are_those_of_transformers(name: str, folders: dict[str, Path]) -> None:
    side, expected = recorded(f"visions/{name}")["side"], np.array(recorded(f"visions/{name}")["rows"])
    with GGUFFile.open(folders[name] / FILE) as gguf:
        session = Session([CPUBackend(1)])
        encoder = VisionEncoder.define(session, gguf, read_params(gguf), 64)
        parts = session.run("rows", lambda: encoder.rows(1, side, side), encoder.feeds([pixels(side)]))
        session.close()
    assert np.abs(np.concatenate(parts)[:, ::8] - expected).max() < 2e-3  # GELU by tanh, as in llama.cpp


@pytest.mark.skipif(find_spec("xllamacpp") is None, reason="no llama.cpp (the package xllamacpp)")
def test_folder_answers_as_llama_cpp_with_the_converted_files(folders: dict[str, Path]) -> None:
    image, pairs = png(picture(50, 30)), []
    for folder in folders.values():
        pairs.append((str(folder.with_name("m.gguf")), str(folder.with_name("mmproj.gguf"))))
        convert(folder, pairs[-1][0])
        convert(folder, pairs[-1][1], mmproj=True)
    prompt = ("h<image>g", [base64.b64encode(image).decode()])
    answers = theirs([(*pair, [prompt]) for pair in pairs])
    for (name, folder), ((n_expected, tops),) in zip(folders.items(), answers, strict=True):
        with GGUFFile.open(folder) as gguf:
            projector = fitting_projector(folder, gguf, hparams_of(gguf))
        assert projector == folder / FILE
        with Runs(folder, projector) as runs:
            n, values = runs.first("h<image>g", [image])
        assert n == n_expected, name
        for id, value in (tops or ())[:3]:
            assert values[id] == pytest.approx(value, abs=0.04), name


def test_folder_says_that_it_reads_images_and_convert_names_the_flag(
    folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    folder = folders["gemma3"]
    assert media_of(folder) == (True, False)
    assert main(["convert", str(folder), "-o", str(tmp_path / "m.gguf")]) == 0
    assert "--mmproj -o mmproj.gguf writes its encoder" in capsys.readouterr().err
    assert main(["convert", str(folder), "--mmproj", "--type", "Q8_0", "-o", str(tmp_path / "p.gguf")]) == 2
    assert not caplog.records  # nothing is left unread


@pytest.mark.parametrize("name", ["qwen2audio", "voxtral"])
def test_rows_of_a_sound_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", f"sounds/{name}")
    assert media_of(folder) == (False, False)  # without its preprocessor's settings
    (folder / FILE).write_text("{}")
    assert media_of(folder) == (False, True)
    with GGUFFile.open(folder / FILE) as gguf:
        params, session = read_audio_params(gguf), Session([CPUBackend(1)])
        encoder = WhisperEncoder.define(session, gguf, params, 64)
        (rows,) = session.run("rows", lambda: encoder.rows(1, 3000, 16), encoder.feeds([spectrogram(16)]))
        session.close()
    assert np.abs(rows[::50, ::8] - recorded(f"sounds/{name}")["rows"]).max() < 2e-3
    with GGUFFile.open(folder) as gguf:
        check_weights(gguf, hparams_of(gguf))


@pytest.mark.skipif(find_spec("xllamacpp") is None, reason="no llama.cpp (the package xllamacpp)")
def test_folder_answers_a_sound_as_llama_cpp_with_the_converted_files(tmp_path: Path) -> None:
    folder, pair = (
        write_folder(tmp_path / "model", "sounds/qwen2audio"),
        (tmp_path / "m.gguf", tmp_path / "mmproj.gguf"),
    )
    (folder / FILE).write_text("{}")
    for path, mmproj in zip(pair, (False, True), strict=True):
        convert(folder, path, mmproj=mmproj)
    prompt, spoken = "h<image>g", sound(3.0)
    encoded = [base64.b64encode(wav(spoken)).decode()]
    (((n_expected, tops),),) = theirs([(*map(str, pair), [(prompt, encoded)])], n_ctx=2048, exact=True)
    with Runs(folder, folder / FILE, n_ctx=2048, type_k="f32", type_v="f32") as runs:
        n, values = runs.first(prompt, [spoken])
    assert n == n_expected
    assert [values[id] for id, _ in tops] == pytest.approx([value for _, value in tops], abs=0.01)


def contents(path: Path) -> dict[str, bytes]:
    with GGUFFile.open(path) as gguf:
        return {name: gguf.bytes_of(name).tobytes() for name in gguf.tensors}


def internvl_chat(name: str) -> str:
    """A name of `InternVLForConditionalGeneration` as `InternVLChatModel` has it."""
    if name.startswith("multi_modal_projector."):
        parts = {"layer_norm": "0", "linear_1": "1", "linear_2": "3"}
        _, part, end = name.split(".")
        return f"mlp1.{parts[part]}.{end}"
    for old, new in (
        ("vision_tower.encoder.layer.", "vision_model.encoder.layers."),
        ("vision_tower.", "vision_model."),
        ("cls_token", "class_embedding"),
        ("position_embeddings", "position_embedding"),
        ("patch_embeddings.projection", "patch_embedding"),
        ("layernorm_before", "norm1"),
        ("layernorm_after", "norm2"),
        ("lambda_", "ls"),
        ("attention.projection_layer", "attn.proj"),
    ):
        name = name.replace(old, new)
    return name


def test_internvl_chat_model_is_that_of_transformers(folders: dict[str, Path], tmp_path: Path) -> None:
    config = recorded("visions/internvl")["config"]
    chat = {"architectures": ["InternVLChatModel"], "text_config": None, "llm_config": config["text_config"]}
    chat |= {"vision_config": {**config["vision_config"], "image_size": 16, "patch_size": 4}}
    folder = rewritten(folders["internvl"], tmp_path / "chat", **chat, max_dynamic_patch=6)
    tensors = {internvl_chat(name): values for name, values in all_tensors("internvl").items()}
    for name in [name for name in tensors if ".attention.q_proj." in name]:
        parts = [tensors.pop(name.replace("q_proj", f"{part}_proj")) for part in "qkv"]
        tensors[name.replace("attention.q_proj", "attn.qkv")] = np.concatenate(parts)
    write_tensors(folder / "model.safetensors", tensors)
    assert contents(folder) == contents(folders["internvl"])
    assert contents(folder / FILE) == contents(folders["internvl"] / FILE)
    with GGUFFile.open(folder / FILE) as gguf:
        assert max(x * y for x, y in read_params(gguf).grids) == 6


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("llava", "vision_tower.", "vision_tower.vision_model."),  # as transformers 4 has them
        ("lfm2vl", "vision_tower.", "vision_tower.vision_model."),
        ("pixtral", "", "model."),
        ("gemma4", ".linear.weight", ".weight"),
    ],
)
def test_other_names_of_an_encoder_mean_the_same(
    name: str, old: str, new: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    folder = rewritten(folders[name], tmp_path / "model")
    tensors = {
        tensor.replace(old, new, 1) if "vision" in tensor or not old else tensor: values
        for tensor, values in all_tensors(name).items()
    }
    write_tensors(folder / "model.safetensors", tensors)
    (folder / FILE).rename(folder / "old")  # transformers 5 has all settings of a processor in one file
    settings = json.dumps({"image_processor": json.loads((folder / "old").read_text())})
    (folder / "processor_config.json").write_text(settings)
    assert contents(projector_file(folder)) == contents(folders[name] / FILE)
    assert contents(folder) == contents(folders[name])
    assert media_of(folder) == (True, False)


def test_gemma3n_has_the_projector_that_llama_cpp_reads(tmp_path: Path) -> None:
    """Its encoder is that of timm; the file is one of tests/models/vision, which compares it with llama.cpp."""
    folder = write_folder(tmp_path / "model", "gemma3n")
    config = json.loads((folder / "config.json").read_text())
    config = {**config, "vocab_size": 280, "vocab_size_per_layer_input": 272}
    tensors = {tensor: weight(tensor, shape) for tensor, shape in recorded("gemma3n")["tensors"].items()}
    for name in [name for name in tensors if name.endswith("embed_tokens.weight")]:
        tensors[name] = np.concatenate([tensors[name], np.ones((8, 64), np.float32)])
    with GGUFFile.open(write_projector(tmp_path / "p.gguf", SPECS["gemma3nv"])) as expected:
        for name, info in expected.tensors.items():
            values = dequantized(info, expected.bytes_of(name)).reshape(info.shape)
            flat = values.reshape(-1) if "layer_scale" in name or name == "v.conv_stem.conv.bias" else values
            tensors[gemma3n_name(name)] = flat
        whole = {"architectures": ["Gemma3nForConditionalGeneration"], "text_config": config}
        whole |= {"model_type": "gemma3n", "vision_config": {"model_type": "gemma3n_vision", "hidden_size": 64}}
        (folder / "config.json").write_text(json.dumps(whole))
        images = {"do_normalize": False, "size": {"height": 256, "width": 256}}
        (folder / FILE).write_text(json.dumps(images))
        tensors["model.embed_vision.embedding.weight"] = np.ones((16, 64), np.float32)
        tensors["model.embed_vision.hard_embedding_norm.weight"] = np.ones(64, np.float32)
        write_tensors(folder / "model.safetensors", tensors)
        with GGUFFile.open(folder) as text, GGUFFile.open(folder / FILE) as own:
            check_projector(folder / FILE, text, hparams_of(text))
            assert text.tensors["per_layer_token_embd.weight"].shape[0] == text.tensors["token_embd.weight"].shape[0]
            assert not text.bytes_of("per_layer_token_embd.weight").view(np.float32).reshape(280, -1)[272:].any()
            for name, info in expected.tensors.items():
                if "layer_scale" not in name:
                    assert (own.tensors[name].shape, own.tensors[name].dtype) == (info.shape, info.dtype)
                assert own.bytes_of(name).tobytes() == expected.bytes_of(name).tobytes(), name
            assert set(own.tensors) - set(expected.tensors) == {"mm.embedding.weight", "mm.hard_emb_norm.weight"}
            params = read_params(own)
            assert (params.image_size, params.mean, params.std) == (256, (0.0,) * 3, (1.0,) * 3)


def gemma3n_name(name: str) -> str:
    """The name of a tensor of its projector in a folder."""
    names = {"mm.soft_emb_norm": "soft_embedding_norm", "mm.input_projection": "embedding_projection"}
    if (own := name.removesuffix(".weight")) in names:
        return f"model.embed_vision.{names[own]}.weight"
    return "model.vision_tower.timm_model." + name.removeprefix("v.").replace("blk.", "blocks.", 1)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("qwen2vl", {"min_pixels": 4096, "max_pixels": 8192}),
        ("qwen3vl", {"size": {"shortest_edge": 4096, "longest_edge": 8192}}),
    ],
)
def test_limits_of_pixels_are_those_of_the_folder(
    name: str, settings: dict[str, Any], folders: dict[str, Path], tmp_path: Path
) -> None:
    folder = rewritten(folders[name], tmp_path / "model")
    with GGUFFile.open(folder / FILE) as gguf:
        assert read_params(gguf).tokens == (8, 4096)  # those of llama.cpp
    (folder / FILE).write_text(json.dumps(json.loads((folder / FILE).read_text()) | settings))
    with GGUFFile.open(folder / FILE) as gguf:
        assert read_params(gguf).tokens == (4096 // 8**2, 8192 // 8**2)
        assert read_params(gguf, (0, 100)).tokens == (64, 100)  # --image-max-tokens


def test_settings_that_transformers_leaves_out_are_its_own(tmp_path: Path) -> None:
    """config.json of gemma-3-4b-it and llava-v1.6-mistral-7b-hf, whose parts have other settings than those alone."""
    text = {"hidden_size": 2560, "model_type": "gemma3_text", "num_hidden_layers": 34}
    (tmp_path / "config.json").write_text(json.dumps({"text_config": text}))
    gemma = Config.read(tmp_path)
    names = ("num_attention_heads", "num_key_value_heads", "vocab_size", "num_hidden_layers")
    assert [gemma.count(name) for name in names] == [8, 4, 262208, 34]
    assert (gemma.head_dim, gemma.rope["rope_theta"], gemma.rope_local["rope_theta"]) == (256, 1e6, 1e4)
    encoder = {"hidden_size": 1024, "model_type": "clip_vision_model"}
    whole = {"text_config": {"model_type": "mistral", "vocab_size": 32064}, "vision_config": encoder}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    llava = Config.read(tmp_path)
    assert [llava.count(name) for name in (*names, "hidden_size")] == [32, 8, 32064, 32, 4096]
    assert Config.of_vision(llava).get("hidden_act") == "quick_gelu"


@pytest.mark.parametrize(
    ("name", "changes", "problem"),
    [
        ("llava", {"vision_feature_layer": -1}, "'vision_feature_layer' is not one of -2 to -2, the supported ones"),
        ("llava", {"vision_feature_select_strategy": "full"}, "'vision_feature_select_strategy' is not default"),
        ("llava", {"vision_config": {"hidden_act": "mish"}}, "'hidden_act' is 'mish'; supported are gelu, quick_gelu"),
        ("llava", {"vision_config": {"model_type": "dinov2"}}, "has no encoder of images or sounds of a suppor"),
        ("llava 1.6", {"image_grid_pinpoints": [[16, 20]]}, "'clip.vision.image_grid_pinpoints' has not pairs of mul"),
        ("llava 1.6", {"image_grid_pinpoints": [[16, "x"]]}, "'image_grid_pinpoints' has not pairs of sizes"),
        ("internvl", {"downsample_ratio": 0.3}, "'downsample_ratio' is 0.3, not one by a whole number"),
        ("internvl", {"vision_config": {"norm_type": "rms_norm"}}, "'norm_type' is not layer_norm without norms"),
        ("internvl", {"max_dynamic_patch": 1 << 20}, "preproc_max_tiles' is 1048576; supported are 1 to 256"),
        ("lfm2vl", {"vision_feature_layer": -2}, "'vision_feature_layer' is not -1, the supported one"),
        ("gemma4", {"vision_config": {"patch_size": 8}}, r"tensor 'v.patch_embd.weight' has shape \(32, 3, 4, 4\)"),
        ("pixtral", {"vision_config": {"hidden_size": 1.5}}, "'hidden_size' is '1.5', not a count"),
    ],
)
def test_settings_of_an_encoder_that_are_not_supported_are_named_in_one_line(
    name: str, changes: dict[str, Any], problem: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    config = json.loads((folders[name] / "config.json").read_text())
    if isinstance(own := changes.get("vision_config"), dict):
        changes = {"vision_config": {**config["vision_config"], **own}}
    folder = rewritten(folders[name], tmp_path / "model", **changes)
    with GGUFFile.open(folder) as text, pytest.raises(ModelFileError, match=problem) as error:
        check_projector(folder / FILE, text, hparams_of(text))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("added", "problem"),
    [
        ([], r"has no token \[IMG_BREAK\], which ends lines"),
        (5, "'added_tokens' is no list"),
        *(([{"id": id, "content": "[IMG_BREAK]"}], r"has no token \[IMG_BREAK\]") for id in (True, -1, None)),
        ([{"id": 10**9, "content": "[IMG_BREAK]"}], r"'\[IMG_BREAK\]' is token 1000000000 of 273"),
    ],
)
def test_break_of_lines_that_no_token_is_refused_in_one_line(
    added: object, problem: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    folder = rewritten(folders["pixtral"], tmp_path / "model")
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer_json() | {"added_tokens": added}))
    with pytest.raises(ModelFileError, match=f"tokenizer.json: {problem}"):
        GGUFFile.open(folder / FILE)


def test_bounds_in_the_wrong_order_are_named(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = rewritten(folders["gemma4"], tmp_path / "model")
    name = "model.vision_tower.encoder.layers.0.self_attn.q_proj.input_min"
    write_tensors(folder / "model.safetensors", {**all_tensors("gemma4"), name: np.array(9.0)})
    with GGUFFile.open(folder) as text, pytest.raises(ModelFileError, match=r"attn_q.input_min' is above its maximum"):
        check_projector(folder / FILE, text, hparams_of(text))


@pytest.mark.parametrize(
    ("family", "setting", "value"),
    [
        ("apertus", "num_hidden_layers", 2**31 - 1),
        ("apertus", "hidden_size", 2**31 - 1),
        ("jamba", "num_hidden_layers", 513),
    ],
)
def test_sizes_that_no_memory_has_are_named(family: str, setting: str, value: int, tmp_path: Path) -> None:
    folder = write_folder(tmp_path, family)
    config = {**recorded(family)["config"], setting: value, "head_dim": None}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelFileError, match=f"'{setting}'"):
        GGUFFile.open(folder)


@pytest.mark.parametrize(("name", "file"), [("visions/llava", FILE), ("llama", "")])
def test_two_tensors_that_are_one_are_refused_in_one_line(name: str, file: str, tmp_path: Path) -> None:
    folder = write_folder(tmp_path, name)
    tensors = {tensor: weight(tensor, shape) for tensor, shape in recorded(name)["tensors"].items()}
    twice = next(tensor for tensor in tensors if ("vision_tower" in tensor) == bool(file) and "layers.0" in tensor)
    tensors[f"model.{twice}" if file else twice.removeprefix("model.")] = tensors[twice]
    write_tensors(folder / "model.safetensors", tensors)
    with pytest.raises(ModelFileError, match=r"has two tensors that are '.*blk.0.*' in GGUF"):
        GGUFFile.open(folder / file)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({FILE: None}, "has no encoder of images or sounds of a suppor"),
        ({FILE: {"image_mean": [0.5], "image_std": [0.5] * 3}}, f"{FILE}: 'image_mean' has not three numbers"),
        ({FILE: {"image_mean": "x"}}, f"{FILE}: 'image_mean' is no list"),
        ({"vision_config": {"patch_size": None}}, "config.json: 'patch_size' is missing"),
        ({"vision_config": {"depth": 1}}, "tensor 'visual.blocks.1.* is unknown in the projector"),
        ({"vision_config": {"depth": 4}}, "'fullatt_block_indexes' is not every n-th layer"),
        ({"vision_config": {"window_size": 64}}, "'window_size' is not 112, the supported one"),
        ({"vision_config": {"num_heads": 3}}, "key 'clip.vision.attention.head_count' is 3"),
        ({"vision_config": {"patch_size": 8}}, r"tensor 'v.patch_embd.weight' has shape \(32, 3, 4, 4\)"),
        ({"vision_config": 3}, "has no encoder of images or sounds of a suppor"),
        ({"vision_config": {"mlp_ratio": -1}}, "'mlp_ratio' is -1, not a positive number"),
    ],
)
def test_wrong_image_encoder_is_refused_in_one_line(changes: dict[str, Any], problem: str, tmp_path: Path) -> None:
    folder = write_folder(tmp_path, "visions/qwen2vl" if "mlp_ratio" in str(changes) else "visions/qwen2.5vl")
    config = json.loads((folder / "config.json").read_text())
    own = changes.get("vision_config", {})
    config["vision_config"] = {**config["vision_config"], **own} if isinstance(own, dict) else own
    (folder / "config.json").write_text(json.dumps(config))
    if FILE in changes:
        (folder / FILE).unlink()
        if changes[FILE] is not None:
            (folder / FILE).write_text(json.dumps(changes[FILE]))
    with GGUFFile.open(folder) as text, pytest.raises(ModelFileError, match=problem) as error:
        check_projector(folder / FILE, text, hparams_of(text))
    assert "\n" not in str(error.value)


def test_text_model_with_an_encoder_of_no_object_is_refused_in_one_line(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, "visions/qwen3vl")
    config = json.loads((folder / "config.json").read_text()) | {"vision_config": 3}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelFileError, match=r"config.json: 'vision_config' is no object"):
        GGUFFile.open(folder)
