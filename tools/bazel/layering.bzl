"""forbidden_deps_test: a test that a target does not depend, at any distance, on certain others."""

def forbidden_deps_test(name, target, forbidden, **kwargs):
    """Fails if a dependency of `target` matches one of `forbidden`, and names all that do.

    Visibility already stops a direct dependency; this also finds the ones that arrive through
    another target.

    Args:
      target: an absolute label, such as "//client:session".
      forbidden: regular expressions, matched anywhere in an absolute label: "^//core/backend[/:]"
        is a folder with all below it, "^@system//:grpc" each gRPC library.
    """
    found = name + "_found"
    native.genquery(
        name = found,
        expression = 'filter("%s", deps(%s))' % ("|".join(["(%s)" % regex for regex in forbidden]), target),
        scope = [target],
        testonly = True,
        tags = ["manual"],
    )
    native.sh_test(
        name = name,
        srcs = ["//tools/bazel:forbidden_deps.sh"],
        args = [target, "$(rootpath :%s)" % found],
        data = [":" + found],
        size = "small",
        **kwargs
    )
