"""The CUDA toolkit, where there is one, as the Bazel repository @cuda.

Chorus links nothing of it. It is wanted for two things: nvcc compiles kernels, and tests compare our
own declarations with its headers. Without it kernels' images are empty and such tests skip, and one
line says so. CUDA_HOME names it; /usr/local/cuda unless set.
"""

_HEADERS = ["cuda.h", "cublasLt.h", "nccl.h"]

_BUILD = """
package(default_visibility = ["//visibility:public"])

# For tests that ask CHORUS_HAVE_CUDA_TOOLKIT first.
cc_library(
    name = "headers",
    hdrs = glob(["include/*.h", "include/*.hpp", "include/crt/*.h", "include/crt/*.hpp"]),
    defines = [
        "CHORUS_HAVE_CUDA_TOOLKIT={have_headers}",
        'CHORUS_CUDA_HOME=\\\\"{home}\\\\"',
    ],
    includes = ["include"],
)
"""

def _cuda_repository_impl(rctx):
    home = rctx.os.environ.get("CUDA_HOME", "/usr/local/cuda")
    missing = [header for header in _HEADERS if not rctx.path(home + "/include/" + header).exists]
    nvcc = rctx.path(home + "/bin/nvcc")
    version = ""
    if nvcc.exists:
        told = rctx.execute([str(nvcc), "--version"])
        version = told.stdout.strip().split("\n")[-1] if told.return_code == 0 else ""
    if not version:
        print("no CUDA compiler in %s (CUDA_HOME): kernels are left out, and gpu_probe has none" % home)
    if missing:
        print("no %s in %s/include: our declarations are not compared with them" %
              (", ".join(missing), home))
    else:
        rctx.symlink(home + "/include", "include")
    rctx.file("BUILD.bazel", _BUILD.format(have_headers = 0 if missing else 1, home = home))
    rctx.file("toolkit.bzl", "NVCC = %r\nNVCC_VERSION = %r\n" % (
        str(nvcc) if version else "",
        version,
    ))

cuda_repository = repository_rule(
    implementation = _cuda_repository_impl,
    local = True,
    configure = True,
    environ = ["CUDA_HOME"],
)
