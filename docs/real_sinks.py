"""Draw results/real-sinks/layers.svg: attention sinks, the largest activation and the damage of
int8 activations by decoder layer, of models that people use. `make pages` runs it."""

from generate import ROOT, by_layer
from matplotlib import pyplot

MODELS = {"smollm2": "SmolLM2-135M-Instruct", "gemma3": "Gemma 3 270M"}
COLOURS = ("#0072b2", "#d55e00")


def draw() -> pyplot.Figure:
    """Return a figure with a row of panels per measurement and a column per model."""
    pyplot.rcParams |= {"svg.hashsalt": "qbench", "font.size": 9}
    figure, panels = pyplot.subplots(3, 2, figsize=(10, 7), layout="constrained", sharex="col")
    rows = (
        ("heads with a sink, %", "sinks 0.3", 100, None),
        ("largest |x| before the layer", "largest", 1, None),
        ("KL, int8 per tensor in it alone", "sensitivity", 1, "int8-tensor"),
    )
    for column, (model, title) in enumerate(MODELS.items()):
        panels[0, column].set_title(title)
        panels[-1, column].set_xlabel("decoder layer")
        for panel, (label, metric, factor, quantizer) in zip(panels[:, column], rows, strict=True):
            values = [factor * value for value in by_layer("real sinks", metric, model, quantizer)]
            shift = metric == "largest"  # what a layer reads is what the one before it wrote
            layers = range(shift, len(values) + shift)
            panel.bar(layers, values, color=COLOURS[column])
            panel.set_yscale("linear" if metric == "sinks 0.3" else "log")
            if column == 0:
                panel.set_ylabel(label)
            panel.spines[["top", "right"]].set_visible(False)
    return figure


if __name__ == "__main__":
    draw().savefig(ROOT / "results" / "real-sinks" / "layers.svg", metadata={"Date": None})
