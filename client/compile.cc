#include "chorus/compile.h"

#include <algorithm>
#include <deque>
#include <exception>
#include <iterator>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "absl/types/optional.h"
#include "client/internal/access.h"
#include "client/internal/errors.h"
#include "client/internal/living_sessions.h"
#include "client/internal/program.h"
#include "client/internal/program_run.h"
#include "client/internal/refusals.h"
#include "client/internal/session_core.h"
#include "client/internal/tape.h"
#include "client/internal/trace.h"
#include "core/base/error.h"
#include "core/base/mutex.h"

namespace chorus {
namespace internal {
namespace {

absl::Status Thrown(absl::string_view what) {
  return MakeError(Reason::kCancelled,
                   absl::StrCat("compiled function: it threw an exception", what));
}

}  // namespace

// Threads that are the first with one list of types at a time trace the function for it each, and
// use one graph. Lock order: session_lock.h.
class CompiledImpl {
 public:
  CompiledImpl(Function function, CompileOptions options)
      : function_(std::move(function)), options_(std::move(options)) {}

  absl::StatusOr<std::vector<Tensor>> Run(const std::vector<Tensor>& inputs, CallSite site) {
    const std::string source = SourceOf(site);
    // One graph is the point: the inner function becomes part of the outer one.
    if (Trace* const outer = Trace::Current()) return RunInside(outer, inputs, source);
    for (const Tensor& input : inputs) {
      // No lock before that: a thread that the child lacks may have held it.
      if (!input.defined() || ImplOf(input)->data->session == nullptr) continue;
      if (ImplOf(input)->data->session->Forked()) return WithSource(ForkedError(), source);
    }
    absl::StatusOr<Prepared> prepared = Prepared();
    try {
      prepared = Prepare(inputs);
    } catch (const std::exception& exception) {
      Refuse(inputs, WithSource(Thrown(absl::StrCat(": ", exception.what())), source))
          .IgnoreError();
      throw;
    } catch (...) {
      Refuse(inputs, WithSource(Thrown(""), source)).IgnoreError();
      throw;
    }
    if (!prepared.ok()) return Refuse(inputs, WithSource(prepared.status(), source));
    return Call(*prepared->program, inputs, *prepared->infos, source);
  }

  int traces() const {
    MutexLock lock(&mutex_);
    return traces_;
  }

 private:
  // What a call with some inputs runs.
  struct Prepared {
    std::shared_ptr<Program> program;
    std::shared_ptr<const Infos> infos;  // of its outputs
  };

  // A call whose end has not been seen.
  struct UnderWay {
    std::weak_ptr<SessionCore> session;
    Sequence run;
  };

  // What a trace counts when it is called.
  struct Calls {
    std::shared_ptr<SessionCore> session;
    Trace::Finished trace;  // without its graph
  };

  absl::StatusOr<std::vector<Tensor>> RunInside(Trace* outer, const std::vector<Tensor>& inputs,
                                                const std::string& source) {
    for (const Tensor& input : inputs) {
      absl::Status refused = CheckInput(input);
      if (refused.ok()) continue;
      refused = WithSource(refused, source);
      // The graph would lack the collectives that the function may have.
      outer->Fail(refused);
      return refused;
    }
    absl::StatusOr<std::vector<Tensor>> results = CallInside(function_, inputs);
    if (!results.ok()) return WithSource(results.status(), source);
    return results;
  }

  // Traces the function where it has to, under no lock: it may throw, and wait for what it likes.
  absl::StatusOr<Prepared> Prepare(const std::vector<Tensor>& inputs) {
    std::shared_ptr<SessionCore> session;
    ProgramKey key;
    key.grad_enabled = GradEnabled();
    key.computes_gradients = ComputesGradients();
    int64_t size = -1;
    for (const Tensor& input : inputs) {
      CHORUS_RETURN_IF_ERROR(CheckInput(input));
      const std::shared_ptr<SessionCore>& its_session = ImplOf(input)->data->session;
      if (session == nullptr) session = its_session;
      if (session != its_session) {
        return BadType("compiled function: expected inputs of one session");
      }
    }
    if (session == nullptr) {
      return BadType(
          "compiled function: expected at least one input: it says on which session the function "
          "runs");
    }
    key.inputs = KeysOf(inputs);
    for (size_t i = 0; i < inputs.size(); ++i) {
      CHORUS_ASSIGN_OR_RETURN(key.inputs[i].info,
                              AtSize(session.get(), options_, static_cast<int>(i),
                                     key.inputs[i].info, options_.max_size, &size));
    }
    Prepared prepared;
    {
      std::shared_ptr<Program> past;
      MutexLock lock(&mutex_);
      prepared.program = Find(session, key, &past);
    }
    // What it needs is put there again, by another trace.
    if (prepared.program != nullptr && !prepared.program->IsThere()) {
      Forget(prepared.program);
      prepared.program = nullptr;
    }
    if (prepared.program == nullptr) {
      CHORUS_ASSIGN_OR_RETURN(std::shared_ptr<Program> program,
                              MakeProgram(function_, options_, session, inputs, key));
      prepared.program = Keep(std::move(program));
    }
    CHORUS_ASSIGN_OR_RETURN(prepared.infos, InfosAt(prepared.program.get(), size));
    return prepared;
  }

  // The program of such inputs; null: there is none, or its groups are others by now. *past: one
  // that goes, behind the lock, for it tells its session.
  std::shared_ptr<Program> Find(const std::shared_ptr<SessionCore>& session, const ProgramKey& key,
                                std::shared_ptr<Program>* past)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    for (size_t i = 0; i < programs_.size(); ++i) {
      if (programs_[i]->session != session || !(programs_[i]->key == key)) continue;
      if (IsCurrent(programs_[i]->trace)) return programs_[i];
      *past = std::move(programs_[i]);
      programs_.erase(programs_.begin() + static_cast<int64_t>(i));
      break;
    }
    return nullptr;
  }

  void Forget(const std::shared_ptr<Program>& program) {
    MutexLock lock(&mutex_);
    const auto row = std::find(programs_.begin(), programs_.end(), program);
    if (row != programs_.end()) programs_.erase(row);
  }

  // What a trace counts is asked for when a call is refused, also when its program is gone by then.
  // *old: what does not count any more, for behind the lock.
  void RememberCalls(const Program& program, std::vector<Calls>* old)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    const auto first_old = std::stable_partition(
        calls_.begin(), calls_.end(), [](const Calls& calls) { return IsCurrent(calls.trace); });
    old->insert(old->end(), std::make_move_iterator(first_old),
                std::make_move_iterator(calls_.end()));
    calls_.erase(first_old, calls_.end());
    for (const Calls& calls : calls_) {
      if (calls.session == program.session && CallsOf(calls.trace) == CallsOf(program.trace))
        return;
    }
    if (calls_.size() < kMaxCalls) {
      calls_.push_back({program.session, WithoutGraph(program.trace)});
    } else {
      calls_are_all_ = false;
    }
  }
  static Trace::Finished WithoutGraph(const Trace::Finished& trace) {
    Trace::Finished calls;
    calls.slots = trace.slots;
    calls.pairs = trace.pairs;
    calls.members = trace.members;
    return calls;
  }

  // The one to use: another thread may have traced the function for such inputs meanwhile.
  std::shared_ptr<Program> Keep(std::shared_ptr<Program> program) {
    std::shared_ptr<Program> past;
    std::shared_ptr<Program> oldest;
    std::vector<Calls> old;
    MutexLock lock(&mutex_);
    RememberCalls(*program, &old);
    if (std::shared_ptr<Program> other = Find(program->session, program->key, &past)) return other;
    if (programs_.size() >= kMaxPrograms) {
      oldest = std::move(programs_.front());
      programs_.erase(programs_.begin());
    }
    programs_.push_back(program);
    ++traces_;
    return program;
  }

  // Whether it says where a call would have run: what failed before it was anywhere does not.
  static bool HasDevice(const Tensor& input) {
    if (!input.defined()) return false;
    const TensorData& data = *ImplOf(input)->data;
    return data.info != nullptr ||
           data.state.load(std::memory_order_acquire) != TensorData::State::kFailed;
  }
  // Whether a call with these inputs may be of the ranks that the trace is of: a function may be
  // several ranks' of one session, each with a device.
  static bool MayBeOf(const Trace::Finished& trace, const std::vector<Tensor>& inputs) {
    return std::all_of(inputs.begin(), inputs.end(), [&trace](const Tensor& input) {
      return !HasDevice(input) || trace.members.empty() ||
             std::any_of(trace.members.begin(), trace.members.end(), [&input](const auto& member) {
               return member->device_slot == ImplOf(input)->data->device_slot;
             });
    });
  }
  // Whether it may as well be of others of their worlds, which the session has.
  static bool MayBeOfOthers(const MemberTable& members, const Trace::Finished& trace,
                            const std::vector<Tensor>& inputs) {
    if (std::any_of(inputs.begin(), inputs.end(), HasDevice)) return false;
    const std::vector<std::shared_ptr<MemberCore>> all = members.members();
    return std::any_of(all.begin(), all.end(), [&trace](const auto& member) {
      const auto is_of_world = [&member](const auto& m) { return m->world == member->world; };
      const auto& traced = trace.members;
      return std::find(traced.begin(), traced.end(), member) == traced.end() &&
             std::any_of(traced.begin(), traced.end(), is_of_world);
    });
  }

  // A call that cannot be made, for `why`: it counts what all traces so far have counted; where
  // that is not one number, or nobody knows of which session, the rank is out of line. The others
  // are told. Gives the error as recorded.
  absl::Status Refuse(const std::vector<Tensor>& inputs, const absl::Status& why) {
    if (IsLost(why)) return why;
    // The session on which a call with these inputs would have run; or all on which it may have
    // been: that others were on one says nothing of this one.
    std::vector<std::shared_ptr<SessionCore>> sessions = SessionsOf(inputs);
    if (sessions.size() != 1) sessions = LivingSessions();
    absl::optional<Trace::Finished> counted;
    bool differ = false;
    {
      MutexLock lock(&mutex_);
      const auto is_local = [](const Calls& calls) { return calls.trace.members.empty(); };
      if (calls_are_all_ && !calls_.empty() &&
          std::all_of(calls_.begin(), calls_.end(), is_local)) {
        return why;
      }
      differ = !calls_are_all_ || sessions.size() != 1;
      for (const Calls& calls : calls_) {
        if (differ || calls.session != sessions[0] || !IsCurrent(calls.trace)) continue;
        if (!MayBeOf(calls.trace, inputs)) continue;
        differ = counted.has_value();
        counted = calls.trace;
      }
    }
    return RefuseOnAll(sessions, why, [&](SessionCore* session, Refusals* refusals) {
      session->AssertLocked();
      if (!counted.has_value() || differ || MayBeOfOthers(session->members(), *counted, inputs)) {
        PutOutOfLine(session->members(), why, refusals);
        return absl::OkStatus();
      }
      CHORUS_RETURN_IF_ERROR(BringInLine(*counted));
      AddRefused(*counted, CountCalls(*counted), refusals);
      return absl::OkStatus();
    });
  }

  // The types of the outputs where the size that varies is `size` (-1: none does).
  absl::StatusOr<std::shared_ptr<const Infos>> InfosAt(Program* program, int64_t size) {
    if (size < 0) return program->output_infos;
    {
      MutexLock lock(&mutex_);
      const auto row = program->infos_at.find(size);
      if (row != program->infos_at.end()) return row->second;
    }
    CHORUS_ASSIGN_OR_RETURN(std::shared_ptr<const Infos> infos, OutputInfosAt(*program, size));
    MutexLock lock(&mutex_);
    if (program->infos_at.size() > Program::kMaxSizes) program->infos_at.clear();
    program->infos_at[size] = infos;
    return infos;
  }

  void ForgetRanksOfEndedSessions() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    absl::erase_if(under_way_, [](const auto& calls) {
      return calls.second.empty() || calls.second.back().session.expired();
    });
  }

  // Waits while as many calls of this rank are under way as may be: another's may wait for this
  // one. Their errors are not its business. `rank`: the member whose calls a run has or waits for;
  // where there is none, the session.
  void Await(const void* rank) {
    const auto most = static_cast<size_t>(std::max(1, options_.max_under_way));
    while (true) {
      UnderWay oldest;
      {
        MutexLock lock(&mutex_);
        const auto calls = under_way_.find(rank);
        if (calls == under_way_.end() || calls->second.size() < most) return;
        oldest = std::move(calls->second.front());
        calls->second.pop_front();
      }
      const std::shared_ptr<SessionCore> session = oldest.session.lock();
      if (session == nullptr || session->Forked()) continue;
      const auto outcome = session->link().Peek(oldest.run);
      // A forgotten outcome is an outcome.
      if (!outcome.ok() || outcome->has_value()) continue;
      session->WaitForRun(oldest.run).IgnoreError();
    }
  }

  // `infos`: of the outputs.
  absl::StatusOr<std::vector<Tensor>> Call(const Program& program,
                                           const std::vector<Tensor>& inputs, const Infos& infos,
                                           const std::string& source) {
    SessionCore* const session = program.session.get();
    TensorDatas outputs;
    absl::StatusOr<Sequence> sequence = Sequence();
    absl::Status refused;
    std::vector<Sequence> refusals_sent;
    const MemberCore* const member = MemberOfRun(program, inputs);
    const void* rank = session;
    if (member != nullptr) rank = member;
    session->Throttle(member);
    Await(rank);
    {
      SessionLock lock(session);
      CHORUS_RETURN_IF_ERROR(lock.status());
      CHORUS_RETURN_IF_ERROR(BringInLine(program.trace));
      const CallPositions calls = CountCalls(program.trace);
      sequence = SubmitProgram(program, options_, inputs, infos, calls, &outputs);
      refused = WithSource(sequence.status(), source);
      if (!refused.ok() && !IsLost(refused)) {
        Refusals refusals;
        AddRefused(program.trace, calls, &refusals);
        refusals_sent = SubmitRefusals(&session->log(), std::move(refusals), refused);
      }
    }
    if (!refused.ok()) return AwaitRefused(session, refusals_sent, refused);
    {
      MutexLock lock(&mutex_);
      const auto [calls, is_new] = under_way_.try_emplace(rank);
      calls->second.push_back({program.session, *sequence});
      if (is_new) ForgetRanksOfEndedSessions();
    }
    std::vector<Tensor> results;
    for (const ProgramResult& result : program.results) {
      if (result.outside != nullptr) {
        results.push_back(MakeTensor(result.outside));
      } else if (result.input >= 0) {
        results.push_back(MakeTensor(ImplOf(inputs[static_cast<size_t>(result.input)])->data));
      } else if (result.output >= 0) {
        results.push_back(MakeTensor(outputs[static_cast<size_t>(result.output)]));
      } else {
        auto absent = std::make_shared<TensorData>(program.session);
        absent->device_slot = result.device_slot;
        absent->producer = *sequence;
        absent->state.store(TensorData::State::kAbsent, std::memory_order_release);
        results.push_back(MakeTensor(std::move(absent)));
      }
    }
    return results;
  }

  // Types of inputs that have a graph at a time: a caller that always has new ones traces again,
  // and does not fill the daemon.
  static constexpr size_t kMaxPrograms = 256;
  static constexpr size_t kMaxCalls = 256;

  const Function function_;
  const CompileOptions options_;
  mutable Mutex mutex_;
  std::vector<std::shared_ptr<Program>> programs_ ABSL_GUARDED_BY(mutex_);
  // Of all traces so far whose groups are current: one row for those that count alike.
  std::vector<Calls> calls_ ABSL_GUARDED_BY(mutex_);
  bool calls_are_all_ ABSL_GUARDED_BY(mutex_) = true;  // no other had to be left out
  int traces_ ABSL_GUARDED_BY(mutex_) = 0;
  // By rank, the oldest first. Of a session that has ended what is left under its rank goes when
  // another one comes, or is found to have ended where that is a new one's.
  absl::flat_hash_map<const void*, std::deque<UnderWay>> under_way_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace internal

Compiled Compile(Function function, const CompileOptions& options) {
  return internal::Access::Make<Compiled>(
      std::make_shared<internal::CompiledImpl>(std::move(function), options));
}

absl::StatusOr<std::vector<Tensor>> Compiled::Run(const std::vector<Tensor>& inputs,
                                                  CallSite site) const {
  if (impl_ == nullptr) {
    return MakeError(Reason::kWrongState, "an empty Compiled: make one with Compile");
  }
  return impl_->Run(inputs, site);
}

int Compiled::traces() const { return impl_ == nullptr ? 0 : impl_->traces(); }

}  // namespace chorus
