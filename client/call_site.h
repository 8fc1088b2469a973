// The line of the trainer that made a call.
//
// Threads: any; a CallSiteScope counts for its thread.
// Ownership: file names are literals of the program. Errors: none.
#ifndef CHORUS_CLIENT_CALL_SITE_H_
#define CHORUS_CLIENT_CALL_SITE_H_

namespace chorus {

// The line of the trainer that made a call: errors name it. What records something takes one as its
// last argument; leave it out, and it is the line of the call. A helper of your own takes one as
// well and hands it on, and errors then name its caller's line:
//
//   Tensor MyMean(const Tensor& x, CallSite site = CallSite::Here()) {
//     const CallSiteScope lines(site);  // operators take no argument
//     return Sum(x) * (1.0 / static_cast<double>(x.num_elements()));
//   }
struct CallSite {
  const char* file = "";
  int line = 0;
  // This line; or, under a CallSiteScope, the line that it was given.
  static CallSite Here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    return scoped == nullptr ? CallSite{file, line} : *scoped;
  }

 private:
  friend class CallSiteScope;
  inline static thread_local const CallSite* scoped = nullptr;
};

// While one lives, calls of this thread that are given no line have its. A function that is
// compiled has lines of its own, wherever Run is called.
class CallSiteScope {
 public:
  explicit CallSiteScope(CallSite site) : site_(site), outer_(CallSite::scoped) {
    CallSite::scoped = &site_;
  }
  // Lines of their own again.
  CallSiteScope() : outer_(CallSite::scoped) { CallSite::scoped = nullptr; }
  ~CallSiteScope() { CallSite::scoped = outer_; }
  CallSiteScope(const CallSiteScope&) = delete;
  CallSiteScope& operator=(const CallSiteScope&) = delete;

 private:
  const CallSite site_;
  const CallSite* const outer_;
};

}  // namespace chorus

#endif  // CHORUS_CLIENT_CALL_SITE_H_
