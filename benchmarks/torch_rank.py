"""One rank of PyTorch's c10d with Gloo over loopback: a helper like those of helper.h.

    torch_rank.py CONTROL INDEX

Speaks helper.cc's messages with the driver. Tasks, all with one thread:
  init       text: a file for the ranks to meet at, number: how many they are. UNAVAILABLE: there is
             no torch. Gives its version.
  any op of collective_case.h, on pieces of `bytes`. UNIMPLEMENTED: Gloo has none.
  train      steps of DistributedDataParallel: the model `text` of training.h, its batch and optimiser
  conv       a convolution without exchange: `text` is batch, channels, size, channels of the result,
             kernel and stride, number 0: forward, 1: the gradient of x, 2: of the weight
  gradients  steps of DistributedDataParallel on gradients of the shapes that `text` lists, which a
             backward pass has at once; number 0: their means; number 1: without any exchange.
             gradients_views: the same with gradients that are views of DDP's buckets
  forget     give the memory back
"""

import contextlib
import os
import socket
import struct
import sys
import time

OK = 0
INVALID_ARGUMENT = 3
UNIMPLEMENTED = 12
UNAVAILABLE = 14
DATA_LOSS = 15

PERIOD = 251  # pattern.cc


# --- Messages: helper.cc and core/base/bytes.h ---------------------------------------------------


def varint(value):
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


class Reader:
    def __init__(self, data):
        self.data = data
        self.at = 0

    def raw(self, size):
        self.at += size
        return self.data[self.at - size : self.at]

    def string(self):
        size = shift = 0
        while True:
            byte = self.raw(1)[0]
            size |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return self.raw(size).decode()

    def i64(self):
        return struct.unpack("<q", self.raw(8))[0]


class Task:
    def __init__(self, message):
        reader = Reader(message)
        self.op = reader.string()
        self.bytes = reader.i64()
        self.iterations = reader.i64()
        self.warm_up = reader.i64()
        self.number = reader.i64()
        self.text = reader.string()


class Outcome:
    def __init__(self, code=OK, error="", text=""):
        self.code = code
        self.error = error
        self.text = text
        self.start_ns = self.end_ns = self.cpu_ns = 0
        self.samples = []

    def encode(self):
        error = self.error.encode()
        text = self.text.encode()
        return (
            struct.pack("<i", self.code)
            + varint(len(error))
            + error
            + struct.pack("<qqq", self.start_ns, self.end_ns, self.cpu_ns)
            + varint(len(text))
            + text
            + struct.pack("<Q%dd" % len(self.samples), len(self.samples), *self.samples)
        )


def receive(connection, size):
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            return None
        data += part
    return data


def serve(control, index, handle):
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(control)
    connection.sendall(struct.pack("<ii", index, os.getpid()))
    while True:
        size = receive(connection, 8)
        message = size and receive(connection, struct.unpack("<Q", size)[0])
        if not message:
            return
        answer = handle(Task(message)).encode()
        connection.sendall(struct.pack("<Q", len(answer)) + answer)


def timed_loop(task, step):
    """timed_loop.h."""
    outcome = Outcome()
    for _ in range(task.warm_up):
        step()
    cpu_before = time.process_time_ns()
    before = outcome.start_ns = time.monotonic_ns()
    for _ in range(task.iterations):
        step()
        now = time.monotonic_ns()
        outcome.samples.append(float(now - before))
        before = now
    outcome.end_ns = before
    outcome.cpu_ns = time.process_time_ns() - cpu_before
    return outcome


# --- Gradients without a model -------------------------------------------------------------------


def gradient_value(rank, tensor):
    return float((rank + 1) * (tensor % 7 + 1))


def gradient_chain(torch, shapes, rank):
    """A module with parameters of `shapes`, given last layer first, whose backward pass only fills
    each gradient, in that order: each when the one before is there, as layers have them."""

    class Layer(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, parameter, value):
            ctx.parameter, ctx.value = parameter, value
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient, torch.full_like(ctx.parameter, ctx.value), None

    class Chain(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ParameterList(
                torch.nn.Parameter(torch.zeros(shape)) for shape in reversed(shapes)
            )

        def forward(self):
            x = torch.zeros(1)
            for k, parameter in enumerate(self.layers):
                x = Layer.apply(x, parameter, gradient_value(rank, k))
            return x

    return Chain()


# --- The collectives: collective_case.cc ---------------------------------------------------------


class Rank:
    def __init__(self, rank):
        self.rank = rank
        self.forget()

    def forget(self):
        self.key = None
        self.inputs = self.outputs = None
        self.model = self.optimizer = None
        self.exchanges = {}

    def handle(self, task):
        if task.op == "init":
            return self.init(task)
        if task.op == "forget":
            self.forget()
            return Outcome()
        if task.op == "train":
            return self.train(task)
        if task.op == "conv":
            return self.conv(task)
        if task.op in ("gradients", "gradients_views"):
            return self.gradients(task)
        step = getattr(self, "step_" + task.op, None)
        if step is None:
            return Outcome(INVALID_ARGUMENT, "no collective " + task.op)
        try:
            self.prepare(task)
            outcome = timed_loop(task, step)
        except (NotImplementedError, RuntimeError) as error:
            # Gloo says "does not support".
            known = "support" in str(error) or "implement" in str(error)
            return Outcome(UNIMPLEMENTED if known else UNAVAILABLE, str(error)[:500])
        if task.op in ("all_reduce", "reduce"):
            # In place: what the loop has summed up and up says nothing, one more from fresh numbers
            # does.
            self.fill(self.inputs, self.rank)
            step()
        outcome.code, outcome.error = self.check(task.op)
        return outcome

    def init(self, task):
        # Before torch is there: it reads them once.
        os.environ["OMP_NUM_THREADS"] = "1"
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        try:
            import torch
            import torch.distributed
        except ImportError as error:
            return Outcome(UNAVAILABLE, str(error))
        self.torch = torch
        self.dist = torch.distributed
        self.size = task.number
        torch.set_num_threads(1)
        self.dist.init_process_group(
            "gloo", init_method="file://" + task.text, rank=self.rank, world_size=self.size
        )
        return Outcome(text="c10d/Gloo %s" % torch.__version__.split("+")[0])

    def train(self, task):
        torch = self.torch
        if self.key != ("train", task.text):
            self.forget()
            torch.manual_seed(1)
            model, optimizer, self.batch = getattr(self, "model_" + task.text)()
            # Statistics of batch norms are each rank's own, as ours are.
            self.model = torch.nn.parallel.DistributedDataParallel(
                model, forward_sync_buffers=False
            )
            self.optimizer = optimizer(self.model.parameters())
            self.key = ("train", task.text)

        def step():
            self.optimizer.zero_grad()
            inputs, labels = self.batch()
            logits = self.model(inputs)
            loss = torch.nn.functional.cross_entropy
            self.loss = loss(logits.flatten(0, -2), labels.flatten())
            self.loss.backward()
            self.optimizer.step()

        outcome = timed_loop(task, step)
        if not torch.isfinite(self.loss):
            outcome.code, outcome.error = DATA_LOSS, "a loss that is no number"
        return outcome

    # Models of training.h: the module, its optimiser, and what a step takes.

    def model_perceptron(self):
        torch, nn = self.torch, self.torch.nn
        images = torch.randint(0, 256, (64, 784), dtype=torch.uint8)
        labels = torch.randint(0, 10, (64,))
        return (
            nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 10)),
            lambda parameters: torch.optim.SGD(parameters, lr=1e-4, momentum=0.9),
            lambda: (images.float() * (1.0 / 255), labels),
        )

    def model_transformer(self, symbols=128, context=32, width=64, heads=4, blocks=2):
        torch, nn = self.torch, self.torch.nn
        mask = torch.triu(torch.full((context, context), float("-inf")), diagonal=1)

        class Block(nn.Module):
            def __init__(self):
                super().__init__()
                self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
                self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
                self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

            def forward(self, x):
                y = self.norm1(x)
                y, _ = self.attention(
                    y, y, y, attn_mask=mask, is_causal=True, need_weights=False
                )
                x = x + y
                return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))

        class Positions(nn.Module):
            def __init__(self):
                super().__init__()
                self.weight = nn.Parameter(torch.randn(context, width) * 0.02)

            def forward(self, x):
                return x + self.weight

        text = torch.randint(0, symbols, (2, 8, context))
        return (
            nn.Sequential(
                nn.Embedding(symbols, width),
                Positions(),
                *[Block() for _ in range(blocks)],
                nn.LayerNorm(width),
                nn.Linear(width, symbols),
            ),
            torch.optim.AdamW,
            lambda: (text[0], text[1]),
        )

    def model_resnet(self, channels=1, width=16, stages=3, blocks=1, classes=10):
        torch, nn = self.torch, self.torch.nn

        def conv(inputs, outputs, kernel, stride):
            return nn.Sequential(
                nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False),
                nn.BatchNorm2d(outputs),
            )

        class Block(nn.Module):
            def __init__(self, inputs, outputs, stride):
                super().__init__()
                self.body = nn.Sequential(
                    conv(inputs, outputs, 3, stride), nn.ReLU(), conv(outputs, outputs, 3, 1)
                )
                same = inputs == outputs and stride == 1
                self.skip = nn.Identity() if same else conv(inputs, outputs, 1, stride)

            def forward(self, x):
                return nn.functional.relu(self.skip(x) + self.body(x))

        layers = [conv(channels, width, 3, 1), nn.ReLU()]
        for i in range(stages * blocks):
            halves = i > 0 and i % blocks == 0
            layers.append(Block(width, width * 2 if halves else width, 2 if halves else 1))
            width *= 2 if halves else 1
        layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, classes)]
        images = torch.randint(0, 256, (32, channels, 28, 28), dtype=torch.uint8)
        labels = torch.randint(0, classes, (32,))
        return (
            nn.Sequential(*layers),
            lambda parameters: torch.optim.SGD(parameters, lr=1e-4, momentum=0.9, nesterov=True),
            lambda: (images.float() * (1.0 / 255), labels),
        )

    def conv(self, task):
        torch = self.torch
        batch, channels, size, out, kernel, stride = map(int, task.text.split(","))
        if self.key != ("conv", task.text):
            self.forget()
            self.x = torch.randn(batch, channels, size, size)
            self.weight = torch.randn(out, channels, kernel, kernel)
            convolution = torch.nn.functional.conv2d
            self.y = convolution(self.x, self.weight, None, stride, kernel // 2)
            self.key = ("conv", task.text)

        def forward():
            torch.nn.functional.conv2d(self.x, self.weight, None, stride, kernel // 2)

        def gradient():
            torch.ops.aten.convolution_backward(
                self.y,
                self.x,
                self.weight,
                None,
                [stride, stride],
                [kernel // 2, kernel // 2],
                [1, 1],
                False,
                [0, 0],
                1,
                [task.number == 1, task.number == 2, False],
            )

        with torch.no_grad():
            return timed_loop(task, forward if task.number == 0 else gradient)

    def gradients(self, task):
        torch = self.torch
        if self.key != task.text:
            self.forget()
            self.key = task.text
        if task.op not in self.exchanges:
            shapes = [[int(size) for size in one.split("x")] for one in task.text.split(",")]
            self.exchanges[task.op] = torch.nn.parallel.DistributedDataParallel(
                gradient_chain(torch, shapes, self.rank),
                gradient_as_bucket_view=task.op == "gradients_views",
            )
        exchange = self.exchanges[task.op]
        parameters = list(exchange.parameters())
        alone = task.number == 1

        def step():
            for parameter in parameters:
                parameter.grad = None
            with exchange.no_sync() if alone else contextlib.nullcontext():
                exchange().backward()

        outcome = timed_loop(task, step)
        ranks = [self.rank] if alone else range(self.size)
        for k, parameter in enumerate(parameters):
            mean = sum(gradient_value(rank, k) for rank in ranks) / len(ranks)
            expected = torch.full_like(parameter, mean)
            if not torch.allclose(parameter.grad, expected, rtol=1e-6, atol=0):
                outcome.code, outcome.error = DATA_LOSS, "gradient %d is wrong" % k
        return outcome

    def pattern(self, stream):
        places = self.torch.arange(PERIOD)
        return (places * (stream + 3) % 61 + stream + 1).float()

    def fill(self, piece, stream):
        period = self.pattern(stream)
        whole = piece.numel() // PERIOD * PERIOD
        piece[:whole].view(-1, PERIOD)[:] = period
        piece[whole:] = period[: piece.numel() - whole]

    def prepare(self, task):
        op, size, rank = task.op, self.size, self.rank
        count = task.bytes // 4
        if self.key != (op, count):
            self.forget()
            root = rank == 0
            ins = {"broadcast": int(root), "scatter": size if root else 0, "reduce_scatter": size}
            ins.update({"reduce_scatter_tensor": size, "all_to_all": size})
            ins.update({"all_to_all_single": size})
            outs = {"all_reduce": 0, "reduce": 0, "gather": size if root else 0}
            outs.update({"all_gather": size, "all_gather_into_tensor": size})
            outs.update({"all_to_all": size, "all_to_all_single": size})
            pieces = ins.get(op, 1)
            self.inputs = self.torch.empty(pieces * count)
            for k in range(pieces):
                several = pieces > 1
                self.fill(
                    self.inputs[k * count : (k + 1) * count], rank * size + k if several else rank
                )
            self.outputs = self.torch.empty(outs.get(op, 1) * count)
            # Lists of pieces: views of the same memory.
            self.input_list = list(self.inputs.split(count)) if pieces else []
            self.output_list = list(self.outputs.split(count)) if outs.get(op, 1) else []
            self.count = count
            self.key = (op, count)
        if op in ("all_reduce", "reduce"):
            self.inputs.zero_()  # so that sums of sums stay numbers
        self.outputs.fill_(-1)
        if op == "broadcast" and rank == 0:
            self.outputs.copy_(self.inputs)

    def check(self, op):
        rank, size = self.rank, self.size
        result = self.inputs if op in ("all_reduce", "reduce") else self.outputs
        if op == "reduce" and rank != 0:
            return OK, ""
        for k in range(result.numel() // self.count):
            several = op.startswith("reduce_scatter")
            if op in ("all_reduce", "reduce") or several:
                streams = [r * size + rank if several else r for r in range(size)]
            elif op == "send_recv":
                streams = [rank ^ 1] if rank ^ 1 < size else []
            elif op == "broadcast":
                streams = [0]
            elif op == "scatter":
                streams = [rank]
            elif op.startswith("all_to_all"):
                streams = [k * size + rank]
            else:
                streams = [k]
            if not streams:
                continue
            expected = sum(self.pattern(stream) for stream in streams)
            piece = result[k * self.count : (k + 1) * self.count]
            whole = self.count // PERIOD * PERIOD
            right = bool((piece[:whole].view(-1, PERIOD) == expected).all())
            right = right and bool((piece[whole:] == expected[: self.count - whole]).all())
            if not right:
                return DATA_LOSS, "piece %d is wrong" % k
        return OK, ""

    def step_broadcast(self):
        self.dist.broadcast(self.outputs, 0)

    def step_reduce(self):
        self.dist.reduce(self.inputs, 0)

    def step_all_reduce(self):
        self.dist.all_reduce(self.inputs)

    def step_reduce_scatter(self):
        self.dist.reduce_scatter(self.outputs, self.input_list)

    def step_reduce_scatter_tensor(self):
        self.dist.reduce_scatter_tensor(self.outputs, self.inputs)

    def step_all_gather(self):
        self.dist.all_gather(self.output_list, self.inputs)

    def step_all_gather_into_tensor(self):
        self.dist.all_gather_into_tensor(self.outputs, self.inputs)

    def step_gather(self):
        self.dist.gather(self.inputs, self.output_list if self.rank == 0 else None, 0)

    def step_scatter(self):
        self.dist.scatter(self.outputs, self.input_list if self.rank == 0 else None, 0)

    def step_all_to_all(self):
        self.dist.all_to_all(self.output_list, self.input_list)

    def step_all_to_all_single(self):
        self.dist.all_to_all_single(self.outputs, self.inputs)

    def step_send_recv(self):
        other = self.rank ^ 1
        if other >= self.size:
            return
        works = [self.dist.isend(self.inputs, other), self.dist.irecv(self.outputs, other)]
        for work in works:
            work.wait()


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]), Rank(int(sys.argv[2])).handle)
