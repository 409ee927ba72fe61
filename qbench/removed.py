"""List names of earlier versions with what took their place, a line per name."""

from __future__ import annotations

# Commands, options, and options with a value.
COMMAND_LINE = {
    "noise": "the quantizer noise-floor shows how far rounding alone moves scores",
    "convert": "checkpoints are read in either format; `save_pretrained` writes one",
    "bench sample-efficiency": "results/bench/sample-efficiency.md has its results",
    "bench analysis": "`qbench analyze` prints how long each part of a cell took",
    "cache": "delete $QBENCH_CACHE, or a part of it, while no run is at work; what a run needs "
    "it makes again",
    "schema": "`qbench.api.Recipe.model_json_schema()` returns it",
    "published": "`qbench tables --published SET` puts a paper's numbers beside ours",
    "compare": "`qbench check NEW --baseline OLD` shows both scores, the loss and its bound; "
    "`qbench tables --against` compares precisions of one folder",
    "report": "`qbench view FOLDER --export DIR` writes the same pages, and the documents",
    "bench products": "products are simulated; a serving engine measures its own",
    "bench training": "`qbench train` prints tokens/s and the share of the GPU's peak",
    "--long-context": "`qbench analyze RECIPE --length TOKENS --out DIR` reads texts of any length",
    "--heads": "maps are kept of the head that weighs the first key most and of the sharpest one",
    "--field": "the text to train on is the field `text`: rename the one that holds it",
    "--held-out": "one document in fifty is held out, up to 200,000 tokens",
    "--licences": "state the licence of a text beside its token files",
    "--split": "the split `train` of a data set is read",
    "--without": "write --decontaminate",
    "--document": "`qbench view` shows documents, with the texts that were asked",
    "--max-gib": "a limit for `qbench tables` went with --rank; the table lists the GiB of each "
    "precision",
    "--evaluate": "`qbench run RECIPE --checkpoint NAME=OUT/NAME-seed0` evaluates what was trained",
    "--tracker": "state/log.jsonl has the numbers of a training",
    "--markdown": "`qbench list models` prints the table",
    "--recipe": "`qbench view` remembers the data of runs of this machine; name others by --data",
    "--results": "a run writes into --out DIR",
    "--run": "give each run a folder of its own, --out DIR",
    "--against": "`qbench tables FOLDER --against QUANTIZER` compares precisions score by score",
    "--json": "--junit and --summary write the verdict",
    "--executor": "`qbench.api.run(planned, out, executor=…)` takes any of concurrent.futures",
    "--rank": "the verdict above the tables orders the precisions",
    "--format html": "`qbench view FOLDER --export DIR` writes pages",
    "--to tensorboard": "tables.csv and qbench.api.load_records have the numbers",
    "--to wandb": "log what qbench.api.load_records returns by `wandb.log`",
}
# Options of lm-eval that are keys of a recipe here.
RECIPE_KEYS = {
    "--apply-chat-template": "evaluation: {apply_chat_template: true}",
    "--system-instruction": "evaluation: {system_instruction: …}",
    "--fewshot-as-multiturn": "evaluation: {fewshot_as_multiturn: true}",
    "--num-fewshot": "tasks: [{name: TASK, num_fewshot: 5}]",
}
# Keys of a recipe, dotted from its top, without the numbers of list items: "quantizers.threads".
KEYS = {
    "baseline": "list the checkpoint that Δ is taken against first",
    "plugins.sha256": "write the path alone; keys of cells have the digest of the file",
    "plugins.path": "write the path alone, as in plugins: [mine.py]",
    "compute.travel": "gradients are averaged in float32",
    "compute.grad_comm_dtype": "gradients are averaged in float32",
    "compute.graphs": "a model is compiled as one graph",
    "replicates": "list the paths of a checkpoint, or write its path with *; they are one group",
}
# Options and parts of a quantizer.
QUANTIZER_OPTIONS = {
    "arithmetic": "products are simulated: values are rounded and multiplied in the model's dtype",
    "before_rope": "keys are quantized as attention reads them, after RoPE",
    "residual_length": "tokens are quantized as they are written; `sink_tokens` spares the first",
    "keep_recent": "tokens are quantized as they are written; `sink_tokens` spares the first",
    "scale_dtype": "scales of a KV cache are float16",
    "tensor_scale": "the layer's scale of NVFP4 is static, from calibration text",
    "queries_keys": "rotation rotates the residual stream, values and the input of down_proj",
    "values": "rotation always rotates values within each head",
    "percentile": "static ranges hold all values of the calibration text",
    "threads": "a CPU quantizes with one thread, since the order of sums decides last bits",
    "prune_heads": "heads are no longer cut out; `qbench analyze` measures dormant heads",
}
# Names of quantizers.
QUANTIZERS = {
    f"kv-int{bits}-channel": f"kv-int{bits}-token with a group_size has scales for a few channels"
    for bits in (8, 4, 3, 2)
}
# Options of a quantizer that have another name now; the earlier one still works.
RENAMED_OPTIONS = {
    "leave_out": "ignore",
    "keep_first": "sink_tokens",
}
# Parts of a quantizer that have another key now; the earlier one still works.
RENAMED_PARTS = {"kv": "kv_cache", "outliers": "transform"}
# Methods under a part's key that have another name now; the earlier one still works there.
RENAMED_METHODS = {
    ("activations", "fp8-row"): "fp8-token",
    ("activations", "mxfp8"): "mxfp8-token",
    ("activations", "mxfp4"): "mxfp4-token",
    ("activations", "nvfp4"): "nvfp4-token",
    ("weights", "fp8-tensor"): "fp8-matrix",
}
