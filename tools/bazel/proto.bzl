"""chorus_proto_library: C++ and a descriptor set from .proto files, with the system's protoc."""

load(":cc.bzl", "CHORUS_COPTS")

_ROOT = "proto"

_ProtoInfo = provider(
    "The .proto files that one target and its dependencies need.",
    fields = ["sources"],
)

def _protoc(ctx, proto_files, outputs, arguments, sources, tools = []):
    ctx.actions.run(
        executable = ctx.file._protoc,
        arguments = arguments + [f.path for f in proto_files],
        inputs = sources,
        outputs = outputs,
        tools = tools,
        mnemonic = "ChorusProtoc",
        progress_message = "Generating C++ of %s" % ctx.label,
    )

def _declare(ctx, proto_files, suffix):
    """The generated file beside each of `proto_files`."""
    directory = "/".join([part for part in [ctx.label.workspace_root, ctx.label.package] if part])
    return [
        ctx.actions.declare_file(f.path[len(directory) + 1:-len(".proto")] + suffix)
        for f in proto_files
    ]

def _chorus_proto_gen_impl(ctx):
    package = ctx.label.package
    if package != _ROOT and not package.startswith(_ROOT + "/"):
        fail("chorus_proto_library works in //%s, the import root, and below it" % _ROOT)
    for f in ctx.files.services:
        if f not in ctx.files.srcs:
            fail("%s is in services but not in srcs" % f.basename)

    # Not empty where Chorus is an external repository.
    import_root = "/".join([part for part in [ctx.label.workspace_root, _ROOT] if part])
    includes = ["-I" + import_root, "-I/usr/include"]
    out_root = ctx.bin_dir.path + "/" + import_root
    sources = depset(ctx.files.srcs, transitive = [dep[_ProtoInfo].sources for dep in ctx.attr.deps])

    headers = _declare(ctx, ctx.files.srcs, ".pb.h")
    bodies = _declare(ctx, ctx.files.srcs, ".pb.cc")
    descriptor_set = ctx.actions.declare_file(ctx.attr.library + ".desc")
    _protoc(ctx, ctx.files.srcs, headers + bodies + [descriptor_set], includes + [
        "--cpp_out=" + out_root,
        "--include_imports",
        "--descriptor_set_out=" + descriptor_set.path,
    ], sources)

    if ctx.files.services:
        service_headers = _declare(ctx, ctx.files.services, ".grpc.pb.h")
        service_bodies = _declare(ctx, ctx.files.services, ".grpc.pb.cc")
        _protoc(ctx, ctx.files.services, service_headers + service_bodies, includes + [
            "--grpc_out=" + out_root,
            "--plugin=protoc-gen-grpc=" + ctx.file._grpc_plugin.path,
        ], sources, tools = [ctx.file._grpc_plugin])
        headers += service_headers
        bodies += service_bodies

    return [
        DefaultInfo(files = depset(headers + bodies)),
        OutputGroupInfo(
            bodies = depset(bodies),
            descriptor_set = depset([descriptor_set]),
            headers = depset(headers),
        ),
        _ProtoInfo(sources = sources),
    ]

_chorus_proto_gen = rule(
    implementation = _chorus_proto_gen_impl,
    attrs = {
        "deps": attr.label_list(providers = [_ProtoInfo]),
        "library": attr.string(mandatory = True),
        "services": attr.label_list(allow_files = [".proto"]),
        "srcs": attr.label_list(allow_files = [".proto"], allow_empty = False),
        "_grpc_plugin": attr.label(default = "@system//:grpc_cpp_plugin", allow_single_file = True, cfg = "exec"),
        "_protoc": attr.label(default = "@system//:protoc", allow_single_file = True, cfg = "exec"),
    },
)

def _gen(label):
    """The generating target beside the library `label`."""
    if ":" in label:
        return label + "_gen"
    return label + ":" + label.split("/")[-1] + "_gen"

def chorus_proto_library(name, srcs, services = [], deps = [], visibility = None, testonly = None):
    """A cc_library of the messages and services in `srcs`.

    The import root is proto/, in .proto files and in C++ alike: proto/chorus/v1/worlds.proto is
    imported as "chorus/v1/worlds.proto" and included as "chorus/v1/worlds.pb.h". The messages of
    protobuf itself (google/protobuf/...) need no entry in deps.

    Args:
      services: those of `srcs` that define services; only they get a .grpc.pb.h.
      deps: other chorus_proto_library targets.

    Also makes NAME_descriptor_set, a FileDescriptorSet (NAME.desc) with all imports.
    """
    gen = _gen(":" + name)
    common = {"visibility": visibility, "testonly": testonly}
    _chorus_proto_gen(
        name = gen[1:],
        library = name,
        srcs = srcs,
        services = services,
        deps = [_gen(dep) for dep in deps],
        **common
    )
    for group in ["bodies", "headers", "descriptor_set"]:
        native.filegroup(
            name = name + "_" + group,
            srcs = [gen],
            output_group = group,
            **common
        )
    native.cc_library(
        name = name,
        hdrs = [name + "_headers"],
        srcs = [name + "_bodies"],
        copts = CHORUS_COPTS,
        linkstatic = True,
        strip_include_prefix = "/" + _ROOT,
        deps = deps + ["@system//:protobuf"] + (["@system//:grpc++"] if services else []),
        **common
    )
