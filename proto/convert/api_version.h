// The version of the API (proto/chorus/v1) that this tree speaks, for both of its ends.
//
// Threads: a constant. Ownership: none. Errors: none.
#ifndef CHORUS_PROTO_CONVERT_API_VERSION_H_
#define CHORUS_PROTO_CONVERT_API_VERSION_H_

#include <cstdint>

namespace chorus {

// 2: a call's position is its name. 3: the log is a service of its own.
inline constexpr int32_t kApiVersion = 3;

}  // namespace chorus

#endif  // CHORUS_PROTO_CONVERT_API_VERSION_H_
