"""Kernels in CUDA C++, compiled to an image that the driver loads, as a part of the program."""

load("@cuda//:toolkit.bzl", "NVCC", "NVCC_VERSION")

# One machine code for each generation of data-centre GPUs; others compile the PTX as they load it.
_TARGETS = ["-gencode arch=compute_%d,code=sm_%d" % (n, n) for n in [80, 90, 100]] + [
    "-gencode arch=compute_80,code=compute_80",
]

def chorus_kernel_image(name, src, hdrs, symbol):
    """A cc_library with `src` compiled: the bytes from SYMBOL_begin to SYMBOL_end.

    There are none where there is no CUDA compiler (third_party/cuda.bzl).

    Args:
      hdrs: every header that `src` includes, at any distance, but for CUDA's and the C++ library's.
    """

    # A product and a sum round twice, as on the host, or bits would differ.
    # Constant expressions may be used on a GPU, too.
    compile = " ".join([NVCC, "-fatbin", "-std=c++17", "-O3", "-fmad=false", "--expt-relaxed-constexpr", "-I."] + _TARGETS +
                       ["-o $@", "$(location %s)" % src, "&& : %s" % NVCC_VERSION.replace(" ", "_")])
    native.genrule(
        name = name + "_code",
        srcs = [src] + hdrs,
        outs = [name + ".fatbin"],
        cmd = compile if NVCC else ": > $@",
    )
    native.genrule(
        name = name + "_object",
        outs = [name + ".pic.o"],
        cmd = "\n".join([
            "as -o $@ - <<END",
            ".section .rodata",
            ".balign 64",
            ".global {0}_begin\n{0}_begin:\n.incbin \"$(execpath :{1}_code)\"".format(symbol, name),
            ".global {0}_end\n{0}_end:\n.byte 0".format(symbol),
            ".section .note.GNU-stack,\"\",@progbits",
            "END",
        ]),
        # As a tool it is the same for all configurations (sanitizers, clang), and made once: a
        # minute for some.
        tools = [name + "_code"],
    )
    native.cc_library(
        name = name,
        srcs = [name + ".pic.o"],
        linkstatic = True,
    )
