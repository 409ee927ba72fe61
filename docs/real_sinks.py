"""Draw results/real-sinks/layers.svg: attention sinks, the largest hidden state and the largest
input of down_proj by decoder layer, of models that people use. `make pages` runs it."""

from generate import REAL_SINKS, ROOT, by_layer
from matplotlib import pyplot
from matplotlib.ticker import MaxNLocator

ROWS = {  # metric: label, factor
    "sinks 0.3": ("heads with a sink, %", 100),
    "largest": ("largest |x| that a layer reads", 1),
    "input largest": ("largest input of its down_proj", 1),
}


def draw() -> pyplot.Figure:
    """Return a figure with a row of panels per measurement and a column per model."""
    pyplot.rcParams |= {"svg.hashsalt": "qbench", "font.size": 9}
    models = {
        name: title for name, title in REAL_SINKS.items() if by_layer("real sinks", "largest", name)
    }
    figure, panels = pyplot.subplots(
        3,
        len(models),
        figsize=(5 * len(models), 7),
        layout="constrained",
        sharex="col",
        squeeze=False,
    )
    for column, (model, title) in enumerate(models.items()):
        panels[0, column].set_title(title)
        panels[-1, column].set_xlabel("decoder layer")
        for panel, (metric, (label, factor)) in zip(panels[:, column], ROWS.items(), strict=True):
            values = [factor * value for value in by_layer("real sinks", metric, model)]
            if metric == "largest":  # what a layer reads is what the one before it wrote
                values = [None, *values[:-1]]
            layers = [layer for layer, value in enumerate(values) if value is not None]
            panel.bar(layers, [values[layer] for layer in layers], color="#0072b2")
            panel.set_yscale("linear" if factor == 100 else "log")
            panel.set_ylabel(label)
            panel.xaxis.set_major_locator(MaxNLocator(integer=True))
            panel.spines[["top", "right"]].set_visible(False)
    return figure


if __name__ == "__main__":
    draw().savefig(ROOT / "results" / "real-sinks" / "layers.svg", metadata={"Date": None})
