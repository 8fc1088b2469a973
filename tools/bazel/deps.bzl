"""What a workspace needs to build Chorus, as its own sources or as an external repository.

    local_repository(name = "chorus", path = "...")
    load("@chorus//tools/bazel:deps.bzl", "chorus_dependencies")
    chorus_dependencies()
"""

load("//third_party:bazel4_stubs.bzl", "bazel4_stubs")
load("//third_party:cuda.bzl", "cuda_repository")
load("//third_party:system.bzl", "system_repository")

def chorus_dependencies():
    bazel4_stubs()
    if not native.existing_rule("system"):
        system_repository(name = "system")
    if not native.existing_rule("cuda"):
        cuda_repository(name = "cuda")
