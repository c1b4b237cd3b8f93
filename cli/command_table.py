"""The commands of logitless: names, usage, summaries, and the modules that run them."""

from __future__ import annotations

from logitless import hooks
from logitless.cli.command import Command

_TRAINING = "logitless.cli.flags.options_training"
_QUANTIZATION = "logitless.cli.flags.options_quantization"


COMMANDS = (
    Command("serve", "[-m FILE] [flags]", "Serve a model over HTTP, with OpenAI's and llama-server's API."),
    Command("generate", "-m FILE -p TEXT [-n N] [flags]", "Continue a text on the terminal.", code="text.generate"),
    Command("batch", "FILE -m MODEL -o FILE [flags]", "Answer the requests of a file (OpenAI's batch lines).",
            code="text.batch", words=("--file",)),
    Command("bench", "-m FILE [flags]", "Measure speed, and compare it with the machine's limits.",
            code="benchmark.bench"),
    Command("plan", "-m FILE [flags]", "Show a model's memory and placement: the device of each layer and op.",
            code="planning.plan"),
    Command("plan finetune", "-m FILE [its flags]", "Show the memory of a finetune.", _TRAINING, "planning.training"),
    Command("plan train", "--shape NAME [its flags]", "Show the memory of a training.", _TRAINING, "planning.training"),
    Command("finetune", "-m FILE --file DATA (--lora-out FILE | -o FILE) [flags]", "Train a model further.", _TRAINING,
            "training.finetune"),
    Command("train", "--shape NAME --file DATA -o FILE [flags]", "Train a new model from scratch.", _TRAINING,
            "training.train"),
    Command("quantize", "IN.gguf OUT.gguf TYPE [--imatrix FILE]", "Write a model with fewer bits a weight, in "
            "llama-quantize's types.", _QUANTIZATION, "quantization.quantize",
            words=("--model", "--output", "--type", "--threads")),
    Command("convert", "FOLDER -o FILE.gguf [--type TYPE | --mmproj] | FILE.gguf --base FOLDER -o FOLDER",
            "Write a Hugging Face folder (config.json, safetensors) as a GGUF file, or a fine-tuned file as a folder.",
            _QUANTIZATION, "quantization.convert", words=("--model",)),
    Command("imatrix", "-m FILE -f TEXT -o FILE [flags]", "Measure how much each input of a model's matrices counts, "
            "for `quantize --imatrix`.", _QUANTIZATION, "quantization.imatrix"),
    Command("perplexity", "-m FILE -f TEXT [flags]", "Measure a model's perplexity.", _QUANTIZATION,
            "quantization.perplexity"),
    Command("export-lora", "-m FILE --lora FILE -o FILE", "Merge adapters into a model.", _TRAINING,
            "training.export_lora"),
    Command("download", "(-hf USER/REPO:QUANT | -mu URL) [flags]", "Bring a model into the cache.",
            "logitless.cli.flags.model_options", "download_model"),
    Command("warm", "-m FILE [serve's flags of the model]", "Compile a model's kernels into the cache, for images of "
            "containers.", code="machine.warm"),
    Command("devices", "[--json]", "List the devices of this machine and missing backends.", code="machine.devices"),
    Command("doctor", "[--json]", "Report on this machine and installation: what is missing, what is slow and why.",
            code="machine.doctor"),
    Command("rpc-server", "[--port N] [--device NAME]", "Lend a device to other machines.",
            "logitless.cli.commands.rpc_server"),
    Command("selftest", "[-m FILE] [flags]", "Check every op of a device against its float64 reference.",
            code="machine.selftest"),
    Command("tokenize", "-m FILE [flags] < TEXT", "Turn a text on standard input into token ids.",
            code="text.tokenize"),
    Command("man", "", "Print the manual page, in the format of man."),
    Command("completion", "bash|zsh|fish", "Print a shell's completion script, to be sourced."),
    Command("synth", "--shape NAME --type TYPE -o FILE", "Write a GGUF model with random weights."),
    *hooks.rows("commands"),
)  # fmt: skip
