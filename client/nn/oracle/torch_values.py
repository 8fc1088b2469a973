#!/usr/bin/env python3
"""What PyTorch computes, for client/nn/oracle_test.cc.

Usage: torch_values.py FILE

Writes a safetensors file. Of a layer or loss NAME: NAME/p.PARAMETER, NAME/in.0, ..., NAME/out, and
the gradients of sum(out * w) as NAME/g.p.PARAMETER, NAME/g.in.0, with w of the same shape; then the
gradients of the sum of those, each times its own weights, as NAME/gg.... Weights are weights(shape,
order), which the test computes as well. Of an optimizer NAME: NAME/step.0 ... NAME/step.10.
"""

import json
import math
import struct
import sys

import torch
from torch import nn
from torch.nn import functional as F

torch.set_default_dtype(torch.float64)
torch.use_deterministic_algorithms(True)
values = {}


def numbers(shape, seed):
    """From -1 to 1, without a pattern."""
    count = math.prod(shape)
    flat = [math.sin(12.9898 * (i + 1) + 78.233 * seed) for i in range(count)]
    return torch.tensor(flat).reshape(shape)


def weights(shape, order):
    count = math.prod(shape)
    flat = [0.4 + 0.3 * math.sin(1.7 * i + order) for i in range(count)]
    return torch.tensor(flat).reshape(shape)


def record(name, function, inputs, parameters=None):
    """`function` of the inputs; `parameters`: by name, those that it also depends on."""
    parameters = parameters or {}
    leaves = {f"in.{i}": x for i, x in enumerate(inputs) if x.is_floating_point()}
    leaves.update({f"p.{key}": value for key, value in parameters.items()})
    for i, x in enumerate(inputs):
        values[f"{name}/in.{i}"] = x.detach().clone()
    for key, value in parameters.items():
        values[f"{name}/p.{key}"] = value.detach().clone()
    for leaf in leaves.values():
        leaf.requires_grad_()
    out = function(*inputs)
    values[f"{name}/out"] = out.detach().clone()
    first = torch.autograd.grad(
        (out * weights(out.shape, 1)).sum(), list(leaves.values()), create_graph=True)
    total = torch.zeros(())
    for i, (key, gradient) in enumerate(zip(leaves, first)):
        values[f"{name}/g.{key}"] = gradient.detach().clone()
        total = total + (gradient * weights(gradient.shape, 2 + i)).sum()
    if not total.requires_grad:
        return
    second = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
    for (key, leaf), gradient in zip(leaves.items(), second):
        values[f"{name}/gg.{key}"] = torch.zeros_like(leaf) if gradient is None else gradient


def record_module(name, module, inputs, function=None):
    parameters = dict(module.named_parameters())
    with torch.no_grad():
        for i, parameter in enumerate(parameters.values()):
            parameter.copy_(numbers(parameter.shape, 10 + i))
    record(name, function or module, inputs, parameters)


def layers():
    record_module("linear", nn.Linear(3, 2), [numbers((4, 3), 1)])
    record_module("layer_norm", nn.LayerNorm((2, 3)), [numbers((4, 2, 3), 1)])
    record_module("rms_norm", nn.RMSNorm(5, eps=1e-6), [numbers((4, 5), 1)])
    record_module("group_norm", nn.GroupNorm(2, 4), [numbers((3, 4, 5), 1)])
    embedding = nn.Embedding(5, 3, padding_idx=2)
    record_module("embedding", embedding, [torch.tensor([[1, 2], [4, 1]])])
    x = numbers((3, 5), 1) * 3
    record("gelu", F.gelu, [x.clone()])
    record("gelu_tanh", lambda v: F.gelu(v, approximate="tanh"), [x.clone()])
    record("silu", F.silu, [x.clone()])
    record("softmax", lambda v: F.softmax(v, -1), [x.clone()])


def convolutions():
    record_module("conv1d", nn.Conv1d(4, 6, 3, stride=2, padding=2, dilation=2, groups=2),
                  [numbers((2, 4, 9), 1)])
    record_module("conv2d", nn.Conv2d(4, 2, (3, 2), stride=(2, 1), padding=(1, 2), dilation=(1, 2),
                                      groups=2), [numbers((2, 4, 5, 6), 1)])
    record_module("conv_transpose2d",
                  nn.ConvTranspose2d(4, 2, (3, 2), stride=(2, 3), padding=(1, 0),
                                     output_padding=(1, 2), groups=2), [numbers((2, 4, 3, 2), 1)])
    x = numbers((2, 2, 5, 6), 1)
    record("max_pool2d", lambda v: F.max_pool2d(v, (3, 2), (2, 1), (1, 1)), [x.clone()])
    record("avg_pool2d", lambda v: F.avg_pool2d(v, (3, 2), (2, 1), (1, 1)), [x.clone()])
    record("avg_pool2d_inside",
           lambda v: F.avg_pool2d(v, (3, 2), (2, 1), (1, 1), count_include_pad=False), [x.clone()])
    record("adaptive_avg_pool2d", lambda v: F.adaptive_avg_pool2d(v, (3, 4)), [x.clone()])


def batch_norms():
    record_module("batch_norm", nn.BatchNorm2d(3), [numbers((4, 3, 2, 2), 1)])
    for name, momentum in (("batch_norm_running", 0.1), ("batch_norm_mean", None)):
        module = nn.BatchNorm2d(3, momentum=momentum)
        for step in range(3):
            module(numbers((2, 3, 2, 2), 1 + step))
            values[f"{name}/mean.{step}"] = module.running_mean.clone()
            values[f"{name}/var.{step}"] = module.running_var.clone()
        module.eval()
        values[f"{name}/eval"] = module(numbers((2, 3, 2, 2), 9)).detach()


def recurrent():
    def flat(*tensors):
        return torch.cat([tensor.flatten() for tensor in tensors])

    def lstm(x):
        out, (hidden, cell) = long(x)
        return flat(out, hidden, cell)

    long = nn.LSTM(3, 2, 2, bidirectional=True)
    record_module("lstm", long, [numbers((3, 2, 3), 1)], lstm)
    gru = nn.GRU(3, 2, 2, bidirectional=True)
    record_module("gru", gru, [numbers((3, 2, 3), 1)], lambda x: flat(*gru(x)))


def attention():
    width, heads = 4, 2
    module = nn.MultiheadAttention(width, heads, batch_first=True)
    parts = {}
    for i, part in enumerate(["query", "key", "value", "out"]):
        parts[f"{part}.weight"] = numbers((width, width), 20 + i)
        parts[f"{part}.bias"] = numbers((width,), 30 + i)
    causal = torch.triu(torch.ones(3, 3, dtype=torch.bool), 1)

    def function(x):
        projections = ["query", "key", "value"]
        state = {
            "in_proj_weight": torch.cat([parts[f"{p}.weight"] for p in projections]),
            "in_proj_bias": torch.cat([parts[f"{p}.bias"] for p in projections]),
            "out_proj.weight": parts["out.weight"],
            "out_proj.bias": parts["out.bias"],
        }
        with nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH):
            return torch.func.functional_call(
                module, state, (x, x, x), {"attn_mask": causal, "need_weights": False})[0]

    record("attention", function, [numbers((2, 3, width), 1)], parts)


def losses():
    logits, labels = numbers((4, 3), 1) * 3, torch.tensor([2, 0, -100, 1])
    w = torch.tensor([0.5, 2.0, 3.0])
    soft = F.softmax(numbers((4, 3), 2), -1)
    record("cross_entropy", lambda x: F.cross_entropy(x, labels), [logits.clone()])
    record("cross_entropy_all",
           lambda x: F.cross_entropy(x, labels, weight=w, label_smoothing=0.3), [logits.clone()])
    record("cross_entropy_sum",
           lambda x: F.cross_entropy(x, labels, weight=w, label_smoothing=0.3, reduction="sum"),
           [logits.clone()])
    record("cross_entropy_soft",
           lambda x: F.cross_entropy(x, soft, weight=w, label_smoothing=0.2), [logits.clone()])
    record("nll", lambda x: F.nll_loss(F.log_softmax(x, -1), labels, weight=w), [logits.clone()])
    x, y = numbers((4, 3), 3) * 2, numbers((4, 3), 4)
    record("mse", F.mse_loss, [x.clone(), y.clone()])
    record("l1", F.l1_loss, [x.clone(), y.clone()])
    record("huber", lambda a, b: F.huber_loss(a, b, delta=0.7), [x.clone(), y.clone()])
    target = (numbers((4, 3), 5) + 1) / 2
    record("bce", lambda a: F.binary_cross_entropy_with_logits(a, target, pos_weight=w), [x.clone()])
    record("kl_div", lambda a: F.kl_div(F.log_softmax(a, -1), soft, reduction="sum"), [x.clone()])


def optimizers():
    def run(name, make, schedule=None):
        parameter = nn.Parameter(numbers((5,), 1))
        optimizer = make([parameter])
        scheduler = schedule(optimizer) if schedule else None
        values[f"{name}/step.0"] = parameter.detach().clone()
        for step in range(10):
            parameter.grad = numbers((5,), 100 + step)
            optimizer.step()
            if scheduler:
                scheduler.step()
            values[f"{name}/step.{step + 1}"] = parameter.detach().clone()

    o, s = torch.optim, torch.optim.lr_scheduler
    run("sgd", lambda p: o.SGD(p, lr=0.1, weight_decay=0.01))
    run("sgd_momentum", lambda p: o.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01))
    run("sgd_nesterov", lambda p: o.SGD(p, lr=0.1, momentum=0.9, nesterov=True))
    run("adam", lambda p: o.Adam(p, lr=0.02, weight_decay=0.01))
    run("adam_amsgrad", lambda p: o.Adam(p, lr=0.02, amsgrad=True))
    run("adamw", lambda p: o.AdamW(p, lr=0.02))
    run("adagrad", lambda p: o.Adagrad(p, lr=0.1, lr_decay=0.2, weight_decay=0.01))
    run("step_decay", lambda p: o.SGD(p, lr=0.1), lambda q: s.StepLR(q, 3, 0.5))
    run("cosine", lambda p: o.SGD(p, lr=0.1), lambda q: s.CosineAnnealingLR(q, 8, 0.02))
    run("warm_up", lambda p: o.SGD(p, lr=0.1),
        lambda q: s.LambdaLR(q, lambda t: min(1.0, (t + 1) / 4)))
    gradients = [numbers((3, 2), 1), numbers((4,), 2)]
    parameters = [nn.Parameter(torch.zeros_like(g)) for g in gradients]
    for parameter, gradient in zip(parameters, gradients):
        parameter.grad = gradient.clone()
    values["clip/norm"] = nn.utils.clip_grad_norm_(parameters, 0.5)
    values["clip/0"], values["clip/1"] = (p.grad.clone() for p in parameters)


def save(path):
    types = {torch.float64: "F64", torch.int64: "I64"}
    header, data = {"__metadata__": {"torch": torch.__version__}}, b""
    for name, value in values.items():
        part = value.detach().contiguous().numpy(force=True).tobytes()
        header[name] = {"dtype": types[value.dtype], "shape": list(value.shape),
                        "data_offsets": [len(data), len(data) + len(part)]}
        data += part
    text = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + data)


layers()
convolutions()
batch_norms()
recurrent()
attention()
losses()
optimizers()
save(sys.argv[1])
print(f"torch {torch.__version__}: {len(values)} tensors")
