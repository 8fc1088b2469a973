"""The ops of this build, and what each one's folder holds.

An op, or a family of them, is a folder under core/ops and a line of OPS: the registries and their
dependencies are made of that line.
"""

load("//tools/bazel:cc.bzl", "camel_case", "chorus_cc_library", "chorus_cc_test", "chorus_list_header")
load("//tools/bazel:cuda.bzl", "chorus_kernel_image")

# By folder: the backends that it has kernels for. Collectives have none: their bytes move in a
# backend's communicator.
OPS = {
    "all_gather": [],
    "all_reduce": [],
    "all_to_all": [],
    "barrier": [],
    "broadcast": [],
    "compare": [
        "host",
        "cuda",
    ],
    "convolution": [
        "host",
        "cuda",
    ],
    "cross_entropy": [
        "host",
        "cuda",
    ],
    "cum_sum": [
        "host",
        "cuda",
    ],
    "elementwise": [
        "host",
        "cuda",
    ],
    "fill": [
        "host",
        "cuda",
    ],
    "gather": [],
    "index": [
        "host",
        "cuda",
    ],
    "matmul": [
        "host",
        "cuda",
    ],
    "norm": [
        "host",
        "cuda",
    ],
    "pool": [
        "host",
        "cuda",
    ],
    "random": [
        "host",
        "cuda",
    ],
    "reduction": [
        "host",
        "cuda",
    ],
    "send": [],
    "shape": [
        "host",
        "cuda",
    ],
    "slice": [
        "host",
        "cuda",
    ],
    "softmax": [
        "host",
        "cuda",
    ],
    "sort": [
        "host",
        "cuda",
    ],
    "sum": [
        "host",
        "cuda",
    ],
}

# What the bodies of all kernels for GPUs may include, as nvcc needs to know.
_BODY_HEADERS = [
    "//core/base:device.h",
    "//core/cuda:this_lane.h",
    "//core/ops:arithmetic.h",
    "//core/tensor:half.h",
]

def _kernel_bodies(name, deps, headers):
    """What each thread of a family's kernels does, in NAME_kernels.h, and the kernels, compiled.

    The header defines CHORUS_KERNELS_OF_Name(X): X(kernel's name, its arguments, its body) of each.
    """
    chorus_cc_library(
        name = name + "_kernels",
        hdrs = [name + "_kernels.h"],
        visibility = ["//core/ops:__subpackages__"],
        deps = deps + [
            "//core/base:device",
            "//core/ops:arithmetic",
        ],
    )
    native.genrule(
        name = name + "_cu",
        outs = [name + "_kernels.cu"],
        cmd = "printf '%s\\n' " + " ".join(["'%s'" % line for line in [
            "#include \"core/cuda/this_lane.h\"",
            "#include \"core/ops/%s/%s_kernels.h\"" % (name, name),
            "namespace chorus {",
            "namespace cuda {",
            "CHORUS_KERNELS_OF_%s(CHORUS_GLOBAL_KERNEL)" % camel_case(name),
            "}",
            "}",
        ]]) + " > $@",
    )
    chorus_kernel_image(
        name = name + "_image",
        src = name + "_kernels.cu",
        hdrs = [name + "_kernels.h"] + headers + _BODY_HEADERS,
        symbol = "chorus_" + name,
    )

def chorus_op(name, deps = [], kernel_deps = {}, kernel_copts = {}, body_deps = [], body_headers = [], test_deps = []):
    """The targets of an op's folder: NAME, NAME_BACKEND for each of its kernels, NAME_test.

    Args:
      name: the folder's, a key of OPS.
      deps: of the definition, beside those that all have.
      kernel_deps: by backend, of the kernels, beside those that all have.
      kernel_copts: by backend, instead of -O3 (-O2 vectorises no loop of unknown length).
      body_deps: of NAME_kernels.h, if there are kernels for GPUs.
      body_headers: of these, what nvcc reads.
      test_deps: of the test, beside those that all have.
    """
    if name not in OPS:
        fail("%s is no line of OPS in core/ops/ops.bzl" % name)
    chorus_cc_library(
        name = name,
        srcs = [name + ".cc"],
        hdrs = [name + ".h"],
        visibility = ["//core/ops:__subpackages__"],
        deps = deps + [
            "//core/base:error",
            "//core/ops:op",
            "@system//:absl_status",
            "@system//:absl_strings",
        ],
    )

    # Linked by what executes graphs, never by clients.
    for backend in OPS[name]:
        kernel = "%s_%s" % (name, backend)
        bodies = []
        if backend == "cuda":
            _kernel_bodies(name, body_deps, body_headers)
            bodies = [":%s_image" % name, ":%s_kernels" % name]
        chorus_cc_library(
            name = kernel,
            srcs = [kernel + ".cc"],
            hdrs = [kernel + ".h"],
            copts = kernel_copts.get(backend, ["-O3"]),
            visibility = ["//core/ops:__subpackages__"],
            deps = kernel_deps.get(backend, []) + bodies + [
                "//core/base:error",
                "//core/ops:%s_kernel" % backend,
                "@system//:absl_status",
                "@system//:absl_strings",
            ],
        )
    chorus_cc_test(
        name = name + "_test",
        srcs = [name + "_test.cc"],
        deps = test_deps + [
            "//core/ops:op",
            "//core/autograd/testing:gradient_check",
            "//core/ops/testing:rank_builder",
        ],
    )

def op_deps():
    """The definitions of all ops."""
    return ["//core/ops/" + name for name in OPS]

def kernel_deps(backend):
    """The kernels of a backend."""
    return ["//core/ops/%s:%s_%s" % (name, name, backend) for name in OPS if backend in OPS[name]]

def op_list(name, macro, kernels_for = None):
    """A header of the ops' headers and of MACRO(X): X(AllGather) and so on, for each op.

    Args:
      name: the header's, without .h.
      macro: its name.
      kernels_for: of this backend's kernels, not of the ops' definitions.
    """
    suffix = "_" + kernels_for if kernels_for else ""
    ops = [op for op in OPS if not kernels_for or kernels_for in OPS[op]]
    chorus_list_header(
        name = name,
        headers = ["core/ops/%s/%s%s.h" % (op, op, suffix) for op in ops],
        items = [camel_case(op) for op in ops],
        macro = macro,
    )

def _families():
    return [op for op in OPS if "cuda" in OPS[op]]

def kernel_body_deps():
    """What each thread of the kernels for GPUs does, of all families."""
    return ["//core/ops/%s:%s_kernels" % (op, op) for op in _families()]

def kernel_body_list(name, macro):
    """A header of these, and of MACRO(X): X(Fill) and so on, for each family."""
    chorus_list_header(
        name = name,
        headers = ["core/ops/%s/%s_kernels.h" % (op, op) for op in _families()],
        items = [camel_case(op) for op in _families()],
        macro = macro,
    )

def kernel_image_list(name, macro):
    """A header of MACRO(X): X(fill) and so on, for each family that has an image."""
    chorus_list_header(
        name = name,
        headers = [],
        items = _families(),
        macro = macro,
    )
