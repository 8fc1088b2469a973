"""The libraries and programs of the operating system, as the Bazel repository @system.

Headers in /usr/include are on the compilers' own path, so a library here is its link options, plus
the version of its Debian package as a define: Bazel does not watch system headers, and the define
makes an upgraded package rebuild what includes it. The versions are read whenever the Bazel server
starts, and by `bazel sync --configure`.
"""

def _library(package, header, linkopts = [], deps = []):
    return struct(package = package, header = header, linkopts = linkopts, deps = deps)

_LIBRARIES = {
    "absl_containers": _library(
        "libabsl-dev",
        "absl/container/flat_hash_map.h",
        ["-labsl_raw_hash_set", "-labsl_hash", "-labsl_city", "-labsl_low_level_hash", "-labsl_throw_delegate"],
    ),
    "absl_flags": _library(
        "libabsl-dev",
        "absl/flags/parse.h",
        ["-labsl_flags_" + part for part in [
            "parse",
            "usage",
            "usage_internal",
            "reflection",
            "marshalling",
            "internal",
            "commandlineflag",
            "commandlineflag_internal",
            "config",
            "program_name",
            "private_handle_accessor",
        ]],
        deps = ["absl_strings", "absl_synchronization"],
    ),
    "absl_status": _library(
        "libabsl-dev",
        "absl/status/statusor.h",
        [
            "-labsl_statusor",
            "-labsl_status",
            "-labsl_cord",
            "-labsl_cord_internal",
            "-labsl_cordz_info",
            "-labsl_cordz_functions",
            "-labsl_bad_optional_access",
            "-labsl_bad_variant_access",
            "-labsl_raw_logging_internal",
        ],
        deps = ["absl_strings"],
    ),
    "absl_strings": _library(
        "libabsl-dev",
        "absl/strings/str_cat.h",
        ["-labsl_strings", "-labsl_str_format_internal", "-labsl_int128", "-labsl_throw_delegate"],
    ),
    "absl_synchronization": _library(
        "libabsl-dev",
        "absl/synchronization/mutex.h",
        ["-labsl_synchronization", "-labsl_base"],
        deps = ["absl_time"],
    ),
    "absl_time": _library(
        "libabsl-dev",
        "absl/time/time.h",
        ["-labsl_time", "-labsl_time_zone", "-labsl_int128"],
    ),
    # With a main function that runs all benchmarks; it would win over the one of gtest.
    "benchmark": _library(
        "libbenchmark-dev",
        "benchmark/benchmark.h",
        ["-lbenchmark_main"],
        deps = ["benchmark_no_main"],
    ),
    "benchmark_no_main": _library(
        "libbenchmark-dev",
        "benchmark/benchmark.h",
        ["-lbenchmark"],
        deps = ["pthread"],
    ),
    # It computes by OpenMP, whose threads its users choose.
    "dnnl": _library("libdnnl-dev", "dnnl.hpp", ["-ldnnl", "-lgomp"]),
    # Included as <eigen3/Eigen/Core>.
    "eigen": _library("libeigen3-dev", "eigen3/Eigen/Core"),
    "glog": _library("libgoogle-glog-dev", "glog/logging.h", ["-lglog"]),
    "grpc++": _library(
        "libgrpc++-dev",
        "grpcpp/grpcpp.h",
        ["-lgrpc++", "-lgrpc", "-lgpr"],
        # The gRPC headers lock absl::Mutex inline.
        deps = ["absl_synchronization"],
    ),
    "grpc++_reflection": _library(
        "libgrpc++-dev",
        "grpcpp/ext/proto_server_reflection_plugin.h",
        ["-lgrpc++_reflection"],
        deps = ["grpc++", "protobuf"],
    ),
    "grpcpp_channelz": _library(
        "libgrpc++-dev",
        "grpcpp/ext/channelz_service_plugin.h",
        ["-lgrpcpp_channelz"],
        deps = ["grpc++", "protobuf"],
    ),
    # With a main function that runs all tests.
    "gtest": _library(
        "libgmock-dev",
        "gmock/gmock.h",
        ["-lgmock_main"],
        deps = ["gtest_no_main"],
    ),
    "gtest_no_main": _library(
        "libgtest-dev",
        "gtest/gtest.h",
        ["-lgmock", "-lgtest"],
        deps = ["pthread"],
    ),
    "hwy": _library("libhwy-dev", "hwy/highway.h", ["-lhwy"]),
    "json": _library("nlohmann-json3-dev", "nlohmann/json.hpp"),
    "protobuf": _library("libprotobuf-dev", "google/protobuf/message.h", ["-lprotobuf"], deps = ["pthread"]),
    "pthread": _library("libc6-dev", "pthread.h", ["-lpthread"]),
    "xxhash": _library("libxxhash-dev", "xxhash.h", ["-lxxhash"]),
    "zip": _library("libzip-dev", "zip.h", ["-lzip"]),
    "zlib": _library("zlib1g-dev", "zlib.h", ["-lz"]),
}

_PROGRAMS = {
    "grpc_cpp_plugin": "protobuf-compiler-grpc",
    "protoc": "protobuf-compiler",
}

_LIBRARY_TEMPLATE = """
cc_library(
    name = "{name}",
    defines = {defines},
    linkopts = {linkopts},
    deps = {deps},
)
"""

def _packages_to_install(rctx):
    packages = []
    for line in rctx.read(rctx.attr.packages).splitlines():
        if line and not line.startswith("#") and line.split(" ")[0] == "build":
            packages.append(line.split(" ")[-1])
    return packages

def _versions(rctx, packages):
    """Package -> version, empty where there is no dpkg."""
    if not rctx.which("dpkg-query"):
        return {}
    result = rctx.execute(["dpkg-query", "--show", "--showformat=${Package} ${Version}\n"] + packages)
    return {line.split(" ")[0]: line.split(" ")[1] for line in result.stdout.splitlines() if " " in line}

def _define(package, version):
    text = package + "_" + version
    return "DEB_" + "".join([c if c.isalnum() else "_" for c in text.elems()])

def _include_directories(rctx):
    directories = ["/usr/include"]
    gcc = rctx.which("gcc")
    if gcc:
        triplet = rctx.execute([gcc, "-print-multiarch"]).stdout.strip()
        if triplet:
            directories.append("/usr/include/" + triplet)
    return directories

def _system_repository_impl(rctx):
    directories = _include_directories(rctx)
    missing = []
    for library in _LIBRARIES.values():
        if not [d for d in directories if rctx.path(d + "/" + library.header).exists]:
            missing.append("<%s> (package %s)" % (library.header, library.package))
    programs = {}
    for name, package in _PROGRAMS.items():
        programs[name] = rctx.which(name)
        if not programs[name]:
            missing.append("%s (package %s)" % (name, package))
    if missing:
        fail("\nNot installed on this machine:\n  " + "\n  ".join(missing) +
             "\nRun tools/setup, or on Debian 12:\n  sudo apt-get install --no-install-recommends " +
             " ".join(_packages_to_install(rctx)))

    versions = _versions(rctx, [library.package for library in _LIBRARIES.values()])
    build = ['package(default_visibility = ["//visibility:public"])\n']
    for name, path in programs.items():
        # A link inside the repository makes the program an input that Bazel watches.
        rctx.symlink(path, "bin/" + name)
        build.append('\nfilegroup(name = "%s", srcs = ["bin/%s"])\n' % (name, name))
    for name, library in _LIBRARIES.items():
        version = versions.get(library.package)
        build.append(_LIBRARY_TEMPLATE.format(
            name = name,
            defines = [_define(library.package, version)] if version else [],
            linkopts = library.linkopts,
            deps = [":" + dep for dep in library.deps],
        ))
    rctx.file("BUILD.bazel", "".join(build), executable = False)

system_repository = repository_rule(
    implementation = _system_repository_impl,
    attrs = {"packages": attr.label(default = "//third_party:debian-packages.txt", allow_single_file = True)},
    local = True,
    configure = True,
)
