"""chorus_py_test: a file of Python unittest cases, run by the system's Python.

Bazel's own py_test wants a program called `python`, which Debian does not install by default.
"""

def chorus_py_test(name, src, data = [], size = "small", timeout = "moderate", **kwargs):
    native.sh_test(
        name = name,
        srcs = ["//tools/bazel:run_unittest.py"],
        args = ["$(rootpath %s)" % src],
        data = [src] + data,
        size = size,
        timeout = timeout,
        **kwargs
    )
