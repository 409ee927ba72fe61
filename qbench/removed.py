"""List names of earlier versions with what took their place, a line per name."""

from __future__ import annotations

# Commands and options that README named.
COMMAND_LINE = {
    "noise": "the quantizer noise-floor shows how far rounding alone moves scores",
    "cache": "delete $QBENCH_CACHE, or a part of it, while no run is at work; what a run needs "
    "it makes again",
    "published": "`qbench tables --published SET` puts a paper's numbers beside ours",
    "compare": "`qbench check NEW --baseline OLD` shows both scores, the loss and its bound; "
    "`qbench tables --against` compares precisions of one folder",
    "report": "`qbench view FOLDER --export DIR` writes the same pages, and the documents",
    "--document": "`qbench view` shows documents, with the texts that were asked",
    "--evaluate": "`qbench run RECIPE --checkpoint NAME=OUT/NAME-seed0` evaluates what was trained",
}
# Options of lm-eval that are keys of a recipe here.
RECIPE_KEYS = {
    "--apply-chat-template": "evaluation: {apply_chat_template: true}",
    "--system-instruction": "evaluation: {system_instruction: …}",
    "--fewshot-as-multiturn": "evaluation: {fewshot_as_multiturn: true}",
    "--num-fewshot": "tasks: [{name: TASK, num_fewshot: 5}]",
}
# Keys of a recipe, dotted from its top, without the numbers of list items: "plugins.path".
KEYS = {
    "replicates": "list the paths of a checkpoint, or write its path with *; they are one group"
}
# Options of a quantizer that have another name now; the earlier one still works.
RENAMED_OPTIONS = {"leave_out": "ignore", "keep_first": "sink_tokens"}
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
