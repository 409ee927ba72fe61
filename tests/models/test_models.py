"""Every class that ``qbench list models`` names: scored as lm-eval scores it, and quantized."""

import pytest
import torch
from loading import load_model
from scoring_models import choices, scorer
from tiny import CONFIGS, KINDS, tiny_model, write_tiny
from transformers import AutoModelForCausalLM

from qbench.checkpoints import find
from qbench.checkpoints.supported import CLASSES, class_names
from qbench.errors import UnavailableError
from qbench.evaluation.settings import MODES, Tolerance

# Of GPT-BigCode in transformers 5.17.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
LOOSE = Tolerance(mean=1e-3, largest=1e-3, changed=0.0)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Writes each tiny checkpoint once."""
    root, made = tmp_path_factory.mktemp("models"), {}

    def folder(kind):
        if kind not in made:
            made[kind] = write_tiny(root / kind, kind)
        return made[kind]

    return folder


def answers(model, mode):
    found = scorer(model, mode, tolerance=LOOSE).loglikelihood(choices(3), disable_tqdm=True)
    return [value for value, _ in found]


def test_every_class_of_the_table_is_tried():
    assert set(CONFIGS) == set(CLASSES)
    assert CLASSES.keys() <= class_names().keys()


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_the_table_says_which_have_no_positions_beyond_their_context(kind):
    model, ids = tiny_model(kind), torch.ones(1, 257, dtype=torch.long)
    try:
        model(ids, use_cache=False)
        bounded = False
    except (IndexError, RuntimeError):
        bounded = True
    assert bounded == CLASSES[kind].bounded


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_scored_as_lm_eval_scores_it_in_the_modes_that_the_table_says(kind, folders):
    found = find(str(folders(kind)))
    can = found.support
    # On its default of transformers 5.17, sdpa, Gemma 2 forgets its cap in silence.
    attention = {"attn_implementation": can.own} if can.own == "eager" else {}
    theirs = AutoModelForCausalLM.from_pretrained(found.folder, dtype=torch.float32, **attention)
    expected = answers(theirs.eval(), "lm-eval")
    ours = load_model(found, dtype=torch.float32, device="cpu")
    runs_on = ours.config._attn_implementation
    assert runs_on == (can.own if can.native else f"qbench-{can.normalizer}-reference")
    assert ours.config.qbench_normalizer == ("native" if can.native else can.normalizer)
    for mode in MODES:
        if MODES.index(mode) >= MODES.index(can.scoring):
            assert answers(ours, mode) == pytest.approx(expected, abs=2e-4), mode
        else:
            with pytest.raises(UnavailableError):
                answers(ours, mode)


@pytest.mark.parametrize(
    ("kind", "stated"),
    [("opt", {"word_embed_proj_dim": 32}), ("falcon_h1", {"lm_head_multiplier": 0.5})],
)
def test_heads_of_another_width_or_scale_are_scored_as_the_plan_says(kind, stated, tmp_path):
    """As OPT-350M's, and Falcon-H1's."""
    found = find(str(write_tiny(tmp_path, kind, **stated)))
    theirs = AutoModelForCausalLM.from_pretrained(found.folder, dtype=torch.float32).eval()
    ours = load_model(found, dtype=torch.float32, device="cpu")
    for mode in MODES[MODES.index(found.support.scoring) :]:
        assert answers(ours, mode) == pytest.approx(answers(theirs, "lm-eval"), abs=2e-4), mode
