"""Pre-tokenizers (`tokenizer.ggml.pre`): split a text into words before byte-pair merging.

The facts (names, expressions, which names ignore merges or add a BOS) are those of llama.cpp's
`src/llama-vocab.cpp` and of the hand-written matchers in its `src/unicode.cpp`; where those
simplify the original tokenizer.json (kimi-k2 and tiny_aya do not tell upper from lower case, for
instance) the simplification is kept, because ids must equal llama.cpp's. Expressions are in
Oniguruma's syntax. Each one in turn isolates its matches inside the pieces that the one before it
left, and the text between two matches is a piece too."""

from __future__ import annotations

from dataclasses import dataclass

_WORDS = "(?<=[A-Za-z])(?= [A-Za-z])|(?<=[A-Za-z]\n)(?=[A-Za-z])"
_LINE_ENDS = "(?<=[A-Za-z]\n)(?=[A-Za-z])"
_NUMBERS = "(?<=[A-Za-z])(?=[0-9])"


@dataclass(frozen=True)
class PreTokenizer:
    """One way of cutting a text into words, with the vocabulary defaults that go with it."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False  # a word that is a token stays whole
    add_bos: bool = False
    has_bos: bool = True  # False: no BOS unless the file names one
    byte_level: bool = True  # False: merges run on UTF-8 with ▁ for spaces, unknown characters become <0xXX> tokens
    gap: str = _WORDS  # (of `re`) positions where a text may be cut: no piece reaches across them


_CONTRACTION = "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_PUNCTUATION = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_PATHS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_ASCII_PUNCTUATION = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"
_KANA_HAN = "[一-龥\u3040-ゟ゠-ヿ]+"
_HAN = "\u4e00-\u9fff\u3400-\u4dbf\U00020000-\U0002a6df\U0002a700-\U0002ebef\uf900-\ufaff\U0002f800-\U0002fa1f"
# Cased words, as llama.cpp approximates them: only a-z and A-Z have a case.
_UPPER, _LOWER = r"[\p{L}&&[^a-z]]", r"[\p{L}&&[^A-Z]]"
_UPPER_M, _LOWER_M = r"[\p{L}\p{M}&&[^a-z]]", r"[\p{L}\p{M}&&[^A-Z]]"
# Groups of three from the right, in three linear steps: the run of digits, its first one or two,
# then threes. (The one-step form of the originals, [0-9]{1,3}(?=(?:[0-9]{3})*\b), looks ahead over
# the whole run at every group.)
_THREES = (r"\A[0-9]{1,2}(?=(?:[0-9]{3})*\z)", "[0-9]{3}")


def _cased(upper: str, lower: str, suffix: str = "") -> str:
    lead = r"[^\r\n\p{L}\p{N}]?"
    return f"{lead}{upper}*{lower}+{suffix}|{lead}{upper}+{lower}*{suffix}"


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}{{1,3}}|{_PUNCTUATION}|{_SPACES}"
_QWEN2 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}|{_PUNCTUATION}|{_SPACES}"
_QWEN35 = (
    rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_JAIS2 = (
    rf"{_CONTRACTION}|{_WORD}|\p{{N}}{{1,3}}|{_PUNCTUATION}|\s*[\r\n]+|"
    + "".join(rf"\s{{{n}}}(?!\S)|" for n in (512, 256, 128, 64, 32, 16, 8, 4))
    + r"\s{1,2}(?!\S)|\s{1}"
)
_DEEPSEEK_WORD = rf"{_ASCII_PUNCTUATION}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+"
_DEEPSEEK3 = rf"{_DEEPSEEK_WORD}[\r\n]*|{_SPACES}"
_SPARK = rf"{_DEEPSEEK_WORD}|[\r\n]|\s+(?!\S)|\s+"
# deepseek-llm lists the cased letters of its time one by one. (Its last punctuation range began at
# U+3000, a space, which llama.cpp never matches.)
_DEEPSEEK_LETTERS = (
    "[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝ"
    "\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec"
    "\u1ff2-\u1ff4\u1ff6-\u1ffcℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗ"
    "Ａ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃]+"
)
_DEEPSEEK_PUNCTUATION = "[!-/:-~！-／：-～‘-‟\u3001\u3002]+"
_DEEPSEEK_CJK = "[一-龥\u0800-\u4e00\uac00-\ud7ff]+"
_AFMOE_ASIAN = (
    "[一-\u9fff㐀-\u4dbf\uf900-\ufaff\u3040-ゟ゠-ヿ･-ﾟ⼀-\u2fdfเ-\u0e7f\u0e80-\u0effក-\u17ffက-႟ꩠ-ꩿꧠ-\ua9ff가-\ud7afᄀ-ᇿ]+"
)
_KIMI_K2 = (
    rf"[{_HAN}]+|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}&&[^{_HAN}]]+{_CONTRACTION}?|\p{{N}}{{1,3}}|{_PUNCTUATION}|{_SPACES}"
)
_YOUTU_ASIAN = "[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，\u3001-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥\u3040-ゟ゠-ヿ]+"
_BAILING = (
    r"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])|"
    rf"{_WORD}|\p{{N}}|{_PUNCTUATION}|\s*[\r\n]|\s+(?!\S)|\s+"
)
_EXAONE_MOE = (
    rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
_TINY_AYA = rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+{_CONTRACTION}?|\p{{N}}{{1,3}}|{_PATHS}|{_SPACES}"
_YOUTU = rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+{_CONTRACTION}?|\p{{N}}|{_PATHS}|{_SPACES}"
_LINES = r"[^\n]+|[\n]+"

# names → pre-tokenizer, one line each
_TABLE: tuple[tuple[str, PreTokenizer], ...] = (
    ("default", PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"))),
    ("gpt-2 phi-2 jina-es jina-de gigachat jina-v2-es jina-v2-de a.x-4.0 mellum modern-bert", PreTokenizer((_GPT2,))),
    ("mpt olmo jais trillion granite-docling exaone4 jina-v1-en jina-v2-code roberta-bpe", PreTokenizer((_GPT2,))),
    ("llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral", PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True)),
    ("midm-2.0 lfm2 jina-v5-nano", PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True)),
    ("dbrx smaug-bpe", PreTokenizer((_LLAMA3,))),
    ("glm4 glm5", PreTokenizer((_LLAMA3,), ignore_merges=True, has_bos=False)),
    ("chatglm-bpe", PreTokenizer((_LLAMA3,), has_bos=False)),
    ("jais-2", PreTokenizer((_JAIS2,))),
    ("starcoder refact command-r smollm codeshell exaone minerva-7b mellum2", PreTokenizer((r"\p{N}", _GPT2))),
    ("falcon", PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]"))),
    ("qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2", PreTokenizer((_QWEN2,))),
    ("qwen35", PreTokenizer((_QWEN35,))),
    ("ufakzeka", PreTokenizer((rf"{_WORD}|\p{{N}}|{_PUNCTUATION}|{_SPACES}",))),
    ("laguna", PreTokenizer((_LINES, _QWEN2))),
    (
        "deepseek-llm",
        PreTokenizer(
            ("[\r\n]", r"\s?" + _DEEPSEEK_LETTERS, r"\s?" + _DEEPSEEK_PUNCTUATION, r"\s+\z", _DEEPSEEK_CJK, r"\p{N}+")
        ),
    ),
    ("deepseek-coder", PreTokenizer(("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_CJK, r"\p{N}"))),
    ("deepseek-v3 hunyuan-dense hy_v4 joyai-llm", PreTokenizer((r"\p{N}{1,3}", _KANA_HAN, _DEEPSEEK3))),
    ("spark2_5", PreTokenizer((r"\p{N}{1,3}", _KANA_HAN, _SPARK, r"\p{N}"))),
    ("youtu", PreTokenizer((_YOUTU_ASIAN, _YOUTU), ignore_merges=True)),
    ("poro-chat bloom gpt3-finnish", PreTokenizer((r" ?[^(\s|.,!?…。，、।۔،)]+",))),
    ("viking", PreTokenizer((r" ?[^(\s|.,!?…。，、।۔،)]+", r"\p{N}"))),
    (
        "tekken",
        PreTokenizer((rf"{_cased(_UPPER, _LOWER)}|\p{{N}}|{_PATHS}|{_SPACES}",), ignore_merges=True, add_bos=True),
    ),
    (
        "gpt-4o llama4 kanana2 talkie minimax-m2",
        PreTokenizer((rf"{_cased(_UPPER, _LOWER, _CONTRACTION + '?')}|\p{{N}}{{1,3}}|{_PATHS}|{_SPACES}",)),
    ),
    (
        "granite-embed-multi-97m",
        PreTokenizer(
            (rf"{_cased(_UPPER_M, _LOWER_M, _CONTRACTION + '?')}|\p{{N}}{{1,3}}|{_PATHS}|{_SPACES}",),
            ignore_merges=True,
        ),
    ),
    ("tiny_aya cohere2moe", PreTokenizer((r"(?<![0-9])[0-9]++(?![A-Za-z_])", *_THREES, _TINY_AYA))),
    (
        "chameleon",
        PreTokenizer(
            (
                "<sentinel:[0-9]+>",
                "(?:IMGIMG)[A-I]{1,4}Z",
                r"[\t\n]|    |  ",
                r"\p{N}",
                r"[\p{P}!-/:-@\[-`{-~]",
                _GPT2,
            ),
            add_bos=True,
        ),
    ),
    ("superbpe", PreTokenizer((r"\p{N}+", *_THREES), gap=_NUMBERS)),
    ("bailingmoe bailingmoe2 llada-moe", PreTokenizer((_BAILING,))),
    (
        "seed-coder",
        PreTokenizer((rf"{_CONTRACTION}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}",)),
    ),
    ("kimi-k2", PreTokenizer((_KIMI_K2,))),
    ("afmoe", PreTokenizer((r"\p{N}+", r"\A\p{N}{1,2}(?=(?:\p{N}{3})*\z)", r"\p{N}{3}", _AFMOE_ASIAN, _DEEPSEEK3))),
    ("exaone-moe", PreTokenizer((_EXAONE_MOE,), gap=_LINE_ENDS)),
    (
        "minicpm5",
        PreTokenizer((r"\p{N}{1,3}", rf"{_CONTRACTION}|{_WORD}|\p{{N}}+|{_PUNCTUATION}|{_SPACES}"), ignore_merges=True),
    ),
    ("gemma4 granite-embed-multi-311m", PreTokenizer((_LINES,), byte_level=False, add_bos=True, gap=_LINE_ENDS)),
    ("sarvam-moe", PreTokenizer((_LINES,), byte_level=False, gap=_LINE_ENDS)),
)

PRE_TOKENIZERS: dict[str, PreTokenizer] = {name: pre for names, pre in _TABLE for name in names.split()}
"""Every name that `tokenizer.ggml.pre` may hold."""
