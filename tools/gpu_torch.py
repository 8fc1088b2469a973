#!/usr/bin/env python3
"""Times with PyTorch what gpu_bench has timed on the same GPU, and sets both side by side.

    gpu_torch.py ROWS [--out=FILE] [--limit=SECONDS] [--device=cpu]
    gpu_torch.py --check ROWS

ROWS is what `gpu_bench --ops --out=ROWS` wrote: a line of JSON for each row, with the op, what it is
given, and Chorus's time. Each op has a function here, which gets PyTorch's form of it ready, the one
that a trainer would call: a backward op for a gradient, with the forward pass outside of what is
timed. A row whose op has none is an error, before anything is measured.

The table goes to standard output, each row with PyTorch's time (torch_us) to FILE. Beyond the limit
rows are left out, and said to be. --check only looks whether every op is known, and needs no PyTorch;
--device=cpu tries the functions where there is no GPU. Exit status: 0; 1 where a row failed; 2 for
wrong arguments and ops that are not known.
"""

import argparse
import json
import math
import statistics
import sys
import time

# As core/backend/cuda/testing/ops_suite.cc times them.
ROUND_SECONDS = 0.02
ROW_SECONDS = 0.3
LEAST_ROUNDS = 3
MOST_ROUNDS = 5
MOST_CALLS = 10000
SLOW_SECONDS = 0.5

# Set where something is measured.
torch = None
aten = None
functional = None
device = None

# By the op's name: a function of the row and its tensors, which returns what is to be timed.
OPS = {}


def op(*names):
    def register(function):
        for name in names:
            OPS[name] = function
        return function

    return register


def dtype_of(name):
    return {
        "f16": torch.float16,
        "bf16": torch.bfloat16,
        "f32": torch.float32,
        "f64": torch.float64,
        "i64": torch.int64,
        "bool": torch.bool,
    }[name]


def others(tensor, dimensions):
    """The axes that are not in the range."""
    return [axis for axis in range(tensor.dim()) if not dimensions[0] <= axis < dimensions[1]]


# --- What each op is in PyTorch ------------------------------------------------------------------


@op("add", "mul", "gt")
def of_two(row, x, y):
    function = getattr(torch, row["op"])
    return lambda: function(x, y)


@op("exp", "tanh")
def of_one(row, x):
    function = getattr(torch, row["op"])
    return lambda: function(x)


@op("relu_grad")
def relu_grad(row, x, g):
    return lambda: aten.threshold_backward(g, x, 0)


@op("gelu")
def gelu(row, x):
    return lambda: functional.gelu(x)


@op("sgd_momentum")
def sgd_momentum(row, p, m, g):
    # What torch.optim.SGD does, with the tensors of one group.
    def step():
        torch._foreach_mul_([m], 0.9)
        torch._foreach_add_([m], [g])
        torch._foreach_add_([p], [m], alpha=-0.01)

    return step


@op("cast")
def cast(row, x):
    to = dtype_of(row["attributes"]["dtype"])
    return lambda: x.to(to)


@op("where")
def where(row, x, y, condition):
    return lambda: torch.where(condition, x, y)


@op("fill")
def fill(row):
    a = row["attributes"]
    dtype = dtype_of(a["dtype"])
    return lambda: torch.full(a["dims"], a["value"], dtype=dtype, device=device)


@op("scale")
def scale(row, x):
    return lambda: torch.mul(x, 0.5)


@op("sum", "mean")
def sums(row, x):
    function = getattr(torch, row["op"])
    axes = row["attributes"]["axes"]
    return lambda: function(x, axes)


@op("max")
def largest(row, x):
    axes = row["attributes"]["axes"]
    return lambda: torch.amax(x, axes)


@op("expand")
def expand(row, x):
    dims = row["attributes"]["dims"]
    return lambda: x.expand(dims).contiguous()


@op("cum_sum")
def cum_sum(row, x):
    axis = row["attributes"]["axis"]
    return lambda: torch.cumsum(x, axis)


@op("softmax", "log_softmax")
def softmax(row, x):
    function = getattr(torch, row["op"])
    axis = row["attributes"]["axis"]
    return lambda: function(x, axis)


@op("softmax_backward", "log_softmax_backward")
def softmax_backward(row, x, g):
    forward, backward = {
        "softmax_backward": (torch.softmax, aten._softmax_backward_data),
        "log_softmax_backward": (torch.log_softmax, aten._log_softmax_backward_data),
    }[row["op"]]
    axis = row["attributes"]["axis"]
    y = forward(x, axis)
    return lambda: backward(g, y, axis, x.dtype)


@op("cross_entropy")
def cross_entropy(row, logits, labels):
    return lambda: functional.cross_entropy(logits, labels, reduction="none")


@op("cross_entropy_grad")
def cross_entropy_grad(row, logits, labels, g):
    none, ignored = 0, -100  # of the sums; of the labels
    logs = torch.log_softmax(logits, 1)
    _, weight = aten.nll_loss_forward(logs, labels, None, none, ignored)

    def backward():
        of_logs = aten.nll_loss_backward(g, logs, labels, None, none, ignored, weight)
        return aten._log_softmax_backward_data(of_logs, logs, 1, logits.dtype)

    return backward


@op("take")
def take(row, x, indices):
    assert row["attributes"]["axis"] == 0
    return lambda: functional.embedding(indices, x)


@op("scatter_add")
def scatter_add(row, updates, indices):
    a = row["attributes"]
    assert a["axis"] == 0
    return lambda: aten.embedding_dense_backward(updates, indices, a["size"], -1, False)


@op("one_hot")
def one_hot(row, indices):
    a = row["attributes"]
    dtype = dtype_of(a["dtype"])
    return lambda: functional.one_hot(indices, a["depth"]).to(dtype)


@op("arg_max")
def arg_max(row, x):
    axis = row["attributes"]["axis"]
    return lambda: torch.argmax(x, axis)


@op("arg_sort")
def arg_sort(row, x):
    axis = row["attributes"]["axis"]
    return lambda: torch.argsort(x, dim=axis, stable=True)


@op("top_k")
def top_k(row, x):
    a = row["attributes"]
    return lambda: torch.topk(x, a["k"], dim=a["axis"], largest=True, sorted=True)


@op("transpose")
def transpose(row, x):
    perm = row["attributes"]["perm"]
    return lambda: x.permute(perm).contiguous()


@op("concat")
def concat(row, *parts):
    axis = row["attributes"]["axis"]
    return lambda: torch.cat(parts, axis)


@op("slice")
def narrow(row, x):
    a = row["attributes"]
    return lambda: x.narrow(a["axis"], a["begin"], a["end"] - a["begin"]).contiguous()


@op("pad")
def pad(row, x):
    a = row["attributes"]
    assert a["axis"] == x.dim() - 1
    return lambda: functional.pad(x, (a["before"], a["after"]))


@op("random_uniform", "random_normal")
def random_numbers(row):
    a = row["attributes"]
    function = {"random_uniform": torch.rand, "random_normal": torch.randn}[row["op"]]
    dtype = dtype_of(a["dtype"])
    return lambda: function(a["dims"], dtype=dtype, device=device)


@op("moments")
def moments(row, x):
    axes = others(x, row["attributes"]["rows"])
    return lambda: torch.var_mean(x, axes, correction=0)


@op("layer_norm")
def layer_norm(row, x, weight, bias):
    epsilon = row["attributes"]["epsilon"]
    return lambda: functional.layer_norm(x, weight.shape, weight, bias, epsilon)


@op("layer_norm_backward")
def layer_norm_backward(row, x, weight, g):
    bias = torch.zeros_like(weight)
    shape = list(weight.shape)
    _, mean, rstd = aten.native_layer_norm(x, shape, weight, bias, row["attributes"].get("epsilon", 1e-5))
    wanted = [True, True, True]
    return lambda: aten.native_layer_norm_backward(g, x, shape, mean, rstd, weight, bias, wanted)


@op("batch_norm")
def batch_norm(row, x, weight, bias):
    epsilon = row["attributes"]["epsilon"]
    return lambda: functional.batch_norm(x, None, None, weight, bias, training=True, eps=epsilon)


@op("batch_norm_backward")
def batch_norm_backward(row, x, weight, g):
    # Which of its backward ops belongs to the forward pass PyTorch alone knows.
    leaves = (x.requires_grad_(), weight.requires_grad_(), torch.zeros_like(weight).requires_grad_())
    with torch.enable_grad():
        y = functional.batch_norm(leaves[0], None, None, leaves[1], leaves[2], training=True)
    return lambda: torch.autograd.grad(y, leaves, g, retain_graph=True)


@op("avg_pool")
def avg_pool(row, x):
    a = row["attributes"]
    return lambda: functional.avg_pool2d(
        x, a["kernel"], a["stride"], a["padding"], count_include_pad=bool(a["count_padding"])
    )


@op("avg_pool_backward")
def avg_pool_backward(row, x, g):
    a = row["attributes"]
    rest = (a["kernel"], a["stride"], a["padding"], False, bool(a["count_padding"]), None)
    return lambda: aten.avg_pool2d_backward(g, x, *rest)


@op("max_pool")
def max_pool(row, x):
    a = row["attributes"]
    window = (a["kernel"], a["stride"], a["padding"], a["dilation"])
    return lambda: functional.max_pool2d(x, *window, return_indices=True)


@op("max_pool_backward")
def max_pool_backward(row, x, g):
    a = row["attributes"]
    window = (a["kernel"], a["stride"], a["padding"], a["dilation"], False)
    _, indices = aten.max_pool2d_with_indices(x, *window)
    return lambda: aten.max_pool2d_with_indices_backward(g, x, *window, indices)


@op("convolution")
def convolution(row, x, w):
    a = row["attributes"]
    window = (a["stride"], a["padding"], a["dilation"], a["groups"])
    return lambda: functional.conv2d(x, w, None, *window)


@op("convolution_data_grad", "convolution_weight_grad")
def convolution_grad(row, x, w, g):
    a = row["attributes"]
    of_data = row["op"] == "convolution_data_grad"
    window = (a["stride"], a["padding"], a["dilation"], False, [0, 0], a["groups"])
    return lambda: aten.convolution_backward(g, x, w, None, *window, [of_data, not of_data, False])


@op("matmul")
def matmul(row, a, b):
    if row["attributes"].get("transpose_a"):
        a = a.mT
    if row["attributes"].get("transpose_b"):
        b = b.mT
    return lambda: torch.matmul(a, b)


# --- Timing --------------------------------------------------------------------------------------


def make(given):
    dtype = dtype_of(given["dtype"])
    if dtype.is_floating_point:
        return torch.randn(given["shape"], dtype=dtype, device=device)
    return torch.randint(given["below"], given["shape"], device=device).to(dtype)


def seconds_of(call, calls):
    start = time.perf_counter()
    for _ in range(calls):
        call()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def time_row(row):
    """Seconds of a call, and how many were in a round."""
    call = OPS[row["op"]](row, *[make(given) for given in row["inputs"]])
    start = time.perf_counter()
    # Kernels are loaded, and algorithms chosen, when they are first wanted.
    taken = seconds_of(call, 1)
    if taken > SLOW_SECONDS:
        return seconds_of(call, 1), 1
    calls = 1
    while True:
        taken = seconds_of(call, calls)
        if taken >= ROUND_SECONDS or calls >= MOST_CALLS:
            break
        wanted = math.ceil(1.2 * calls * ROUND_SECONDS / max(taken, 1e-9))
        calls = min(MOST_CALLS, max(2 * calls, wanted))
    rounds = [taken]
    while len(rounds) < LEAST_ROUNDS or (
        len(rounds) < MOST_ROUNDS and time.perf_counter() - start < ROW_SECONDS
    ):
        rounds.append(seconds_of(call, calls))
    return statistics.median_high(rounds) / calls, calls


def measure(rows, limit, tell):
    """Adds torch_us to each row; `torch_error` to one that failed."""
    start = time.perf_counter()
    for row in rows:
        row["torch_us"] = None
        if not limit or time.perf_counter() - start < limit:
            try:
                with torch.no_grad():
                    seconds, row["torch_calls"] = time_row(row)
                row["torch_us"] = seconds * 1e6
            except Exception as error:  # whatever a version of PyTorch does not take: the others count
                row["torch_error"] = "%s: %s" % (type(error).__name__, str(error).split("\n")[0])
        tell(row)


# --- Telling -------------------------------------------------------------------------------------


def read_rows(path):
    with open(path, encoding="utf-8") as lines:
        return [json.loads(line) for line in lines if line.strip()]


def unknown_ops(rows):
    return sorted({row["op"] for row in rows} - set(OPS))


def ratio_of(row):
    """Ours over theirs: above 1 Chorus takes longer. None where one was not measured."""
    if not row.get("us") or not row.get("torch_us"):
        return None
    return row["us"] / row["torch_us"]


def table(rows):
    """Lines of Markdown: the rows, then how each family does."""

    def cell(value):
        return "left out" if value is None else "%.2f" % value

    lines = ["| op | Chorus, us | PyTorch, us | ratio |", "|---|---|---|---|"]
    families = {}
    for row in rows:
        ratio = ratio_of(row)
        theirs = "failed" if "torch_error" in row else cell(row.get("torch_us"))
        lines.append(
            "| %s | %s | %s | %s |"
            % (row["name"], cell(row.get("us")), theirs, "" if ratio is None else "%.2f" % ratio)
        )
        if ratio is not None:
            families.setdefault(row["family"], []).append(ratio)
    lines += ["", "| family | rows | geometric mean of the ratios |", "|---|---|---|"]
    for family, ratios in families.items():
        lines.append(
            "| %s | %d | %.2f |" % (family, len(ratios), statistics.geometric_mean(ratios))
        )
    for row in rows:
        if "torch_error" in row:
            lines += ["", "PyTorch, %s: %s" % (row["name"], row["torch_error"])]
    return lines


def prepare(wanted_device):
    """Loads PyTorch: what products and convolutions round to is what their dtype says."""
    global torch, aten, functional, device
    import torch as loaded

    torch, aten, functional, device = loaded, loaded.ops.aten, loaded.nn.functional, wanted_device
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.benchmark = True
    torch.manual_seed(7)
    on = torch.cuda.get_device_name() if device == "cuda" else "the CPU"
    return "PyTorch %s, CUDA %s, %s; no TF32" % (torch.__version__, torch.version.cuda, on)


def main(arguments):
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("rows")
    parser.add_argument("--out")
    parser.add_argument("--limit", type=float, default=0)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args(arguments)
    rows = read_rows(options.rows)
    unknown = unknown_ops(rows)
    if unknown or not rows:
        what = "%s has no rows" % options.rows
        if unknown:
            what = "PyTorch's form of these is not known: %s" % ", ".join(unknown)
        print("gpu_torch: " + what, file=sys.stderr)
        return 2
    if options.check:
        return 0
    print(prepare(options.device) + "\n")
    out = open(options.out, "w", encoding="utf-8") if options.out else None

    def tell(row):
        if out:
            print(json.dumps(row), file=out, flush=True)

    measure(rows, options.limit, tell)
    print("\n".join(table(rows)))
    if out:
        out.close()
    return 1 if any("torch_error" in row for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
