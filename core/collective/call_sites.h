// Whether the lines in which ranks call one collective are compared.
//
// Threads: plain values. Ownership: none. Errors: none.
#ifndef CHORUS_CORE_COLLECTIVE_CALL_SITES_H_
#define CHORUS_CORE_COLLECTIVE_CALL_SITES_H_

#include <cstdint>

namespace chorus {

// Two equal collectives that one rank calls in the other order are summed crosswise: nothing but
// their lines (file and number, as the trainers were compiled) tells them apart. Not for send and
// recv, whose ends stand in lines of their own.
enum class CheckCallSites : uint8_t {
  kOff = 0,
  kWarn = 1,    // written down once for each pair of lines
  kRefuse = 2,  // a mismatch
};

// "off", "warn", "refuse".
inline const char* CheckCallSitesName(CheckCallSites check) {
  return check == CheckCallSites::kOff ? "off" : check == CheckCallSites::kWarn ? "warn" : "refuse";
}

}  // namespace chorus

#endif  // CHORUS_CORE_COLLECTIVE_CALL_SITES_H_
