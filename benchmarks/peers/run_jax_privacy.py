# ruff: noqa: E402, E731
"""Runs one common workload with JAX Privacy and prints one line of JSON.

Modes: nondp (jitted mean-loss SGD), dp (clipped_grad, its default one vmap
over the batch), dp-micro (clipped_grad with microbatch_size 8: a scan over
vmaps of 8).
"""

import argparse
import json
import os
import resource
import statistics
import time

os.sched_setaffinity(
    0, sorted(os.sched_getaffinity(0))[:2]
)  # XLA sizes its pool by this
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import jax_privacy
import numpy as np
from jax import lax
from jax_privacy import clipping, noise_addition

CLIP, SIGMA, LR, MICRO = 1.0, 1.0, 0.01, 8


def rss_mb():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


# ---- layers: init functions return params, apply functions take them ----

rng = np.random.default_rng(0)


def weight(*shape, fan_in=None):
    scale = (fan_in or np.prod(shape[:-1])) ** -0.5
    return jnp.asarray(
        rng.standard_normal(shape, np.float32) * np.float32(scale)
    )


def dense_init(n_in, n_out, bias=True):
    p = {"w": weight(n_in, n_out)}
    return {**p, "b": jnp.zeros(n_out)} if bias else p


def dense(p, x):
    y = x @ p["w"]
    return y + p["b"] if "b" in p else y


def conv_init(k, c_in, c_out, bias=True):
    p = {"w": weight(k, k, c_in, c_out)}
    return {**p, "b": jnp.zeros(c_out)} if bias else p


def conv(p, x, stride=1):
    y = lax.conv_general_dilated(
        x,
        p["w"],
        (stride, stride),
        "SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )
    return y + p["b"] if "b" in p else y


def max_pool2(x):
    return lax.reduce_window(
        x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID"
    )


def norm_init(c):
    return {"g": jnp.ones(c), "b": jnp.zeros(c)}


def layer_norm(p, x):
    mean, var = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return (x - mean) * lax.rsqrt(var + 1e-6) * p["g"] + p["b"]


def group_norm(p, x, groups=16):
    g = x.reshape(*x.shape[:3], groups, -1)
    mean, var = (
        g.mean((1, 2, 4), keepdims=True),
        g.var((1, 2, 4), keepdims=True),
    )
    return ((g - mean) * lax.rsqrt(var + 1e-6)).reshape(x.shape) * p["g"] + p[
        "b"
    ]


def block_init(d=256, ff=1024):
    p = {k: dense_init(d, d) for k in "qkvo"}
    return {
        **p,
        "ff1": dense_init(d, ff),
        "ff2": dense_init(ff, d),
        "ln1": norm_init(d),
        "ln2": norm_init(d),
    }


def attention(p, x, causal):
    q, k, v = (dense(p[n], x).reshape(*x.shape[:2], 4, 64) for n in "qkv")
    y = jax.nn.dot_product_attention(q, k, v, is_causal=causal)
    return dense(p["o"], y.reshape(x.shape))


def feed_forward(p, x):
    return dense(p["ff2"], jax.nn.gelu(dense(p["ff1"], x), approximate=False))


# ---- workloads: each returns (params, logits function) ----


def mlp():
    sizes = [3072] + [1000] * 10
    params = [
        dense_init(a, b) for a, b in zip(sizes, sizes[1:], strict=False)
    ] + [dense_init(1000, 10)]

    def logits(ps, x):
        for p in ps[:-1]:
            x = jax.nn.relu(dense(p, x))
        return dense(ps[-1], x)

    return params, logits


def cnn():
    channels = [3, 32, 32, 64, 64, 128, 128]
    params = {
        "conv": [
            conv_init(3, a, b)
            for a, b in zip(channels, channels[1:], strict=False)
        ],
        "d1": dense_init(2048, 128),
        "d2": dense_init(128, 10),
    }

    def logits(p, x):
        for i, c in enumerate(p["conv"]):
            x = jnp.tanh(conv(c, x))
            if i % 2:
                x = max_pool2(x)
        return dense(
            p["d2"], jnp.tanh(dense(p["d1"], x.reshape(x.shape[0], -1)))
        )

    return params, logits


def resnet():
    widths = [64, 64, 128, 128, 256, 256, 512, 512]
    strides = [1, 1, 2, 1, 2, 1, 2, 1]
    cn = lambda k, a, b: {
        "c": conv_init(k, a, b, bias=False),
        "n": norm_init(b),
    }
    blocks, c_in = [], 64
    for c, s in zip(widths, strides, strict=False):
        b = {"a": cn(3, c_in, c), "b": cn(3, c, c)}
        if s > 1 or c != c_in:
            b["s"] = cn(1, c_in, c)
        blocks.append(b)
        c_in = c
    params = {
        "stem": cn(3, 3, 64),
        "blocks": blocks,
        "head": dense_init(512, 10),
    }
    apply = lambda p, x, s=1: group_norm(p["n"], conv(p["c"], x, s))

    def logits(p, x):
        x = jax.nn.relu(apply(p["stem"], x))
        for b, s in zip(p["blocks"], strides, strict=False):
            y = apply(b["b"], jax.nn.relu(apply(b["a"], x, s)))
            x = jax.nn.relu(y + (apply(b["s"], x, s) if "s" in b else x))
        return dense(p["head"], x.mean((1, 2)))

    return params, logits


def bert():
    params = {
        "tok": weight(30522, 256, fan_in=256),
        "pos": weight(128, 256, fan_in=256),
        "ln": norm_init(256),
        "blocks": [block_init() for _ in range(4)],
        "head": dense_init(256, 2),
    }

    def logits(p, ids):
        x = layer_norm(p["ln"], p["tok"][ids] + p["pos"])
        for b in p["blocks"]:
            x = layer_norm(b["ln1"], x + attention(b, x, False))
            x = layer_norm(b["ln2"], x + feed_forward(b, x))
        return dense(p["head"], x.mean(1))

    return params, logits


def gpt():
    params = {
        "tok": weight(10000, 256, fan_in=256),
        "pos": weight(100, 256, fan_in=256),
        "blocks": [block_init() for _ in range(4)],
        "ln": norm_init(256),
        "head": dense_init(256, 10000, bias=False),
    }

    def logits(p, ids):
        x = p["tok"][ids] + p["pos"]
        for b in p["blocks"]:
            x = x + attention(b, layer_norm(b["ln1"], x), True)
            x = x + feed_forward(b, layer_norm(b["ln2"], x))
        return dense(p["head"], layer_norm(p["ln"], x))

    return params, logits


def lstm():
    params = {
        "emb": weight(10000, 100, fan_in=100),
        "wx": dense_init(100, 512),
        "wh": weight(128, 512),
        "head": dense_init(128, 2),
    }

    def logits(p, ids):
        xs = dense(p["wx"], p["emb"][ids]).swapaxes(0, 1)  # time first

        def cell(carry, x):
            h, c = carry
            i, f, g, o = jnp.split(x + h @ p["wh"], 4, axis=-1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            return (jax.nn.sigmoid(o) * jnp.tanh(c), c), None

        zero = jnp.zeros((ids.shape[0], 128))
        (h, _), _ = lax.scan(cell, (zero, zero), xs)
        return dense(p["head"], h)

    return params, logits


def rec():
    params = {
        "emb": weight(100000, 32, fan_in=32),
        "d1": dense_init(32, 64),
        "d2": dense_init(64, 1),
    }

    def logits(p, ids):
        x = p["emb"][ids].mean(1)
        return dense(p["d2"], jax.nn.relu(dense(p["d1"], x)))[:, 0]

    return params, logits


# name: (build, batch, input shape of an example, vocabulary or None, label
# shape, classes)
WORKLOADS = {
    "mlp": (mlp, 128, (3072,), None, (), 10),
    "cnn": (cnn, 256, (32, 32, 3), None, (), 10),
    "resnet": (resnet, 32, (32, 32, 3), None, (), 10),
    "bert": (bert, 32, (128,), 30522, (), 2),
    "gpt": (gpt, 16, (100,), 10000, (100,), 10000),
    "lstm": (lstm, 64, (100,), 10000, (), 2),
    "rec": (rec, 512, (64,), 100000, (), 2),
}


def cross_entropy(logits, y):
    """Per-example loss; a sequence of labels is averaged over its tokens."""
    if logits.ndim == 1:  # one logit: sigmoid cross-entropy
        return jax.nn.softplus(logits) - y * logits
    nll = -jnp.take_along_axis(jax.nn.log_softmax(logits), y[..., None], -1)[
        ..., 0
    ]
    return nll.reshape(nll.shape[0], -1).mean(1)


def make_step(mode, loss, batch_size):
    """Returns step(params, noise_state, batch) and the first state."""
    sgd = lambda p, g: jax.tree.map(lambda a, b: a - LR * b, p, g)
    if mode == "nondp":
        return lambda p, s, b: (sgd(p, jax.grad(loss)(p, b)), s), lambda p: ()
    micro = None
    if mode == "dp-micro":
        micro = max(m for m in range(1, MICRO + 1) if batch_size % m == 0)
    grad_fn = clipping.clipped_grad(
        loss,
        l2_clip_norm=CLIP,
        normalize_by=batch_size,
        batch_argnums=1,
        microbatch_size=micro,
    )
    noise = noise_addition.gaussian_privatizer(
        stddev=SIGMA * grad_fn.sensitivity(), prng_key=jax.random.key(0)
    )

    def step(params, state, batch):
        grads, state = noise.update(grad_fn(params, batch), state)
        return sgd(params, grads), state

    return step, noise.init


def available_bytes():
    with open("/proc/meminfo") as f:
        return next(
            int(x.split()[1]) * 1024 for x in f if x.startswith("MemAvailable")
        )


def run(args, out):
    build, batch_size, x_shape, vocab, y_shape, classes = WORKLOADS[
        args.workload
    ]
    batch_size = out["batch"] = args.batch or batch_size
    params, logits = build()
    out["params"] = int(sum(p.size for p in jax.tree.leaves(params)))
    shape = (batch_size, *x_shape)
    x = (
        rng.integers(0, vocab, shape, np.int32)
        if vocab
        else rng.standard_normal(shape, np.float32)
    )
    y = rng.integers(0, classes, (batch_size, *y_shape), np.int32)
    batch = jax.device_put((x, y))
    loss = lambda p, b: cross_entropy(logits(p, b[0]), b[1]).mean()

    step, init = make_step(args.mode, loss, batch_size)
    state = init(params)
    start = time.perf_counter()
    step = (
        jax.jit(step, donate_argnums=(0, 1))
        .lower(params, state, batch)
        .compile()
    )
    out["compile_sec"] = round(time.perf_counter() - start, 3)
    need, have = step.memory_analysis().temp_size_in_bytes, available_bytes()
    if need > have:
        raise MemoryError(
            f"step needs {need / 2**30:.1f} GiB, of {have / 2**30:.1f} GiB"
        )

    times = []
    for _ in range(args.warmup + args.steps):
        start = time.perf_counter()
        params, state = jax.block_until_ready(step(params, state, batch))
        times.append(time.perf_counter() - start)
    if not all(bool(jnp.isfinite(p).all()) for p in jax.tree.leaves(params)):
        raise FloatingPointError("non-finite parameters")
    times = times[args.warmup :]
    out.update(sec_per_step=statistics.median(times), sec_min=min(times))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workload", required=True, choices=WORKLOADS)
    parser.add_argument(
        "--mode", required=True, choices=["nondp", "dp", "dp-micro"]
    )
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--batch", type=int)
    args = parser.parse_args()
    jax.devices()
    out = {
        "peer": "jax_privacy",
        "version": jax_privacy.__version__,
        "mode": args.mode,
        "workload": args.workload,
        "batch": args.batch or WORKLOADS[args.workload][1],
    }
    base = rss_mb()
    try:
        run(args, out)
        out.update(peak_rss_mb=round(rss_mb(), 1), base_rss_mb=round(base, 1))
    except Exception as e:  # the contract: one line instead of the figures
        out["error"] = f"{type(e).__name__}: {e}".splitlines()[0][:300]
    print(json.dumps(out))


if __name__ == "__main__":
    main()
