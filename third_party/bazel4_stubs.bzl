"""Stand-ins for the repositories that Bazel 4 downloads even where nothing in them is needed.

Debian's Bazel is 4.2.3 and a build must not touch the network. Toolchain resolution loads rules_cc
and rules_java, and `bazel test` loads remote_coverage_tools; these stand-ins pass on to the rules
that are part of that Bazel.
"""

def _native(names):
    return "".join(["%s = native.%s\n" % (name, name) for name in names])

_STUBS = {
    "remote_coverage_tools": {
        "BUILD.bazel": "".join([
            'filegroup(name = "%s", visibility = ["//visibility:public"])\n' % name
            for name in ["coverage_report_generator", "lcov_merger"]
        ]),
    },
    "rules_cc": {
        "cc/BUILD.bazel": "",
        "cc/defs.bzl": _native(["cc_binary", "cc_library", "cc_test", "cc_toolchain", "cc_toolchain_suite"]),
    },
    "rules_java": {
        "java/BUILD.bazel": "",
        "java/defs.bzl": _native(["java_import", "java_runtime", "java_toolchain"]),
    },
}

def _stub_repository_impl(rctx):
    for path, content in rctx.attr.files.items():
        rctx.file(path, content, executable = False)

_stub_repository = repository_rule(
    implementation = _stub_repository_impl,
    attrs = {"files": attr.string_dict()},
)

def bazel4_stubs():
    # The version is empty in Debian's build.
    if native.bazel_version and not native.bazel_version.startswith("4."):
        return
    for name, files in _STUBS.items():
        if not native.existing_rule(name):
            _stub_repository(name = name, files = files)
