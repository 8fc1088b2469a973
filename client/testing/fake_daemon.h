// A daemon in memory, for tests of the SDK alone: it executes graphs with the naive evaluator and
// matches instances by their names, at once and in the calling thread.
//
// It keeps to the contract of the log (names in order, outcomes by sequence, epochs, positions that
// are passed, refusals, tapes) and to nothing else: no gangs, no memory limits, no deaths. It
// checks what the SDK must get right: the position of every vote and refusal, the request number of
// every gradient, names that exist.
//
// Threads: any.
// Ownership: its links share its state, and may outlive it. Errors: those of the log's contract, as
//   outcomes.
#ifndef CHORUS_CLIENT_TESTING_FAKE_DAEMON_H_
#define CHORUS_CLIENT_TESTING_FAKE_DAEMON_H_

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "chorus/chorus.h"
#include "client/internal/link.h"

namespace chorus {
namespace testing {

class FakeDaemon {
 public:
  FakeDaemon();
  ~FakeDaemon();

  static constexpr int kMaxTensors = 4096;  // of a session

  // A session with `devices` devices. The daemon outlives it. `wait_timeout`: as in SessionOptions.
  // `infos`: what it says of them.
  Session Open(int devices = 1, Timeout wait_timeout = std::chrono::seconds(20),
               const std::vector<DeviceInfo>& infos = {});

  // What the sessions have sent, all together.
  struct Counts {
    int runs = 0;
    int registered = 0;
    int created_tensors = 0;
    int entered_epochs = 0;
    int ended_epochs = 0;
    int refusals = 0;
    int drops_abandoned = 0;
    int drops_consumed = 0;
    int released_tensors = 0;
    int tensor_waits = 0;
    int command_waits = 0;
  };
  Counts counts() const;
  // Tape entries that are live.
  int live_tapes() const;
  // Tensors that have a name.
  int live_tensors() const;
  // Graphs that have one.
  int live_graphs() const;
  // Of staging.
  int live_arenas() const;

  // The next `count` registrations of graphs fail with OUT_OF_MEMORY.
  void FailRegistrations(int count);
  // So do `count` tensors from bytes, after as many sound ones.
  void FailTensors(int count, int after = 0);

  class Impl;

 private:
  const std::shared_ptr<Impl> impl_;
};

}  // namespace testing
}  // namespace chorus

#endif  // CHORUS_CLIENT_TESTING_FAKE_DAEMON_H_
