"""What the public headers of a library of client/ are held to."""

load("//tools/bazel:cc.bzl", "chorus_cc_test")

def public_headers(prefix, headers, deps):
    """Each header compiles alone, as C++17 and as C++20: headers_cxx17_test, headers_cxx20_test.

    Also makes :public_headers, these files, for tests/layering.

    Args:
      prefix: as they are included, "chorus/".
      headers: of this package.
      deps: the libraries that have them.
    """
    sources = ["include_" + header.replace("/", "_").replace(".h", "") for header in headers]
    for header, source in zip(headers, sources):
        native.genrule(
            name = source,
            outs = [source + ".cc"],
            cmd = "printf '#include \"%s%s\"\n' > $@" % (prefix, header),
        )
    for standard in [17, 20]:
        chorus_cc_test(
            name = "headers_cxx%d_test" % standard,
            srcs = ["//client:headers_test.cc"] + [source + ".cc" for source in sources],
            copts = ["-std=c++%d" % standard],
            deps = deps,
        )
    native.filegroup(
        name = "public_headers",
        srcs = headers,
        visibility = ["//tests/layering:__pkg__"],
    )
