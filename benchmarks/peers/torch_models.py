"""The common workloads in PyTorch, and the timing loop of the PyTorch runners.

No peer is imported here, so that every runner measures its own imports.

Notes on equality with the other peers:
  * attention is one fused query/key/value Linear, one output Linear and
    torch's scaled_dot_product_attention: the same parameters and function as
    three separate projections, and the fastest form in every mode;
  * torch's LSTM cell has two bias vectors (512 parameters more than Keras's);
  * per-example methods need position ids repeated over the batch
    (``per_example=True``); plain training broadcasts one row.
"""

import json
import os
import resource
import statistics
import sys
import time

import limits

THREADS = 2
for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(_name, str(THREADS))

import torch  # noqa: E402
import torch.nn as nn  # noqa: E402
import torch.nn.functional as F  # noqa: E402

torch.set_num_threads(THREADS)

BATCH = {
    "mlp": 128,
    "cnn": 256,
    "resnet": 32,
    "bert": 32,
    "gpt": 16,
    "lstm": 64,
    "rec": 512,
}
LEARNING_RATE = 0.01
CLIP_NORM = 1.0
NOISE_MULTIPLIER = 1.0


def mlp():
    layers, width = [], 3072
    for _ in range(10):
        layers += [nn.Linear(width, 1000), nn.ReLU()]
        width = 1000
    return nn.Sequential(*layers, nn.Linear(width, 10))


def cnn():
    layers, channels = [], 3
    for c in (32, 64, 128):
        for _ in range(2):
            layers += [nn.Conv2d(channels, c, 3, padding=1), nn.Tanh()]
            channels = c
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(
        *layers,
        nn.Flatten(),
        nn.Linear(2048, 128),
        nn.Tanh(),
        nn.Linear(128, 10),
    )


def _conv(inputs, outputs, size, stride):
    return nn.Conv2d(
        inputs, outputs, size, stride=stride, padding=size // 2, bias=False
    )


class BasicBlock(nn.Module):
    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.conv1 = _conv(inputs, outputs, 3, stride)
        self.norm1 = nn.GroupNorm(16, outputs)
        self.conv2 = _conv(outputs, outputs, 3, 1)
        self.norm2 = nn.GroupNorm(16, outputs)
        self.shortcut = None
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                _conv(inputs, outputs, 1, stride), nn.GroupNorm(16, outputs)
            )

    def forward(self, x):
        y = F.relu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        return F.relu(y + (x if self.shortcut is None else self.shortcut(x)))


class ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = _conv(3, 64, 3, 1)
        self.norm = nn.GroupNorm(16, 64)
        blocks, width = [], 64
        for stage, c in enumerate((64, 128, 256, 512)):
            for i in range(2):
                blocks.append(
                    BasicBlock(width, c, 2 if stage and i == 0 else 1)
                )
                width = c
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(512, 10)

    def forward(self, x):
        x = self.blocks(F.relu(self.norm(self.stem(x))))
        return self.head(x.mean((2, 3)))


class Attention(nn.Module):
    def __init__(self, width, heads, causal):
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = (
            z.view(b, t, self.heads, -1).transpose(1, 2)
            for z in self.qkv(x).split(d, dim=-1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(y.transpose(1, 2).reshape(b, t, d))


class Block(nn.Module):
    def __init__(self, width, causal, pre_norm):
        super().__init__()
        self.pre_norm = pre_norm
        self.attention = Attention(width, 4, causal)
        self.norm1 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 1024)
        self.down = nn.Linear(1024, width)
        self.norm2 = nn.LayerNorm(width)

    def _feed_forward(self, x):
        return self.down(F.gelu(self.up(x)))

    def forward(self, x):
        if self.pre_norm:
            x = x + self.attention(self.norm1(x))
            return x + self._feed_forward(self.norm2(x))
        x = self.norm1(x + self.attention(x))
        return self.norm2(x + self._feed_forward(x))


class Embeddings(nn.Module):
    """Token plus position embedding."""

    def __init__(self, vocabulary, length, width, per_example):
        super().__init__()
        self.per_example = per_example
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(length, width)

    def forward(self, ids):
        positions = torch.arange(ids.shape[1])
        if self.per_example:
            positions = positions.expand(ids.shape).contiguous()
        return self.token(ids) + self.position(positions)


class Bert(nn.Module):
    def __init__(self, per_example):
        super().__init__()
        self.embeddings = Embeddings(30522, 128, 256, per_example)
        self.norm = nn.LayerNorm(256)
        self.blocks = nn.Sequential(
            *[Block(256, False, False) for _ in range(4)]
        )
        self.head = nn.Linear(256, 2)

    def forward(self, ids):
        return self.head(self.blocks(self.norm(self.embeddings(ids))).mean(1))


class Gpt(nn.Module):
    def __init__(self, per_example):
        super().__init__()
        self.embeddings = Embeddings(10000, 100, 256, per_example)
        self.blocks = nn.Sequential(*[Block(256, True, True) for _ in range(4)])
        self.norm = nn.LayerNorm(256)
        self.head = nn.Linear(256, 10000, bias=False)

    def forward(self, ids):
        return self.head(self.norm(self.blocks(self.embeddings(ids))))


class Lstm(nn.Module):
    def __init__(self, lstm_class):
        super().__init__()
        self.embedding = nn.Embedding(10000, 100)
        self.lstm = lstm_class(100, 128, batch_first=True)
        self.head = nn.Linear(128, 2)

    def forward(self, ids):
        return self.head(self.lstm(self.embedding(ids))[0][:, -1])


class Rec(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(100000, 32)
        self.hidden = nn.Linear(32, 64)
        self.head = nn.Linear(64, 1)

    def forward(self, ids):
        x = F.relu(self.hidden(self.embedding(ids).mean(1)))
        return self.head(x).squeeze(-1)


def build(workload, per_example, lstm_class=nn.LSTM):
    """The model of a workload, from seed 0."""
    torch.manual_seed(0)
    if workload == "mlp":
        return mlp()
    if workload == "cnn":
        return cnn()
    if workload == "resnet":
        return ResNet()
    if workload == "bert":
        return Bert(per_example)
    if workload == "gpt":
        return Gpt(per_example)
    if workload == "lstm":
        return Lstm(lstm_class)
    if workload == "rec":
        return Rec()
    raise ValueError(f"unknown workload {workload!r}")


def data(workload, batch):
    """One random batch (inputs, targets), from seed 0."""
    g = torch.Generator().manual_seed(0)

    def ids(vocabulary, length):
        return torch.randint(vocabulary, (batch, length), generator=g)

    def labels(classes):
        return torch.randint(classes, (batch,), generator=g)

    if workload == "mlp":
        return torch.randn(batch, 3072, generator=g), labels(10)
    if workload in ("cnn", "resnet"):
        return torch.randn(batch, 3, 32, 32, generator=g), labels(10)
    if workload == "bert":
        return ids(30522, 128), labels(2)
    if workload == "gpt":
        return ids(10000, 100), ids(10000, 100)
    if workload == "lstm":
        return ids(10000, 100), labels(2)
    if workload == "rec":
        return ids(100000, 64), labels(2).float()
    raise ValueError(f"unknown workload {workload!r}")


def criterion(workload):
    """The loss, its mean over the batch (and over the tokens for gpt)."""
    return (
        nn.BCEWithLogitsLoss() if workload == "rec" else nn.CrossEntropyLoss()
    )


def flat(workload, outputs, targets):
    """Outputs and targets in the two-dimensional form the loss takes."""
    if workload == "gpt":
        return outputs.flatten(0, 1), targets.flatten()
    return outputs, targets


def peak_rss_mb():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def one_line(error):
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"[:300]


def arguments(modes, parser):
    parser.add_argument("--workload", required=True, choices=sorted(BATCH))
    parser.add_argument("--mode", required=True, choices=modes)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--batch", type=int)
    args = parser.parse_args()
    args.batch = args.batch or BATCH[args.workload]
    return args


def measure(peer, version, args, prepare):
    """Times prepare(args)'s step and prints the JSON line of the contract.

    ``prepare`` returns the model and a function that does one training step.
    """
    result = {
        "peer": peer,
        "version": version,
        "mode": args.mode,
        "workload": args.workload,
        "batch": args.batch,
    }
    base = peak_rss_mb()
    limits.limit_memory()
    try:
        model, step = prepare(args)
        result["params"] = sum(p.numel() for p in model.parameters())
        for _ in range(args.warmup):
            step()
        times = []
        for _ in range(args.steps):
            start = time.perf_counter()
            step()
            times.append(time.perf_counter() - start)
        result["sec_per_step"] = round(statistics.median(times), 6)
        result["sec_min"] = round(min(times), 6)
        result["peak_rss_mb"] = round(peak_rss_mb(), 1)
        result["base_rss_mb"] = round(base, 1)
    except Exception as error:  # reported in the line, by the contract
        result["error"] = one_line(error)
    sys.stderr.flush()
    print(json.dumps(result), flush=True)
