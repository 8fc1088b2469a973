"""C++ rules with the project's settings. Every C++ target goes through one of these macros."""

# The standard is repeated here, beside .bazelrc, for projects that build Chorus from outside.
CHORUS_COPTS = [
    "-std=c++17",
    "-Wall",
    "-Wextra",
]

# Everything is linked statically from our own objects. Tests then are built like the daemon, and a
# library that registers something and lacks `alwayslink = True` fails in both, not in one of them.
_LINKSTATIC = True

def chorus_cc_library(name, copts = [], **kwargs):
    native.cc_library(
        name = name,
        copts = CHORUS_COPTS + copts,
        linkstatic = _LINKSTATIC,
        **kwargs
    )

def chorus_cc_binary(name, copts = [], **kwargs):
    native.cc_binary(
        name = name,
        copts = CHORUS_COPTS + copts,
        linkstatic = _LINKSTATIC,
        **kwargs
    )

def chorus_cc_test(name, deps = [], copts = [], size = "small", timeout = "long", main = True, **kwargs):
    """A GoogleTest.

    Its own sources are optimised less: they take a quarter less time to compile, and there are many.

    Args:
      main: False if `srcs` or `deps` have a main function of their own.
      timeout: long is a quarter of an hour: room for a sanitizer on a machine that does much else.
    """
    native.cc_test(
        name = name,
        copts = CHORUS_COPTS + ["-O1"] + copts,
        linkstatic = _LINKSTATIC,
        size = size,
        timeout = timeout,
        deps = deps + ["@system//:gtest" if main else "@system//:gtest_no_main"],
        **kwargs
    )

def chorus_list_header(name, headers, macro, items):
    """A header NAME.h that includes `headers` and defines a list: MACRO(X) is X(ITEM) for each item."""
    lines = ["#include \"%s\"" % header for header in headers]
    lines.append("#define %s(X) %s" % (macro, " ".join(["X(%s)" % item for item in items])))
    native.genrule(
        name = name,
        outs = [name + ".h"],
        cmd = "printf '%s\\n' " + " ".join(["'%s'" % line for line in lines]) + " > $@",
    )

def camel_case(name):
    """AllGather of all_gather."""
    return "".join([word.capitalize() for word in name.split("_")])

def chorus_cc_fuzz_test(name, srcs, corpus, deps = [], copts = [], size = "small", timeout = "long", data = [], **kwargs):
    """A fuzz target: `srcs` define LLVMFuzzerTestOneInput.

    As a test, in every configuration, it runs once over each file of `corpus`. Built with
    --config=fuzz and run by hand on a directory it searches for new inputs.
    """
    if not corpus:
        fail("%s: an empty corpus tests nothing" % name)
    corpus_name = name + "_corpus"
    native.filegroup(name = corpus_name, srcs = corpus, testonly = True)
    native.cc_test(
        name = name,
        srcs = srcs,
        args = ["$(rootpaths :%s)" % corpus_name],
        copts = CHORUS_COPTS + copts,
        data = data + [":" + corpus_name],
        linkopts = select({
            "//tools/bazel:fuzzing": ["-fsanitize=fuzzer"],
            "//conditions:default": [],
        }),
        linkstatic = _LINKSTATIC,
        size = size,
        timeout = timeout,
        deps = deps + select({
            "//tools/bazel:fuzzing": [],
            "//conditions:default": ["//tools/bazel:fuzz_replay_main"],
        }),
        **kwargs
    )
