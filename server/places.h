// So many of something at a time, of which one user has ShareOf at most.
//
// Threads: any; a pure function. Ownership: none. Errors: said at CheckPlaces().
#ifndef CHORUS_SERVER_PLACES_H_
#define CHORUS_SERVER_PLACES_H_

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace chorus::server {

// RESOURCE_EXHAUSTED kQuota: an owner that has `own_count` of the `all_count` that there are gets
// no more of `most`. `what` stands there, in words: "calls under way". How many others have is
// theirs.
absl::Status CheckPlaces(absl::string_view what, int own_count, int all_count, int most);

}  // namespace chorus::server

#endif  // CHORUS_SERVER_PLACES_H_
