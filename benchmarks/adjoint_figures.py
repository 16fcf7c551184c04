"""The figures of the adjoint paper (Kong & Muñoz Medina, 2023), recomputed.

    python -m benchmarks.adjoint_figures

Time and peak memory of three ways to the norm of an example's gradient:
`adjoint`, the library's own rules; `classic`, ghost clipping as it was before,
where a bias is extra columns of the input and an embedding a product with
one-hot rows; and `naive`, the norm of the gradient itself.

1. A fully-connected layer with inputs of width 2 in 4096 channels, outputs of
   width q and a bias of dimension m that is broadcast over the channels.
2. An embedding of width 10, with q queries and a vocabulary of r.
3. Training of a one-layer BERT encoder (vocabulary 100, 5 tokens, width 768)
   by batch size; `classic` is the method `ghost` here, whose rules are the
   library's.

Each measurement runs in a process of its own. The default is a part of the
papers' grid, which `--full` runs as a whole, in about 25 minutes; `--figure`
takes one of "fully connected", "embedding" and "BERT". Of the 50 training
steps of the third figure no more are made than begin within some seconds
(`--seconds`); what is shown is the time for all, in proportion. With `--out
FILE` the tables go to a file as well, and with `--plot FILE` and the `plots`
extra there is a picture.
"""

import argparse
import statistics
import sys
import time

import keras
import rich.box
import rich.console
import rich.table
import tensorflow as tf

import keras_fastclip
from benchmarks import machine
from benchmarks.processes import measured
from keras_fastclip import _keras, capture
from keras_fastclip.parts import make_parts
from keras_fastclip.registry import default_registry
from keras_fastclip.registry.terms import ONE_ROW

WAYS = ("adjoint", "classic", "naive")
CHANNELS = 4096
REPEATS = 20


# -- norms of one example, in three ways ---------------------------------------


def adjoint(layer, x, g):
    """By the registered rule of the layer."""
    variables = tuple(_keras.own_trainable_variables(layer))
    unit = capture.Unit(
        layer, "layer", variables, default_registry().lookup(layer)
    )
    layout = capture.Layout((ONE_ROW,), (ONE_ROW,))
    call, _ = capture.captured(
        unit, ("layer", 0), layout, layer.call, (x,), {}, 1
    )
    parts = make_parts(
        [capture.Use(term, g, call.rows, unit) for term in call.terms]
    )
    return tf.add_n([part.squared_norms() for part in parts])


def naive(layer, x, g):
    """Of the gradient itself, dense as an optimizer takes it."""
    raw = [_keras.raw(v) for v in layer.trainable_variables]
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch(raw)
        outputs = layer(x)
    gradients = tape.gradient(outputs, raw, output_gradients=g)
    return tf.add_n(
        [tf.reduce_sum(tf.square(tf.convert_to_tensor(p))) for p in gradients]
    )[None]


def classic_dense(layer, x, g):
    """⟨[U; Q][U; Q]ᵀ, ggᵀ⟩, with Q the matrix that broadcasts the bias."""
    u = tf.reshape(x, [-1, x.shape[-1]])
    rows = tf.reshape(g, [-1, g.shape[-1]])
    kernel = tf.matmul(u, u, transpose_b=True)
    kernel *= tf.matmul(rows, rows, transpose_b=True)
    flat = tf.reshape(g, [-1, 1])
    m = layer.bias.shape.num_elements()
    q = tf.one_hot(tf.range(tf.shape(flat)[0]) % m, m)
    bias = tf.matmul(q, q, transpose_b=True)
    bias *= tf.matmul(flat, flat, transpose_b=True)
    return (tf.reduce_sum(kernel) + tf.reduce_sum(bias))[None]


def classic_embedding(layer, ids, g):
    """⟨YYᵀ, ggᵀ⟩, with one-hot rows Y; YYᵀ tells which ids are equal."""
    equal = tf.cast(ids[0][:, None] == ids[0][None], g.dtype)
    return tf.reduce_sum(equal * tf.matmul(g[0], g[0], transpose_b=True))[None]


def norm_seconds(way, figure, *sizes):
    """Median time and value of the norm of one example."""
    layer, x, g, classic = LAYERS[figure](*sizes)
    layer.build(x.shape)
    function = {"adjoint": adjoint, "naive": naive, "classic": classic}[way]
    step = tf.function(lambda: function(layer, x, g), autograph=False)
    value, times = float(step()[0]), []
    for _ in range(REPEATS):
        start = time.perf_counter()
        float(step()[0])
        times.append(time.perf_counter() - start)
    return statistics.median(times), value


def fully_connected(q, k):
    """Outputs of width q; the bias has k·q numbers, one for each of k rows."""
    shape = [1, CHANNELS // k, k]
    layer = keras.layers.EinsumDense(
        "bcki,ij->bckj", (CHANNELS // k, k, q), bias_axes="kj"
    )
    x = tf.random.stateless_normal([*shape, 2], [1, 2])
    return (
        layer,
        x,
        tf.random.stateless_normal([*shape, q], [3, 4]),
        classic_dense,
    )


def embedding(queries, vocabulary):
    ids = tf.random.stateless_uniform(
        [1, queries], [1, 2], maxval=vocabulary, dtype=tf.int32
    )
    g = tf.random.stateless_normal([1, queries, 10], [3, 4])
    return keras.layers.Embedding(vocabulary, 10), ids, g, classic_embedding


LAYERS = {"fully connected": fully_connected, "embedding": embedding}


# -- training ------------------------------------------------------------------


STEPS = 50


class _Limit(keras.callbacks.Callback):
    """Begins no step after so many seconds."""

    def __init__(self, seconds):
        super().__init__()
        self._seconds, self.steps = seconds, 0

    def on_train_begin(self, logs=None):
        self._start = time.perf_counter()

    def on_train_batch_end(self, batch, logs=None):
        self.steps += 1
        if time.perf_counter() - self._start > self._seconds:
            self.model.stop_training = True


def bert_seconds(way, batch, most):
    """Seconds for 50 training steps, after the first."""
    method = {"adjoint": "auto", "classic": "ghost", "naive": "naive"}[way]
    ids = keras.Input((5,), dtype="int32")
    x = keras.layers.Embedding(100, 768)(ids)
    x = keras.layers.LayerNormalization()(x)
    attended = keras.layers.MultiHeadAttention(12, 64)(x, x)
    x = keras.layers.LayerNormalization()(x + attended)
    wide = keras.layers.Dense(3072, activation="gelu")(x)
    x = keras.layers.LayerNormalization()(x + keras.layers.Dense(768)(wide))
    model = keras_fastclip.DPModel(
        ids,
        x,
        l2_norm_clip=1.0,
        noise_multiplier=1.0,
        method=method,
        expected_batch_size=batch,
    )
    model.compile("sgd", "mse")
    inputs = tf.random.stateless_uniform(
        [batch, 5], [1, 2], maxval=100, dtype=tf.int32
    )
    data = tf.data.Dataset.from_tensors((inputs, tf.zeros([batch, 5, 768])))
    model.fit(data, verbose=0, num_examples="unknown")
    limit = _Limit(most)
    start = time.perf_counter()
    model.fit(
        data.repeat(STEPS),
        verbose=0,
        num_examples="unknown",
        callbacks=[limit],
    )
    return (time.perf_counter() - start) * STEPS / limit.steps, None


# -- the figures ---------------------------------------------------------------


def grids(full):
    """Figure, names of its sizes, and the sizes."""
    outputs = (3, 4, 5) if full else (3, 5)
    rows = [2**i for i in range(10)] if full else [1, 16, 256]
    queries = range(1000, 10001, 1000) if full else (1000, 4000, 10000)
    tables = (5000, 7500, 10000) if full else (5000, 10000)
    batches = (100, 200, 400, 800, 1600) if full else (100, 200)
    yield "fully connected", ("q", "k"), [(q, k) for q in outputs for k in rows]
    yield "embedding", ("q", "r"), [(q, r) for r in tables for q in queries]
    yield "BERT", ("batch",), [(batch,) for batch in batches]


def run(figure, names, sizes, most, console):
    table = rich.table.Table(title=figure, box=rich.box.SIMPLE_HEAD)
    for column in (*names, *(f"{w} {u}" for w in WAYS for u in ("ms", "MB"))):
        table.add_column(column, justify="right")
    rows = []
    for size in sizes:
        cells, values = [], []
        for way in WAYS:
            job = (bert_seconds, way, *size, most)
            if figure != "BERT":
                job = (norm_seconds, way, figure, *size)
            (seconds, value), memory = measured(*job)
            print(f"{figure} {size} {way}: {seconds:.3f} s", file=sys.stderr)
            values.append(value)
            rows.append((figure, size, way, seconds, memory))
            cells += [f"{1e3 * seconds:,.1f}", f"{memory:,.0f}"]
        if None not in values and max(values) > 1.01 * min(values):
            raise AssertionError(f"The ways disagree: {values}")
        table.add_row(*map(str, size), *cells)
    console.print(table)
    return rows


def plot(rows, path):
    import matplotlib.pyplot as plt

    figures = list(dict.fromkeys(row[0] for row in rows))
    grid, axes = plt.subplots(
        len(figures), 2, figsize=(10, 10), layout="constrained", squeeze=False
    )
    for pair, figure in zip(axes, figures, strict=True):
        for color, way in enumerate(WAYS):
            own = [row for row in rows if row[0] == figure and row[2] == way]
            names = [" ".join(map(str, row[1])) for row in own]
            pair[0].plot(
                names, [1e3 * r[3] for r in own], f"C{color}o", label=way
            )
            pair[1].plot(names, [r[4] for r in own], f"C{color}o", label=way)
        pair[0].set(title=f"{figure}: milliseconds", yscale="log")
        pair[1].set(title=f"{figure}: peak memory, MB", yscale="log")
        for axis in pair:
            axis.tick_params("x", rotation=60)
            axis.legend()
    grid.savefig(path, dpi=120)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--full", action="store_true")
    figures = [figure for figure, *_ in grids(full=False)]
    parser.add_argument("--figure", choices=figures)
    parser.add_argument("--seconds", type=float, default=15)
    parser.add_argument("--out", metavar="FILE")
    parser.add_argument("--plot", metavar="FILE")
    arguments = parser.parse_args()
    console = rich.console.Console(width=100, record=True)
    console.print(machine.description(), highlight=False)
    rows = []
    for figure, names, sizes in grids(arguments.full):
        if arguments.figure not in (None, figure):
            continue
        rows += run(figure, names, sizes, arguments.seconds, console)
    if arguments.out:
        with open(arguments.out, "w") as file:
            file.write(console.export_text())
    if arguments.plot:
        plot(rows, arguments.plot)


if __name__ == "__main__":
    main()
