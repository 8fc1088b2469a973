"""The backends of this build: a folder under core/backend and a line here each.

A backend `name` defines OpenName(const BackendOptions&) in core/backend/name/name_backend.h, target
name_backend. main, the conformance suites and the layering tests go by this list.
"""

load("//tools/bazel:cc.bzl", "camel_case", "chorus_list_header")

BACKENDS = [
    "host",
    "sim",
]

def backend_list(name):
    """A header of the backends' headers and of CHORUS_BACKENDS(X): X("host", Host) and so on.

    Args:
      name: the header's, without .h.
    """
    chorus_list_header(
        name = name,
        headers = ["core/backend/%s/%s_backend.h" % (backend, backend) for backend in BACKENDS],
        items = ["\"%s\", %s" % (backend, camel_case(backend)) for backend in BACKENDS],
        macro = "CHORUS_BACKENDS",
    )

def backend_deps():
    """The targets of all backends."""
    return ["//core/backend/%s:%s_backend" % (name, name) for name in BACKENDS]
