"""A lesson: a program of one rank, and a test that runs it as its README says."""

load("//tools/bazel:cc.bzl", "chorus_cc_binary")

def lesson(name, ranks = 4, devices = None, status = 0, expect = [], deps = [], visibility = None):
    """Declares the program NAME, from NAME.cc, and NAME_test.

    Args:
      ranks: how many of it make the job.
      devices: of the daemon; None: as many as ranks.
      status: what tools/launch is to end with.
      expect: texts that must be in what the ranks print.
      visibility: the program's.
    """
    chorus_cc_binary(
        name = name,
        srcs = [name + ".cc"],
        visibility = visibility,
        deps = ["//client:chorus"] + deps,
    )
    native.sh_test(
        name = name + "_test",
        timeout = "long",
        srcs = ["//examples:lesson_test.sh"],
        args = [
            "$(rootpath //tools:launch)",
            "$(rootpath //server:chorusd)",
            "$(rootpath :%s)" % name,
            str(ranks),
            str(devices or ranks),
            str(status),
        ] + ["'%s'" % text for text in expect],
        data = [
            ":" + name,
            "//server:chorusd",
            "//tools:launch",
        ],
    )
