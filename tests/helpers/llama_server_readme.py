"""Flags, endpoints, fields and metrics that llama-server's README names (commit 00dc8057, November 2026), as facts."""

_FLAGS = """
-h --help --usage --version -cl --cache-list --completion-bash -t --threads -tb --threads-batch -C --cpu-mask -Cr
--cpu-range --cpu-strict --prio --poll -Cb --cpu-mask-batch -Crb --cpu-range-batch --cpu-strict-batch --prio-batch
--poll-batch -c --ctx-size -n --predict --n-predict -b --batch-size -ub --ubatch-size --keep --swa-full -fa
--flash-attn --perf --no-perf -e --escape --no-escape --rope-scaling --rope-scale --rope-freq-base --rope-freq-scale
--yarn-orig-ctx --yarn-ext-factor --yarn-attn-factor --yarn-beta-slow --yarn-beta-fast -kvo --kv-offload -nkvo
--no-kv-offload --repack -nr --no-repack --no-host -ctk --cache-type-k -ctv --cache-type-v -dt --defrag-thold --rpc -lm
--load-mode -lzm --lazy-mode --numa -dev --device --list-devices -ot --override-tensor -cmoe --cpu-moe -ncmoe
--n-cpu-moe --moe-cache-mib -ncffn --n-cpu-ffn -ngl --gpu-layers --n-gpu-layers -sm --split-mode -ts --tensor-split -mg
--main-gpu -fit --fit -fitt --fit-target -fitc --fit-ctx --check-tensors --override-kv --op-offload --no-op-offload
--lora --lora-scaled --control-vector --control-vector-scaled --control-vector-layer-range -m --model -mu --model-url
-dr --docker-repo -hf -hfr --hf-repo -hff --hf-file -hft --hf-token --log-disable --log-file --log-jsonl --no-log-jsonl
--log-colors -v --verbose --log-verbose --offline -lv --verbosity --log-verbosity --log-prefix --no-log-prefix
--log-timestamps --no-log-timestamps --spec-draft-type-k -ctkd --cache-type-k-draft --spec-draft-type-v -ctvd
--cache-type-v-draft --samplers -s --seed --sampler-seq --sampling-seq --ignore-eos --temp --temperature --top-k --top-p
--min-p --top-nsigma --top-n-sigma --xtc-probability --xtc-threshold --typical --typical-p --repeat-last-n
--repeat-penalty --presence-penalty --frequency-penalty --dry-multiplier --dry-base --dry-allowed-length
--dry-penalty-last-n --dry-sequence-breaker --adaptive-target --adaptive-decay --dynatemp-range --dynatemp-exp
--mirostat --mirostat-lr --mirostat-ent -l --logit-bias --grammar --grammar-file -j --json-schema -jf
--json-schema-file -bs --backend-sampling -lcs --lookup-cache-static -lcd --lookup-cache-dynamic --kv-unified-per-slot
-ctxcp --ctx-checkpoints --swa-checkpoints -cms --checkpoint-min-step -cram --cache-ram -kvu --kv-unified -no-kvu
--no-kv-unified --cache-idle-slots --no-cache-idle-slots --context-shift --no-context-shift -r --reverse-prompt -sp
--special --warmup --no-warmup --spm-infill --pooling -np --parallel -cb --cont-batching -nocb --no-cont-batching -mm
--mmproj -mmu --mmproj-url --mmproj-auto --no-mmproj --no-mmproj-auto --mmproj-offload --no-mmproj-offload -mmdev
--mmproj-device --image-min-tokens --image-max-tokens --mtmd-batch-max-tokens --video-fps --video-timestamp-interval
--video-ffmpeg-dir -a --alias --tags --embd-normalize --host --port --reuse-port --path --cors-origins --cors-methods
--cors-headers --cors-credentials --no-cors-credentials --api-prefix --ui-config --webui-config --ui-config-file
--webui-config-file --ui-mcp-proxy --webui-mcp-proxy --no-ui-mcp-proxy --no-webui-mcp-proxy --tools --tools-runtime
--mcp-servers-config --mcp-servers-json -ag --agent -no-ag --no-agent --ui --webui --no-ui --no-webui --embedding
--embeddings --rerank --reranking --api-key --api-key-file --ssl-key-file --ssl-cert-file --chat-template-kwargs -to
--timeout --sse-ping-interval --threads-http --cache-prompt --no-cache-prompt --cache-reuse --metrics --props --slots
--no-slots --slot-save-path --media-path --models-dir --models-preset --models-max --models-autoload
--no-models-autoload --jinja --no-jinja --reasoning-format -rea --reasoning --reasoning-effort --reasoning-budget
--reasoning-budget-message --reasoning-preserve --no-reasoning-preserve --chat-template --chat-template-file
--skip-chat-parsing --no-skip-chat-parsing --prefill-assistant --no-prefill-assistant -sps --slot-prompt-similarity
--lora-init-without-apply --sleep-idle-seconds --log-prompts-dir --spec-draft-hf -hfd -hfrd --hf-repo-draft
--spec-draft-threads -td --threads-draft --spec-draft-threads-batch -tbd --threads-batch-draft --spec-draft-cpu-mask -Cd
--cpu-mask-draft --spec-draft-cpu-range -Crd --cpu-range-draft --spec-draft-cpu-strict --cpu-strict-draft
--spec-draft-prio --prio-draft --spec-draft-poll --poll-draft --spec-draft-cpu-mask-batch -Cbd --cpu-mask-batch-draft
--spec-draft-cpu-strict-batch --cpu-strict-batch-draft --spec-draft-prio-batch --prio-batch-draft
--spec-draft-poll-batch --poll-batch-draft --spec-draft-override-tensor -otd --override-tensor-draft
--spec-draft-cpu-moe -cmoed --cpu-moe-draft --spec-draft-n-cpu-moe --spec-draft-ncmoe -ncmoed --n-cpu-moe-draft
--spec-draft-n-max --spec-draft-n-min --spec-synth-len --spec-synth-rates --spec-draft-p-split --draft-p-split
--spec-draft-p-min --draft-p-min --spec-draft-backend-sampling --no-spec-draft-backend-sampling --spec-draft-sampling
--spec-draft-device -devd --device-draft --spec-draft-ngl -ngld --gpu-layers-draft --n-gpu-layers-draft
--spec-draft-model -md --model-draft --spec-type --spec-ngram-mod-n-min --spec-ngram-mod-n-max
--spec-ngram-mod-n-match --spec-ngram-simple-size-n --spec-ngram-simple-size-m --spec-ngram-simple-min-hits
--spec-ngram-map-k-size-n --spec-ngram-map-k-size-m --spec-ngram-map-k-min-hits --spec-ngram-map-k4v-size-n
--spec-ngram-map-k4v-size-m --spec-ngram-map-k4v-min-hits --draft --draft-n --draft-max --draft-min --draft-n-min
--spec-ngram-size-n --spec-ngram-size-m --spec-ngram-min-hits --embd-gemma-default --fim-qwen-1.5b-default
--fim-qwen-3b-default --fim-qwen-7b-default --fim-qwen-7b-spec --fim-qwen-14b-spec --fim-qwen-30b-default
--gpt-oss-20b-default --gpt-oss-120b-default --vision-gemma-4b-default --vision-gemma-12b-default --spec-default
"""
FLAGS = _FLAGS.split()

ENDPOINTS = """
GET /health, GET /v1/health, POST /completion, POST /tokenize, POST /detokenize, POST /apply-template, POST /embedding,
POST /reranking, POST /rerank, POST /v1/rerank, POST /v1/reranking, POST /infill, GET /props, POST /props,
POST /embeddings, GET /slots, GET /slots?fail_on_no_slot=1, GET /metrics, POST /slots/0?action=save,
POST /slots/0?action=restore, POST /slots/0?action=erase, GET /lora-adapters, POST /lora-adapters, GET /v1/models,
POST /v1/completions, POST /v1/chat/completions, POST /v1/chat/completions/control, POST /v1/responses,
POST /v1/embeddings, POST /v1/responses/input_tokens, POST /v1/chat/completions/input_tokens, POST /v1/messages,
POST /v1/messages/count_tokens, POST /v1/systemone, GET /models, POST /models/load, POST /models/unload,
GET /models/sse, POST /models, DELETE /models, GET /tools
"""

FIELDS = {
    "/completion": "prompt temperature dynatemp_range dynatemp_exponent top_k top_p min_p n_predict n_indent n_keep "
    "n_cmpl n_cache_reuse stream stop typical_p repeat_penalty repeat_last_n presence_penalty frequency_penalty "
    "dry_multiplier dry_base dry_allowed_length dry_penalty_last_n dry_sequence_breakers xtc_probability "
    "xtc_threshold mirostat mirostat_tau mirostat_eta grammar json_schema seed ignore_eos logit_bias n_probs min_keep "
    "t_max_predict_ms id_slot cache_prompt return_tokens samplers timings_per_token return_progress "
    "sse_ping_interval post_sampling_probs response_fields lora multimodal_data",
    "/tokenize": "content add_special parse_special with_pieces",
    "/detokenize": "tokens",
    "/apply-template": "messages",
    "/embedding": "content embd_normalize",
    "/rerank": "query documents top_n",
    "/infill": "input_prefix input_suffix input_extra prompt",
    "/slots": "filename",
    "/v1/chat/completions": "messages response_format chat_template_kwargs reasoning_effort reasoning_format "
    "reasoning_control parallel_tool_calls",
    "/v1/chat/completions/control": "id action",
    "/v1/embeddings": "input encoding_format",
    "/v1/messages": "messages max_tokens system temperature top_p top_k stop_sequences stream tools tool_choice",
}

_METRICS = """
prompt_tokens_total prompt_seconds_total prompt_tokens_seconds tokens_predicted_total tokens_predicted_seconds_total
predicted_tokens_seconds requests_processing requests_deferred n_tokens_max n_decode_total n_busy_slots_per_decode
spec_decode_num_draft_tokens_total spec_decode_num_accepted_tokens_total spec_decode_num_drafts_total
spec_decode_num_accepted_tokens_per_pos_total
"""
METRICS = _METRICS.split()

_CACHE_TYPES = "f32 f16 bf16 q8_0 q4_0 q4_1 iq4_nl q5_0 q5_1"
VALUES = {
    flag: words.split()
    for flag, words in {
        "--cache-type-k": _CACHE_TYPES,
        "--cache-type-v": _CACHE_TYPES,
        "--cache-type-k-draft": _CACHE_TYPES,
        "--cache-type-v-draft": _CACHE_TYPES,
        "--spec-type": "none draft-simple draft-eagle3 draft-mtp draft-dflash draft-dspark ngram-simple ngram-map-k "
        "ngram-map-k4v ngram-mod ngram-cache",
        "--spec-draft-sampling": "greedy probabilistic",
        "--pooling": "none mean cls last rank",
        "--rope-scaling": "none linear yarn",
        "--split-mode": "none layer row tensor",
        "--load-mode": "auto none mmap mlock mmap+mlock dio",
        "--lazy-mode": "on auto off",
        "--numa": "distribute isolate numactl",
        "--flash-attn": "on off auto",
        "--log-colors": "on off auto",
        "--log-verbosity": "0 1 2 3 4 5",
        "--fit": "on off",
        "--prio": "-1 0 1 2 3",
        "--poll": "0 50 100",
        "--gpu-layers": "0 auto all",
        "--mirostat": "0 1 2",
        "--embd-normalize": "-1 0 1 2 3",
        "--samplers": "penalties;dry;top_n_sigma;top_k;typ_p;top_p;min_p;xtc;temperature",
        "--sampler-seq": "edskypmxt",
        "--cors-origins": "localhost *",
        "--tools": "read_file file_glob_search grep_search exec_shell_command write_file edit_file get_info",
        "--reasoning": "on off auto",
        "--reasoning-format": "none deepseek deepseek-legacy auto",
        "--reasoning-effort": "default minimal low medium high xhigh max",
        "--chat-template": "bailing bailing-think bailing2 chatglm3 chatglm4 chatml command-r deepseek deepseek-ocr "
        "deepseek2 deepseek3 exaone-moe exaone3 exaone4 falcon3 gemma gigachat glmedge gpt-oss granite granite-4.0 "
        "granite-4.1 grok-2 hunyuan-dense hunyuan-moe hunyuan-vl kimi-k2 llama2 llama2-sys llama2-sys-bos "
        "llama2-sys-strip llama3 llama4 megrez minicpm mistral-v1 mistral-v3 mistral-v3-tekken mistral-v7 "
        "mistral-v7-tekken monarch openchat orion pangu-embedded phi3 phi4 rwkv-world seed_oss smolvlm solar-open "
        "vicuna vicuna-orca yandex zephyr",
    }.items()
}
