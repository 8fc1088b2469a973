#include "server/flags.h"

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/flags/reflection.h"
#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/time.h"
#include "core/base/error.h"
#include "gtest/gtest.h"
#include "server/listen_address.h"

namespace chorus::server {
namespace {

std::string Text(const std::string& value) { return value; }
std::string Text(bool value) { return value ? "true" : "false"; }
std::string Text(absl::Duration value) { return absl::FormatDuration(value); }
template <typename Int>
std::string Text(Int value) {
  return absl::StrCat(value);
}

// By their flags; what a flag is not for is somewhere else.
std::map<std::string, std::string> Texts(const Flags& flags) {
  const DaemonOptions& daemon = flags.daemon;
  const node::NodeOptions& node = daemon.node;
  std::map<std::string, std::string> texts;
#define CHORUS_TEXT(where, flag) texts[#flag] = Text((where).flag)
#define CHORUS_TEXT_AS(flag, field) texts[#flag] = Text(field)
  CHORUS_TEXT(flags, backend);
  CHORUS_TEXT(flags, host_devices);
  CHORUS_TEXT(flags, gpu);
  CHORUS_TEXT(flags, logical_devices_per_gpu);
  CHORUS_TEXT(flags, worker_processes);
  CHORUS_TEXT(flags, worker);
  CHORUS_TEXT(flags, sim_seed);
  CHORUS_TEXT(flags, fault_script);
  CHORUS_TEXT(flags, drain_timeout);
  CHORUS_TEXT(flags, exit_timeout);
  CHORUS_TEXT_AS(memory_limit_bytes, node.memory_limit_bytes);

  CHORUS_TEXT_AS(listen, absl::StrJoin(daemon.listen, ",", [](std::string* out, const auto& one) {
                   absl::StrAppend(out, one.ToString());
                 }));
  CHORUS_TEXT(daemon, insecure_loopback);
  CHORUS_TEXT_AS(socket_mode, absl::StrCat("0", absl::Hex(daemon.access.mode >> 6),
                                           absl::Hex(daemon.access.mode >> 3 & 7),
                                           absl::Hex(daemon.access.mode & 7)));
  CHORUS_TEXT_AS(socket_group, daemon.access.group);
  CHORUS_TEXT(daemon, max_wait);
  CHORUS_TEXT(daemon, read_timeout);
  CHORUS_TEXT(daemon, download_timeout);
  CHORUS_TEXT(daemon, idle_timeout);
  CHORUS_TEXT(daemon, max_connections);
  CHORUS_TEXT(daemon, max_calls);
  CHORUS_TEXT(daemon, max_streams);

  CHORUS_TEXT(node, share_equal_work);
  CHORUS_TEXT(node, max_sessions);
  CHORUS_TEXT(node, max_worlds);
  CHORUS_TEXT(node, max_waits);
  CHORUS_TEXT(node, max_downloads);
  CHORUS_TEXT(node, max_session_downloads);
  CHORUS_TEXT(node, max_tensors);
  CHORUS_TEXT(node, max_graphs);
  CHORUS_TEXT(node, max_node_graphs);
  CHORUS_TEXT(node, max_graph_nodes);
  CHORUS_TEXT(node, max_graph_collectives);
  CHORUS_TEXT(node, max_graph_inputs);
  CHORUS_TEXT(node, max_graph_outputs);
  CHORUS_TEXT(node, max_graph_bytes);
  CHORUS_TEXT(node, max_pending_runs);
  CHORUS_TEXT(node, max_staging_arenas);
  CHORUS_TEXT(node, max_staging_bytes);
  CHORUS_TEXT(node, lease);
  CHORUS_TEXT(node, max_lease);
  CHORUS_TEXT(node, detach_grace);
  CHORUS_TEXT(node, join_timeout);
  CHORUS_TEXT(node, gap_timeout);
  CHORUS_TEXT(node, kill_timeout);
  CHORUS_TEXT_AS(max_groups_per_world, node.sequencer.max_groups);
  CHORUS_TEXT(node.sequencer, max_gang_size);
  CHORUS_TEXT(node.sequencer, agree_timeout);
  CHORUS_TEXT(node.sequencer, exec_timeout);
  CHORUS_TEXT_AS(max_plan_bytes, node.plan.max_bytes);
  CHORUS_TEXT_AS(max_plan_dependences, node.plan.max_dependences);
  CHORUS_TEXT_AS(max_plan_steps, node.plan.max_dependence_steps);
#undef CHORUS_TEXT
#undef CHORUS_TEXT_AS
  return texts;
}

std::set<std::string> NamesOfFlags() {
  std::set<std::string> names;
  for (const auto& [name, flag] : absl::GetAllFlags()) {
    if (IsFileOfFlags(flag->Filename())) names.emplace(name);
  }
  return names;
}

// Another value than the default, of the same form.
std::string Another(const std::string& value) {
  if (value == "true") return "false";
  if (value == "false") return "true";
  if (value == "auto") return "12345678";
  absl::Duration duration;
  if (value != "0" && absl::ParseDuration(value, &duration)) {
    return absl::FormatDuration(duration + absl::Seconds(1));
  }
  int64_t number = 0;
  if (absl::SimpleAtoi(value, &number)) return absl::StrCat(number + 1);
  return absl::StrCat("another", value);
}

void Set(const std::string& flag, const std::string& value) {
  std::string error;
  ASSERT_TRUE(absl::FindCommandLineFlag(flag)->ParseFrom(value, &error)) << flag << ": " << error;
}

TEST(FlagsTest, EachSetsWhatItIsForAndNothingElse) {
  const std::map<std::string, std::string> defaults = Texts(*ReadFlags());
  std::set<std::string> seen;
  for (const auto& [name, text] : defaults) seen.insert(name);
  EXPECT_EQ(seen, NamesOfFlags());
  for (const std::string& name : NamesOfFlags()) {
    SCOPED_TRACE(name);
    const absl::FlagSaver saver;
    std::map<std::string, std::string> expected = defaults;
    std::string value = Another(absl::FindCommandLineFlag(name)->CurrentValue());
    if (name == "listen") value = "unix:/another";
    if (name == "socket_mode") value = "0321";
    Set(name, value);
    expected[name] = value;
    std::map<std::string, std::string> got = Texts(*ReadFlags());
    // What the machine's memory leaves depends on how much the daemon may have for itself.
    if (name != "memory_limit_bytes") expected.erase("memory_limit_bytes");
    if (name != "memory_limit_bytes") got.erase("memory_limit_bytes");
    EXPECT_EQ(got, expected);
  }
}

TEST(FlagsTest, ALeaseIsNotShorterThanTheUsualOne) {
  const absl::FlagSaver saver;
  Set("lease", "1h");
  Set("max_lease", "1m");
  EXPECT_EQ(ReadFlags()->daemon.node.max_lease, absl::Hours(1));
}

TEST(FlagsTest, BytesHaveUnits) {
  const absl::FlagSaver saver;
  Set("memory_limit_bytes", "3MiB");
  Set("max_plan_bytes", "5KiB");
  const Flags flags = *ReadFlags();
  EXPECT_EQ(flags.daemon.node.memory_limit_bytes, 3 << 20);
  EXPECT_EQ(flags.memory.bytes, 3 << 20);
  EXPECT_EQ(flags.daemon.node.plan.max_bytes, 5 << 10);
}

TEST(FlagsTest, WhatIsNotSoIsRefused) {
  for (const auto& [flag, value] :
       std::map<std::string, std::string>{{"lease", "0"},
                                          {"max_wait", "-1s"},
                                          {"max_plan_bytes", "0"},
                                          {"memory_limit_bytes", "9223372036854775807KiB"},
                                          {"socket_mode", "0778"},
                                          {"socket_mode", "1777"},
                                          {"listen", "nowhere"},
                                          {"max_tensors", "many"}}) {
    std::string error;
    EXPECT_FALSE(absl::FindCommandLineFlag(flag)->ParseFrom(value, &error)) << flag;
  }
}

TEST(FlagsTest, NumbersArePositive) {
  const absl::FlagSaver saver;
  Set("max_sessions", "0");
  Set("max_graphs", "-7");
  const absl::Status refusal = ReadFlags().status();
  EXPECT_EQ(ErrorOf(refusal).reason, Reason::kMalformed);
  EXPECT_EQ(ErrorOf(refusal).message, "--max_sessions: expected a positive number, got 0");
}

}  // namespace
}  // namespace chorus::server
